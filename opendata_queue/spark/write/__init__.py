"""Writing rows of Spark into bulk shards."""
