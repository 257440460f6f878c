"""One request, from its bytes to the bytes of its answer, whatever the protocol."""
