"""Routing: bounded batches, logs that can't be read, and an end while others wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from opendata_queue import (
    ClosedError,
    Engine,
    NewMessage,
    QueueOptions,
    StoreUnavailableError,
)
from opendata_queue.log.metadata_log import LogChunk, MetadataLog
from opendata_queue.model.messages import MAX_HEADERS_BYTES
from opendata_queue.routing.router import Router
from opendata_queue.store import DatabaseReads, ScannedRows
from opendata_queue.store.db.reads import SCAN_BYTES
from opendata_queue.testing import ManualClock

LARGE_HEADER = 65_000
LARGE_HEADERS = 16


async def test_messages_for_many_queues_are_routed_in_bounded_batches(
    memory_system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        await memory_system.create_queue(f"q{number}", options=QueueOptions(window=1))
    sizes: list[int] = []
    commit = memory_system._queues.database.commit

    async def watched(rows: Any, **options: Any) -> None:
        sizes.append(len(rows))
        await commit(rows, **options)

    monkeypatch.setattr(memory_system._queues.database, "commit", watched)
    await memory_system.publish_many([NewMessage(b"x")] * 1_000)
    await memory_system._tailer.caught_up()
    await memory_system._queues.all_durable()

    assert sum(sizes) > 60 * 999
    assert max(sizes) < 26_000  # the limit of a batch, and what was added to a batch below it
    assert (await memory_system.stats("q59")).available == 1_000


async def test_routing_goes_on_when_the_log_can_be_read_again(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open("memory:///unread", clock=clock) as system:
        await system.create_queue("q")
        await system._tailer.close()  # nothing is routed any more
        ids = await system.publish_many([NewMessage(b"x")] * 3)
    read, failed = MetadataLog.chunks, asyncio.Event()

    def broken(self: MetadataLog, *arguments: Any, **options: Any) -> Any:
        if failed.is_set():
            return read(self, *arguments, **options)
        failed.set()
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(MetadataLog, "chunks", broken)
    async with await Engine.open("memory:///unread", clock=clock) as system:
        await failed.wait()
        assert await system.claim("q", 10) == []
        claiming = asyncio.create_task(system.claim("q", 10, wait_ms=60_000))
        await asyncio.sleep(0)
        clock.advance_ms(1_000)

        assert [m.message_id for m in await claiming] == ids


def with_large_headers(count: int) -> list[NewMessage]:
    large = {f"large{number}": "y" * LARGE_HEADER for number in range(LARGE_HEADERS)}
    return [NewMessage(b"x", headers={"n": str(number), **large}) for number in range(count)]


async def test_a_log_with_large_headers_is_routed_in_chunks_of_bounded_bytes(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open("memory:///large", clock=clock) as system:
        await system.create_queue("q", filter="n <> '3'")
        await system._tailer.close()  # nothing is routed any more
        ids = await system.publish_many(with_large_headers(14))
    sizes: list[int] = []
    route_log = Router.route_log

    async def watched(self: Router, chunk: LogChunk, **options: Any) -> None:
        sizes.append(sum(len(key) + len(value) for key, value in chunk._rows.rows()))
        await route_log(self, chunk, **options)

    monkeypatch.setattr(Router, "route_log", watched)
    async with await Engine.open("memory:///large", clock=clock) as system:
        await system._tailer.caught_up()
        claimed = await system.claim("q", 100)

    assert [message.message_id for message in claimed] == ids[:3] + ids[4:]
    assert sum(sizes) > 14 * LARGE_HEADERS * LARGE_HEADER
    assert max(sizes) < SCAN_BYTES + MAX_HEADERS_BYTES


async def test_a_queue_from_the_past_reads_large_headers_once_and_in_bounded_chunks(
    memory_system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await memory_system.publish_many(with_large_headers(14))
    chunks: list[ScannedRows] = []
    scan_packed = DatabaseReads.scan_packed

    async def watched(self: DatabaseReads, *span: Any, **options: Any) -> Any:
        async for chunk in scan_packed(self, *span, **options):
            chunks.append(chunk)
            yield chunk

    monkeypatch.setattr(DatabaseReads, "scan_packed", watched)
    await memory_system.create_queue("q", start="beginning")
    await memory_system._replay.finished()

    assert [message.message_id for message in await memory_system.claim("q", 100)] == ids
    assert sum(map(len, chunks)) == len(ids)
    assert max(len(chunk) for chunk in chunks) <= 5


async def test_whoever_waits_for_routing_is_told_when_it_is_closed(
    memory_system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def stuck(*_: Any, **__: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    await memory_system.create_queue("q")
    monkeypatch.setattr(Router, "route", stuck)
    await memory_system.publish(b"x")
    await begun.wait()
    waiting = asyncio.create_task(memory_system.create_queue("next"))
    await asyncio.sleep(0)

    await memory_system._tailer.close()

    with pytest.raises(ClosedError, match="before all"):
        await waiting
    with pytest.raises(ClosedError, match="before all"):
        await memory_system._tailer.caught_up()
