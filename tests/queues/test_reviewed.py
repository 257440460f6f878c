"""What reviews have found: bad arguments, deleted queues, waiters, fan-out, smaller windows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from odq_encodings import ActiveMessages, ActiveMessagesKey
from opendata_queue import (
    ClosedError,
    Engine,
    InvalidInputError,
    NewMessage,
    PublishOptions,
    QueueNotFoundError,
    QueueOptions,
    StoreUnavailableError,
)
from opendata_queue.metadata_log import MetadataLog
from opendata_queue.routing import Router
from opendata_queue.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def memory_system(clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open("memory:///", clock=clock) as system:
        yield system


@pytest.fixture
async def claimed(memory_system: Engine) -> str:
    """The receipt of a message in queue q."""
    await memory_system.create_queue("q")
    await memory_system.publish(b"x")
    (message,) = await memory_system.claim("q", wait_ms=1_000)
    return message.receipt


@pytest.mark.parametrize(
    "arguments",
    [
        {"delay_ms": 0.0},
        {"delay_ms": 1.5},
        {"delay_ms": 2**63},
        {"delay_ms": -1},
        {"delay_ms": "x"},
        {"error": None},
        {"error": b"x"},
    ],
    ids=str,
)
async def test_a_nack_with_bad_arguments_changes_nothing(
    memory_system: Engine, claimed: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(arguments))):
        await memory_system.nack("q", claimed, **arguments)

    assert (await memory_system.stats("q")).in_flight == 1
    assert await memory_system.ack("q", claimed) == ["ok"]


@pytest.mark.parametrize(
    "arguments",
    [{"consumer": "\ud800"}, {"consumer": 5}, {"wait_ms": "x"}, {"wait_ms": None}, {"count": 1.0}],
    ids=ascii,
)
async def test_a_claim_with_bad_arguments_claims_nothing(
    memory_system: Engine, arguments: dict[str, Any]
) -> None:
    await memory_system.create_queue("q")
    await memory_system.publish(b"x")
    await memory_system._tailer.caught_up()

    with pytest.raises(InvalidInputError, match=next(iter(arguments))):
        await memory_system.claim("q", **arguments)

    assert (await memory_system.stats("q")).available == 1


async def test_what_is_no_receipt_is_named(memory_system: Engine, claimed: str) -> None:
    bad: Any = [claimed]
    with pytest.raises(
        InvalidInputError, match="no receipt and no claimed message, but a list: give each"
    ):
        await memory_system.ack("q", bad)


async def test_a_window_that_is_made_smaller_gives_the_rest_to_the_backlog(
    memory_system: Engine,
) -> None:
    await memory_system.create_queue("q", options=QueueOptions(window=50))
    ids = await memory_system.publish_many([NewMessage(b"x")] * 80)
    await memory_system._tailer.caught_up()

    await memory_system.update_queue("q", window=2)

    value = await memory_system._queues._database.get(ActiveMessagesKey(queue_id=b"q").encode())
    assert value is not None
    assert len(ActiveMessages.decode(value).available) == 2
    assert (await memory_system.stats("q")).available == 80
    assert [m.message_id for m in await memory_system.claim("q", 100)] == ids


async def test_those_who_were_woken_in_vain_keep_their_place(memory_system: Engine) -> None:
    await memory_system.create_queue("q")
    order: list[str] = []

    async def wait(name: str, count: int) -> None:
        if await memory_system.claim("q", count, wait_ms=60_000):
            order.append(name)

    waiting = []
    for name, count in (("first", 2), ("second", 1), ("third", 1)):
        waiting.append(asyncio.create_task(wait(name, count)))
        await asyncio.sleep(0)
    await memory_system.publish_many([NewMessage(b"x")] * 2)
    while not order:
        await asyncio.sleep(0)
    for number in (2, 3):
        await memory_system.publish(b"x")
        while len(order) < number:
            await asyncio.sleep(0)

    assert order == ["first", "second", "third"]
    await asyncio.gather(*waiting)


async def test_a_waiter_that_is_cancelled_when_it_was_its_turn_lets_the_next_one_have_it(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open("memory:///reviewed", clock=clock) as system:
        await system.create_queue("q")
        first = asyncio.create_task(system.claim("q", wait_ms=60_000))
        await asyncio.sleep(0)
        second = asyncio.create_task(system.claim("q", wait_ms=60_000))
        await asyncio.sleep(0)
        # The first one has to learn of earlier claims before it can take the message.
        learning = asyncio.Event()

        async def learn(_: object) -> None:
            learning.set()
            await asyncio.Event().wait()  # until it is cancelled

        with monkeypatch.context() as patched:
            patched.setattr(system._queues.ledger, "unknown", list)
            patched.setattr(system._queues.ledger, "learn", learn)
            await system.publish(b"x")
            await learning.wait()
        first.cancel()

        (message,) = await second
        assert message.payload == b"x"


async def test_a_refill_of_a_deleted_queue_touches_no_row(memory_system: Engine) -> None:
    await memory_system.create_queue("q", options=QueueOptions(window=2))
    await memory_system.publish_many([NewMessage(b"x")] * 20)
    await memory_system._tailer.caught_up()
    store = memory_system._queues
    old = store.queue("q")
    async with old.reading:
        refill = asyncio.create_task(store._refill(old))
        old.state._window.clear()
        await asyncio.sleep(0)
        await memory_system.delete_queue("q")
        await memory_system.create_queue("q", options=QueueOptions(window=2), start="beginning")

    with pytest.raises(QueueNotFoundError):
        await refill
    while (await memory_system.stats("q")).replaying:
        await asyncio.sleep(0)
    claimed = [m for _ in range(10) for m in await memory_system.claim("q", 2)]
    assert len({m.message_id for m in claimed}) == 20


async def test_messages_for_many_queues_are_routed_in_bounded_batches(
    memory_system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        await memory_system.create_queue(f"q{number}", options=QueueOptions(window=1))
    sizes: list[int] = []
    commit = memory_system._queues._database.commit

    async def watched(rows: Any, **options: Any) -> None:
        sizes.append(len(rows))
        await commit(rows, **options)

    monkeypatch.setattr(memory_system._queues._database, "commit", watched)
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


async def test_a_message_whose_payload_is_missing_becomes_a_dead_letter_and_blocks_nobody(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    options = PublishOptions(inline_bytes=10)
    async with await Engine.open(url, clock=clock, options=options) as system:
        await system.create_queue("q", options=QueueOptions(max_attempts=2, backoff_ms=1_000))
        broken, _ = await system.publish_many([NewMessage(bytes(11)), NewMessage(b"fine")])
        await system._tailer.caught_up()
    (blob,) = (tmp_path / "root" / "blobs" / "00000").iterdir()
    blob.unlink()
    async with await Engine.open(url, clock=clock) as system:
        (message,) = await system.claim("q", 2)
        clock.advance_ms(1_000)
        assert await system.claim("q", 2) == []
        (failed,) = await system.failed("q")

    assert message.payload == b"fine"
    assert (failed.message_id, failed.attempts) == (broken, 2)
    assert "is missing" in failed.error


@pytest.mark.parametrize("given_back", ["released", "replayed"])
async def test_what_was_given_back_can_not_be_finished_by_its_last_holder_after_a_restart(
    tmp_path: Path, given_back: str
) -> None:
    url, clock = tmp_path.as_uri(), ManualClock()  # which stands still
    async with await Engine.open(url, clock=clock) as system:
        await system.create_queue("q", options=QueueOptions(max_attempts=1))
        await system.publish(b"x")
        (first,) = await system.claim("q")
        if given_back == "released":
            await system.release("q", first)
        else:
            await system.nack("q", first)
            await system.replay("q", all=True)
    async with await Engine.open(url, clock=clock) as system:
        (second,) = await system.claim("q", consumer="another")

        assert await system.ack("q", first.receipt) == ["lease_lost"]
        assert await system.ack("q", second.receipt) == ["ok"]
