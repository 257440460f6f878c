"""A small shop, live: make demo."""
