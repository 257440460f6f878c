"""Compares the tiers of the batch writer on a local file store, without fsync.

    python benchmarks/batch_writer.py [--uvloop] [--seconds 4] [--root DIR]

Batches are 500 messages of two puts each (256-byte payload, 90-byte metadata), each batch flushed;
the tiers take turns in several rounds. Single commits are one row, written and flushed; there the
tiers take turns commit by commit on one database. A disk's latency can drift by half within a
minute, which is more than the tiers differ by: tiers measured one after the other compare the disk.
For the same reason a root in memory (`--root /dev/shm`) shows the tiers, and a disk the truth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import slatedb.uniffi as slatedb

from opendata_queue.store.rows.rows import Rows
from opendata_queue.store.rows.writer import BatchWriterUnavailable, Tier, commit_rows

MESSAGES_PER_BATCH = 500
PAYLOAD = bytes(256)
METADATA = bytes(90)
ROUNDS = 4


async def open_db(root: Path) -> slatedb.Db:
    settings = slatedb.Settings.default()
    settings.set("flush_interval", json.dumps(None))
    builder = slatedb.DbBuilder(str(root).lstrip("/"), slatedb.ObjectStore.resolve("file:///"))
    builder.with_settings(settings)
    return await builder.build()


def batch_rows(batch: int) -> Rows:
    rows = Rows()
    first = batch * MESSAGES_PER_BATCH
    for sequence in range(first, first + MESSAGES_PER_BATCH):
        rows.put(b"\x01\x01" + sequence.to_bytes(8, "big"), PAYLOAD)
        rows.put(b"\x01\x01opendata-queue/messages/metadata\0%020d" % sequence, METADATA)
    return rows


def single_row(commit: int) -> Rows:
    rows = Rows()
    rows.put(b"\x01\x02%020d" % commit, PAYLOAD)
    return rows


async def timed(db: slatedb.Db, tier: Tier, make: Callable[[int], Rows], number: int) -> float:
    """Seconds of one commit, rows built in Python included."""
    started = time.perf_counter()
    await commit_rows(db, make(number), tier=tier)
    return time.perf_counter() - started


async def measure_batches(root: Path, tier: Tier, seconds: float) -> list[float]:
    async with fresh_db(root) as db:
        durations = [await timed(db, tier, batch_rows, 0)]
        while sum(durations) < seconds:
            durations.append(await timed(db, tier, batch_rows, len(durations)))
        return durations[1:]


async def measure_singles(root: Path, tiers: list[Tier], seconds: float) -> dict[Tier, list[float]]:
    durations: dict[Tier, list[float]] = {tier: [] for tier in tiers}
    async with fresh_db(root) as db:
        end = time.perf_counter() + seconds * len(tiers)
        number = 0
        while time.perf_counter() < end:
            for tier in tiers:
                number += 1
                durations[tier].append(await timed(db, tier, single_row, number))
    return durations


@contextlib.asynccontextmanager
async def fresh_db(root: Path) -> AsyncIterator[slatedb.Db]:
    with tempfile.TemporaryDirectory(dir=root) as path:
        db = await open_db(Path(path))
        try:
            yield db
        finally:
            await db.shutdown()


async def usable_tiers(root: Path) -> list[Tier]:
    tiers = []
    async with fresh_db(root) as db:
        for tier in Tier:
            try:
                await commit_rows(db, single_row(0), tier=tier)
                tiers.append(tier)
            except BatchWriterUnavailable as error:
                print(error, file=sys.stderr)
    return tiers


async def measure(root: Path, seconds: float) -> None:
    tiers = await usable_tiers(root)
    batches: dict[Tier, list[float]] = {tier: [] for tier in tiers}
    for _ in range(ROUNDS):
        for tier in tiers:
            batches[tier] += await measure_batches(root, tier, seconds / ROUNDS)
    singles = await measure_singles(root, tiers, seconds)
    print(f"{'tier':<10}{'messages/s':>12}{'single p50':>14}{'single p99':>14}{'commits':>10}")
    for tier in tiers:
        print_line(tier, batches[tier], singles[tier])


def print_line(tier: Tier, batches: list[float], singles: list[float]) -> None:
    rate = MESSAGES_PER_BATCH * len(batches) / sum(batches)
    percentiles = statistics.quantiles(singles, n=100)
    p50, p99 = percentiles[49] * 1e6, percentiles[98] * 1e6
    print(f"{tier:<10}{rate:>12,.0f}{p50:>11,.0f} µs{p99:>11,.0f} µs{len(singles):>10,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each figure")
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    if options.uvloop:
        import uvloop

        uvloop.run(measure(options.root, options.seconds))
    else:
        asyncio.run(measure(options.root, options.seconds))


if __name__ == "__main__":
    main()
