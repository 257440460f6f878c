"""Many consumers of one event loop: everybody is served, nothing is done twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from opendata_queue import (
    ClaimedMessage,
    ClosedError,
    Engine,
    FencedError,
    NewMessage,
    QueueOptions,
)
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.waiters import Waiters
from opendata_queue.store import Rows
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot

# Longer than any test may take: whoever waits has to be woken.
LONG_MS = 600_000
GUARD_SECONDS = 120
# Longer still: no lease that ends may wake somebody in place of what should have.
LEASE_MS = 36_000_000

Waiting = asyncio.Task[list[ClaimedMessage]]


@pytest.fixture
async def system(clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open("memory:///", clock=clock) as system:
        yield system


def stored(system: Engine) -> StoredQueue:
    return system._queues.queue("q")


async def wait_in_line(system: Engine, number: int, count: int = 1) -> list[Waiting]:
    """Consumers that wait in the order of the list."""
    line = []
    for place in range(number):
        line.append(asyncio.create_task(system.claim("q", count, wait_ms=LONG_MS)))
        while len(stored(system).waiters) <= place:
            await asyncio.sleep(0)
    return line


async def all_of(tasks: list[Waiting]) -> list[list[ClaimedMessage]]:
    async with asyncio.timeout(GUARD_SECONDS):
        return await asyncio.gather(*tasks)


# --- once -----------------------------------------------------------------------------------------


class Consumers:
    """They finish, fail and give back messages at random, until all are done."""

    def __init__(self, system: Engine, messages: int) -> None:
        self.system = system
        self.messages = messages
        self.acked: Counter[int] = Counter()
        self.attempts: Counter[int] = Counter()
        self.finished = asyncio.Event()
        self.chance = random.Random(messages)

    async def run(self) -> None:
        while True:
            count = self.chance.choice([1, 1, 3, 20])
            try:
                claimed = await self.system.claim("q", count, wait_ms=LONG_MS)
            except ClosedError:
                return
            assert 0 < len(claimed) <= count
            await asyncio.gather(*(self.finish(message) for message in claimed))

    async def finish(self, message: ClaimedMessage) -> None:
        message_id, receipt = message.message_id, message.receipt
        self.attempts[message_id] += 1
        assert message.attempts == self.attempts[message_id]
        assert message_id not in self.acked, "handed out although it is done"
        for _ in range(self.chance.randrange(3)):
            await asyncio.sleep(0)
        match self.chance.choice(["ack", "ack", "ack", "nack", "release"]):
            case "nack":
                assert await self.system.nack("q", receipt, delay_ms=0) == ["ok"]
            case "release":
                self.attempts[message_id] -= 1  # before it can be claimed again
                assert await self.system.release("q", receipt) == ["ok"]
            case _:
                outcomes = await self.system.ack("q", receipt, receipt)
                assert outcomes == ["ok", "lease_lost"]
                self.acked[message_id] += 1
                if len(self.acked) == self.messages:
                    self.finished.set()


@pytest.mark.parametrize(
    ("number", "published_before", "max_in_flight"),
    [(2_000, 0, 10_000), (2_000, 1_000, 10_000), (500, 0, 7), (500, 500, 7)],
)
async def test_50_consumers_finish_each_message_once(
    new_memory_root: NewRoot,
    clock: ManualClock,
    number: int,
    published_before: int,
    max_in_flight: int,
) -> None:
    url = new_memory_root()
    options = QueueOptions(
        window=8, bucket=8, max_attempts=0, max_in_flight=max_in_flight, lease_ms=LEASE_MS
    )
    messages = [NewMessage(b"x", headers={"priority": str(n % 3)}) for n in range(number)]
    system = await Engine.open(url, clock=clock)
    await system.create_queue("q", options=options)
    if published_before:
        await system.publish_many(messages[:published_before])
        await system._tailer.caught_up()
        await system.close()
        system = await Engine.open(url, clock=clock)

    consumers = Consumers(system, number)
    async with asyncio.timeout(GUARD_SECONDS), asyncio.TaskGroup() as tasks:
        for _ in range(50):
            tasks.create_task(consumers.run())
        for start in range(published_before, number, 50):
            await system.publish_many(messages[start : start + 50])
        await consumers.finished.wait()
        stats = await system.stats("q")
        await system.close()

    assert set(consumers.acked.values()) == {1}
    assert (stats.done, stats.available, stats.delayed, stats.in_flight) == (number, 0, 0, 0)


async def test_claims_at_the_same_time_share_what_there_is(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    url = new_memory_root()
    async with await Engine.open(url, clock=clock) as system:
        await system.create_queue("q", options=QueueOptions(window=4, lease_ms=LEASE_MS))
        ids = await system.publish_many([NewMessage(b"x")] * 30)
        await system._tailer.caught_up()
    async with await Engine.open(url, clock=clock) as system:
        claimed = await asyncio.gather(*(system.claim("q", 3) for _ in range(10)))

    assert [len(messages) for messages in claimed] == [3] * 10
    assert sorted(m.message_id for messages in claimed for m in messages) == ids


@pytest.mark.parametrize("way", ["release", "nack", "replay"])
async def test_a_receipt_is_void_once_it_was_used_even_within_a_millisecond(
    system: Engine, way: str
) -> None:
    await system.create_queue("q", options=QueueOptions(max_attempts=1 if way == "replay" else 0))
    await system.publish(b"x")
    await system._tailer.caught_up()
    old: list[str] = []
    for _ in range(4):
        (message,) = await system.claim("q")
        for receipt in old:
            assert await system.ack("q", receipt) == ["lease_lost"]
        old.append(message.receipt)
        if way == "release":
            assert await system.release("q", message.receipt) == ["ok"]
        else:
            assert await system.nack("q", message.receipt, delay_ms=0) == ["ok"]
        if way == "replay":
            assert await system.replay("q", message.message_id) == [message.message_id]

    (message,) = await system.claim("q")
    assert await system.ack("q", *old, message.receipt) == ["lease_lost"] * 4 + ["ok"]


# --- waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 7, 256])
async def test_everybody_who_waits_gets_one_when_there_are_enough(
    system: Engine, window: int
) -> None:
    await system.create_queue("q", options=QueueOptions(window=window, lease_ms=LEASE_MS))
    line = await wait_in_line(system, 40)

    ids = await system.publish_many([NewMessage(b"x")] * 40)

    claimed = await all_of(line)
    assert [len(messages) for messages in claimed] == [1] * 40
    assert sorted(m.message_id for messages in claimed for m in messages) == ids


async def test_those_who_wait_are_served_in_their_order(system: Engine) -> None:
    await system.create_queue("q", options=QueueOptions(lease_ms=LEASE_MS))
    line = await wait_in_line(system, 20)

    for waiting in list(line):
        message_id = await system.publish(b"x")
        async with asyncio.timeout(GUARD_SECONDS):
            done, _ = await asyncio.wait(line, return_when=asyncio.FIRST_COMPLETED)
        assert done == {waiting}
        assert [message.message_id for message in await waiting] == [message_id]
        line.remove(waiting)


@pytest.mark.parametrize("finish", ["ack", "nack", "release"])
async def test_what_others_finish_makes_room_for_those_who_wait(
    system: Engine, finish: str
) -> None:
    await system.create_queue(
        "q", options=QueueOptions(window=2, max_in_flight=5, lease_ms=LEASE_MS)
    )
    await system.publish_many([NewMessage(b"x")] * 20)
    await system._tailer.caught_up()
    held = await system.claim("q", 5)
    line = await wait_in_line(system, 5)
    receipts = [message.receipt for message in held]

    if finish == "ack":
        await system.ack("q", *receipts)
    elif finish == "nack":
        await system.nack("q", *receipts, delay_ms=0)
    else:
        await system.release("q", *receipts)

    assert [len(messages) for messages in await all_of(line)] == [1] * 5


@pytest.mark.parametrize("ways", ["ack ack", "ack nack", "nack ack", "release ack", "ack ack ack"])
async def test_each_that_is_finished_wakes_somebody(system: Engine, ways: str) -> None:
    """Also before those who were woken by the one before have claimed."""
    count = len(ways.split())
    await system.create_queue("q", options=QueueOptions(max_in_flight=count, lease_ms=LEASE_MS))
    await system.publish_many([NewMessage(b"x")] * 20)
    await system._tailer.caught_up()
    held = await system.claim("q", count)
    line = await wait_in_line(system, count)

    await asyncio.gather(
        *(
            getattr(system, way)("q", message)
            for way, message in zip(ways.split(), held, strict=True)
        )
    )

    assert [len(messages) for messages in await all_of(line)] == [1] * count


async def test_resuming_and_replaying_wake_those_who_wait(system: Engine) -> None:
    options = QueueOptions(window=2, max_attempts=1, paused=True, lease_ms=LEASE_MS)
    await system.create_queue("q", options=options)
    ids = await system.publish_many([NewMessage(b"x")] * 6)
    await system._tailer.caught_up()
    line = await wait_in_line(system, 6)
    await system.update_queue("q", paused=False)
    claimed = [message for messages in await all_of(line) for message in messages]
    assert sorted(message.message_id for message in claimed) == ids

    await system.nack("q", *(message.receipt for message in claimed))
    line = await wait_in_line(system, 6)
    await system.replay("q", *ids)

    assert [len(messages) for messages in await all_of(line)] == [1] * 6


async def test_a_lease_or_a_delay_that_ends_wakes_those_who_wait(new_memory_root: NewRoot) -> None:
    async with await Engine.open(new_memory_root()) as system:
        await system.create_queue("q", options=QueueOptions(lease_ms=1, backoff_ms=1))
        await system.publish(b"x")
        (first,) = await system.claim("q", wait_ms=LONG_MS)
        async with asyncio.timeout(GUARD_SECONDS):
            (second,) = await system.claim("q", wait_ms=LONG_MS, lease_ms=LONG_MS)
            await system.publish(b"y", delay_ms=20)
            (third,) = await system.claim("q", wait_ms=LONG_MS)

    assert (first.payload, second.payload, third.payload) == (b"x", b"x", b"y")
    assert second.attempts == 2


async def test_whoever_waits_does_not_try_again_without_being_woken(
    system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await system.create_queue("q")
    await system.create_queue("other", filter="kind = 'other'")
    await system.update_queue("q", filter="kind = 'mine'")
    tries = 0
    claim_now = system._queues.consumers.claim_now

    async def counted(*arguments: object) -> object:
        nonlocal tries
        tries += 1
        return await claim_now(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(system._queues.consumers, "claim_now", counted)
    line = await wait_in_line(system, 30)
    assert tries == 30

    for _ in range(10):  # nothing of this is for them
        await system.publish(b"x", headers={"kind": "other"})
        (message,) = await system.claim("other", wait_ms=LONG_MS)
        await system.ack("other", message.receipt)
    assert all(not waiting.done() for waiting in line)
    theirs, tries = tries - 30, 0
    assert 10 <= theirs <= 20  # those of "other" alone: at once, or after being woken

    await system.publish_many([NewMessage(b"x", headers={"kind": "mine"})] * 30)
    await all_of(line)
    assert tries == 30


async def test_whoever_waited_in_vain_gets_nothing_and_leaves_nothing_behind(
    system: Engine, clock: ManualClock
) -> None:
    await system.create_queue("q")
    for _ in range(20):
        line = await wait_in_line(system, 10)
        clock.advance_ms(LONG_MS)
        assert await all_of(line) == [[]] * 10

    assert not stored(system).waiters
    await system.publish(b"x")
    assert len(await system.claim("q", wait_ms=LONG_MS)) == 1


async def test_a_consumer_that_is_cancelled_as_it_is_woken_leaves_it_to_the_next(
    system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await system.create_queue("q")
    first, second = await wait_in_line(system, 2)
    wake = Waiters.wake

    def wake_and_cancel(waiters: Waiters) -> None:
        wake(waiters)
        first.cancel()

    monkeypatch.setattr(Waiters, "wake", wake_and_cancel)
    await system.publish(b"x")

    with pytest.raises(asyncio.CancelledError):
        await first
    (claimed,) = await all_of([second])
    assert [message.payload for message in claimed] == [b"x"]


async def test_whoever_waits_is_told_when_the_system_closes(clock: ManualClock) -> None:
    system = await Engine.open("memory:///", clock=clock)
    await system.create_queue("q", options=QueueOptions(lease_ms=LEASE_MS))
    line = await wait_in_line(system, 20)
    coming = [asyncio.create_task(system.claim("q", wait_ms=LONG_MS)) for _ in range(20)]

    await system.close()

    async with asyncio.timeout(GUARD_SECONDS):
        outcomes = await asyncio.gather(*line, *coming, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {ClosedError}


async def test_whoever_waits_is_told_when_another_owner_has_taken_over(
    new_memory_root: NewRoot,
) -> None:
    url = new_memory_root()
    async with await Engine.open(url) as system:
        await system.create_queue("q")
        line = await wait_in_line(system, 5)
        async with await Engine.open(url, takeover=True):
            with pytest.raises(FencedError):
                await system.create_queue("another")

            async with asyncio.timeout(GUARD_SECONDS):
                outcomes = await asyncio.gather(*line, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {FencedError}


# --- failed messages while commits are under way --------------------------------------------------


class SlowCommits:
    """Commits of the queue store wait until they are let through."""

    def __init__(self, system: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        database = system._queues.database
        commit = database.commit
        self.let_through = asyncio.Event()
        self.under_way = asyncio.Event()

        async def slow_commit(rows: Rows, **options: Any) -> None:
            self.under_way.set()
            await self.let_through.wait()
            await commit(rows, **options)

        monkeypatch.setattr(database, "commit", slow_commit)


async def two_of_which_one_has_failed(system: Engine) -> tuple[ClaimedMessage, ClaimedMessage]:
    await system.create_queue("q", options=QueueOptions(max_attempts=1, bucket=2))
    await system.publish_many([NewMessage(b"x"), NewMessage(b"y")])
    await system._tailer.caught_up()
    failed, held = await system.claim("q", 2)
    await system.nack("q", failed.receipt, error="failed")
    return failed, held


@pytest.mark.parametrize("again", [True, False])
async def test_a_bucket_that_is_sealed_while_its_message_is_replayed_or_purged(
    system: Engine, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    failed, held = await two_of_which_one_has_failed(system)
    commits = SlowCommits(system, monkeypatch)
    nacked = asyncio.create_task(system.nack("q", held.receipt, error="seals the bucket"))
    await commits.under_way.wait()
    finish = system.replay if again else system.purge_failed
    finished = asyncio.create_task(finish("q", failed.message_id))
    for _ in range(20):
        await asyncio.sleep(0)
    commits.let_through.set()

    assert await nacked == ["ok"]
    assert await finished == [failed.message_id]
    assert [f.message_id for f in await system.failed("q")] == [held.message_id]
    stats = await system.stats("q")
    assert (stats.failed, stats.available) == (1, int(again))


async def test_a_replay_that_is_cancelled_half_way_is_not_done_twice(
    system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, _ = await two_of_which_one_has_failed(system)
    commits = SlowCommits(system, monkeypatch)
    first = asyncio.create_task(system.replay("q", failed.message_id))
    await commits.under_way.wait()
    first.cancel()
    second = asyncio.create_task(system.replay("q", failed.message_id))
    await asyncio.wait([first])
    commits.let_through.set()

    assert await second == []
    stats = await system.stats("q")
    assert (stats.failed, stats.available, stats.in_flight) == (0, 1, 1)


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
