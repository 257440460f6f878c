"""What several benchmarks need: the messages, a Redis to compare with, and how to print spreads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import statistics
import subprocess
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path

import redis

PAYLOAD = bytes(range(256))
HEADERS = {"type": "order.created", "region": "emea"}


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[redis.Redis]:
    """A Redis of our own that answers a write when it is on the disk."""
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "daemonize": "no",
        "appendonly": "yes", "appendfsync": "always",
    }  # fmt: skip
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    server = subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    try:
        while True:
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                break
        yield client
    finally:
        client.close()
        server.terminate()
        server.wait()


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

    Without it Python's collector stops everything for 40 ms now and then, to look at modules.
    """
    gc.collect()
    gc.freeze()
    if uvloop:
        import uvloop as fast

        fast.run(work)
    else:
        asyncio.run(work)
