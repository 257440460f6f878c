"""What every system promises, in this process or behind a broker, on every kind of store."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

import opendata_queue
from opendata_queue import (
    AsyncSystem,
    ClosedError,
    FilterError,
    InvalidInputError,
    NewMessage,
    QueueExistsError,
    QueueNotFoundError,
    QueueOptions,
)
from tests.contract.conftest import Show

BATCH = 30
AT_ONCE = QueueOptions(backoff_ms=0)


async def fill(
    system: AsyncSystem, name: str, count: int = 1, *, options: QueueOptions | None = None
) -> list[int]:
    """A queue of that name, with messages 0, 1, … in it; returns their ids."""
    await system.create_queue(name, filter=f"case = '{name}'", options=options)
    return await publish(system, name, count)


async def publish(system: AsyncSystem, name: str, count: int = 1) -> list[int]:
    return await system.publish_many(
        [NewMessage(b"%d" % number, headers={"case": name}) for number in range(count)]
    )


# --- publishing and reading -----------------------------------------------------------------------


async def test_a_message_is_read_back_as_it_was_published(
    system: AsyncSystem, show: Show, name: str
) -> None:
    payload = bytes(range(256))
    message_id = await system.publish(
        payload,
        headers={"case": name, "ключ": "值"},
        created_at_ms=1_234,
        delay_ms=5_000,
        retention_seconds=3_600,
    )

    message = await (await show()).read(message_id)

    assert message is not None
    assert message.message_id == message_id
    assert message.payload == payload
    assert message.payload_uri is None
    assert dict(message.headers) == {"case": name, "ключ": "值"}
    assert message.created_at_ms == 1_234
    assert message.visible_at_ms == message.received_at_ms + 5_000
    assert message.retention_seconds == 3_600


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 1_000_000])
async def test_payloads_of_all_sizes_come_back(
    system: AsyncSystem, show: Show, size: int, name: str
) -> None:
    await fill(system, name, 0)
    message_id = await system.publish(b"x" * size, headers={"case": name})

    (claimed,) = await system.claim(name, wait_ms=60_000)

    assert claimed.message_id == message_id
    assert claimed.payload == b"x" * size
    read = await (await show()).read(message_id)
    assert read is not None
    assert read.payload == b"x" * size


async def test_a_uri_of_the_producer_is_handed_on(system: AsyncSystem, name: str) -> None:
    await fill(system, name, 0)
    await system.publish(payload_uri="s3://elsewhere/object", headers={"case": name})

    (claimed,) = await system.claim(name, wait_ms=60_000)

    assert (claimed.payload, claimed.payload_uri) == (None, "s3://elsewhere/object")


async def test_an_unknown_id_reads_as_nothing(system: AsyncSystem, show: Show, name: str) -> None:
    known = await system.publish(b"x")
    shown = await show()

    found = await shown.read_many([(1 << 63) - 1, known])

    assert found[0] is None
    assert found[1] is not None
    assert await shown.history((1 << 63) - 1) is None


async def test_the_same_idempotency_key_publishes_once(system: AsyncSystem, name: str) -> None:
    first = await system.publish(b"1", idempotency_key=name)

    assert await system.publish(b"2", idempotency_key=name) == first
    other = await system.publish(b"3", idempotency_key=name, headers={"namespace": "other"})
    assert other != first


async def test_publishing_nothing_gives_nothing(system: AsyncSystem) -> None:
    assert await system.publish_many([]) == []


@pytest.mark.parametrize(
    "message",
    [
        NewMessage(b"x", delay_ms=1, visible_at_ms=1),
        NewMessage(b"x", delay_ms=-1),
        NewMessage(b"x", retention_seconds=1 << 40),
        NewMessage(None),
        NewMessage(b"x", payload_uri="s3://both/given"),
        NewMessage("text"),  # type: ignore[arg-type]
        NewMessage(b"x", headers={"number": 5}),  # type: ignore[dict-item]
        NewMessage(b"x", headers={"long": "x" * 70_000}),
        NewMessage(b"x", delay_ms=1 << 70),
    ],
)
async def test_a_message_that_can_not_be_stored_is_refused_with_its_batch(
    system: AsyncSystem, name: str, message: NewMessage
) -> None:
    await fill(system, name, 0)

    with pytest.raises(InvalidInputError):
        await system.publish_many([NewMessage(b"good", headers={"case": name}), message])

    await system.publish(b"later", headers={"case": name})
    (claimed,) = await system.claim(name, 10, wait_ms=60_000)
    assert claimed.payload == b"later"


# --- queues ---------------------------------------------------------------------------------------


async def test_a_queue_shows_what_it_was_told(system: AsyncSystem, show: Show, name: str) -> None:
    options = QueueOptions(max_attempts=9, backoff_factor=1.5, relaxed_claims=True)
    made = await system.create_queue(
        name, filter="price>=99.990 and a='b' priority 7", options=options
    )

    assert made.options == options
    assert made.filter == "price >= 99.99 AND a = 'b' PRIORITY 7"
    shown = await show()
    assert await shown.get_queue(name) == made
    assert name in await shown.list_queues()

    changed = await system.update_queue(name, filter="a = 'c'", max_attempts=3)
    assert changed.options.max_attempts == 3
    assert changed.options.backoff_factor == 1.5
    assert changed.filter == "a = 'c'"
    assert await (await show()).get_queue(name) == changed


async def test_a_queue_with_a_slash_in_its_name_is_like_any_other(
    system: AsyncSystem, name: str
) -> None:
    queue = f"{name}/emea"
    await system.create_queue(queue, filter=f"case = '{name}'")
    await publish(system, name)

    (claimed,) = await system.claim(queue, wait_ms=60_000)

    assert claimed.queue == queue
    assert (await system.get_queue(queue)).filter == f"case = '{name}'"


async def test_making_a_queue_twice_is_refused(system: AsyncSystem, name: str) -> None:
    await system.create_queue(name)

    with pytest.raises(QueueExistsError):
        await system.create_queue(name)


async def test_a_queue_that_is_not_there_is_missed(
    system: AsyncSystem, show: Show, name: str
) -> None:
    shown = await show()
    for call in (
        shown.get_queue(name),
        shown.stats(name),
        system.claim(name, wait_ms=60_000),
        system.update_queue(name, max_attempts=1),
        shown.peek(name),
        shown.browse(name, "done"),
        shown.failed(name),
        system.replay(name, all=True),
    ):
        with pytest.raises(QueueNotFoundError, match=name):
            await call


@pytest.mark.parametrize("queue", ["", "a b", "/a", "ä", "x" * 256])
async def test_a_bad_name_is_refused(system: AsyncSystem, queue: str) -> None:
    with pytest.raises(InvalidInputError):
        await system.create_queue(queue)


async def test_a_bad_filter_is_refused_with_its_place(system: AsyncSystem, name: str) -> None:
    with pytest.raises(FilterError, match="column 9") as refused:
        await system.create_queue(name, filter="price >= ")
    assert (refused.value.line, refused.value.column) == (1, 9)
    assert refused.value.reason
    assert str(refused.value).endswith("^")


async def test_bad_options_are_refused_and_change_nothing(system: AsyncSystem, name: str) -> None:
    made = await system.create_queue(name)

    refused: list[dict[str, Any]] = [
        {"max_attempts": -1},
        {"colour": 1},
        {"lease_ms": 1 << 40},
        {"paused": 3},
    ]
    for options in refused:
        with pytest.raises(InvalidInputError):
            await system.update_queue(name, **options)

    assert await system.get_queue(name) == made


async def test_a_queue_can_begin_in_the_past(system: AsyncSystem, name: str) -> None:
    await publish(system, name, 3)
    await system.create_queue(name, filter=f"case = '{name}'", start="beginning")

    claimed = await claim_all(system, name, 3)

    assert [one.payload for one in claimed] == [b"0", b"1", b"2"]


async def test_a_paused_queue_gives_nothing_until_it_is_resumed(
    system: AsyncSystem, name: str
) -> None:
    await fill(system, name)
    await system.pause_queue(name)
    assert await system.claim(name) == []

    await system.resume_queue(name)

    assert len(await system.claim(name, wait_ms=60_000)) == 1


async def test_purging_and_deleting(system: AsyncSystem, show: Show, name: str) -> None:
    await fill(system, name, 5)

    assert await system.purge_queue(name) == 5
    assert await system.claim(name) == []
    shown = await show()
    assert (await shown.stats(name)).available == 0
    await system.delete_queue(name)

    shown = await show()
    assert name not in await shown.list_queues()
    with pytest.raises(QueueNotFoundError):
        await shown.get_queue(name)
    with pytest.raises(QueueNotFoundError):
        await system.delete_queue(name)


# --- consuming ------------------------------------------------------------------------------------


async def claim_all(
    system: AsyncSystem, name: str, count: int, consumer: str | None = None
) -> list[opendata_queue.ClaimedMessage]:
    claimed: list[opendata_queue.ClaimedMessage] = []
    while len(claimed) < count:
        left = count - len(claimed)
        found = await system.claim(name, left, consumer=consumer, wait_ms=60_000)
        assert found, f"{len(claimed)} of {count} messages came"
        claimed += found
    return claimed


async def test_messages_are_claimed_in_order_and_done_once(
    system: AsyncSystem, show: Show, name: str
) -> None:
    ids = await fill(system, name, BATCH)

    claimed = await claim_all(system, name, BATCH)
    outcomes = await system.ack(name, *(one.receipt for one in claimed))

    assert [one.message_id for one in claimed] == ids
    assert outcomes == ["ok"] * BATCH
    assert await system.ack(name, claimed[0].receipt) == ["lease_lost"]
    assert await system.claim(name) == []
    stats = await (await show()).stats(name)
    assert [one.message_id for one in (await (await show()).browse(name, "done")).entries] == ids[
        ::-1
    ]
    assert (stats.available, stats.in_flight, stats.done) == (0, 0, BATCH)


async def test_better_priorities_come_first(system: AsyncSystem, name: str) -> None:
    await system.create_queue(name, filter=f"case = '{name}'")
    await system.publish_many(
        [
            NewMessage(priority.encode(), headers={"case": name, "priority": priority})
            for priority in ("9", "1", "5")
        ]
    )

    claimed = await claim_all(system, name, 3)

    assert [one.payload for one in claimed] == [b"1", b"5", b"9"]
    assert [one.priority for one in claimed] == [1, 5, 9]


async def test_a_claim_waits_for_a_message(system: AsyncSystem, name: str) -> None:
    await fill(system, name, 0)
    claiming = asyncio.create_task(system.claim(name, wait_ms=60_000))
    await asyncio.sleep(0)
    (message_id,) = await publish(system, name)

    (claimed,) = await claiming

    assert claimed.message_id == message_id
    assert claimed.attempts == 1


async def test_a_claim_that_waits_in_vain_gives_nothing(system: AsyncSystem, name: str) -> None:
    await fill(system, name, 0)

    assert await system.claim(name, wait_ms=50) == []


async def test_a_cancelled_wait_takes_nothing(system: AsyncSystem, name: str) -> None:
    await fill(system, name, 0)
    claiming = asyncio.create_task(system.claim(name, wait_ms=60_000))
    await asyncio.sleep(0.05)
    claiming.cancel()
    await asyncio.wait([claiming])
    await publish(system, name)

    (claimed,) = await system.claim(name, wait_ms=60_000)

    assert claimed.payload == b"0"


async def test_a_nack_brings_a_message_back_until_it_fails(
    system: AsyncSystem, show: Show, name: str
) -> None:
    (message_id,) = await fill(system, name, options=QueueOptions(max_attempts=2, backoff_ms=0))
    for attempt in (1, 2):
        (claimed,) = await system.claim(name, consumer="tester", wait_ms=60_000)
        assert claimed.attempts == attempt
        assert await system.nack(name, claimed.receipt, error="no way") == ["ok"]

    shown = await show()
    (failed,) = await shown.failed(name)

    assert (failed.message_id, failed.error, failed.consumer) == (message_id, "no way", "tester")
    assert dict(failed.headers) == {"case": name}
    assert await shown.failed(name, filter="case = 'other'") == []
    assert await shown.failed(name, after_id=message_id) == []

    assert await system.replay(name, message_id) == [message_id]
    (claimed,) = await system.claim(name, wait_ms=60_000)
    assert claimed.attempts == 1


async def test_failed_messages_can_be_forgotten(system: AsyncSystem, name: str) -> None:
    ids = await fill(system, name, 3, options=QueueOptions(max_attempts=1))
    claimed = await claim_all(system, name, 3)
    await system.nack(name, *(one.receipt for one in claimed))

    assert await system.purge_failed(name, filter=f"case = '{name}'") == ids
    assert await system.failed(name) == []
    with pytest.raises(InvalidInputError):
        await system.purge_failed(name)
    with pytest.raises(InvalidInputError):
        await system.replay(name, filter=" ")


async def test_a_released_message_is_there_at_once_and_not_counted(
    system: AsyncSystem, name: str
) -> None:
    await fill(system, name)
    (claimed,) = await system.claim(name, wait_ms=60_000)

    assert await system.release(name, claimed.receipt) == ["ok"]

    (again,) = await system.claim(name, wait_ms=60_000)
    assert again.attempts == 1


async def test_a_lease_that_ends_is_lost_and_one_that_is_extended_is_not(
    system: AsyncSystem, name: str
) -> None:
    await fill(system, name, 2, options=AT_ONCE)
    kept, lost = await claim_all(system, name, 2)
    (deadline,) = await system.extend(name, kept.receipt, lease_ms=600_000)
    assert deadline is not None
    assert deadline > kept.lease_deadline_ms

    await system.extend(name, lost.receipt, lease_ms=1)
    (again,) = await system.claim(name, wait_ms=60_000)

    assert again.message_id == lost.message_id
    assert await system.ack(name, lost.receipt, kept.receipt) == ["lease_lost", "ok"]
    assert await system.extend(name, lost.receipt) == [None]


async def test_messages_are_finished_by_themselves_or_by_their_receipts(
    system: AsyncSystem, name: str
) -> None:
    await fill(system, name, 5, options=AT_ONCE)
    done, passed_on, failing, released, kept = await claim_all(system, name, 5)
    copied = pickle.loads(pickle.dumps(passed_on))

    assert copied == passed_on
    assert await system.ack(name, done, copied) == ["ok", "ok"]
    assert await system.ack(name, passed_on, done.receipt) == ["lease_lost", "lease_lost"]
    assert await system.nack(name, failing, error="not today", delay_ms=600_000) == ["ok"]
    assert await system.release(name, released) == ["ok"]
    (deadline,) = await system.extend(name, kept, lease_ms=600_000)
    assert deadline is not None
    assert deadline > kept.lease_deadline_ms
    changed = replace(kept, payload=b"changed", attempts=7)
    assert await system.ack(name, changed) == ["ok"]

    stats = await system.stats(name)
    assert (stats.done, stats.delayed, stats.available, stats.in_flight) == (3, 1, 1, 0)


async def test_a_receipt_that_was_never_given_is_refused(
    system: AsyncSystem, name: str, new_name: Callable[[], str]
) -> None:
    await fill(system, name)
    other = new_name()
    await fill(system, other)
    (claimed,) = await system.claim(name, wait_ms=60_000)

    forged = claimed.receipt[:-1] + ("0" if claimed.receipt[-1] != "0" else "1")
    for receipt in ("", "zz", "00" * 42, forged):
        with pytest.raises(InvalidInputError):
            await system.ack(name, receipt)
    for foreign in (claimed, claimed.receipt):
        with pytest.raises(InvalidInputError):
            await system.ack(other, foreign)
    with pytest.raises(InvalidInputError):
        await system.ack(name, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments", [{"count": 0}, {"count": 1 << 40}, {"wait_ms": -1}, {"lease_ms": 0}]
)
async def test_a_claim_that_makes_no_sense_is_refused(
    system: AsyncSystem, name: str, arguments: dict[str, Any]
) -> None:
    await fill(system, name)

    with pytest.raises(InvalidInputError):
        await system.claim(name, **arguments)


# --- looking --------------------------------------------------------------------------------------


async def test_peeking_and_browsing_take_nothing(
    system: AsyncSystem, show: Show, name: str
) -> None:
    ids = await fill(system, name, 5)
    (first,) = await system.claim(name, wait_ms=60_000)

    shown = await show()
    peeked = await shown.peek(name, 10)
    page = await shown.browse(name, "available", limit=2)
    rest = await shown.browse(name, "available", after=page.next)
    in_flight = await shown.browse(name, "in_flight")

    assert [one.message_id for one in peeked] == ids[1:]
    assert [one.payload for one in peeked] == [b"1", b"2", b"3", b"4"]
    assert [one.message_id for one in (*page.entries, *rest.entries)] == ids[1:]
    assert rest.next is None
    assert [one.message_id for one in in_flight.entries] == [first.message_id]
    assert in_flight.entries[0].lease_deadline_ms == first.lease_deadline_ms
    with pytest.raises(InvalidInputError):
        await shown.browse(name, "nowhere")  # type: ignore[arg-type]


async def test_messages_are_found_by_state_headers_error_consumer_and_time(
    system: AsyncSystem, show: Show, name: str
) -> None:
    once = QueueOptions(max_attempts=1)
    await system.create_queue(name, filter=f"case = '{name}'", options=once)
    new = [NewMessage(b"", headers={"case": name, "n": str(n)}) for n in range(6)]
    ids = await system.publish_many(new)
    for message in await claim_all(system, name, 4, "tester"):
        error = "timeout" if message.message_id in ids[:2] else "no such host"
        await system.nack(name, message, error=error)

    shown = await show()
    timeouts = await shown.find(name, "failed", error="time", consumer="tester")
    first = await shown.find(name, "failed", filter="n >= 1", limit=2)
    second = await shown.find(name, "failed", filter="n >= 1", limit=2, after=first.next)
    failed_at = [one.finished_at_ms or 0 for one in (*first.entries, *second.entries)]
    later = await shown.find(name, "failed", since_ms=max(failed_at) + 1)
    before = await shown.find(name, "failed", until_ms=max(failed_at) + 1)
    available = await shown.find(name, "available", filter="n = 5")

    assert [(one.message_id, one.error) for one in timeouts.entries] == [
        (ids[0], "timeout"),
        (ids[1], "timeout"),
    ]
    assert (timeouts.examined, timeouts.next) == (4, None)
    assert [one.message_id for one in first.entries] == ids[1:3]
    assert [one.message_id for one in second.entries] == ids[3:4]
    assert (second.entries[0].state, second.next) == ("failed", None)
    assert dict(second.entries[0].headers) == {"case": name, "n": "3"}
    assert (later.entries, [one.message_id for one in before.entries]) == ((), ids[:4])
    assert [one.message_id for one in available.entries] == [ids[5]]


async def test_a_history_says_where_a_message_is(
    system: AsyncSystem, show: Show, name: str
) -> None:
    (message_id,) = await fill(system, name)
    (claimed,) = await system.claim(name, consumer="tester", wait_ms=60_000)

    history = await (await show()).history(message_id)

    assert history is not None
    assert dict(history.headers) == {"case": name}
    assert history.consumers == ("tester",)
    entry = next(one for one in history.entries if one.queue == name)
    assert (entry.state, entry.attempts) == ("in_flight", claimed.attempts)


async def test_delayed_messages_are_not_available_yet(
    system: AsyncSystem, show: Show, name: str
) -> None:
    await fill(system, name, 0)
    message_id = await system.publish(b"x", headers={"case": name}, delay_ms=3_600_000)
    await system.publish(b"y", headers={"case": name})
    await claim_all(system, name, 1)

    shown = await show()
    stats = await shown.stats(name)
    page = await shown.browse(name, "delayed")

    assert (stats.available, stats.delayed) == (0, 1)
    assert [one.message_id for one in page.entries] == [message_id]


async def test_a_look_that_makes_no_sense_is_refused(
    system: AsyncSystem, show: Show, name: str
) -> None:
    await fill(system, name)
    shown = await show()

    for call in (
        shown.read(-1),
        shown.read_many([1 << 63]),
        shown.history(-1),
        shown.peek(name, 0),
        shown.peek(name, 1 << 40),
        shown.browse(name, "available", limit=0),
        shown.browse(name, "available", after="elsewhere"),
        shown.failed(name, limit=0),
        shown.failed(name, after_id=-2),
        shown.failed(name, filter="price >= "),
        shown.find(name, "failed", filter="price >= "),
        shown.find(name, "failed", limit=1_001),
        shown.find(name, "failed", since_ms=-1),
        shown.find(name, "failed", after="available:1.1"),
        shown.find(name, "done", error="x"),
        shown.find(name, "available", consumer="x"),
    ):
        with pytest.raises(InvalidInputError):
            await call


# --- loops and workers ----------------------------------------------------------------------------


async def test_a_loop_gets_everything_and_acks_it(system: AsyncSystem, name: str) -> None:
    await fill(system, name, BATCH)
    seen = []

    async with system.consumer(name, limit=BATCH) as messages:
        async for message in messages:
            seen.append(message.payload)

    assert seen == [b"%d" % number for number in range(BATCH)]
    assert (await system.stats(name)).done == BATCH


async def test_workers_handle_what_comes_and_retry_what_fails(
    system: AsyncSystem, name: str
) -> None:
    await fill(system, name, 0, options=AT_ONCE)
    seen: list[tuple[bytes | None, int]] = []
    done = asyncio.Event()

    @system.worker(name, concurrency=4)
    async def handle(message: opendata_queue.ClaimedMessage) -> None:
        seen.append((message.payload, message.attempts))
        if message.payload == b"3" and message.attempts == 1:
            raise ValueError("not yet")
        if len(seen) == 11:
            done.set()

    handle.start()
    await publish(system, name, 10)
    async with asyncio.timeout(120):
        await done.wait()
    await handle.stop()

    assert sorted(seen) == sorted([(b"%d" % n, 1) for n in range(10)] + [(b"3", 2)])
    assert (await system.stats(name)).done == 10


async def test_many_consumers_share_a_queue_and_nothing_is_done_twice(
    system: AsyncSystem, name: str
) -> None:
    ids = await fill(system, name, 100)
    seen: list[int] = []

    async def consume() -> None:
        while len(seen) < len(ids):
            claimed = await system.claim(name, 7, wait_ms=200)
            outcomes = await system.ack(name, *(one.receipt for one in claimed))
            assert outcomes == ["ok"] * len(claimed)
            seen.extend(one.message_id for one in claimed)

    await asyncio.gather(*(consume() for _ in range(5)))

    assert sorted(seen) == ids
    assert (await system.stats(name)).done == len(ids)


# --- closing --------------------------------------------------------------------------------------


async def test_a_closed_system_says_so(url: str, name: str) -> None:
    system = await opendata_queue.open_async(url)
    await system.close()
    await system.close()

    with pytest.raises(ClosedError):
        await system.publish(b"x")


def test_threads_can_share_a_system_that_blocks(url: str, name: str) -> None:
    with opendata_queue.open(url) as system:
        system.create_queue(name, filter=f"case = '{name}'")
        with ThreadPoolExecutor(4) as threads:
            ids = list(
                threads.map(lambda n: system.publish(b"%d" % n, headers={"case": name}), range(20))
            )
        with system.consumer(name, limit=20) as messages:
            assert sorted(message.message_id for message in messages) == sorted(ids)
