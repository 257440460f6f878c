"""``odq bench``."""
