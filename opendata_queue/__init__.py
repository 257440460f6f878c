"""OpenData Queue: a message queue whose only durable state is an object store."""

from importlib.metadata import version

from opendata_queue.clock import Clock, SystemClock
from opendata_queue.committer import CommitLimits
from opendata_queue.engine import System
from opendata_queue.errors import (
    ClosedError,
    CorruptStoreError,
    FencedError,
    FormatVersionError,
    InvalidInputError,
    OdqError,
    ShardFullError,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.messages import NewMessage, StoredMessage
from opendata_queue.shard import PublishOptions
from opendata_queue.store import StoreSettings

__version__ = version("opendata-queue")

__all__ = [
    "Clock",
    "ClosedError",
    "CommitLimits",
    "CorruptStoreError",
    "FencedError",
    "FormatVersionError",
    "InvalidInputError",
    "NewMessage",
    "OdqError",
    "PublishOptions",
    "ShardFullError",
    "StoreAccessError",
    "StoreSettings",
    "StoreUnavailableError",
    "StoredMessage",
    "System",
    "SystemClock",
    "__version__",
]
