"""What several benchmarks need: the messages, a Redis to compare with, and how to print spreads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import redis

PAYLOAD = bytes(range(256))
HEADERS = {"type": "order.created", "region": "emea"}

T = TypeVar("T")


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[redis.Redis]:
    """A Redis of our own that answers a write when it is on the disk."""
    # Imported here and not above: benchmarks that need no Redis must run without it.
    import redis

    from benchmarks.compare.systems.redis_streams import redis_streams

    with (
        redis_streams("always").serve(folder, False) as address,
        contextlib.closing(redis.Redis(port=int(address["port"]))) as client,
    ):
        yield client


def spread(values: Sequence[float]) -> str:
    """By how much rounds differ from their middle."""
    return f"±{(max(values) - min(values)) / statistics.median(values) / 2:.0%}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How two contenders compare that took turns: the middle one of their rounds' ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def run_loop(work: Coroutine[object, object, None], *, uvloop: bool) -> None:
    """Run a benchmark, all contenders alike as a service would: what was imported is no garbage.

    Without it Python's collector stops everything for 40 ms now and then, to go through modules.
    """
    gc.collect()
    gc.freeze()
    if uvloop:
        import uvloop as fast

        fast.run(work)
    else:
        asyncio.run(work)


def run_fast(work: Coroutine[Any, Any, T]) -> T:
    """Run something on uvloop, or on Python's own event loop where that is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
