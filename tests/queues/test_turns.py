"""Background work takes turns that are bounded by time, and callers go first.

Nothing is timed: the clock of turns is one that the test moves, and turns are counted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from opendata_queue import (
    Engine,
    NewMessage,
    QueueOptions,
    log_replay,
    queue_store,
    routing,
)
from opendata_queue.filters import Filter
from opendata_queue.queue_state import Held
from opendata_queue.queue_store import _ROWS_BESIDE_CALLERS
from opendata_queue.store import Rows
from opendata_queue.testing import ManualClock
from opendata_queue.turns import (
    CALLED_LATELY_S,
    CALLING_S,
    SHORT_TURN_S,
    SHORTEST_REST_S,
    TURN_S,
    Turns,
)
from tests.shards.bulk_jobs import append

ROWS = 1_500
_numbers = itertools.count()


@pytest.fixture
def memory_root() -> str:
    return f"memory:///turns-{next(_numbers)}"


class TurnClock:
    """Goes on by a step whenever it is read, and by what is slept."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.step_s = step_s
        self.sleeps: list[float] = []
        self.on_sleep: Callable[[], None] | None = None

    def read(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds
        if self.on_sleep is not None:
            self.on_sleep()
        await asyncio.sleep(0)

    def turns(self) -> Turns:
        return Turns(self.read, self.sleep)


async def length_of(turns: Turns, clock: TurnClock) -> float:
    """For how long a turn goes on, by a clock that stands still, in steps of 0.1 ms."""
    async with turns.turn() as turn:
        began = clock.now_s
        while not turn.is_over:
            clock.now_s += 0.000_1
        return round(clock.now_s - began, 4)


async def test_a_turn_is_long_while_nobody_calls_and_short_while_somebody_does() -> None:
    clock = TurnClock()
    turns = clock.turns()

    assert await length_of(turns, clock) == TURN_S
    assert await length_of(turns, clock) == TURN_S
    turns.called()
    assert await length_of(turns, clock) == SHORT_TURN_S
    assert clock.sleeps == [0, 0, 0]
    assert await length_of(turns, clock) == SHORT_TURN_S
    assert clock.sleeps[-1] == pytest.approx(SHORTEST_REST_S)

    clock.now_s += CALLING_S
    await length_of(turns, clock)
    assert await length_of(turns, clock) == SHORT_TURN_S  # the next call may come at any moment
    assert clock.sleeps[-1] == 0

    clock.now_s += CALLED_LATELY_S
    assert await length_of(turns, clock) == TURN_S


async def test_a_rest_is_as_long_as_the_work_before_it() -> None:
    clock = TurnClock()
    turns = clock.turns()
    turns.called()

    async with turns.turn():
        clock.now_s += 0.007  # one message that went into a great many queues
    turns.called()
    async with turns.turn():
        pass

    assert clock.sleeps[-1] == pytest.approx(0.007)


async def test_one_has_a_turn_at_a_time_in_the_order_in_which_they_ask() -> None:
    turns = TurnClock().turns()
    seen: list[str] = []

    async def work(name: str) -> None:
        for _ in range(3):
            async with turns.turn():
                seen.append(name)
                await asyncio.sleep(0)
                seen.append(name)

    await asyncio.gather(*(work(name) for name in "abc"))

    assert "".join(seen) == "aabbcc" * 3


async def test_one_that_is_cancelled_or_fails_leaves_its_turn_to_others() -> None:
    turns = TurnClock().turns()
    holds = asyncio.Event()

    async def hold() -> None:
        async with turns.turn():
            holds.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    waiter = asyncio.create_task(hold())
    await holds.wait()
    waiter.cancel()
    holder.cancel()
    await asyncio.wait([holder, waiter])
    with pytest.raises(MemoryError):
        async with turns.turn():
            raise MemoryError

    async with turns.turn() as turn:
        assert not turn.is_over


# --- routing -------------------------------------------------------------------------------------


class Watched:
    """An engine whose turns go by a clock of ours, and how many rows each of them has routed."""

    def __init__(self, system: Engine, clock: TurnClock) -> None:
        self.system = system
        self.clock = clock
        self.turns = system._queues.turns = clock.turns()
        self.available: list[int] = []
        self.commits: list[int] = []
        clock.on_sleep = self._note
        commit = system._queues._database.commit

        async def noted(rows: Rows, *, on_start: Callable[[], None] | None = None) -> None:
            self.commits.append(len(rows))
            await commit(rows, on_start=on_start)

        system._queues._database.commit = noted  # type: ignore[method-assign]

    def _note(self) -> None:
        self.available.append(self.system._queues.stats("bulk").available)

    @property
    def routed(self) -> list[int]:
        """What each turn has routed, but for the last one of them."""
        return [b - a for a, b in zip(self.available, self.available[1:], strict=False)]

    async def all_is_quiet(self) -> None:
        await self.system._following.bulk.look()
        await self.system._following.bulk.finished()

    async def claimed_ids(self) -> list[int]:
        found: list[int] = []
        while claimed := await self.system.claim("bulk", 1_000):
            found += [one.message_id for one in claimed]
        return found


@asynccontextmanager
async def watched(root: str, step_s: float = 0.0) -> AsyncIterator[Watched]:
    async with await Engine.open(root) as system:
        await system.create_queue("bulk", filter="source = 'job'")
        await system.create_queue("others", filter="type = 'order'")
        yield Watched(system, TurnClock(step_s))


def rows(count: int = ROWS) -> list[NewMessage]:
    return [NewMessage(b"x", headers={"source": "job", "n": str(one)}) for one in range(count)]


async def test_a_turn_of_routing_ends_when_its_time_is_over(memory_root: str) -> None:
    # Each look at the clock takes a millisecond: some hundred rows at first, then fewer at once.
    async with watched(memory_root, step_s=0.001) as one:
        await append(memory_root, "job", rows())
        await one.all_is_quiet()

        assert sum(one.routed) <= ROWS
        assert max(one.routed) <= 300
        assert len(one.routed) >= ROWS // 300
        ids = await one.claimed_ids()
        assert len(ids) == len(set(ids)) == ROWS


async def test_a_caller_is_served_between_two_turns_of_routing(memory_root: str) -> None:
    async with watched(memory_root, step_s=0.001) as one:
        gate = asyncio.Event()
        turns = 0

        async def sleep(_: float) -> None:
            nonlocal turns
            turns += 1
            if turns == 3:
                await gate.wait()

        one.turns._sleep = sleep
        await append(memory_root, "job", rows())
        finding = asyncio.create_task(one.all_is_quiet())
        while turns < 3:
            await asyncio.sleep(0)
        routed = one.system._queues.stats("bulk").available
        assert 0 < routed < ROWS

        # Routing waits for its next turn, and for nothing of what callers need.
        await one.system.publish(b"order", headers={"type": "order"})
        (claimed,) = await one.system.claim("others")
        assert await one.system.ack("others", claimed) == ["ok"]
        assert one.system._queues.stats("bulk").available == routed

        gate.set()
        await finding
        assert one.system._queues.stats("bulk").available == ROWS


async def test_routing_goes_on_however_busy_callers_are(memory_root: str) -> None:
    async with watched(memory_root, step_s=0.001) as one:
        note = one.clock.on_sleep

        def call() -> None:
            one.turns.called()
            if note is not None:
                note()

        one.clock.on_sleep = call
        await append(memory_root, "job", rows())
        await one.all_is_quiet()

        assert one.system._queues.stats("bulk").available == ROWS
        # Every turn brings it on by so many rows, and waits for no longer than the last one took.
        assert len(one.clock.sleeps) <= ROWS / routing._PLACES_AT_LEAST + 10
        assert max(one.clock.sleeps) <= 0.02


async def test_commits_stay_small_while_callers_may_join_them(memory_root: str) -> None:
    async with watched(memory_root) as one:  # a clock that stands still: no turn is ever over
        one.clock.on_sleep = one.turns.called
        await append(memory_root, "job", rows(3_500), rows(3_500))
        await one.all_is_quiet()

        assert one.system._queues.stats("bulk").available == 7_000
        assert max(one.commits) <= _ROWS_BESIDE_CALLERS + 1_000 + 10  # and what a turn brought


async def test_a_backlog_of_the_log_is_routed_in_turns_after_a_restart(
    memory_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(memory_root) as one:
        await one.system._tailer.close()
        await one.system.publish_many(rows())
    clock = TurnClock(step_s=0.001)
    monkeypatch.setattr(queue_store, "Turns", clock.turns)
    async with await Engine.open(memory_root) as system:
        await system.all_is_routed()

        assert len(clock.sleeps) >= ROWS // 300
        ids = await Watched(system, clock).claimed_ids()
        assert len(ids) == len(set(ids)) == ROWS


async def test_a_filter_that_changes_in_the_middle_counts_from_the_next_turn_on(
    memory_root: str,
) -> None:
    """It may ask for headers that were left out of what is being routed."""
    async with watched(memory_root, step_s=0.001) as one:
        gate, turns = asyncio.Event(), 0

        async def sleep(_: float) -> None:
            nonlocal turns
            turns += 1
            if turns == 3:
                await gate.wait()

        one.turns._sleep = sleep
        await append(memory_root, "job", rows(900))
        finding = asyncio.create_task(one.all_is_quiet())
        while turns < 3:
            await asyncio.sleep(0)
        routed = one.system._queues.stats("bulk").available
        assert 0 < routed < 800
        await one.system._queues.update("bulk", filter=Filter.parse("n >= 890"), changes={})
        gate.set()
        await finding

        assert one.system._queues.stats("bulk").available == routed + 10


# --- replaying ------------------------------------------------------------------------------------


async def test_a_replay_goes_on_in_turns_and_brings_everything_once(memory_root: str) -> None:
    async with watched(memory_root, step_s=0.002) as one:
        await one.system.publish_many([NewMessage(b"x", headers={"n": str(n)}) for n in range(900)])
        await one.system.delete_queue("bulk")
        await one.system.create_queue("bulk", filter="n >= 100", start="beginning")
        one.clock.on_sleep = one._note
        await one.system._replay.finished()

        assert max(one.routed) <= 3 * log_replay._ROUTED_AT_ONCE
        ids = await one.claimed_ids()
        assert len(ids) == len(set(ids)) == 800


# --- what time brings -----------------------------------------------------------------------------


async def test_leases_of_a_dead_consumer_are_taken_back_in_pieces(memory_root: str) -> None:
    clock = ManualClock()
    async with await Engine.open(memory_root, clock=clock) as system:
        await system.create_queue("q", options=QueueOptions(lease_ms=1_000, backoff_ms=0))
        await system.publish_many(rows(900))
        assert len(await system.claim("q", 900)) == 900
        state = system._queues.queue("q").state
        expire, taken = state.expire_leases, []

        def noted(*args: Any, **options: Any) -> list[Held]:
            taken.append(expire(*args, **options))
            return taken[-1]

        state.expire_leases = noted  # type: ignore[method-assign]
        clock.advance_ms(1_001)

        assert len(await system.claim("q", 1_000)) == 900
        assert [len(some) for some in taken] == [250, 250, 250, 150]
