"""The offsets of a stream of messages: how far each batch goes, and where it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from opendata_queue import NewMessage
from opendata_queue.spark.read.reader import MessagesPartition
from opendata_queue.spark.read.stream_reader import MessagesStreamReader, Offset
from opendata_queue.spark.schemas import schema_of
from opendata_queue.testing import ManualClock
from tests.retention.rows import ERASING, opened
from tests.support.bulk_jobs import append

GONE, LEFT = 500, 25


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/root"


def stream_reader(url: str, **options: str) -> MessagesStreamReader:
    return MessagesStreamReader({"path": url, **options}, schema_of({"table": "messages"}))


def batches(
    reader: MessagesStreamReader, start: Offset | None = None
) -> list[list[tuple[int, int]]]:
    """The ranges of sequences that Spark would read, batch by batch, until nothing is left."""
    offset = reader.initialOffset() if start is None else start
    found = []
    while (end := reader.latestOffset(offset, reader.getDefaultReadLimit())) != offset:
        parts = [
            one for one in reader.partitions(offset, end) if isinstance(one, MessagesPartition)
        ]
        found.append([(one.first, one.end) for part in parts for one in part.ranges])
        offset = end
    return found


async def test_a_log_whose_beginning_was_removed_is_read_from_what_is_left(
    url: str, clock: ManualClock
) -> None:
    async with opened(url, clock, ERASING) as (engine, compactor):
        await engine.publish_many([NewMessage(b"gone", retention_seconds=1)] * GONE)
        behind = await asyncio.to_thread(lambda: stream_reader(url).initialOffset())
        clock.advance_ms(10_000)
        assert (await compactor.run_once()).total("expired messages") == GONE
        await engine.publish_many([NewMessage(b"left")] * LEFT)

        reader = await asyncio.to_thread(stream_reader, url, maxRowsPerTrigger="10")
        from_the_start = await asyncio.to_thread(batches, reader)
        from_before = await asyncio.to_thread(batches, reader, behind)

    assert from_the_start == [[(500, 510)], [(510, 520)], [(520, 525)]]
    assert from_before == [[(0, 510)], [(510, 520)], [(520, 525)]]


async def test_an_offset_does_not_go_back_when_a_log_is_emptied(
    url: str, clock: ManualClock
) -> None:
    async with opened(url, clock, ERASING) as (engine, compactor):
        await engine.publish_many([NewMessage(b"gone", retention_seconds=1)] * GONE)
        reader = await asyncio.to_thread(stream_reader, url)
        limit = reader.getDefaultReadLimit()
        start = await asyncio.to_thread(reader.initialOffset)
        end = await asyncio.to_thread(reader.latestOffset, start, limit)
        clock.advance_ms(10_000)
        assert (await compactor.run_once()).total("expired messages") == GONE

        assert await asyncio.to_thread(reader.latestOffset, end, limit) == end


async def test_what_is_available_now_is_read_within_the_limit_and_nothing_that_comes_later(
    url: str, clock: ManualClock
) -> None:
    async with opened(url, clock) as (engine, _):
        await engine.publish_many([NewMessage(b"now")] * LEFT)
        for job in ("one", "two"):
            await append(url, job, [NewMessage(b"bulk")] * 7)
            await engine.parts.following.bulk.look()
            await engine.parts.following.bulk.finished()
        reader = await asyncio.to_thread(stream_reader, url, maxRowsPerTrigger="10")
        await asyncio.to_thread(reader.prepareForTriggerAvailableNow)
        await engine.publish_many([NewMessage(b"later")] * 100)
        await append(url, "three", [NewMessage(b"bulk")] * 7)
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()

        now = await asyncio.to_thread(batches, reader)

    assert now == [[(0, 10)], [(10, 20)], [(20, 25), (0, 7)], [(0, 7)]]
