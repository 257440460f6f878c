"""Files on a disk that survive a loss of power."""
