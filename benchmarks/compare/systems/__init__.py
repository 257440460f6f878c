"""All contenders, in the order of the report.

A process only imports the one that it measures: importing all takes longer than most cells.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.compare.contract import System, no_clients, no_server

_MADE_BY: Final[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
    "odq": ("ours", "on_files", {"fsync": True}),
    "odq-nosync": ("ours", "on_files", {"fsync": False}),
    "odq-http-1": ("ours", "over_http", {"clients": 1}),
    "odq-http-16": ("ours", "over_http", {"clients": 16}),
    "postgres": ("postgres", "postgres", {}),
    "redis-always": ("redis_streams", "redis_streams", {"appendfsync": "always"}),
    "redis-everysec": ("redis_streams", "redis_streams", {"appendfsync": "everysec"}),
    "rabbitmq": ("rabbitmq", "rabbitmq", {}),
    "nats": ("nats_jetstream", "nats_jetstream", {}),
    "beanstalkd": ("beanstalk", "beanstalkd", {}),
    "litequeue": ("sqlite_queues", "litequeue", {"full": True}),
    "litequeue-normal": ("sqlite_queues", "litequeue", {"full": False}),
    "persist-queue": ("sqlite_queues", "persist_queue", {}),
    "huey": ("sqlite_queues", "huey", {}),
    "odq-s3": ("ours", "on_s3", {}),
    "queue-json": ("queue_json", "queue_json", {}),
    "queue-json-fast": ("queue_json", "queue_json", {"fast": True}),
    "queue-json-fast-kept": ("queue_json", "queue_json", {"fast": True, "keep": True}),
    "raw-compiled": ("raw_slatedb", "raw", {"tier": "compiled"}),
    "raw-ctypes": ("raw_slatedb", "raw", {"tier": "ctypes"}),
    "raw-public": ("raw_slatedb", "raw", {"tier": "public"}),
    "raw-compiled-fsync": ("raw_slatedb", "raw", {"tier": "compiled", "fsync": True}),
    "raw-compiled-s3": ("raw_slatedb", "raw", {"tier": "compiled", "s3": True}),
}

KEYS: Final = tuple(_MADE_BY)


@functools.cache
def find(key: str) -> System:
    """The contender of that key."""
    module, function, arguments = _MADE_BY[key]
    try:
        make = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    except ModuleNotFoundError as error:
        return _lacking(key, str(error.name))
    system: System = make(**arguments)
    assert system.key == key, system.key
    return system


def _lacking(key: str, module: str) -> System:
    """One whose adapter can't even be imported: it is skipped like the others."""
    reason = f"the Python library {module} is not installed"
    return System(key=key, name=key, serve=no_server, connect=no_clients, missing=lambda: reason)
