"""One request, from its bytes to the bytes of its answer, in any protocol."""
