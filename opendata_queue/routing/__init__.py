"""From the logs of all shards into the queues whose filters match."""
