"""How fast messages become durable: 256-byte payloads, two headers, on a local disk.

    python benchmarks/publish.py [--seconds 2] [--rounds 3] [--root DIR] [--uvloop]

Every figure is the median of several rounds in which all contenders take turns, each on a fresh
root: a disk's speed drifts by more than contenders differ. "fsync" rows survive a power cut; the
others survive a crash of the process only. Redis takes part where redis-server is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import HEADERS, PAYLOAD, percentile, redis_server, run_loop, spread
from odq_encodings import (
    encode_headers,
    encode_inline_payload,
    encode_message_metadata,
    encode_metadata_log_key,
    encode_payload_key,
)
from opendata_queue import Engine, NewMessage, StoreSettings
from opendata_queue.store import Database, Objects, Rows, Tier
from opendata_queue.store.rows.writer import BatchWriterUnavailable, _forced, commit_rows
from tests.support.s3_server import S3Server

MESSAGE = NewMessage(PAYLOAD, headers=HEADERS)
CONCURRENT = 64

Step = Callable[[], Awaitable[int]]
"""Publishes some messages durably and says how many."""


@dataclass(kw_only=True)
class Contender:
    """One way to publish; ``steps`` opens it on a folder and yields what to time."""

    name: str
    fsync: bool
    steps: Callable[[Path], contextlib.AbstractAsyncContextManager[Step]]
    rates: list[float] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)


def settings(fsync: bool) -> StoreSettings:
    return StoreSettings(fsync=fsync)


def raw(tier: Tier, fsync: bool) -> Contender:
    """The rows of a publish, put together and written through the batch writer: the limit."""
    value = encode_inline_payload(PAYLOAD)
    headers = encode_headers(HEADERS.items())

    @contextlib.asynccontextmanager
    async def steps(folder: Path) -> AsyncIterator[Step]:
        objects = Objects.open(f"file://{folder}", settings(fsync))
        database = await Database.open(objects, "messages/00000")
        numbers = itertools.count()

        async def step() -> int:
            rows = Rows()
            for number in itertools.islice(numbers, 500):
                rows.put(encode_payload_key(number), value)
                rows.put(
                    encode_metadata_log_key(number),
                    encode_message_metadata(number, 1, 1, 1, 0, 2, headers),
                )
            await commit_rows(database._db, rows, after_flush=database._wal_sync, tier=tier)
            return 500

        yield step
        await database.close()

    return Contender(name=f"raw rows x500, tier {tier}", fsync=fsync, steps=steps)


def publish_many(size: int, fsync: bool) -> Contender:
    @contextlib.asynccontextmanager
    async def steps(folder: Path) -> AsyncIterator[Step]:
        async with await Engine.open(f"file://{folder}", settings=settings(fsync)) as system:

            async def step() -> int:
                # As a producer does: the messages are made anew for every call.
                messages = [NewMessage(PAYLOAD, headers=HEADERS) for _ in range(size)]
                return len(await system.publish_many(messages))

            yield step

    return Contender(name=f"publish_many x{size}", fsync=fsync, steps=steps)


def publish_single(concurrent: int, fsync: bool) -> Contender:
    @contextlib.asynccontextmanager
    async def steps(folder: Path) -> AsyncIterator[Step]:
        async with await Engine.open(f"file://{folder}", settings=settings(fsync)) as system:

            async def step() -> int:
                if concurrent == 1:
                    await system.publish(PAYLOAD, headers=HEADERS)
                else:
                    one = (system.publish(PAYLOAD, headers=HEADERS) for _ in range(concurrent))
                    await asyncio.gather(*one)
                return concurrent

            yield step

    name = "publish, one after the other" if concurrent == 1 else f"publish, {concurrent} at once"
    return Contender(name=name, fsync=fsync, steps=steps)


def redis_streams(size: int) -> Contender:
    """XADD in a pipeline, appendfsync always: what a durable Redis does from Python."""

    @contextlib.asynccontextmanager
    async def steps(folder: Path) -> AsyncIterator[Step]:
        fields: dict[Any, Any] = {"payload": PAYLOAD}
        fields.update(HEADERS)
        with redis_server(folder) as client:

            async def step() -> int:
                pipeline = client.pipeline(transaction=False)
                for _ in range(size):
                    pipeline.xadd("stream", fields)
                return len(pipeline.execute())

            yield step

    return Contender(name=f"Redis Streams, XADD x{size}", fsync=True, steps=steps)


def contenders() -> list[Contender]:
    found = []
    for fsync in (False, True):
        found += [
            raw(tier, fsync) for tier in usable_tiers() if not fsync or tier is usable_tiers()[0]
        ]
        found += [publish_many(500, fsync), publish_many(100, fsync)]
        found += [publish_single(CONCURRENT, fsync), publish_single(1, fsync)]
    if shutil.which("redis-server"):
        found.append(redis_streams(100))
    return found


def usable_tiers() -> list[Tier]:
    usable = []
    for tier in Tier:
        with contextlib.suppress(BatchWriterUnavailable):
            _forced(tier)
            usable.append(tier)
    return usable


async def measure(contender: Contender, root: Path, seconds: float) -> None:
    async with contender.steps(Path(tempfile.mkdtemp(dir=root)) / "root") as step:
        for _ in range(3):
            await step()  # the first ones open files and reserve sequences
        count, start = 0, time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end:
            count += await step()
            contender.latencies_ms.append((time.perf_counter() - now) * 1e3)
        contender.rates.append(count / (time.perf_counter() - start))


async def requests_on_s3() -> Table:
    """How many requests a thousand messages cost."""
    table = Table(title="Requests to S3 per 1,000 messages (moto, background work included)")
    table.add_column("publishing")
    for column in ("PUT", "GET", "LIST", "HEAD", "DELETE", "KiB in"):
        table.add_column(column, justify="right")
    with S3Server() as server:
        os.environ |= server.environment()
        server.create_bucket("bench")
        for name, size, calls in (("publish_many x500", 500, 20), ("publish_many x100", 100, 50),
                                  (f"publish, {CONCURRENT} at once", 0, 40)):  # fmt: skip
            async with await Engine.open(f"s3://bench/{size}") as system:
                await system.publish(b"opens the shard")
                server.reset_requests()
                for _ in range(calls):
                    if size:
                        await system.publish_many([MESSAGE] * size)
                    else:
                        one = (system.publish(PAYLOAD, headers=HEADERS) for _ in range(CONCURRENT))
                        await asyncio.gather(*one)
                counts = server.requests()
            thousands = calls * (size or CONCURRENT) / 1_000
            row = [
                f"{counts[kind] / thousands:.1f}"
                for kind in ("PUT", "GET", "LIST", "HEAD", "DELETE")
            ]
            table.add_row(name, *row, f"{counts['bytes_in'] / 1024 / thousands:.0f}")
    return table


def summary(found: list[Contender]) -> Table:
    limits = {c.fsync: statistics.median(c.rates) for c in found if "compiled" in c.name}
    stock = {c.fsync: statistics.median(c.rates) for c in found if "public" in c.name}
    table = Table(title="Durable messages per second, 256-byte payloads, two headers")
    for column in ("", "fsync", "messages/s", "spread", "of the limit", "× stock binding",
                   "call p50 ms", "call p99 ms"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("", "fsync") else "right")
    for contender in found:
        rate = statistics.median(contender.rates)
        limit = limits.get(contender.fsync)
        base = stock.get(contender.fsync)
        table.add_row(
            contender.name,
            "yes" if contender.fsync else "no",
            f"{rate:,.0f}",
            spread(contender.rates),
            f"{rate / limit:.0%}" if limit else "",
            f"{rate / base:.1f}" if base else "",
            f"{percentile(contender.latencies_ms, 0.5):.2f}",
            f"{percentile(contender.latencies_ms, 0.99):.2f}",
        )
    return table


async def run(arguments: argparse.Namespace) -> None:
    found = contenders()
    turns = [contender for _ in range(arguments.rounds) for contender in found]
    # Removed at the end, not in between: ext4 makes new files slowly for a minute after many
    # were deleted (perf shows ext4_create in recently_deleted).
    with tempfile.TemporaryDirectory(dir=arguments.root) as root:
        for contender in track(turns, description="publishing", refresh_per_second=1):
            await measure(contender, Path(root), arguments.seconds)
    console = Console(width=120)
    console.print(summary(found))
    console.print(await requests_on_s3())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--uvloop", action="store_true")
    arguments = parser.parse_args()
    run_loop(run(arguments), uvloop=arguments.uvloop)


if __name__ == "__main__":
    main()
