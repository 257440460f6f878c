"""OpenData Queue: a message queue whose only durable state is an object store."""

from importlib.metadata import version

__version__ = version("opendata-queue")

__all__ = ["__version__"]
