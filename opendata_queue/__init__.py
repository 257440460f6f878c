"""OpenData Queue: a message queue whose only durable state is an object store."""

from importlib.metadata import version

from opendata_queue.api.consumers import AsyncConsumer, RetryLater
from opendata_queue.api.sync import Consumer, System, Worker
from opendata_queue.api.system import AsyncSystem
from opendata_queue.api.workers import AsyncWorker
from opendata_queue.filters import Filter, FilterError
from opendata_queue.log.writer import PublishOptions
from opendata_queue.model.clock import Clock, SystemClock
from opendata_queue.model.errors import (
    ClosedError,
    CorruptStoreError,
    FencedError,
    FormatVersionError,
    InvalidInputError,
    MessageExpiredError,
    OdqError,
    OtherRoleError,
    OwnedError,
    QueueExistsError,
    QueueNotFoundError,
    ShardFullError,
    StoreAccessError,
    StoreUnavailableError,
    TimedOutError,
    WrongContextError,
)
from opendata_queue.model.messages import ClaimedMessage, NewMessage, PeekedMessage, StoredMessage
from opendata_queue.model.options import QueueOptions
from opendata_queue.model.values import (
    BrowsedState,
    FailedMessage,
    FoundEntry,
    FoundPage,
    MessageHistory,
    Outcome,
    QueueEntry,
    QueueInfo,
    QueuePage,
    QueueStats,
    Start,
)
from opendata_queue.opening import connect, connect_async, open, open_async
from opendata_queue.root.owner_files import find_broker
from opendata_queue.root.owner_watch import Vacancy
from opendata_queue.store import StoreSettings
from opendata_queue.store.group_commit import CommitLimits
from opendata_queue.systems.engine import Engine
from opendata_queue.systems.ingest import Ingest

__version__ = version("opendata-queue")

__all__ = [
    "AsyncConsumer",
    "AsyncSystem",
    "AsyncWorker",
    "BrowsedState",
    "ClaimedMessage",
    "Clock",
    "ClosedError",
    "CommitLimits",
    "Consumer",
    "CorruptStoreError",
    "Engine",
    "FailedMessage",
    "FencedError",
    "Filter",
    "FilterError",
    "FormatVersionError",
    "FoundEntry",
    "FoundPage",
    "Ingest",
    "InvalidInputError",
    "MessageExpiredError",
    "MessageHistory",
    "NewMessage",
    "OdqError",
    "OtherRoleError",
    "Outcome",
    "OwnedError",
    "PeekedMessage",
    "PublishOptions",
    "QueueEntry",
    "QueueExistsError",
    "QueueInfo",
    "QueueNotFoundError",
    "QueueOptions",
    "QueuePage",
    "QueueStats",
    "RetryLater",
    "ShardFullError",
    "Start",
    "StoreAccessError",
    "StoreSettings",
    "StoreUnavailableError",
    "StoredMessage",
    "System",
    "SystemClock",
    "TimedOutError",
    "Vacancy",
    "Worker",
    "WrongContextError",
    "__version__",
    "connect",
    "connect_async",
    "find_broker",
    "open",
    "open_async",
]
