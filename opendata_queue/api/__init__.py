"""What users program against, wherever the system runs."""
