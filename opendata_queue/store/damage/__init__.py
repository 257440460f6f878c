"""Finding damaged files and missing ones, and mending what can be mended (RFC 0013)."""
