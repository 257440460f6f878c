"""Publishing: messages on their way into a shard, its log, and reading them again."""
