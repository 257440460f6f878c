"""What a bulk job does to others: latency of publish, claim and ack while its rows are routed.

    python benchmarks/routing.py [--rows 300000] [--shards 4] [--seconds 10] [--root /tmp]

A job is appended as Spark does it, without Spark. First the engine is left alone with it: rows
routed in a second, and the processor time of each. With ``--alone`` that is all.

Then another one is routed while one task publishes and another claims and acks, both of another
queue; ``--callers`` makes more of them, and ``--pause-ms`` has each wait before its next call.
Routing is held up in every other of many short windows: whatever else the machine does meets both
kinds alike, and what calls take in them is compared. The beginning of each window is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.common import HEADERS, PAYLOAD, percentile, run_fast
from opendata_queue import AsyncSystem, Engine, NewMessage, StoreSettings
from opendata_queue.log.bulk_writer import BulkShard
from opendata_queue.model.clock import SystemClock
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import Objects

BULK: Final = "bulk"
OTHERS: Final = "others"
_KINDS: Final = 50
"""How many different headers the rows of a job have, in turns."""
_AT_ONCE: Final = 10_000
_POLL_S: Final = 0.02
_WINDOW_S: Final = 0.4
_SETTLING_S: Final = 0.15
"""Of a window, while calls, flushes and rests of the one before it come to their end."""
_IDLE: Final = "idle"
_ROUTING: Final = "routing"

Latencies = dict[str, list[float]]
T = TypeVar("T")


class Windows:
    """What calls took in windows of each kind; those that have met two of them are left out."""

    def __init__(self) -> None:
        self.found: dict[str, Latencies] = {
            kind: {"publish": [], "claim": [], "ack": []} for kind in (_IDLE, _ROUTING)
        }
        self.rows = 0
        """Routed while that was let go on, and in how many seconds."""
        self.routing_s = 0.0
        self._kind: str | None = None
        self._number = 0

    async def measure(self, kind: str, engine: Engine) -> None:
        """One window."""
        await asyncio.sleep(_SETTLING_S)
        self._kind = kind
        before, start = engine.stores.queues.stats(BULK).available, time.perf_counter()
        await asyncio.sleep(_WINDOW_S)
        if kind == _ROUTING:
            self.rows += engine.stores.queues.stats(BULK).available - before
            self.routing_s += time.perf_counter() - start
        self._kind = None
        self._number += 1

    async def timed(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        kind, number, start = self._kind, self._number, time.perf_counter()
        result = await call()
        if kind is not None and kind == self._kind and number == self._number and result != []:
            self.found[kind][name].append(time.perf_counter() - start)
        return result


async def written_shard(objects: Objects, job: str, rows: int) -> CommittedShard:
    """A shard of a job, with rows that only one queue asks for."""
    clock = SystemClock()
    reserved = await ShardFiles(objects).reserve_bulk(job=job, now_ms=clock.now_ms())
    shard = await BulkShard.create(objects, reserved.shard, clock)
    kinds = [{"source": "job", "kind": str(number), "region": "emea"} for number in range(_KINDS)]
    messages = [NewMessage(PAYLOAD, headers=kinds[place % _KINDS]) for place in range(_AT_ONCE)]
    for first in range(0, rows, _AT_ONCE):
        await shard.add(messages[: rows - first])
    done = await shard.finish()
    return CommittedShard(
        shard=done.shard,
        messages=done.messages,
        next_sequence=done.next_sequence,
        bytes=done.bytes,
    )


async def appended(url: str, job: str, rows: int, shards: int) -> None:
    """Append a job of so many rows."""
    objects = Objects.open(url, StoreSettings())
    sizes = [rows // shards + (number < rows % shards) for number in range(shards)]
    written = [await written_shard(objects, job, size) for size in sizes if size]
    commit = Commit.new(job, written, now_ms=SystemClock().now_ms())
    await CommitFiles(objects).create(commit)


async def routed(engine: Engine, wanted: int) -> None:
    """Wait until so many rows are in their queue, without a call: callers go first."""
    while engine.stores.queues.stats(BULK).available < wanted:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


async def began(system: Engine, before: int) -> float:
    """Wait for the first rows of a job: when that was."""
    await routed(system, before + 1)
    return time.perf_counter()


async def publish_on(system: AsyncSystem, windows: Windows, pause_s: float) -> None:
    while True:
        await windows.timed("publish", lambda: system.publish(PAYLOAD, headers=HEADERS))
        await asyncio.sleep(pause_s)


async def consume_on(system: AsyncSystem, windows: Windows, pause_s: float) -> None:
    while True:
        claimed = await windows.timed("claim", lambda: system.claim(OTHERS, 1, wait_ms=1_000))
        await asyncio.sleep(pause_s)
        if claimed:
            await windows.timed("ack", partial(system.ack, OTHERS, *claimed))
            await asyncio.sleep(pause_s)


async def alternated(engine: Engine, windows: Windows, given: argparse.Namespace) -> None:
    """Hold routing up in every other window, until a job is routed or the time is over."""
    end = time.perf_counter() + given.seconds
    turns = engine.stores.queues.turns
    while time.perf_counter() < end:
        async with turns.turn() as turn:  # one at a time has one: now it is ours
            await windows.measure(_IDLE, engine)
            turn.begin()  # it has done nothing that anybody has to rest from
        await windows.measure(_ROUTING, engine)
        if engine.stores.queues.stats(BULK).available >= 2 * given.rows:
            break


async def called(engine: Engine, given: argparse.Namespace) -> Windows:
    """How long calls take while a job is routed, and while it is held up."""
    windows = Windows()
    calls = [
        asyncio.create_task(call(engine, windows, given.pause_ms / 1e3))
        for call in (publish_on, consume_on)
        for _ in range(given.callers)
    ]
    done = asyncio.create_task(alternated(engine, windows, given))
    try:
        await asyncio.wait([done, *calls], return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            if call.done():
                call.result()
        done.result()
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return windows


def shown(idle: Latencies, busy: Latencies) -> Table:
    table = Table("milliseconds", "idle p50", "p99", "while routing p50", "p99", "most", "p50 ×")
    for name, before in idle.items():
        after = busy[name]
        if not before or not after:  # no caller got so far in the time that there was
            table.add_row(name, *["–"] * 6)
            continue
        figures = [
            *(1e3 * percentile(before, part) for part in (0.5, 0.99)),
            *(1e3 * percentile(after, part) for part in (0.5, 0.99)),
            1e3 * max(after),
        ]
        times = figures[2] / figures[0]
        table.add_row(name, *(f"{one:.2f}" for one in figures), f"{times:.2f}")
    return table


async def measured(url: str, given: argparse.Namespace) -> None:
    console = Console()
    async with await Engine.open(url) as system:
        await system.create_queue(BULK, filter="source = 'job'")
        await system.create_queue(OTHERS, filter=f"type = '{HEADERS['type']}'")
        await appended(url, "alone", given.rows, given.shards)
        start, cpu = await began(system, 0), time.process_time()
        await routed(system, given.rows)
        seconds = time.perf_counter() - start
        cpu_us = (time.process_time() - cpu) / given.rows * 1e6
        console.print(
            f"{given.rows:,} rows routed alone in {seconds:.2f} s: {given.rows / seconds:,.0f} "
            f"rows/s, {cpu_us:.1f} µs of CPU each"
        )
        if given.alone:
            return
        await appended(url, "beside", given.rows, given.shards)
        await began(system, given.rows)
        windows = await called(system, given)
        console.print(
            f"{windows.rows / windows.routing_s:,.0f} rows/s routed beside {given.callers} "
            "producers and as many consumers"
        )
        console.print(shown(windows.found[_IDLE], windows.found[_ROUTING]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.root, prefix="odq-routing-") as folder:
        run_fast(measured(f"file://{folder}/root", given))


if __name__ == "__main__":
    main()
