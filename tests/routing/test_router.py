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
from opendata_queue.log.metadata_log import MetadataLog
from opendata_queue.routing.router import Router
from opendata_queue.testing import ManualClock


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
