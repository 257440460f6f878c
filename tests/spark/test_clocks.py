"""Tables go by the clock of the root, whatever the reader's machine shows (RFC 0012)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import DataSourceReader, InputPartition

from opendata_queue import Engine, NewMessage, QueueOptions, SystemClock
from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.spark.options import SinkOptions
from opendata_queue.spark.read import messages as message_rows
from opendata_queue.spark.read.reader import MessagesReader, QueueTableReader
from opendata_queue.spark.read.stream_reader import MessagesStreamReader
from opendata_queue.spark.rows.columns import Layout
from opendata_queue.spark.schemas import schema_of
from opendata_queue.spark.visible import open_objects, root_now_ms, visible_ranges
from opendata_queue.spark.write.sink import SinkTask, commit_job
from tests.root.shifted import ShiftedClock
from tests.spark.test_driver_checks import report

MINUTE_S = 60
BEHIND_MS = -10 * MINUTE_S * 1000
QUEUE = QueueOptions(
    max_attempts=1, done_retention_seconds=MINUTE_S, failed_retention_seconds=MINUTE_S
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/root"


@pytest.fixture
async def root(url: str) -> AsyncIterator[str]:
    """One whose owner runs on the reader's machine, with a wall clock of its own that is behind.

    By the reader's wall clock all that is kept for a minute ended nine minutes ago.
    """
    clock = ShiftedClock(BEHIND_MS, SystemClock().timeline)
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q", options=QUEUE)
        await engine.publish_many([NewMessage(b"x", retention_seconds=MINUTE_S)] * 2)
        done, failed = await engine.claim("q", 2)
        await engine.ack("q", done)
        await engine.nack("q", failed, error="no")
        yield url


def rows_of(
    reader: DataSourceReader | MessagesStreamReader, planned: Sequence[InputPartition]
) -> int:
    batches: list[Any] = [batch for part in planned for batch in reader.read(part)]
    return sum(batch.num_rows for batch in batches)


async def test_messages_are_there_until_they_expire_by_the_clock_of_the_root(root: str) -> None:
    reader = MessagesReader(root, schema_of({"table": "messages"}), 1_000)

    def rows() -> int:
        return rows_of(reader, reader.partitions())

    assert await asyncio.to_thread(rows) == 2


async def test_a_stream_has_messages_until_they_expire_by_the_clock_of_the_root(root: str) -> None:
    def rows() -> int:
        reader = MessagesStreamReader({"path": root}, schema_of({"table": "messages"}))
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        return rows_of(reader, reader.partitions(start, end))

    assert await asyncio.to_thread(rows) == 2


@pytest.mark.parametrize("table", ["done", "failed"])
async def test_entries_are_there_until_they_expire_by_the_clock_of_the_root(
    root: str, table: str
) -> None:
    reader = QueueTableReader(root, table, schema_of({"table": table}))

    assert await asyncio.to_thread(rows_of, reader, [InputPartition(None)]) == 1


async def test_a_payload_that_is_missing_is_damage_until_its_message_expires_by_the_root(
    root: str,
) -> None:
    objects = open_objects(root)
    (one,) = [one for one in await visible_ranges(objects) if one.size]
    now_ms = await root_now_ms(objects)
    entry = (one.shard << 32, 0, now_ms, now_ms, MINUTE_S, None)

    with pytest.raises(CorruptStoreError, match="payload of message 0 is missing"):
        await message_rows._check_gone(objects, one.shard, [entry], None)  # type: ignore[list-item]


async def test_a_job_is_committed_whose_rows_have_not_expired_by_the_clock_of_the_root(
    root: str,
) -> None:
    options = SinkOptions(root=root, job="j", header_columns=(), rejects=None)
    task = SinkTask(options=options, layout=Layout(columns=("payload",)))
    in_a_minute = await root_now_ms(open_objects(root)) + MINUTE_S * 1000
    written = report(0, SystemClock().now_ms(), expires_from=in_a_minute, expires_at=in_a_minute)

    assert await commit_job(task, "j", [written])
