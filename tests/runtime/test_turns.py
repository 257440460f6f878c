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

from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.filters import Filter, like
from opendata_queue.queues.state import Held, QueueState
from opendata_queue.queues.store import ROWS_BESIDE_CALLERS, store
from opendata_queue.routing import replay as log_replay
from opendata_queue.routing import router as routing
from opendata_queue.runtime.turns import (
    CALLED_LATELY_S,
    CALLING_S,
    LONGEST_REST_S,
    REST_TIMES,
    SHORT_TURN_S,
    SHORTEST_REST_S,
    TURN_S,
    Turns,
)
from opendata_queue.store import Rows
from opendata_queue.testing import ManualClock
from tests.support.bulk_jobs import append

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
            assert clock.now_s < began + 1, "the turn never ends"
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
    assert clock.sleeps[-1] == pytest.approx(REST_TIMES * SHORT_TURN_S)

    clock.now_s += CALLING_S
    await length_of(turns, clock)
    assert await length_of(turns, clock) == SHORT_TURN_S  # the next call may come at any moment
    assert clock.sleeps[-1] == 0

    clock.now_s += CALLED_LATELY_S
    assert await length_of(turns, clock) == TURN_S


async def rest_behind(turns: Turns, clock: TurnClock, took_s: float) -> float:
    """How long a turn waits behind one that took so long, right after a call."""
    turns.called()
    async with turns.turn():
        clock.now_s += took_s
        turns.called()
    async with turns.turn():
        pass
    return round(clock.sleeps[-1], 6)


async def test_while_callers_call_background_work_has_an_eighth_of_the_loop() -> None:
    clock = TurnClock()
    turns = clock.turns()

    assert REST_TIMES == 7
    assert await rest_behind(turns, clock, 0.000_5) == 0.003_5
    assert await rest_behind(turns, clock, 0.002) == 0.014
    assert await rest_behind(turns, clock, 0.000_01) == SHORTEST_REST_S


async def test_a_rest_is_bounded_however_long_a_turn_was_held_up() -> None:
    """By a garbage collection, for example: that says nothing about what the next one takes."""
    clock = TurnClock()

    assert await rest_behind(clock.turns(), clock, 0.3) == LONGEST_REST_S


async def test_one_who_calls_some_times_a_second_finds_small_commits_and_rests() -> None:
    clock = TurnClock()
    turns = clock.turns()
    turns.called()
    async with turns.turn():  # sees the call
        pass

    clock.now_s += 0.2
    async with turns.turn() as turn:
        assert turn.leaves_room
        clock.now_s += SHORT_TURN_S
    async with turns.turn():
        pass
    assert clock.sleeps[-1] == pytest.approx(REST_TIMES * SHORT_TURN_S)

    clock.now_s += CALLING_S  # nobody has called since: what there is goes on at full speed
    async with turns.turn() as turn:
        assert not turn.leaves_room
        clock.now_s += SHORT_TURN_S
    async with turns.turn():
        pass
    assert clock.sleeps[-1] == 0


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
        commit = system._queues.database.commit

        async def noted(rows: Rows, *, on_start: Callable[[], None] | None = None) -> None:
            self.commits.append(len(rows))
            await commit(rows, on_start=on_start)

        system._queues.database.commit = noted  # type: ignore[method-assign]

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
        while turns < 3 and not finding.done():
            await asyncio.sleep(0)
        assert turns == 3
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
        # Every turn brings it on by so many rows, and none waits for longer than that.
        assert len(one.clock.sleeps) <= ROWS / routing._PLACES_AT_LEAST + 10
        assert max(one.clock.sleeps) <= LONGEST_REST_S


async def test_commits_stay_small_while_callers_may_join_them(memory_root: str) -> None:
    async with watched(memory_root) as one:  # a clock that stands still: no turn is ever over
        one.clock.on_sleep = one.turns.called
        await append(memory_root, "job", rows(3_500), rows(3_500))
        await one.all_is_quiet()

        assert one.system._queues.stats("bulk").available == 7_000
        assert max(one.commits) <= ROWS_BESIDE_CALLERS + 1_000 + 10  # and what a turn brought


