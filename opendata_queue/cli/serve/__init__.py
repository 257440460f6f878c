"""``odq serve`` and ``odq tailer``."""
