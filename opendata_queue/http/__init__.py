"""A root over HTTP: what both sides say, the client, and the broker."""
