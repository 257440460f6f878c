"""``odq inspect``."""
