"""The queue store, which has one owner: ``store.py`` puts its parts together."""

from opendata_queue.queues.store.commits import ROWS_BESIDE_CALLERS
from opendata_queue.queues.store.consumers import (
    MAX_AT_ONCE,
    MAX_CONSUMER_BYTES,
    MAX_ERROR_BYTES,
    MAX_WAIT_MS,
)
from opendata_queue.queues.store.cursors import read_cursor
from opendata_queue.queues.store.registry import ALL_BULK_SHARDS
from opendata_queue.queues.store.store import QueueStore, open_queues

__all__ = [
    "ALL_BULK_SHARDS",
    "MAX_AT_ONCE",
    "MAX_CONSUMER_BYTES",
    "MAX_ERROR_BYTES",
    "MAX_WAIT_MS",
    "ROWS_BESIDE_CALLERS",
    "QueueStore",
    "open_queues",
    "read_cursor",
]
