"""Compaction of databases, so that removed bytes leave the bucket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from odq_compactor.positions import Position
from odq_compactor.report import RetentionReport
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import StoreAccessError
from opendata_queue.model.paths import QUEUES_PATH, messages_path
from opendata_queue.root.descriptor import read_root
from opendata_queue.root.owner_files import QUEUES_ROLE, OwnerFiles, messages_role
from opendata_queue.root.owner_watch import Verdict, judge
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import Objects, StoreSettings, Upkeep

logger = logging.getLogger(__name__)

_TRIES: Final = 60
_TRY_AGAIN_SECONDS: Final = 0.5
_REPLAYED_AT_MOST: Final = 16


async def free_space(
    positions: Iterable[Position], report: RetentionReport, *, anyway: bool, patient: bool
) -> None:
    """Have databases rewritten of which enough can be freed, or all of them.

    A ``patient`` caller waits for a compaction of SlateDB's own to end, if there is one.
    """
    for position in positions:
        database = position.store.database
        if not anyway and not position.freeable.at(report.now_ms):
            continue
        size_bytes = await database.size_bytes()
        if not anyway and not position.freeable.is_worth_it(size_bytes, report.now_ms):
            continue
        if await _rewrite(position, report.now_ms, patient=patient):
            report.rewritten.append(database.name)
            logger.info("compacted %s, which had %d bytes", database.name, size_bytes)


async def _rewrite(position: Position, now: int, *, patient: bool) -> bool:
    database = position.store.database
    # SlateDB judges by the newest row in a file, and its collector keeps the newest file. So that
    # is one with nothing but our position in it.
    await database.flush_to_files()
    await position.write()
    await database.flush_to_files()
    for _ in range(_TRIES if patient else 1):
        if await database.compact():
            position.freeable.were_freed(now)
            await position.write()
            return True
        await asyncio.sleep(_TRY_AGAIN_SECONDS)  # it is compacting already
    return False


async def shorten_replay(upkeep: Upkeep, position: Position) -> None:
    """Spare the next open of a database reading all that was written by those before it.

    Each open writes a WAL file, and reads those since the last flush: so passes that find nothing
    to do would cost more and more.
    """
    if await upkeep.wal_files() > _REPLAYED_AT_MOST:
        await position.write()  # nothing is flushed if nothing was written
        await position.store.database.flush_to_files()


async def collect_garbage(
    positions: Iterable[Position], report: RetentionReport, *, kept_ms: int
) -> None:
    """Wait until replaced files are old enough, and remove them: no other process reads them."""
    if report.rewritten:
        await asyncio.sleep(kept_ms / 1000)
    for position in positions:
        await position.store.database.collect_garbage(min_age_ms=kept_ms)


async def free_space_beside(
    url: str, *, settings: StoreSettings | None = None, clock: Clock | None = None
) -> RetentionReport:
    """Free space of the databases of a root that processes serve, and remove nothing else.

    Those processes do the work of compactions. A database that no process has open is left out.
    """
    clock = machine_clock(clock)
    objects = Objects.open(url, settings or StoreSettings())
    if await read_root(objects) is None:
        raise StoreAccessError(f"there is no root at {url}")
    loop = asyncio.get_running_loop()
    started = loop.time()
    report = RetentionReport(now_ms=clock.now_ms())
    report.bytes_before = await objects.size_bytes()
    shards = [0, *await ShardFiles(objects).live_shards()]
    paths = {QUEUES_PATH: QUEUES_ROLE}
    paths |= {messages_path(shard): messages_role(shard) for shard in shards}
    served = 0
    for path, role in paths.items():
        if judge(await OwnerFiles(objects, role).newest(), clock) is Verdict.GONE:
            continue
        served += 1
        database = Upkeep(objects, path)
        if await database.compact():
            report.rewritten.append(database.name)
        await database.collect_garbage()
    if not served:
        raise StoreAccessError(f"no process serves {url}: run odq compact without --space-only")
    report.bytes_after = await objects.size_bytes()
    report.requests = objects.requests
    report.duration_ms = round((loop.time() - started) * 1000)
    return report
