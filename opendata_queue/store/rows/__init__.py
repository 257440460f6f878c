"""Rows in bulk: packed into one write, and out of one scan, without an object for each."""
