"""The rows of one queue: what of them is not durable yet, and who may read them."""
