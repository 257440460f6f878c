"""The C helper: its sources, the library that is loaded, and jobs for its threads."""
