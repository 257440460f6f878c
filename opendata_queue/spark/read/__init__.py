"""Reading messages and queues into Spark."""