async def test_a_backlog_of_the_log_is_routed_in_turns_after_a_restart(
    memory_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(memory_root) as one:
        await one.system._tailer.close()
        await one.system.publish_many(rows())
    clock = TurnClock(step_s=0.001)
    monkeypatch.setattr(store, "Turns", clock.turns)
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
        while turns < 3 and not finding.done():
            await asyncio.sleep(0)
        assert turns == 3
        routed = one.system._queues.stats("bulk").available
        assert 0 < routed < 800
        await one.system._queues.admin.update("bulk", filter=Filter.parse("n >= 890"), changes={})
        gate.set()
        await finding

        assert one.system._queues.stats("bulk").available == routed + 10


# --- costly filters -------------------------------------------------------------------------------

COSTLY = [f"n LIKE '%{letter}_%_{letter}%{letter * 9}_{letter}%'" for letter in "abc"]


class Evaluations:
    """At which turn of the event loop each costly filter was evaluated; all of them match."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[int] = []
        self.turns = 0
        monkeypatch.setattr(like, "matcher", lambda pattern, escape: self._matches)

    def _matches(self, text: str) -> bool:
        self.at.append(self.turns)
        return True

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        async def count() -> None:
            while True:
                self.turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        try:
            yield
        finally:
            counting.cancel()


@pytest.mark.parametrize("by", ["publish", "job", "job, by its system fields"])
async def test_routing_lets_others_run_after_each_costly_filter(
    memory_root: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """By a clock that ends a turn whenever it is asked, within a message just as after it."""
    evaluations = Evaluations(monkeypatch)
    async with watched(memory_root, step_s=0.01) as one:
        besides = " AND sys.id >= 0" if "system" in by else ""
        for number, costly in enumerate(COSTLY):
            await one.system.create_queue(f"costly-{number}", filter=costly + besides)
        async with evaluations.counted():
            if by == "publish":
                await one.system.publish_many(rows(20))
            else:
                await append(memory_root, "job", rows(20))
                await one.all_is_quiet()
            await one.system.all_is_routed()

        assert len(evaluations.at) == 3 * 20
        assert len(set(evaluations.at)) == 3 * 20
        for queue in ("bulk", *(f"costly-{number}" for number in range(3))):
            assert one.system._queues.stats(queue).available == 20


async def test_routing_asks_the_clock_before_many_cheap_filters_have_taken_long(
    memory_root: str,
) -> None:
    """A filter of a hundred conditions counts a hundred microseconds: ten messages at most."""
    async with watched(memory_root, step_s=0.01) as one:
        many = " OR ".join(f"n > {number}" for number in range(100))
        await one.system.create_queue("many", filter=many)
        await append(memory_root, "job", rows(200))
        await one.all_is_quiet()

        assert max(one.routed) <= 10
        assert len(await one.claimed_ids()) == 200


async def test_a_message_is_in_all_of_its_queues_or_in_none_when_a_turn_ends_within_it(
    memory_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Evaluations(monkeypatch)
    names = [f"costly-{number}" for number in range(3)]
    async with watched(memory_root, step_s=0.01) as one:
        for name, costly in zip(names, COSTLY, strict=True):
            await one.system.create_queue(name, filter=costly)
        gate, turns = asyncio.Event(), 0

        async def sleep(_: float) -> None:
            nonlocal turns
            turns += 1
            if turns == 6:  # within the second message: the first has taken four
                await gate.wait()

        one.turns._sleep = sleep
        await append(memory_root, "job", rows(4))
        finding = asyncio.create_task(one.all_is_quiet())
        while turns < 6 and not finding.done():
            await asyncio.sleep(0)
        assert turns == 6
        store = one.system._queues
        (routed,) = {store.stats(name).available for name in ("bulk", *names)}
        assert routed < 4
        finding.cancel()

    async with await Engine.open(memory_root) as system:
        await system._following.bulk.look()
        await system._following.bulk.finished()
        for name in ("bulk", *names):
            ids = [one.message_id for one in await system.claim(name, 100)]
            assert len(ids) == len(set(ids)) == 4


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


async def test_a_replay_evaluates_equal_headers_once_however_many_turns_it_takes(
    memory_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations = Evaluations(monkeypatch)
    async with watched(memory_root, step_s=0.01) as one:
        await one.system.publish_many([NewMessage(b"x", headers={"n": "a"}) for _ in range(50)])
        await one.system.create_queue("late", filter=COSTLY[0], start="beginning")
        await one.system._replay.finished()

        assert len(evaluations.at) == 1
        assert one.system._queues.stats("late").available == 50


# --- what time brings -----------------------------------------------------------------------------


async def test_leases_of_a_dead_consumer_are_taken_back_in_pieces(
    memory_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with await Engine.open(memory_root, clock=clock) as system:
        await system.create_queue("q", options=QueueOptions(lease_ms=1_000, backoff_ms=0))
        await system.publish_many(rows(900))
        assert len(await system.claim("q", 900)) == 900
        expire, taken = QueueState.expire_leases, []

        def noted(*args: Any, **options: Any) -> list[Held]:
            taken.append(expire(*args, **options))
            return taken[-1]

        monkeypatch.setattr(QueueState, "expire_leases", noted)
        clock.advance_ms(1_001)

        assert len(await system.claim("q", 1_000)) == 900
        assert [len(some) for some in taken] == [250, 250, 250, 150]
