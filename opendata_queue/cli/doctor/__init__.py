"""``odq doctor`` and ``odq repair``: checks of a root or a server, and mending a root."""
