"""Looking into queues: peek, pages of every state, the oldest age, and the history of a message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from opendata_queue import (
    BrowsedState,
    ClaimedMessage,
    Engine,
    InvalidInputError,
    MessageHistory,
    NewMessage,
    QueueEntry,
    QueueNotFoundError,
    QueueOptions,
)
from opendata_queue.queues import browse
from opendata_queue.runtime import turns
from opendata_queue.store import Database, Rows
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot

SMALL = QueueOptions(window=2, bucket=3, max_attempts=2, backoff_ms=1_000, backoff_jitter=0)
DAY_MS = 24 * 3_600_000


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, new_memory_root: NewRoot) -> str:
    return new_memory_root() if request.param == "memory" else f"file://{tmp_path}/root"


@pytest.fixture
async def system(url: str, clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open(url, clock=clock) as system:
        await system.create_queue("q", options=SMALL)
        yield system


async def publish(system: Engine, *messages: NewMessage) -> list[int]:
    ids = await system.publish_many(messages)
    await system._tailer.caught_up()
    return ids


async def finish(system: Engine, count: int) -> list[ClaimedMessage]:
    claimed = await system.claim("q", count)
    await system.ack("q", *(message.receipt for message in claimed))
    return claimed


async def all_pages(system: Engine, state: BrowsedState, limit: int) -> list[QueueEntry]:
    entries: list[QueueEntry] = []
    after = None
    while True:
        page = await system.browse("q", state, after=after, limit=limit)
        assert len(page.entries) <= limit
        entries += page.entries
        if page.next is None:
            return entries
        assert len(page.entries) == limit
        after = page.next


def ids_of(entries: list[QueueEntry] | tuple[QueueEntry, ...]) -> list[int]:
    return [entry.message_id for entry in entries]


def with_priority(priority: int) -> NewMessage:
    return NewMessage(b"x", headers={"priority": str(priority)})


# --- peek -----------------------------------------------------------------------------------------


async def test_a_peek_shows_what_a_claim_would_get_and_takes_nothing(system: Engine) -> None:
    priorities = [9, 1, 5, 1, 200, 5, 9, 1] * 5
    await publish(system, *(with_priority(one) for one in priorities))

    peeked = await system.peek("q", 40)

    assert (await system.stats("q")).available == 40
    assert [(m.priority, m.attempts, m.payload, m.headers) for m in peeked[:1]] == [
        (1, 0, b"x", (("priority", "1"),))
    ]
    claimed = await system.claim("q", 40)
    assert [m.message_id for m in peeked] == [m.message_id for m in claimed]
    assert await system.peek("q") == []


async def test_a_peek_knows_what_time_it_is(system: Engine, clock: ManualClock) -> None:
    await publish(system, NewMessage(b"gone", retention_seconds=1), NewMessage(b"now"))
    await publish(system, NewMessage(b"later", delay_ms=2_000))
    clock.advance_ms(2_000)

    assert [message.payload for message in await system.peek("q", 10)] == [b"now", b"later"]


async def test_a_peek_goes_past_hundreds_that_are_expired(
    system: Engine, clock: ManualClock
) -> None:
    await publish(system, *[NewMessage(b"gone", retention_seconds=1)] * 350, NewMessage(b"there"))
    clock.advance_ms(1_001)

    assert [message.payload for message in await system.peek("q")] == [b"there"]


async def test_a_paused_queue_can_be_looked_into(system: Engine) -> None:
    await publish(system, NewMessage(b"x"))
    await system.update_queue("q", paused=True)

    assert len(await system.peek("q")) == 1
    assert len((await system.browse("q", "available")).entries) == 1


# --- pages ----------------------------------------------------------------------------------------


async def test_available_messages_come_in_the_order_of_claiming(system: Engine) -> None:
    await publish(system, *(with_priority(n * 7 % 11) for n in range(3_000)))

    entries = await all_pages(system, "available", 997)

    order = [(entry.priority, entry.message_id) for entry in entries]
    assert order == sorted(order)
    assert len(set(order)) == 3_000 == (await system.stats("q")).available
    assert await all_pages(system, "available", 1_000) == entries


async def test_every_page_size_gives_the_same_entries(system: Engine) -> None:
    await publish(system, *(with_priority(n % 3) for n in range(23)))
    await publish(system, *(NewMessage(b"x", delay_ms=1 + n % 4) for n in range(11)))
    await finish(system, 8)
    claimed = await system.claim("q", 4)
    whole = {
        state: await all_pages(system, state, 1_000)
        for state in ("available", "delayed", "in_flight", "done")
    }

    assert [len(entries) for entries in whole.values()] == [11, 11, 4, 8]
    assert ids_of(whole["in_flight"]) == sorted(message.message_id for message in claimed)
    for state, entries in whole.items():
        for limit in (1, 2, 3, 4, 8, 11):
            assert await all_pages(system, state, limit) == entries  # type: ignore[arg-type]


async def test_delayed_messages_come_by_the_time_they_are_due(
    system: Engine, clock: ManualClock
) -> None:
    now = clock.now_ms()
    await publish(system, *(NewMessage(b"x", delay_ms=1 + n * 7 % 1_000) for n in range(2_500)))

    entries = await all_pages(system, "delayed", 700)

    order = [(entry.visible_at_ms, entry.message_id) for entry in entries]
    assert order == sorted(order)
    assert order[0][0] == now + 1
    assert len(set(order)) == 2_500 == (await system.stats("q")).delayed
    clock.advance_ms(500)
    left = await all_pages(system, "delayed", 700)
    assert left == [entry for entry in entries if (entry.visible_at_ms or 0) > clock.now_ms()]


async def test_done_messages_come_the_latest_first_over_all_buckets(
    system: Engine, clock: ManualClock
) -> None:
    await publish(system, *[NewMessage(b"x")] * 400)
    done: list[int] = []
    for count in (1, 2, 3, 94, 100, 200):
        done += [message.message_id for message in await finish(system, count)]
        clock.advance_ms(1)

    entries = await all_pages(system, "done", 150)

    assert ids_of(entries) == done[::-1]
    times = [entry.finished_at_ms or 0 for entry in entries]
    assert times == sorted(times, reverse=True)
    assert len(entries) == (await system.stats("q")).done


async def test_done_pages_end_where_buckets_were_dropped(system: Engine) -> None:
    await publish(system, *[NewMessage(b"x")] * 400)
    done = [message.message_id for message in await finish(system, 400)]
    rows = Rows()
    prefix = b"\x02\x03q\x00"
    for bucket in range(100):
        rows.delete(prefix + bucket.to_bytes(8, "big"))
    await system._queues.committer.wait(system._queues.committer.add(rows))

    entries = await all_pages(system, "done", 7)

    assert ids_of(entries) == done[:299:-1]


async def test_entries_say_what_their_state_knows(system: Engine, clock: ManualClock) -> None:
    now = clock.now_ms()
    ids = await publish(system, *[NewMessage(b"x", retention_seconds=60)] * 4)
    await publish(system, NewMessage(b"x", delay_ms=5_000))
    claimed = await system.claim("q", 3, consumer="me", lease_ms=10_000)
    await system.ack("q", claimed[0].receipt)
    await system.nack("q", claimed[1].receipt, error="once", delay_ms=0)
    (again,) = await system.claim("q", consumer="you")
    await system.nack("q", again.receipt, error="twice")
    expires = now + 60_000

    async def only(state: BrowsedState) -> QueueEntry:
        (entry,) = (await system.browse("q", state)).entries
        return entry

    assert await only("done") == QueueEntry(
        queue="q", message_id=ids[0], state="done", attempts=1, finished_at_ms=now
    )
    assert await only("failed") == QueueEntry(
        queue="q", message_id=ids[1], state="failed", priority=128, attempts=2, consumer="you",
        finished_at_ms=now, error="twice", expires_at_ms=expires,
    )  # fmt: skip
    assert await only("in_flight") == QueueEntry(
        queue="q", message_id=ids[2], state="in_flight", priority=128, attempts=1, consumer="me",
        claimed_at_ms=now, lease_deadline_ms=now + 10_000, expires_at_ms=expires,
    )  # fmt: skip
    assert await only("available") == QueueEntry(
        queue="q", message_id=ids[3], state="available", priority=128, attempts=0,
        visible_at_ms=now, expires_at_ms=expires,
    )  # fmt: skip
    delayed = await only("delayed")
    assert (delayed.visible_at_ms, delayed.expires_at_ms) == (now + 5_000, None)


async def test_pages_go_on_where_they_were_when_the_queue_has_changed(system: Engine) -> None:
    ids = await publish(system, *[with_priority(5)] * 1_000)
    first = await system.browse("q", "available", limit=400)
    await system.claim("q", 300)
    (sooner,) = await publish(system, with_priority(1))
    (later,) = await publish(system, with_priority(9))

    rest: list[int] = []
    after = first.next
    while after is not None:
        page = await system.browse("q", "available", after=after, limit=333)
        rest += ids_of(page.entries)
        after = page.next

    assert ids_of(first.entries) == ids[:400]
    assert rest == [*ids[400:], later]
    assert sooner not in rest


async def test_done_pages_stay_in_place_while_more_is_done(system: Engine) -> None:
    await publish(system, *[NewMessage(b"x")] * 100)
    done = [message.message_id for message in await finish(system, 50)]
    page = await system.browse("q", "done", limit=5)
    seen = list(ids_of(page.entries))
    while page.next is not None:
        await finish(system, 4)
        page = await system.browse("q", "done", after=page.next, limit=5)
        seen += ids_of(page.entries)

    assert seen == done[::-1]


async def test_failed_entries_are_paged_by_their_ids(system: Engine) -> None:
    await system.update_queue("q", max_attempts=1)
    ids = await publish(system, *[NewMessage(b"x")] * 25)
    claimed = await system.claim("q", 25)
    await system.nack("q", *(message.receipt for message in claimed))

    assert ids_of(await all_pages(system, "failed", 10)) == ids


async def test_a_page_sees_what_is_not_durable_yet(
    system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await publish(system, *[NewMessage(b"x")] * 20)
    claimed = await system.claim("q", 10)
    commit = Database.commit
    go_on = asyncio.Event()

    async def held_back(self: Database, rows: Rows, **options: Any) -> None:
        if "queues" in self.name:
            await go_on.wait()
        await commit(self, rows, **options)

    monkeypatch.setattr(Database, "commit", held_back)
    releasing = asyncio.create_task(
        system.release("q", *(message.receipt for message in claimed[:6]))
    )
    delaying = asyncio.create_task(system.nack("q", claimed[6].receipt, delay_ms=DAY_MS))
    while (await system.stats("q")).in_flight != 3:
        await asyncio.sleep(0)

    available = await all_pages(system, "available", 4)
    delayed = await all_pages(system, "delayed", 4)
    go_on.set()

    assert ids_of(available) == [*ids[:6], *ids[10:]]
    assert ids_of(delayed) == [ids[6]]
    await asyncio.gather(releasing, delaying)
    assert await all_pages(system, "available", 4) == available


async def test_pages_of_a_busy_queue_show_no_entry_twice(system: Engine) -> None:
    """Whatever moves between window and backlog during a page."""
    await publish(system, *(with_priority(n % 5) for n in range(300)))
    busy = True

    async def consume() -> None:
        while busy:
            claimed = await system.claim("q", 3)
            await system.release("q", *(message.receipt for message in claimed))

    consuming = [asyncio.create_task(consume()) for _ in range(3)]
    for _ in range(20):
        page = await system.browse("q", "available", limit=1_000)
        ids = ids_of(page.entries)
        assert len(set(ids)) == len(ids)
        assert len(ids) >= 300 - 3 * 3
    busy = False
    await asyncio.gather(*consuming)


async def test_bad_arguments_of_looking_are_named(system: Engine) -> None:
    await publish(system, *[NewMessage(b"x")] * 3)
    token = (await system.browse("q", "available", limit=1)).next
    assert token is not None

    with pytest.raises(InvalidInputError, match="state is 'lost', not one of available, delayed"):
        await system.browse("q", "lost")  # type: ignore[arg-type]
    for bad in (
        "", "x", token + "0x", token.replace(":", ""), f"available:1.{1 << 63}", "available:-1.1",
        "available:01.1", "available:²", 5,
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="which is no `next` of a page of available"):
            await system.browse("q", "available", after=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="no `next` of a page of delayed entries"):
        await system.browse("q", "delayed", after=token)
    for limit in (0, 1_001, "1"):
        with pytest.raises(InvalidInputError, match="limit is"):
            await system.browse("q", "done", limit=limit)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="count is"):
            await system.peek("q", limit)  # type: ignore[arg-type]
    with pytest.raises(QueueNotFoundError):
        await system.browse("r", "done")
    with pytest.raises(QueueNotFoundError):
        await system.peek("r")


# --- the oldest age -------------------------------------------------------------------------------


async def oldest_age(system: Engine) -> int | None:
    return (await system.stats("q")).oldest_age_ms


async def test_the_oldest_age_is_that_of_the_smallest_id_wherever_it_is(
    url: str, clock: ManualClock
) -> None:
    async with await Engine.open(url, clock=clock) as system:
        await system.create_queue("q", options=SMALL)
        assert await oldest_age(system) is None
        await publish(system, *[with_priority(200)] * 3)
        clock.advance_ms(1_000)
        await publish(system, *[with_priority(n % 7) for n in range(40)])
        assert await oldest_age(system) == 1_000
    async with await Engine.open(url, clock=clock) as system:
        clock.advance_ms(500)
        assert await oldest_age(system) == 1_500
        claimed = await system.claim("q", 43)
        assert await oldest_age(system) is None
        last = claimed[-1]
        assert (last.priority, await system.release("q", last.receipt)) == (200, ["ok"])
        assert await oldest_age(system) == 1_500


async def test_a_delay_does_not_count_as_age_but_a_retry_does(
    system: Engine, clock: ManualClock
) -> None:
    await publish(system, NewMessage(b"x", delay_ms=DAY_MS))
    clock.advance_ms(DAY_MS + 10)
    (message,) = await system.claim("q")
    await system.nack("q", message.receipt)
    assert await oldest_age(system) is None
    clock.advance_ms(1_000)
    await system._queues.sweeper.caught_up()

    assert await oldest_age(system) == 1_010


# --- history --------------------------------------------------------------------------------------


async def history(system: Engine, message_id: int) -> MessageHistory:
    found = await system.history(message_id)
    assert found is not None
    return found


async def state_of(system: Engine, message_id: int) -> list[tuple[str, str]]:
    return [(entry.queue, entry.state) for entry in (await history(system, message_id)).entries]


async def test_a_message_is_found_in_every_state_it_goes_through(
    system: Engine, clock: ManualClock
) -> None:
    first = await publish(system, *[NewMessage(b"x")] * 10)
    (delayed,) = await publish(system, NewMessage(b"x", delay_ms=500))
    target = first[9]

    assert await state_of(system, target) == [("q", "available")]  # in the backlog
    assert await state_of(system, first[0]) == [("q", "available")]  # in the window
    assert await state_of(system, delayed) == [("q", "delayed")]
    claimed = await system.claim("q", 10, consumer="one")
    assert await state_of(system, target) == [("q", "in_flight")]
    await system.nack("q", claimed[9].receipt, error="once")
    assert await state_of(system, target) == [("q", "delayed")]
    await system.ack("q", *(message.receipt for message in claimed[:9]))
    assert await state_of(system, first[0]) == [("q", "done")]  # in a sealed bucket
    clock.advance_ms(1_000)
    assert await state_of(system, target) == [("q", "available")]
    (_, again) = sorted(await system.claim("q", 2, consumer="two"), key=lambda m: m.attempts)
    await system.nack("q", again.receipt, error="twice")

    found = await history(system, target)
    (entry,) = found.entries
    assert (entry.state, entry.error, entry.attempts) == ("failed", "twice", 2)
    assert found.consumers == ("one", "two")
    assert found.queues_left_out == 0
    await system.replay("q", target)
    assert await state_of(system, target) == [("q", "available")]


async def test_a_history_spans_queues_and_survives_a_reopen(url: str, clock: ManualClock) -> None:
    async with await Engine.open(url, clock=clock) as system:
        await system.create_queue("all")
        await system.create_queue("q", filter="kind = 'a'", options=SMALL)
        await system.create_queue("other", filter="kind = 'b'")
        (message_id,) = await publish(system, NewMessage(b"x", headers={"kind": "a"}))
        await finish(system, 1)
        await system.claim("all", consumer="me")
        before = await history(system, message_id)
    async with await Engine.open(url, clock=clock) as system:
        after = await history(system, message_id)

    assert [(e.queue, e.state) for e in before.entries] == [("all", "in_flight"), ("q", "done")]
    assert [(e.queue, e.state) for e in after.entries] == [("all", "in_flight"), ("q", "done")]
    assert before.headers == after.headers == (("kind", "a"),)
    assert before.received_at_ms == clock.now_ms()
    assert len(after.consumers) == 2


async def test_a_queue_that_never_held_the_message_does_not_appear(system: Engine) -> None:
    (message_id,) = await publish(system, NewMessage(b"x"))
    await system.create_queue("younger")

    assert await state_of(system, message_id) == [("q", "available")]


async def test_a_queue_whose_filter_has_changed_shows_what_is_at_hand_or_failed(
    system: Engine,
) -> None:
    flying, failed, done, next_one = await publish(system, *[NewMessage(b"x")] * 4)
    (_, message, finished) = await system.claim("q", 3)
    await system.update_queue("q", filter="kind = 'new'", max_attempts=1)
    await system.nack("q", message.receipt)
    await system.ack("q", finished.receipt)

    assert await state_of(system, flying) == [("q", "in_flight")]
    assert await state_of(system, failed) == [("q", "failed")]
    assert await state_of(system, done) == [("q", "done")]
    assert await state_of(system, next_one) == [("q", "available")]


async def test_an_expired_or_purged_message_leaves_no_entry(
    system: Engine, clock: ManualClock
) -> None:
    (message_id,) = await publish(system, NewMessage(b"x", retention_seconds=1))
    clock.advance_ms(1_001)
    assert await system.claim("q") == []

    assert (await history(system, message_id)).entries == ()


async def test_a_message_that_was_done_long_after_it_came_is_unknown_not_guessed(
    system: Engine, clock: ManualClock
) -> None:
    ids = await publish(system, *[NewMessage(b"x")] * 300)
    await finish(system, 300)
    await publish(system, NewMessage(b"x"))

    assert await state_of(system, ids[191]) == [("q", "done")]
    assert await state_of(system, ids[192]) == [("q", "unknown")]
    assert (await history(system, ids[299])).entries[0].attempts is None

    clock.advance_ms(1)
    recent = await publish(system, *[NewMessage(b"x")] * 30)
    await finish(system, 31)
    for message_id in recent:
        assert await state_of(system, message_id) == [("q", "done")]


async def test_a_retry_far_down_the_schedule_is_unknown_not_guessed(system: Engine) -> None:
    (message_id,) = await publish(system, NewMessage(b"x"))
    (message,) = await system.claim("q")
    *_, last = await publish(system, *[NewMessage(b"x", delay_ms=10)] * 1_001)
    await system.nack("q", message.receipt, delay_ms=DAY_MS)
    assert await state_of(system, message_id) == [("q", "delayed")]  # as it has just come
    for _ in range(2):
        await publish(system, NewMessage(b"x"))

    assert await state_of(system, message_id) == [("q", "unknown")]
    assert await state_of(system, last) == [("q", "delayed")]


async def test_too_many_queues_are_left_out_and_counted(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    async with await Engine.open(new_memory_root(), clock=clock) as system:
        await asyncio.gather(
            *(system.create_queue(f"q{n}", filter=f"n = '{n}'") for n in range(300))
        )
        (message_id,) = await publish(system, NewMessage(b"x", headers={"n": "299"}))

        found = await history(system, message_id)

    assert [(entry.queue, entry.state) for entry in found.entries] == [("q299", "available")]
    assert found.queues_left_out == 300 - 256


async def test_there_is_no_history_of_what_is_not_there(system: Engine) -> None:
    (message_id,) = await publish(system, NewMessage(b"x"))

    assert await system.history(message_id + 1) is None
    assert await system.history((7 << 32) + message_id) is None
    for bad in (-1, 1 << 63, "1"):
        with pytest.raises(InvalidInputError, match="message_id is"):
            await system.history(bad)  # type: ignore[arg-type]


async def test_a_page_of_messages_in_flight_is_made_in_turns_and_is_full_though_some_are_acked(
    memory_system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop is free between two parts of what is in flight, however much that is."""
    monkeypatch.setattr(browse, "_IDS_AT_ONCE", 50)
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    await memory_system.create_queue("q")
    ids = await memory_system.publish_many([NewMessage(b"x")] * 1_000)
    claimed = await memory_system.claim("q", 1_000, wait_ms=60_000)
    steps = 0

    async def count_steps() -> None:
        nonlocal steps
        while True:
            steps += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_steps())
    browsing = asyncio.create_task(memory_system.browse("q", "in_flight", limit=100))
    while steps < 10:
        await asyncio.sleep(0)
    acking = asyncio.create_task(memory_system.ack("q", *claimed[:10]))
    page = await browsing
    counting.cancel()
    await acking

    assert steps >= 1_000 // 50
    assert len(page.entries) == 100
    shown = [one.message_id for one in page.entries]
    assert shown in (ids[:100], ids[10:110])
