"""SlateDB databases: opened, written, read, and kept small."""
