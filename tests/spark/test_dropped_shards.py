"""Reading while retention drops what is read: rows past their time are left out, nothing fails."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from odq_compactor import RetentionCompactor
from opendata_queue import Engine, NewMessage
from opendata_queue.bulk import BulkShard
from opendata_queue.commit_files import CommittedShard
from opendata_queue.errors import OdqError
from opendata_queue.shard_files import ShardFiles
from opendata_queue.spark.arrow_rows import Batches
from opendata_queue.spark.message_rows import message_batches
from opendata_queue.spark.reader import MessagesPartition, MessagesReader
from opendata_queue.spark.schemas import schema_of
from opendata_queue.spark.visible import ShardRange, visible_ranges
from opendata_queue.store import Objects
from opendata_queue.testing import ManualClock
from tests.retention.rows import QUICK
from tests.shards.bulk_jobs import commit

MINUTE_S = 60
ROWS = 1_000
MANY_ROWS = 60_000
"""More than is read ahead while the first batch is made."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_790_000_000_000)


def columns() -> StructType:
    return schema_of({"table": "messages", "columns": "message_id,payload"})


async def append(
    objects: Objects, clock: ManualClock, job: str, retention_seconds: int, rows: int = ROWS
) -> int:
    """A committed shard; returns its number."""
    reserved = await ShardFiles(objects).reserve_bulk(job=job, now_ms=clock.now_ms())
    shard = await BulkShard.create(objects, reserved.shard, clock)
    await shard.add([NewMessage(bytes(600), retention_seconds=retention_seconds)] * rows)
    done = CommittedShard(**asdict(await shard.finish()))
    await commit(str(objects.location), job, [done], now_ms=clock.now_ms())
    return reserved.shard


async def drop_what_is_past(engine: Engine, clock: ManualClock) -> None:
    clock.advance_ms(2 * MINUTE_S * 1000)
    report = await RetentionCompactor(engine, QUICK).run_once()
    assert report.total("bulk shards") == 1


async def test_a_shard_that_is_dropped_after_planning_is_left_out(
    tmp_path: Path, clock: ManualClock
) -> None:
    root = f"file://{tmp_path}/root"
    async with await Engine.open(root, clock=clock) as engine:
        objects = engine.stores.objects
        short = await append(objects, clock, "short", MINUTE_S)
        kept = await append(objects, clock, "kept", 0)
        await engine._following.bulk.look()
        await engine._following.bulk.finished()
        reader = MessagesReader(root, columns(), 10 * ROWS)
        planned = await asyncio.to_thread(reader.partitions)
        ranges = [one for part in planned for one in _ranges(part)]
        await drop_what_is_past(engine, clock)
        batches = await asyncio.to_thread(
            lambda: [one for part in planned for one in reader.read(part)]
        )

    assert {one.shard for one in ranges} == {short, kept}
    ids = [one for batch in batches for one in batch["message_id"].to_pylist()]
    assert sorted(ids) == list(range(kept << 32, (kept << 32) + ROWS))


async def test_a_shard_that_is_dropped_while_it_is_read_ends_there(
    tmp_path: Path, clock: ManualClock
) -> None:
    async with await Engine.open(f"file://{tmp_path}/root", clock=clock) as engine:
        objects = engine.stores.objects
        short = await append(objects, clock, "short", MINUTE_S, MANY_ROWS)
        await engine._following.bulk.look()
        await engine._following.bulk.finished()
        ranges = await visible_ranges(objects)
        reading = message_batches(objects, ranges, Batches(columns()), clock.now_ms())
        batches = [await anext(reading)]
        await drop_what_is_past(engine, clock)
        batches += [batch async for batch in reading]

    ids = [one for batch in batches for one in batch["message_id"].to_pylist()]
    assert ids == list(range(short << 32, (short << 32) + len(ids)))
    assert len(ids) < MANY_ROWS
    assert {one for batch in batches for one in batch["payload"].to_pylist()} == {bytes(600)}


@pytest.mark.parametrize("registered", [True, False])
async def test_a_shard_that_is_lost_and_was_not_dropped_fails_the_read(
    tmp_path: Path, clock: ManualClock, registered: bool
) -> None:
    async with await Engine.open(f"file://{tmp_path}/root", clock=clock) as engine:
        objects = engine.stores.objects
        shard = await append(objects, clock, "job", 0)
        if registered:
            await engine._following.bulk.look()
            await engine._following.bulk.finished()
        ranges = await visible_ranges(objects)
        await objects.delete_under(f"messages/{shard:05}")

        with pytest.raises(OdqError, match=str(shard)):
            async for _ in message_batches(objects, ranges, Batches(columns()), clock.now_ms()):
                pass


def _ranges(part: InputPartition) -> tuple[ShardRange, ...]:
    assert isinstance(part, MessagesPartition)
    return part.ranges
