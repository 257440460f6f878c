"""Helpers for event loops, threads and processes. Nothing here knows of queues."""
