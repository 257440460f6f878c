"""The journal of a database on files: where its commits are durable first (RFC 0011)."""
