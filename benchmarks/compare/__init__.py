"""OpenData Queue next to its alternatives, on one machine: ``python -m benchmarks.compare``."""
