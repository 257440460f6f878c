"""What a bulk job does to others: latency of publish and claim while its rows are routed.

    python benchmarks/routing.py [--rows 300000] [--shards 4] [--seconds 3] [--root /tmp]

A job is appended as Spark does it, without Spark. First the engine is left alone with it: rows
routed in a second. Then another one is routed while one task publishes and another claims and acks,
both of another queue, and their latency is printed beside that of an idle engine. ``--callers``
makes more of them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.common import HEADERS, PAYLOAD, percentile, run_fast
from opendata_queue import AsyncSystem, Engine, NewMessage, StoreSettings
from opendata_queue.bulk import BulkShard
from opendata_queue.clock import SystemClock
from opendata_queue.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.shard_files import ShardFiles
from opendata_queue.store import Objects

BULK: Final = "bulk"
OTHERS: Final = "others"
_KINDS: Final = 50
"""How many different headers the rows of a job have, in turns."""
_AT_ONCE: Final = 10_000
_POLL_S: Final = 0.02

Latencies = dict[str, list[float]]


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


async def _timed(latencies: list[float], call: Callable[[], Awaitable[object]]) -> None:
    start = time.perf_counter()
    await call()
    latencies.append(time.perf_counter() - start)


async def publish_on(system: AsyncSystem, found: Latencies) -> None:
    while True:
        await _timed(found["publish"], lambda: system.publish(PAYLOAD, headers=HEADERS))


async def consume_on(system: AsyncSystem, found: Latencies) -> None:
    while True:
        start = time.perf_counter()
        claimed = await system.claim(OTHERS, 1, wait_ms=1_000)
        if claimed:
            found["claim"].append(time.perf_counter() - start)
            await _timed(found["ack"], partial(system.ack, OTHERS, *claimed))


async def called(
    system: AsyncSystem, callers: int, until: Callable[[], Awaitable[None]]
) -> Latencies:
    """How long calls take until something has happened."""
    found: Latencies = {"publish": [], "claim": [], "ack": []}
    calls = [
        asyncio.create_task(call(system, found))
        for call in (publish_on, consume_on)
        for _ in range(callers)
    ]
    done = asyncio.ensure_future(until())
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
    return found


def shown(idle: Latencies, busy: Latencies) -> Table:
    table = Table("milliseconds", "idle p50", "p99", "while routing p50", "p99", "most", "p50 ×")
    for name, before in idle.items():
        after = busy[name]
        if not before or not after:  # nobody got so far in the time that there was
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
        idle = await called(system, given.callers, lambda: asyncio.sleep(given.seconds))
        await appended(url, "beside", given.rows, given.shards)
        start = await began(system, given.rows)
        busy = await called(system, given.callers, lambda: routed(system, 2 * given.rows))
        seconds = time.perf_counter() - start
        console.print(
            f"{given.rows:,} rows routed beside {given.callers} producers and as many consumers in "
            f"{seconds:.2f} s: {given.rows / seconds:,.0f} rows/s"
        )
        console.print(shown(idle, busy))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.root, prefix="odq-routing-") as folder:
        run_fast(measured(f"file://{folder}/root", given))


if __name__ == "__main__":
    main()
