"""What retention frees, what it costs, and what consumers notice of it.

    python benchmarks/retention.py [--quick] [--stores file,s3] [--only space,claims,requests]

space     Messages of 256 bytes are published, nine in ten with a retention that ends some seconds
          later. Then the compactor runs alone, as ``odq compact`` does, and the bytes of all files
          of the root are counted before and after. Next to it a root into which only the survivors
          were published, and which was compacted too: that is what they need. Nothing is deleted
          row by row: SlateDB drops the rows by their time-to-live (with a grace of 0 here, so that
          there is no need to wait for the hour that is usual).
claims    How many messages a second four consumers claim and acknowledge, in batches of 10, while a
          pass runs in the background as in an owner, from its beginning to its end: it expires
          nine in ten of all messages (entries of another queue, and done ones of this), and has
          SlateDB rewrite the database to be rid of them. Before and after it they are alone. Each
          round has its part of the messages, and a root of its own.
requests  Requests to the object store per 1,000 expired messages, space included, for a history of
          one, two and four times as many messages that stay: of one pass in an owner, and of one
          alone, from opening the root to closing it.

On ``file:///`` and on the S3 server of the tests, which is in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from rich.console import Console
from rich.table import Table

from benchmarks.common import HEADERS, PAYLOAD, ratio, run_loop, spread
from odq_compactor import CompactorOptions, RetentionCompactor, compact_root
from opendata_queue import Engine, NewMessage, QueueOptions, StoreSettings
from opendata_queue.testing import ManualClock
from tests.support.s3_server import S3Server

SETTINGS = StoreSettings(ttl_grace_ms=0, garbage_age_ms=1_000)
BATCH = 1_000
BUCKET = "odq-retention"
EXPIRE_IN_TEN = 9
LARGE_PAYLOAD = 8 * PAYLOAD
TARGET_SPACE = 1.5
TARGET_CLAIMS = 0.7
QUICK = CompactorOptions(work_share=1.0)
REWRITE = CompactorOptions(work_share=1.0, rewrite=True)
CONSUMERS = 4
CLAIMED_AT_ONCE = 10

T = TypeVar("T")


@contextlib.contextmanager
def stores(wanted: set[str], folder: Path) -> Iterator[dict[str, str]]:
    """Where each kind of store is."""
    urls = {}
    with contextlib.ExitStack() as stack:
        if "file" in wanted:
            urls["file"] = f"file://{folder}"
        if "s3" in wanted:
            server = stack.enter_context(S3Server())
            server.create_bucket(BUCKET)
            os.environ.update(server.environment())
            urls["s3"] = f"s3://{BUCKET}"
        yield urls


async def publish(
    engine: Engine,
    count: int,
    *,
    retention_seconds: int = 0,
    survivors: bool = False,
    payload: bytes = PAYLOAD,
) -> None:
    """So many messages, nine in ten with a retention; or only those that have none."""
    messages = []
    for number in range(count):
        expires = number % 10 < EXPIRE_IN_TEN
        if survivors and expires:
            continue
        seconds = retention_seconds if expires else 0
        headers = {**HEADERS, "kind": "short" if seconds else "long"}
        messages.append(NewMessage(payload, headers=headers, retention_seconds=seconds))
    for start in range(0, len(messages), BATCH):
        await engine.publish_many(messages[start : start + BATCH])


async def measure_space(url: str, count: int, seconds: int) -> tuple[list[object], float]:
    """Bytes before and after a pass alone, and what the survivors alone need."""
    root, alone = f"{url}/{uuid4().hex}", f"{url}/{uuid4().hex}"
    async with await Engine.open(root, settings=SETTINGS) as engine:
        await engine.create_queue("q")
        await publish(engine, count, retention_seconds=seconds)
        expired_at = time.monotonic() + seconds + 1
        await engine.all_is_routed()
    async with await Engine.open(alone, settings=SETTINGS) as engine:
        await engine.create_queue("q")
        await publish(engine, count, retention_seconds=seconds, survivors=True)
        await engine.all_is_routed()
    needed = (await compact_root(alone, settings=SETTINGS, options=REWRITE)).bytes_after
    await asyncio.sleep(expired_at - time.monotonic())
    report = await compact_root(root, settings=SETTINGS)
    assert needed
    assert report.bytes_before is not None
    assert report.bytes_after is not None
    expired = report.total("expired messages")
    assert expired == count // 10 * EXPIRE_IN_TEN, expired
    async with await Engine.open(root, settings=SETTINGS) as engine:
        stats = await engine.stats("q")
        assert stats.available == count - expired, stats
        assert len(await engine.claim("q", 100)) == 100
    part = report.bytes_after / needed
    row: list[object] = [
        f"{expired:,} of {count:,}",
        f"{report.bytes_before / 1e6:.1f}",
        f"{report.bytes_after / 1e6:.1f}",
        f"{needed / 1e6:.1f}",
        f"{part:.2f}",
        f"{report.duration_ms / 1000:.1f}",
        f"{report.requests * 1000 / expired:.2f}",
    ]
    return row, part


@dataclass(kw_only=True, slots=True)
class Claims:
    """What consumers got, in each round: messages a second."""

    alone: list[float] = field(default_factory=list)
    """Before and after a pass, the mean of both."""
    beside: list[float] = field(default_factory=list)
    slowest: list[float] = field(default_factory=list)
    """In the slowest second of a pass."""
    pass_seconds: list[float] = field(default_factory=list)
    expired: int = 0


async def measure_claims(url: str, options: argparse.Namespace) -> Claims:
    """Each round on a root of its own: alone, during a whole pass, and alone again."""
    found = Claims()
    for _ in range(options.rounds):
        await claims_of_a_round(url, options, found)
    return found


async def claims_of_a_round(url: str, options: argparse.Namespace, found: Claims) -> None:
    clock = ManualClock()
    # The files of commits are collected every 15 s as a rule, in one turn or another: never here.
    settings = replace(SETTINGS, compaction_poll_ms=200, garbage_interval_ms=600_000)
    count = options.messages // options.rounds
    short_seconds = options.claims_retention_seconds
    async with await Engine.open(f"{url}/{uuid4().hex}", settings=settings, clock=clock) as engine:
        of_claimed = QueueOptions(done_retention_seconds=short_seconds)
        await engine.create_queue("q", filter="kind = 'long'", options=of_claimed)
        await engine.create_queue("short", filter="kind = 'short'")
        # On files so many are claimed meanwhile that more have to stay than expire. Then what
        # expires is larger, so that the files are rewritten for it all the same.
        on_files = url.startswith("file:")
        payload = LARGE_PAYLOAD if on_files else PAYLOAD
        await publish(engine, count, retention_seconds=short_seconds, payload=payload)
        # What SlateDB drops, it drops by the machine's own clock.
        droppable_at = time.monotonic() + short_seconds + 1
        await publish(engine, options.claim_messages * (4 if on_files else 1))
        await engine.all_is_routed()
        await settle(engine)
        await claim_while(engine, asyncio.sleep(options.seconds))  # what is cold becomes warm
        before, _ = await claim_while(engine, asyncio.sleep(options.seconds))
        await asyncio.sleep(droppable_at - time.monotonic())
        clock.advance_ms(short_seconds * 1000 + 1)
        compactor = RetentionCompactor(engine)
        meanwhile, report = await claim_while(engine, compactor.run_once())
        after, _ = await claim_while(engine, asyncio.sleep(options.seconds))
    assert report.total("expired messages") == count // 10 * EXPIRE_IN_TEN, report
    assert report.total("done entries"), report
    assert report.rewritten or options.quick, report
    found.alone.append((before.rate + after.rate) / 2)
    found.beside.append(meanwhile.rate)
    found.slowest.append(meanwhile.slowest_second)
    found.pass_seconds.append(meanwhile.seconds)
    found.expired += report.total("expired messages")


async def settle(engine: Engine) -> None:
    """Let SlateDB end what publishing has left to it, so that nothing else goes on."""
    stores = engine.stores
    for database in (stores.queues.database, *(one.database for one in stores.shards.values())):
        await database.flush_to_files()
        while not await database.compact():  # noqa: ASYNC110
            await asyncio.sleep(0.2)


@dataclass(kw_only=True, slots=True)
class Meanwhile:
    """What was claimed and acknowledged while something went on."""

    seconds: float
    times: list[float]
    """When each batch was done, from the beginning."""

    @property
    def rate(self) -> float:
        return len(self.times) * CLAIMED_AT_ONCE / self.seconds

    @property
    def slowest_second(self) -> float:
        if self.seconds < 1:
            return self.rate
        in_each = Counter(int(one) for one in self.times)
        return min(in_each[one] for one in range(int(self.seconds))) * CLAIMED_AT_ONCE


async def claim_while(engine: Engine, work: Coroutine[Any, Any, T]) -> tuple[Meanwhile, T]:
    """Let consumers claim and acknowledge from the beginning of some work to its end."""
    times: list[float] = []
    task = asyncio.create_task(work)
    started = time.perf_counter()

    async def consume() -> None:
        while not task.done():
            messages = await engine.claim("q", CLAIMED_AT_ONCE)
            assert len(messages) == CLAIMED_AT_ONCE, "there were too few messages to claim"
            await engine.ack("q", *messages)
            times.append(time.perf_counter() - started)

    await asyncio.gather(*(consume() for _ in range(CONSUMERS)))
    return Meanwhile(seconds=time.perf_counter() - started, times=times), await task


async def measure_requests(url: str, expired: int, history: int, *, alone: bool) -> float:
    """Requests per 1,000 expired messages, with so many messages that stay."""
    clock = ManualClock()
    root = f"{url}/{uuid4().hex}"
    async with await Engine.open(root, settings=SETTINGS, clock=clock) as engine:
        await engine.create_queue("q", options=QueueOptions(done_retention_seconds=0))
        await publish(engine, history)
        await publish(engine, expired * 10 // 9, retention_seconds=60)
        await engine.all_is_routed()
    clock.advance_ms(60_001)
    if alone:
        report = await compact_root(root, settings=SETTINGS, clock=clock)
    else:
        # Opened again, so that nothing is at hand.
        async with await Engine.open(root, settings=SETTINGS, clock=clock) as engine:
            report = await RetentionCompactor(engine, QUICK).run_once()
    return report.requests * 1000 / report.total("expired messages")


def kept(found: Claims) -> str:
    """Which part of the throughput is kept in each round."""
    parts = zip(found.beside, found.alone, strict=True)
    return ", ".join(f"{beside / alone:.0%}" for beside, alone in parts)


async def run(options: argparse.Namespace, urls: dict[str, str]) -> None:
    console = Console(width=120)
    failed = []
    space = Table("store", "expired", "MB before", "MB after", "MB needed", "after / needed",
                  "seconds", "requests per 1,000", title="Space")  # fmt: skip
    claims = Table("store", "claimed/s alone", "beside a pass", "kept (each round)",
                   "slowest second", "expired", "seconds a pass", title="Claims")  # fmt: skip
    growth = Table("store", "expired", "messages that stay", "requests per 1,000 in an owner",
                   "alone", title="Requests of a pass")  # fmt: skip
    for name, url in urls.items():
        if "space" in options.parts:
            row, part = await measure_space(url, options.messages, options.retention_seconds)
            space.add_row(name, *map(str, row))
            if part > TARGET_SPACE:
                failed.append(f"{name}: {part:.2f} times what survivors need")
        for times in (1, 2, 4) if "requests" in options.parts else ():
            history = options.history * times
            requests = [
                await measure_requests(url, options.expired, history, alone=alone)
                for alone in (False, True)
            ]
            shown = [f"{one:.2f}" for one in requests]
            growth.add_row(name, f"{options.expired:,}", f"{history:,}", *shown)
        if "claims" in options.parts:
            found = await measure_claims(url, options)
            part = ratio(found.beside, found.alone)
            slowest = ratio(found.slowest, found.alone)
            claims.add_row(
                name,
                f"{statistics.median(found.alone):,.0f} {spread(found.alone)}",
                f"{statistics.median(found.beside):,.0f} {spread(found.beside)}",
                f"{part:.0%} ({kept(found)})",
                f"{slowest:.0%}",
                f"{found.expired:,}",
                f"{statistics.median(found.pass_seconds):.1f}",
            )
            if part < TARGET_CLAIMS:
                failed.append(f"{name}: claims keep {part:.0%}")
    for table in (space, growth, claims):
        if table.row_count:
            console.print(table)
    console.print(
        f"Targets: at most {TARGET_SPACE} times what survivors need, claims keep "
        f"{TARGET_CLAIMS:.0%}: " + ("; ".join(failed) or "met")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few messages: does it run?")
    parser.add_argument("--stores", default="file,s3", help="which stores")
    parser.add_argument("--only", default="space,claims,requests", help="which parts")
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--retention-seconds", type=int, default=10)
    parser.add_argument("--root", type=Path, default=None, help="where to put files")
    options = parser.parse_args()
    options.parts = set(options.only.split(","))
    options.expired, options.history, options.claim_messages = 18_000, 50_000, 120_000
    options.rounds, options.seconds, options.claims_retention_seconds = 2, 1.0, 10
    if options.quick:
        options.messages, options.retention_seconds = 2_000, 2
        options.expired, options.history, options.claim_messages = 900, 1_000, 20_000
        options.rounds, options.seconds, options.claims_retention_seconds = 1, 0.2, 1
    folder = Path(tempfile.mkdtemp(dir=options.root))
    try:
        with stores(set(options.stores.split(",")), folder) as urls:
            run_loop(run(options, urls), uvloop=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
