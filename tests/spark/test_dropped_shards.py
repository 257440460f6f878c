"""Reading while retention drops what is read: rows past their time are left out, nothing fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from odq_compactor import CompactorOptions, RetentionCompactor, set_delete_when_done
from odq_encodings import encode_payload_key
from opendata_queue import Engine, NewMessage
from opendata_queue.log.bulk_writer import BulkShard
from opendata_queue.model.errors import CorruptStoreError, OdqError
from opendata_queue.root.commit_files import CommittedShard
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.spark.read import messages as message_rows
from opendata_queue.spark.read.messages import message_batches
from opendata_queue.spark.read.reader import MessagesPartition, MessagesReader
from opendata_queue.spark.rows.arrow import Batches
from opendata_queue.spark.schemas import schema_of
from opendata_queue.spark.visible import ShardRange, visible_ranges
from opendata_queue.store import Objects, Rows
from opendata_queue.testing import ManualClock
from tests.retention.rows import ERASING, QUICK, opened
from tests.support.bulk_jobs import commit

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
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()
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
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()
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
            await engine.parts.following.bulk.look()
            await engine.parts.following.bulk.finished()
        ranges = await visible_ranges(objects)
        await objects.delete_under(f"messages/{shard:05}")

        with pytest.raises(OdqError, match=str(shard)):
            async for _ in message_batches(objects, ranges, Batches(columns()), clock.now_ms()):
                pass


# --- messages of live shards ----------------------------------------------------------------------

LARGE = bytes(70_000)


async def read_while(
    engine: Engine,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[], Awaitable[object]],
) -> list[bytes]:
    """The payloads that are read if something happens after the log is read, and before they are.

    The planned moment is now; no clock but ours is asked.
    """
    real = message_rows._Payloads.of

    async def of(payloads: message_rows._Payloads, entries: Sequence[Any]) -> Any:
        await happens()
        return await real(payloads, entries)

    monkeypatch.setattr(message_rows._Payloads, "of", of)
    objects = engine.stores.objects
    ranges = await visible_ranges(objects)
    reading = message_batches(objects, ranges, Batches(columns()), clock.now_ms(), clock)
    return [one async for batch in reading for one in batch["payload"].to_pylist()]


@pytest.mark.parametrize("options", [QUICK, ERASING], ids=["quick", "erasing"])
async def test_messages_that_expire_while_they_are_read_are_left_out(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, options: CompactorOptions
) -> None:
    async with opened(f"file://{tmp_path}/root", clock, options) as (engine, compactor):
        await engine.publish_many(
            [
                NewMessage(LARGE, retention_seconds=MINUTE_S),
                NewMessage(b"short", retention_seconds=MINUTE_S),
                NewMessage(b"kept"),
                NewMessage(LARGE + b"kept"),
            ]
        )

        async def expire() -> None:
            clock.advance_ms(2 * MINUTE_S * 1000)
            assert (await compactor.run_once()).total("blobs") == 1

        found = await read_while(engine, clock, monkeypatch, expire)

    # A small one whose rows nobody has removed yet could still be read.
    assert found in ([b"kept", LARGE + b"kept"], [b"short", b"kept", LARGE + b"kept"])


async def test_messages_that_are_deleted_as_done_while_they_are_read_are_left_out(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(f"file://{tmp_path}/root", clock) as (engine, compactor):
        await set_delete_when_done(engine.stores.queues, True)
        await engine.create_queue("q")
        await engine.publish_many([NewMessage(LARGE), NewMessage(b"kept")])
        (first,) = await engine.claim("q", 1)
        await engine.ack("q", first.receipt)

        async def delete() -> None:
            clock.advance_ms(2 * MINUTE_S * 1000)
            assert (await compactor.run_once(thorough=True)).total("blobs") == 1

        found = await read_while(engine, clock, monkeypatch, delete)

    assert (first.payload, found) == (LARGE, [b"kept"])


@pytest.mark.parametrize("large", [True, False])
async def test_a_message_that_lost_its_payload_fails_the_read(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    async with opened(f"file://{tmp_path}/root", clock) as (engine, _):
        (message_id,) = await engine.publish_many(
            [NewMessage(LARGE if large else b"small", retention_seconds=MINUTE_S)]
        )

        async def lose() -> None:
            if large:
                await engine.stores.objects.delete_under("blobs/00000")

        if not large:
            rows = Rows()
            rows.delete(encode_payload_key(message_id))
            await engine.stores.shards[0].commit(rows)
        with pytest.raises(CorruptStoreError, match=f"payload of message {message_id} is missing"):
            await read_while(engine, clock, monkeypatch, lose)


def _ranges(part: InputPartition) -> tuple[ShardRange, ...]:
    assert isinstance(part, MessagesPartition)
    return part.ranges
