"""The control files of a root: what it is, who owns it, which shards it has, what time it is."""
