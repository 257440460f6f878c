"""Queues as their users see them, on every kind of store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    Attempts,
    AttemptsKey,
    MetadataLogKey,
    PayloadKey,
    decode_any,
)
from opendata_queue import (
    ClaimedMessage,
    ClosedError,
    Engine,
    FencedError,
    FilterError,
    InvalidInputError,
    NewMessage,
    QueueExistsError,
    QueueNotFoundError,
    QueueOptions,
    QueueStats,
    StoreSettings,
)
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.store.consumers import Consumers
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.testing import ManualClock


async def publish(system: Engine, *payloads: bytes, **headers: str) -> list[int]:
    """Publish, and wait until it is routed."""
    messages = [NewMessage(payload, headers=headers) for payload in payloads]
    ids = await system.publish_many(messages)
    await system._tailer.caught_up()
    return ids


def payloads(messages: list[ClaimedMessage]) -> list[bytes | None]:
    return [message.payload for message in messages]


async def test_a_message_goes_from_publish_to_ack(system: Engine, clock: ManualClock) -> None:
    await system.create_queue("emails", filter="type = 'order.created'")
    (message_id,) = await publish(system, b"hi", type="order.created")

    (message,) = await system.claim("emails", consumer="me", lease_ms=5_000)

    assert (message.message_id, message.payload, message.attempts) == (message_id, b"hi", 1)
    assert message.headers == (("type", "order.created"),)
    assert (message.queue, message.priority) == ("emails", 128)
    assert message.lease_deadline_ms == clock.now_ms() + 5_000
    assert await system.claim("emails") == []
    assert await system.ack("emails", message.receipt) == ["ok"]
    assert (await system.stats("emails")) == QueueStats(
        available=0, delayed=0, in_flight=0, done=1, failed=0, expired=0
    )


async def test_every_message_goes_into_every_queue_that_it_matches(system: Engine) -> None:
    await system.create_queue("all")
    await system.create_queue("emea", filter="region = 'emea'")
    await system.create_queue("large", filter="price > 100")
    await system.publish_many(
        [
            NewMessage(b"1", headers={"region": "emea", "price": "99.99"}),
            NewMessage(b"2", headers={"region": "apj", "price": "100.01"}),
            NewMessage(b"3", headers={"region": "emea", "price": "1000"}),
        ]
    )
    await system._tailer.caught_up()

    found = {name: payloads(await system.claim(name, 10)) for name in await system.list_queues()}

    assert found == {"all": [b"1", b"2", b"3"], "emea": [b"1", b"3"], "large": [b"2", b"3"]}


async def test_messages_with_the_same_headers_are_told_apart_by_their_ids(
    memory_system: Engine,
) -> None:
    await memory_system.create_queue("all", filter="kind = 'x'")
    first, *_ = await publish(memory_system, b"1", b"2", kind="x")
    await memory_system.create_queue("late", filter=f"kind = 'x' AND sys.id >= {first + 4}")

    ids = await publish(memory_system, b"3", b"4", b"5", kind="x")

    assert [one.message_id for one in await memory_system.claim("late", 10)] == ids[2:]
    assert len(await memory_system.claim("all", 10)) == 5


async def test_a_queue_holds_what_is_published_after_it_was_made(system: Engine) -> None:
    await publish(system, b"before")
    await system.create_queue("q")
    await publish(system, b"after")

    assert payloads(await system.claim("q", 10)) == [b"after"]


async def test_without_queues_nothing_is_written_for_them(
    root: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[str] = []
    commit = Database.commit

    async def watched(self: Database, rows: Rows, **options: Any) -> None:
        commits.append(self.name)
        await commit(self, rows, **options)

    monkeypatch.setattr(Database, "commit", watched)
    async with await Engine.open(root, clock=clock) as system:
        await publish(system, b"a", b"b")
    async with await Engine.open(root, clock=clock) as system:
        await publish(system, b"c")
        assert not [name for name in commits if "/queues/" in name]

        await system.create_queue("q")
        await publish(system, b"d")
    async with await Engine.open(root, clock=clock) as system:
        await system._tailer.caught_up()
        assert payloads(await system.claim("q", 10)) == [b"d"]


async def test_everything_is_as_it_was_after_a_reopen(root: str, clock: ManualClock) -> None:
    options = QueueOptions(window=4, bucket=2, max_attempts=1, backoff_jitter=0)
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("ns/topic", filter="a = '1'", options=options)
        await publish(system, *(b"%d" % n for n in range(20)), a="1")
        claimed = await system.claim("ns/topic", 8)
        await system.ack("ns/topic", *(m.receipt for m in claimed[:3]))
        await system.nack("ns/topic", claimed[3].receipt, error="broken")
        before = await system.stats("ns/topic")
        told = await system.get_queue("ns/topic")

    async with await Engine.open(root, clock=clock) as system:
        assert (await system.list_queues()) == ["ns/topic"]
        assert (await system.get_queue("ns/topic")) == told
        assert (await system.stats("ns/topic")) == before
        assert before == QueueStats(
            available=12,
            delayed=0,
            in_flight=4,
            done=3,
            failed=1,
            expired=0,
            oldest_age_ms=0,
        )
        assert await system.ack("ns/topic", claimed[4].receipt) == ["ok"]
        assert await system.ack("ns/topic", claimed[0].receipt) == ["lease_lost"]
        assert payloads(await system.claim("ns/topic", 20)) == [b"%d" % n for n in range(8, 20)]


async def test_what_was_published_but_not_routed_is_routed_after_a_reopen(
    root: str, clock: ManualClock
) -> None:
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("q")
        await system._tailer.close()
        await system.publish_many([NewMessage(b"%d" % n) for n in range(2_500)])

    async with await Engine.open(root, clock=clock) as system:
        await system._tailer.caught_up()
        assert (await system.stats("q")).available == 2_500
    async with await Engine.open(root, clock=clock) as system:
        await system._tailer.caught_up()
        assert (await system.stats("q")).available == 2_500


# --- order ----------------------------------------------------------------------------------------


async def test_priority_holds_over_the_whole_backlog_then_the_order_of_ids(
    system: Engine,
) -> None:
    await system.create_queue("q", options=QueueOptions(window=3))
    for priority in ("5", "1", "200", "1", "5", "", "0"):
        headers = {"priority": priority} if priority else {}
        await system.publish_many([NewMessage(priority.encode(), headers=headers)] * 7)
    await system._tailer.caught_up()

    claimed = []
    for count in (1, 2, 30, 4, 12):
        claimed += await system.claim("q", count)

    order = [(message.priority, message.message_id) for message in claimed]
    assert len(order) == 49
    assert order == sorted(order)
    assert [p for p, _ in order] == [0] * 7 + [1] * 14 + [5] * 14 + [128] * 7 + [200] * 7


async def test_the_active_record_holds_the_window_and_what_is_in_flight(system: Engine) -> None:
    await system.create_queue("q", options=QueueOptions(window=10))
    await publish(system, *[b"x"] * 500)
    await system.claim("q", 25)

    key = ActiveMessagesKey(queue_id=b"q").encode()
    value = await system._queues.database.get(key)

    assert value is not None
    active = ActiveMessages.decode(value)
    assert len(active.in_flight) == 25
    assert len(active.available) <= 10


async def test_delayed_messages_come_when_they_are_due_and_block_nobody(
    system: Engine, clock: ManualClock
) -> None:
    await system.create_queue("q", options=QueueOptions(window=2))
    await system.publish_many(
        [NewMessage(b"late", delay_ms=5_000), NewMessage(b"later", delay_ms=9_000)]
        + [NewMessage(b"now")] * 3
    )
    await system._tailer.caught_up()
    assert (await system.stats("q")).delayed == 2
    assert payloads(await system.claim("q", 10)) == [b"now"] * 3

    clock.advance_ms(4_999)
    assert await system.claim("q", 10) == []
    clock.advance_ms(1)
    assert payloads(await system.claim("q", 10)) == [b"late"]
    clock.advance_ms(10_000)
    assert payloads(await system.claim("q", 10)) == [b"later"]


async def test_more_than_some_hundred_due_at_once_all_come(
    memory_system: Engine, clock: ManualClock
) -> None:
    await memory_system.create_queue("q", options=QueueOptions(window=8))
    await memory_system.publish_many([NewMessage(b"x", delay_ms=n) for n in range(1_300)])
    await memory_system._tailer.caught_up()
    clock.advance_ms(2_000)

    claimed = []
    while some := await memory_system.claim("q", 300):
        claimed += some

    assert len({message.message_id for message in claimed}) == 1_300


async def test_an_expired_message_is_never_handed_out(system: Engine, clock: ManualClock) -> None:
    await system.create_queue("q", options=QueueOptions(window=2, backoff_ms=0))
    await system.publish_many([NewMessage(b"%d" % n, retention_seconds=60) for n in range(6)])
    await system._tailer.caught_up()
    held = await system.claim("q", 1)
    clock.advance_ms(30_000)
    assert await system.extend("q", held[0].receipt, lease_ms=60_000) != [None]
    clock.advance_ms(30_001)

    assert await system.claim("q", 10) == []
    assert await system.nack("q", held[0].receipt) == ["ok"]
    assert await system.claim("q", 10) == []
    assert (await system.stats("q")).expired == 6


# --- ownership ------------------------------------------------------------------------------------


async def test_a_late_ack_is_refused_and_changes_nothing(
    system: Engine, clock: ManualClock
) -> None:
    await system.create_queue("q", options=QueueOptions(lease_ms=1_000, backoff_ms=0))
    await publish(system, b"x")
    (first,) = await system.claim("q")
    clock.advance_ms(1_001)

    assert await system.ack("q", first.receipt) == ["lease_lost"]
    assert await system.nack("q", first.receipt) == ["lease_lost"]
    assert await system.extend("q", first.receipt) == [None]
    assert await system.release("q", first.receipt) == ["lease_lost"]

    (second,) = await system.claim("q")
    assert second.attempts == 2
    assert await system.ack("q", first.receipt) == ["lease_lost"]
    assert await system.ack("q", second.receipt, second.receipt) == ["ok", "lease_lost"]
    assert (await system.stats("q")).done == 1


async def test_an_extended_lease_holds(system: Engine, clock: ManualClock) -> None:
    await system.create_queue("q", options=QueueOptions(lease_ms=1_000))
    await publish(system, b"x")
    (message,) = await system.claim("q")
    clock.advance_ms(900)

    assert await system.extend("q", message.receipt) == [clock.now_ms() + 1_000]
    clock.advance_ms(1_000)

    assert await system.claim("q") == []
    assert await system.ack("q", message.receipt) == ["ok"]


async def test_a_grace_period_delays_the_taking_back(clock: ManualClock) -> None:
    async with await Engine.open("memory:///", clock=clock, lease_grace_ms=500) as system:
        options = QueueOptions(lease_ms=1_000, backoff_ms=0)
        await system.create_queue("q", options=options)
        await publish(system, b"x")
        await system.claim("q")
        clock.advance_ms(1_500)
        assert await system.claim("q") == []
        clock.advance_ms(1)
        assert payloads(await system.claim("q")) == [b"x"]


async def test_a_receipt_of_another_queue_or_a_forged_one_is_refused(system: Engine) -> None:
    await system.create_queue("a")
    await system.create_queue("b")
    await publish(system, b"x")
    (message,) = await system.claim("a")
    forged = message.receipt[:-6] + "AAAA=="

    for receipt in (forged, "", "not base64!", "AAAA"):
        with pytest.raises(InvalidInputError, match="is no receipt"):
            await system.ack("a", receipt)
    with pytest.raises(InvalidInputError, match="is no receipt of queue 'b'"):
        await system.ack("b", message.receipt)
    assert await system.ack("a", message.receipt) == ["ok"]


async def test_a_released_message_comes_back_at_once_and_uncounted(system: Engine) -> None:
    await system.create_queue("q")
    await publish(system, b"x", b"y")
    (message,) = await system.claim("q")

    assert await system.release("q", message.receipt) == ["ok"]

    again = await system.claim("q", 2)
    assert [(m.payload, m.attempts) for m in again] == [(b"x", 1), (b"y", 1)]


async def test_the_clock_never_goes_back_not_even_over_a_takeover(root: str) -> None:
    ahead = ManualClock(2_000_000)
    async with await Engine.open(root, clock=ahead) as system:
        await system.create_queue("q", options=QueueOptions(lease_ms=1_000))
        await publish(system, b"x")
        (message,) = await system.claim("q")

    async with await Engine.open(root, clock=ManualClock(1_000_000)) as system:
        assert await system.claim("q") == []
        assert await system.ack("q", message.receipt) == ["ok"]


async def test_options_are_the_same_after_a_reopen(root: str, clock: ManualClock) -> None:
    async with await Engine.open(root, clock=clock) as system:
        options = QueueOptions(backoff_factor=1.2345, backoff_jitter=0.333)
        told = await system.create_queue("q", options=options)
    async with await Engine.open(root, clock=clock) as system:
        assert await system.get_queue("q") == told


async def test_attempts_are_kept_when_expired_messages_are_passed_over_after_a_restart(
    root: str, clock: ManualClock
) -> None:
    async with await Engine.open(root, clock=clock) as system:
        for name in ("a", "b"):
            await system.create_queue(name)
        await system.publish_many([NewMessage(b"short", retention_seconds=1)])
        (kept,) = await publish(system, b"kept")
        await system._tailer.caught_up()
        await system.claim("a", 2, consumer="ann")
    clock.advance_ms(1_001)
    async with await Engine.open(root, clock=clock) as system:
        (claimed,) = await system.claim("b", 1, consumer="bob")
        key = AttemptsKey(message_id=kept).encode()
        value = await system._queues.database.get(key)

    assert claimed.message_id == kept
    assert value is not None
    assert Attempts.decode(value).consumer_ids == ("ann", "bob")


async def test_attempts_name_every_consumer_of_every_queue(root: str, clock: ManualClock) -> None:
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("a", options=QueueOptions(backoff_ms=0))
        await system.create_queue("b")
        (message_id,) = await publish(system, b"x")
        (first,) = await system.claim("a", consumer="one")
        await system.nack("a", first.receipt)
        await system.claim("b", consumer="two")
    async with await Engine.open(root, clock=clock) as system:
        await system.claim("a", consumer="three")
        value = await system._queues.database.get(AttemptsKey(message_id=message_id).encode())

    assert value is not None
    assert Attempts.decode(value).consumer_ids == ("one", "two", "three")


# --- failing --------------------------------------------------------------------------------------


async def test_back_off_grows_until_the_message_fails(system: Engine, clock: ManualClock) -> None:
    options = QueueOptions(max_attempts=3, backoff_ms=1_000, backoff_factor=3, backoff_jitter=0)
    await system.create_queue("q", options=options)
    (message_id,) = await publish(system, b"x")
    for pause in (1_000, 3_000):
        (message,) = await system.claim("q")
        assert await system.nack("q", message.receipt, error="not yet") == ["ok"]
        clock.advance_ms(pause - 1)
        assert await system.claim("q") == []
        clock.advance_ms(1)
    (message,) = await system.claim("q", consumer="last")
    assert message.attempts == 3

    await system.nack("q", message.receipt, error="gateway timeout")

    (failed,) = await system.failed("q")
    assert (failed.message_id, failed.attempts, failed.error, failed.consumer) == (
        message_id, 3, "gateway timeout", "last",
    )  # fmt: skip
    assert failed.failed_at_ms == clock.now_ms()
    assert (await system.stats("q")).failed == 1


async def test_a_message_whose_rest_ends_during_a_claim_comes_before_younger_ones(
    system: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await system.create_queue("q")
    ids = [await system.publish(b"x") for _ in range(4)]
    resting = await system.claim("q", count=2)
    await system.nack("q", *(one.receipt for one in resting), delay_ms=1_000)
    bring_up_to_date = Consumers.bring_up_to_date

    async def while_time_passes(consumers: Consumers, queue: StoredQueue, count: int) -> int:
        now = await bring_up_to_date(consumers, queue, count)
        clock.advance_ms(1_000)  # after what was claimable at this moment was found
        return now

    monkeypatch.setattr(Consumers, "bring_up_to_date", while_time_passes)
    claimed = await system.claim("q", count=10)

    assert [one.message_id for one in claimed] == ids


async def test_a_nack_may_name_its_own_delay(system: Engine, clock: ManualClock) -> None:
    await system.create_queue("q")
    await publish(system, b"x")
    (message,) = await system.claim("q")

    await system.nack("q", message.receipt, delay_ms=0)
    (message,) = await system.claim("q")
    await system.nack("q", message.receipt, delay_ms=70)
    clock.advance_ms(69)
    assert await system.claim("q") == []
    clock.advance_ms(1)

    assert payloads(await system.claim("q")) == [b"x"]


async def test_a_lease_that_runs_out_without_attempts_left_fails_the_message(
    root: str, clock: ManualClock
) -> None:
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("q", options=QueueOptions(max_attempts=1, lease_ms=10))
        await publish(system, b"x")
        await system.claim("q")
    clock.advance_ms(11)
    async with await Engine.open(root, clock=clock) as system:
        assert await system.claim("q") == []
        await system.close()
    async with await Engine.open(root, clock=clock) as system:
        (failed,) = await system.failed("q")

    assert failed.error == "the lease ran out"


async def test_failed_messages_are_replayed_or_purged_wherever_they_are(
    root: str, clock: ManualClock
) -> None:
    options = QueueOptions(max_attempts=1, bucket=3, window=2)
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("q", options=options)
        ids = await publish(system, *(b"%d" % n for n in range(10)))
        for message in await system.claim("q", 10):
            await system.nack("q", message.receipt, error="e" * 10_000)

        assert [f.message_id for f in await system.failed("q")] == ids
        assert [f.message_id for f in await system.failed("q", after_id=ids[3], limit=2)] == ids[
            4:6
        ]
        assert await system.replay("q", ids[0], ids[9], ids[4], ids[4], 999) == [
            ids[0], ids[9], ids[4],
        ]  # fmt: skip
        assert await system.replay("q", ids[0]) == []
        assert await system.purge_failed("q", *ids[1:4]) == ids[1:4]
        assert [f.message_id for f in await system.failed("q")] == ids[5:9]
        assert len((await system.failed("q"))[0].error) == 4_096
    async with await Engine.open(root, clock=clock) as system:
        assert [f.message_id for f in await system.failed("q")] == ids[5:9]
        again = await system.claim("q", 10)

    assert [(m.message_id, m.attempts) for m in again] == [(ids[0], 1), (ids[4], 1), (ids[9], 1)]


# --- settings -------------------------------------------------------------------------------------


async def test_a_paused_queue_hands_nothing_out_until_it_is_resumed(system: Engine) -> None:
    await system.create_queue("q")
    await publish(system, b"x")

    await system.update_queue("q", paused=True)
    assert await system.claim("q") == []
    await system.update_queue("q", paused=False)

    assert payloads(await system.claim("q")) == [b"x"]


async def test_a_new_filter_counts_for_what_comes_next(root: str, clock: ManualClock) -> None:
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("q", filter="a = '1'")
        await publish(system, b"old", a="1")
        info = await system.update_queue("q", filter="a='2'", max_attempts=9)
        await publish(system, b"not any more", a="1")
        await publish(system, b"new", a="2")
    assert (info.filter, info.options.max_attempts) == ("a = '2'", 9)

    async with await Engine.open(root, clock=clock) as system:
        assert (await system.get_queue("q")) == info
        assert payloads(await system.claim("q", 10)) == [b"old", b"new"]


async def test_the_number_in_flight_is_bounded(system: Engine) -> None:
    await system.create_queue("q", options=QueueOptions(max_in_flight=3))
    await publish(system, *[b"x"] * 10)

    first = await system.claim("q", 10)
    assert len(first) == 3
    assert await system.claim("q", 10) == []
    await system.ack("q", first[0].receipt)

    assert len(await system.claim("q", 10)) == 1


async def test_relaxed_claims_are_durable_with_the_next_commit(
    root: str, clock: ManualClock
) -> None:
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("q", options=QueueOptions(relaxed_claims=True))
        await publish(system, b"x")
        (message,) = await system.claim("q")
    async with await Engine.open(root, clock=clock) as system:
        assert await system.ack("q", message.receipt) == ["ok"]


@pytest.mark.parametrize("name", ["a", "ns/topic", "a.b-c_d/E/9", "x" * 255])
async def test_names_of_queues(memory_system: Engine, name: str) -> None:
    await memory_system.create_queue(name)

    assert (await memory_system.list_queues()) == [name]


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", ".a", "-a", "a b", "ä", "x" * 256, None])
async def test_other_names_are_refused(memory_system: Engine, name: str) -> None:
    with pytest.raises(InvalidInputError, match="is no queue name"):
        await memory_system.create_queue(name)


async def test_bad_arguments_are_named_and_change_nothing(memory_system: Engine) -> None:
    await memory_system.create_queue("q")

    with pytest.raises(QueueExistsError, match="there is a queue 'q' already"):
        await memory_system.create_queue("q")
    with pytest.raises(FilterError):
        await memory_system.create_queue("r", filter="type ==")
    with pytest.raises(QueueNotFoundError, match="there is no queue 'r'"):
        await memory_system.claim("r")
    for bad in (
        {"count": 0},
        {"count": 1_001},
        {"count": True},
        {"lease_ms": 0},
        {"lease_ms": True},
        {"wait_ms": -1},
        {"consumer": ""},
    ):
        with pytest.raises(InvalidInputError, match=next(iter(bad))):
            await memory_system.claim("q", **bad)
    with pytest.raises(InvalidInputError, match="consumer"):
        await memory_system.claim("q", consumer="x" * 256)
    await memory_system.update_queue("q", lease_ms=10, max_lease_ms=50)
    with pytest.raises(InvalidInputError, match="lease_ms is 100, not within 1 to 50"):
        await memory_system.claim("q", lease_ms=100)
    for option in ({"window": 0}, {"max_attempts": -1}, {"backoff_factor": 0.5}, {"bucket": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(option))):
            await memory_system.update_queue("q", **option)


# --- waiting --------------------------------------------------------------------------------------


async def test_a_claim_waits_for_the_first_message(system: Engine) -> None:
    await system.create_queue("q")
    waiting = asyncio.create_task(system.claim("q", 5, wait_ms=60_000))
    await asyncio.sleep(0)

    await system.publish(b"x")

    assert payloads(await waiting) == [b"x"]


async def test_a_claim_waits_for_what_is_due_soon() -> None:
    async with await Engine.open("memory:///") as system:
        await system.create_queue("q", options=QueueOptions(lease_ms=1, backoff_ms=1))
        await system.publish(b"x", delay_ms=20)

        first = await system.claim("q", wait_ms=60_000)
        again = await system.claim("q", wait_ms=60_000)

    assert [m.attempts for m in (*first, *again)] == [1, 2]


async def test_a_claim_gives_up_after_its_wait(memory_system: Engine, clock: ManualClock) -> None:
    await memory_system.create_queue("q")
    waiting = asyncio.create_task(memory_system.claim("q", wait_ms=5_000))
    while not memory_system._queues.queue("q").waiters:
        await asyncio.sleep(0)

    clock.advance_ms(4_999)
    assert not (await asyncio.wait([waiting], timeout=0))[0]
    clock.advance_ms(1)

    assert await waiting == []


async def test_those_who_wait_are_ended_when_the_system_closes() -> None:
    system = await Engine.open("memory:///")
    await system.create_queue("q")
    waiting = asyncio.create_task(system.claim("q", wait_ms=60_000))
    while not system._queues.queue("q").waiters:
        await asyncio.sleep(0)

    await system.close()

    with pytest.raises(ClosedError):
        await waiting


async def test_a_second_owner_fences_consumers_too(root: str) -> None:
    first = await Engine.open(root)
    await first.create_queue("q")
    await publish(first, b"x")
    second = await Engine.open(root, takeover=True)

    with pytest.raises(FencedError):
        await first.claim("q")

    (message,) = await second.claim("q")
    assert await second.ack("q", message.receipt) == ["ok"]
    await second.close()
    await first.close()


async def test_routing_that_stopped_is_told_to_consumers(
    memory_system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room")

    await memory_system.create_queue("q")
    monkeypatch.setattr(memory_system._queues.index, "route", broken)
    await memory_system.publish(b"x")

    with pytest.raises(MemoryError):
        await memory_system._tailer.caught_up()
    with pytest.raises(MemoryError):
        await memory_system.claim("q")


async def test_a_queue_can_be_made_while_others_publish(memory_system: Engine) -> None:
    publishing = True

    async def publish_on() -> None:
        while publishing:
            await memory_system.publish_many([NewMessage(b"x")] * 50)

    task = asyncio.create_task(publish_on())
    for number in range(5):
        await memory_system.create_queue(f"q{number}")
    publishing = False
    await task
    await memory_system._tailer.caught_up()

    depths = [(await memory_system.stats(f"q{number}")).available for number in range(5)]
    assert depths == sorted(depths, reverse=True)


async def test_every_row_of_the_queue_store_can_be_decoded_with_the_rfcs_alone(
    root: str, clock: ManualClock
) -> None:
    options = QueueOptions(window=2, bucket=2, max_attempts=1)
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("q", options=options)
        await publish(system, *[b"x"] * 20)
        await system.publish(b"later", delay_ms=1)
        await system._tailer.caught_up()
        claimed = await system.claim("q", 6)
        await system.ack("q", *(m.receipt for m in claimed[:3]))
        await system.nack("q", *(m.receipt for m in claimed[3:]), error="e")
    database = await Database.open(Objects.open(root, StoreSettings()), "queues/00000")
    kinds = {
        decode_any(key, value).kind.title
        async for chunk in database.scan(b"\x01", b"\xff")
        for key, value in chunk
    }
    await database.close()

    assert kinds == {
        "active messages", "done messages", "failed messages", "attempts", "queue configuration",
        "queue options", "queue counters", "backlog row", "schedule row", "failure", "cursor",
        "clock", "sealed done messages", "sealed failed messages",
    }  # fmt: skip


async def test_a_message_that_is_gone_counts_as_expired_and_holds_nobody_up(
    memory_system: Engine,
) -> None:
    system = memory_system
    await system.create_queue("q")
    ids = await publish(system, b"gone", b"gone too", b"here")
    rows = Rows()
    for one in ids[:2]:  # as if the store had dropped them before their time
        rows.delete(PayloadKey(message_id=one).encode())
        rows.delete(MetadataLogKey(sequence=one).encode())
    await system.stores.shards[0].commit(rows)
    system.stores.shards[0].recent.forget(ids)

    assert payloads(await system.claim("q")) == [b"here"]

    stats = await system.stats("q")
    assert (stats.expired, stats.done, stats.in_flight, stats.available) == (2, 0, 1, 0)


async def test_whoever_has_published_finds_it_in_its_queue_at_once(memory_system: Engine) -> None:
    await memory_system.create_queue("q")
    for number in range(20):
        (first, second) = await memory_system.publish_many([NewMessage(b"1"), NewMessage(b"2")])

        if number % 4 == 0:
            assert (await memory_system.stats("q")).available == 2
        elif number % 4 == 1:
            assert [one.message_id for one in await memory_system.peek("q", 2)] == [first, second]
        elif number % 4 == 2:
            page = await memory_system.browse("q", "available")
            assert [one.message_id for one in page.entries] == [first, second]
        claimed = await memory_system.claim("q", 2)

        assert [one.message_id for one in claimed] == [first, second]
        await memory_system.ack("q", *claimed)


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


async def test_the_indexes_of_a_queue_are_of_no_use_to_one_that_does_not_hold_them_any_more(
    memory_system: Engine,
) -> None:
    await memory_system.create_queue("q", options=QueueOptions(window=2))
    await memory_system.publish_many([NewMessage(b"x")] * 9)
    await memory_system.all_is_routed()
    queue = memory_system._queues.queue("q")

    async with queue.reading() as indexes:
        assert not queue.front_may_be_taken
        with indexes.ahead():
            assert queue.front_may_be_taken
        assert len(await indexes.first_of_backlog(9)) == 7

    assert queue.front_may_be_taken
    with pytest.raises(RuntimeError, match="does not hold them"):
        await indexes.first_of_backlog(9)
    with pytest.raises(RuntimeError, match="does not hold them"):
        indexes.rewrite_failed(0, {})
