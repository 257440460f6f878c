"""Queues: their state, the rows behind it, and what consumers do with them."""
