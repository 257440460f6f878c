"""OpenData Queue: a message queue whose only durable state is an object store."""

from importlib.metadata import version

from opendata_queue.clock import Clock, SystemClock
from opendata_queue.committer import CommitLimits
from opendata_queue.engine import FailedMessage, QueueInfo, System
from opendata_queue.errors import (
    ClosedError,
    CorruptStoreError,
    FencedError,
    FormatVersionError,
    InvalidInputError,
    OdqError,
    QueueExistsError,
    QueueNotFoundError,
    ShardFullError,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.filters import Filter, FilterError
from opendata_queue.messages import ClaimedMessage, NewMessage, StoredMessage
from opendata_queue.queue_options import QueueOptions
from opendata_queue.queue_store import QueueStats
from opendata_queue.shard import PublishOptions
from opendata_queue.store import StoreSettings

__version__ = version("opendata-queue")

__all__ = [
    "ClaimedMessage",
    "Clock",
    "ClosedError",
    "CommitLimits",
    "CorruptStoreError",
    "FailedMessage",
    "FencedError",
    "Filter",
    "FilterError",
    "FormatVersionError",
    "InvalidInputError",
    "NewMessage",
    "OdqError",
    "PublishOptions",
    "QueueExistsError",
    "QueueInfo",
    "QueueNotFoundError",
    "QueueOptions",
    "QueueStats",
    "ShardFullError",
    "StoreAccessError",
    "StoreSettings",
    "StoreUnavailableError",
    "StoredMessage",
    "System",
    "SystemClock",
    "__version__",
]
