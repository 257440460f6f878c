"""The parts put together: a process that owns all, one that publishes, one that reads."""
