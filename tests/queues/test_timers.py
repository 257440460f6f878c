"""What happens to queues while nobody claims from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from opendata_queue import Engine, NewMessage, QueueOptions, StoreUnavailableError
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.rows.schedule import ScheduleRows
from opendata_queue.queues.store import store
from opendata_queue.queues.store.due import DueWork
from opendata_queue.queues.timers import Sweeper
from opendata_queue.runtime.turns import TURN_S, Turn, Turns
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot

LEASE_MS = 1_000
HOUR_MS = 3_600_000


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, new_memory_root: NewRoot) -> str:
    return new_memory_root() if request.param == "memory" else f"file://{tmp_path}/root"


@pytest.fixture
async def system(url: str, clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open(url, clock=clock) as system:
        yield system


async def publish(system: Engine, count: int, **fields: int) -> list[int]:
    ids = await system.publish_many([NewMessage(b"x", **fields)] * count)  # type: ignore[arg-type]
    await system._tailer.caught_up()
    return ids


async def pass_time(system: Engine, clock: ManualClock, milliseconds: int) -> None:
    clock.advance_ms(milliseconds)
    await system._queues.sweeper.caught_up()


async def test_a_message_without_attempts_left_fails_though_nobody_claims(
    system: Engine, clock: ManualClock
) -> None:
    await system.create_queue("q", options=QueueOptions(max_attempts=1, lease_ms=LEASE_MS))
    (message_id,) = await publish(system, 1)
    await system.claim("q", consumer="gone")

    await pass_time(system, clock, LEASE_MS)
    assert (await system.stats("q")).in_flight == 1
    await pass_time(system, clock, 1)

    assert (await system.stats("q")).failed == 1
    (failed,) = await system.failed("q")
    assert (failed.message_id, failed.error, failed.consumer) == (
        message_id, "the lease ran out", "gone",
    )  # fmt: skip


class TickingClock:
    """Each time that it is asked, so much time has passed."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._now_s = 100.0

    def read(self) -> float:
        self._now_s += self.step_s
        return self._now_s


@pytest.mark.parametrize(
    ("pieces", "at_most"), [(1, 50), (4, 200), (1_000, 500)], ids=["slow", "busy", "fast"]
)
async def test_a_step_that_admits_due_messages_ends_by_time(
    new_memory_root: NewRoot,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    pieces: int,
    at_most: int,
) -> None:
    """As many pieces as fit into a turn; the next step goes on behind them."""
    ticking = TickingClock()
    monkeypatch.setattr(store, "Turns", lambda: Turns(ticking.read))
    steps: list[int] = []
    admit_due = DueWork.admit_due

    async def noted(work: DueWork, queue: StoredQueue) -> int:
        steps.append(await admit_due(work, queue))
        return steps[-1]

    monkeypatch.setattr(DueWork, "admit_due", noted)
    async with await Engine.open(new_memory_root(), clock=clock) as system:
        await system.create_queue("q")
        ids = await publish(system, 1_200, delay_ms=1_000)
        ticking.step_s = TURN_S / pieces
        await pass_time(system, clock, 1_000)

        assert (sum(steps), max(steps)) == (1_200, at_most)
        stats = await system.stats("q")
        assert (stats.available, stats.delayed) == (1_200, 0)
        assert [one.message_id for one in await system.claim("q", 1_000)] == ids[:1_000]


async def test_a_claim_admits_as_many_due_messages_however_slow_the_machine_is(
    new_memory_root: NewRoot, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticking = TickingClock()
    monkeypatch.setattr(store, "Turns", lambda: Turns(ticking.read))
    monkeypatch.setattr(Sweeper, "start", lambda _sweeper: None)
    async with await Engine.open(new_memory_root(), clock=clock) as system:
        await system.create_queue("q")
        await publish(system, 1_200, delay_ms=1_000)
        ticking.step_s = TURN_S
        clock.advance_ms(1_000)

        assert len(await system.claim("q", 1_000)) == 1_000


async def test_a_lease_that_runs_out_leads_through_its_back_off_to_available(
    system: Engine, clock: ManualClock
) -> None:
    options = QueueOptions(lease_ms=LEASE_MS, backoff_ms=500, backoff_jitter=0)
    await system.create_queue("q", options=options)
    await publish(system, 3)
    await system.claim("q", 2)

    await pass_time(system, clock, LEASE_MS + 1)
    stats = await system.stats("q")
    assert (stats.available, stats.delayed, stats.in_flight) == (1, 2, 0)
    await pass_time(system, clock, 500)

    stats = await system.stats("q")
    assert (stats.available, stats.delayed, stats.in_flight) == (3, 0, 0)


async def test_a_lease_that_was_extended_or_ended_is_left_alone(
    system: Engine, clock: ManualClock
) -> None:
    await system.create_queue("q", options=QueueOptions(lease_ms=LEASE_MS))
    await publish(system, 2)
    kept, finished = await system.claim("q", 2)
    await system.ack("q", finished.receipt)
    await system.extend("q", kept.receipt, lease_ms=3 * LEASE_MS)

    await pass_time(system, clock, 3 * LEASE_MS)

    stats = await system.stats("q")
    assert (stats.in_flight, stats.done, stats.delayed) == (1, 1, 0)
    assert await system.ack("q", kept.receipt) == ["ok"]


async def test_the_grace_period_holds_for_the_sweeper_too(url: str, clock: ManualClock) -> None:
    async with await Engine.open(url, clock=clock, lease_grace_ms=200) as system:
        await system.create_queue("q", options=QueueOptions(lease_ms=LEASE_MS))
        await publish(system, 1)
        await system.claim("q")
        await pass_time(system, clock, LEASE_MS + 200)
        assert (await system.stats("q")).in_flight == 1
        await pass_time(system, clock, 1)
        assert (await system.stats("q")).in_flight == 0


async def test_thousands_that_are_due_at_once_are_swept_in_many_turns(
    system: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await system.create_queue("q", options=QueueOptions(window=2, max_attempts=1))
    await publish(system, 1_800)
    await publish(system, 1_800, delay_ms=HOUR_MS)
    for _ in range(2):
        await system.claim("q", 900, lease_ms=HOUR_MS)
    turns: list[str] = []
    sweep = system._queues.sweeper._sweep

    async def watched(queue: StoredQueue) -> None:
        turns.append(queue.name)
        await sweep(queue)

    monkeypatch.setattr(system._queues.sweeper, "_sweep", watched)

    await pass_time(system, clock, HOUR_MS + 1)

    stats = await system.stats("q")
    assert (stats.available, stats.delayed, stats.in_flight, stats.failed) == (1_800, 0, 0, 1_800)
    assert len(turns) >= 4


async def test_a_queue_with_much_to_do_does_not_keep_the_others_waiting(
    new_memory_root: NewRoot, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(new_memory_root(), clock=clock) as system:
        await system.create_queue("many", filter="kind = 'many'")
        await system.create_queue("one", filter="kind = 'one'")
        many = NewMessage(b"x", headers={"kind": "many"}, delay_ms=1_000)
        await system.publish_many([many] * 1_200)
        await system.publish(b"x", headers={"kind": "one"}, delay_ms=1_001)
        await system._tailer.caught_up()
        order: list[str] = []
        sweep = system._queues.sweeper._sweep

        async def watched(queue: StoredQueue) -> None:
            order.append(queue.name)
            await sweep(queue)

        monkeypatch.setattr(system._queues.sweeper, "_sweep", watched)
        await pass_time(system, clock, 2_000)

    assert order[:2] == ["many", "one"]
    assert order[2:] == ["many"] * len(order[2:])


async def test_queues_without_events_are_not_looked_at(
    new_memory_root: NewRoot, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(new_memory_root(), clock=clock) as system:
        for number in range(50):
            await system.create_queue(f"idle/{number}", filter=f"queue = '{number}'")
        await system.create_queue("q", options=QueueOptions(lease_ms=LEASE_MS))
        await publish(system, 1)
        await system.claim("q")
        swept: list[str] = []
        sweep = system._queues.sweeper._sweep

        async def watched(queue: StoredQueue) -> None:
            swept.append(queue.name)
            await sweep(queue)

        monkeypatch.setattr(system._queues.sweeper, "_sweep", watched)
        await pass_time(system, clock, HOUR_MS)

    assert set(swept) == {"q"}


async def test_what_came_due_while_nobody_owned_the_root_is_swept_after_the_open(
    url: str, clock: ManualClock
) -> None:
    async with await Engine.open(url, clock=clock) as system:
        await system.create_queue("q", options=QueueOptions(max_attempts=1, lease_ms=LEASE_MS))
        await publish(system, 1)
        await publish(system, 2, delay_ms=500)
        await system.claim("q")
    clock.advance_ms(LEASE_MS + 1)
    async with await Engine.open(url, clock=clock) as system:
        await system._queues.sweeper.caught_up()
        stats = await system.stats("q")

    assert (stats.available, stats.delayed, stats.in_flight, stats.failed) == (2, 0, 0, 1)


async def test_whoever_waits_is_woken_when_time_brings_something(
    system: Engine, clock: ManualClock
) -> None:
    await system.create_queue("q")
    await publish(system, 1, delay_ms=2_000)
    waiting = asyncio.create_task(system.claim("q", wait_ms=HOUR_MS))
    while not system._queues.queue("q").waiters:
        await asyncio.sleep(0)

    clock.advance_ms(2_000)

    assert len(await waiting) == 1


async def test_a_delayed_message_comes_in_time_though_the_machine_is_behind(url: str) -> None:
    """After a takeover from one that was ahead: the clock of the queues goes on."""
    async with await Engine.open(url, clock=ManualClock(2_000_000)) as system:
        await system.create_queue("q")
        await publish(system, 1, delay_ms=1_000)
    behind = ManualClock(1_000_000)
    async with await Engine.open(url, clock=behind) as system:
        await pass_time(system, behind, 999)
        assert await system.claim("q") == []
        waiting = asyncio.create_task(system.claim("q", wait_ms=5_000))
        while not system._queues.queue("q").waiters:
            await asyncio.sleep(0)
        # While it is ahead of its machine's, the clock runs two per cent slower.
        for _ in range(30):
            await pass_time(system, behind, 1)
        assert len(await waiting) == 1


async def test_many_short_events_leave_a_small_heap(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    async with await Engine.open(new_memory_root(), clock=clock) as system:
        await system.create_queue("q", options=QueueOptions(backoff_ms=1, max_attempts=0))
        await publish(system, 2)
        await system.claim("q", lease_ms=HOUR_MS)
        for _ in range(300):
            await system.claim("q", lease_ms=1)
            await pass_time(system, clock, 2)
            await pass_time(system, clock, HOUR_MS // 1_000)
        assert len(system._queues.sweeper._heap) < 100


async def test_a_queue_that_is_gone_is_forgotten(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    async with await Engine.open(new_memory_root(), clock=clock) as system:
        await system.create_queue("q", options=QueueOptions(lease_ms=LEASE_MS))
        await publish(system, 1)
        await system.claim("q")
        system._queues.registry.remove(system._queues.queue("q"))

        await pass_time(system, clock, LEASE_MS + 1)

        assert not system._queues.sweeper._heap
        assert not system._queues.sweeper._due_at


async def test_a_store_that_does_not_answer_is_asked_again_later(
    new_memory_root: NewRoot, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(new_memory_root(), clock=clock) as system:
        await system.create_queue("q")
        await publish(system, 1, delay_ms=1_000)
        with monkeypatch.context() as patched:

            async def unavailable(*_: object, **__: object) -> None:
                raise StoreUnavailableError("no answer")

            patched.setattr(ScheduleRows, "due", unavailable)
            await pass_time(system, clock, 1_000)
            assert (await system.stats("q")).delayed == 1

        await pass_time(system, clock, 5_000)

        assert (await system.stats("q")).available == 1


async def test_a_fenced_owner_stops_sweeping_quietly(url: str, clock: ManualClock) -> None:
    first = await Engine.open(url, clock=clock)
    await first.create_queue("q", options=QueueOptions(lease_ms=LEASE_MS))
    await publish(first, 1)
    await first.claim("q")
    second = await Engine.open(url, clock=clock, takeover=True)

    clock.advance_ms(LEASE_MS + 1)
    await first._queues.sweeper.caught_up()
    await second._queues.sweeper.caught_up()

    assert (await second.stats("q")).in_flight == 0
    await first.close()
    await second.close()


def steps_of_any_length(system: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step of what is due be bounded by its number alone: the machine may be a slow one."""
    endless = Turn(lambda: 0.0, 1.0, leaves_room=False)
    monkeypatch.setattr(system._queues.turns, "of_a_caller", lambda: endless)


async def test_a_claim_does_not_wait_for_all_that_is_due(
    system: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_of_any_length(system, monkeypatch)
    await system.create_queue("q", filter="kind = 'urgent' PRIORITY 1; TRUE")
    urgent = await system.publish(b"x", headers={"kind": "urgent"})
    delayed = await publish(system, 2_600, delay_ms=HOUR_MS)
    await system._queues.sweeper.close()  # nobody else moves them
    clock.advance_ms(HOUR_MS)

    (claimed,) = await system.claim("q")

    assert claimed.message_id == urgent
    stats = await system.stats("q")
    assert (stats.available, stats.delayed) == (1_000, 1_600)
    # All are due in one millisecond, and come in the order of their ids all the same.
    assert [m.message_id for m in await system.claim("q", 1_000)] == delayed[:1_000]


async def test_what_is_due_and_expired_is_passed_over_to_find_something_to_claim(
    system: Engine, clock: ManualClock
) -> None:
    await system.create_queue("q")
    await publish(system, 1_600, delay_ms=HOUR_MS, retention_seconds=60)
    last = await publish(system, 1, delay_ms=HOUR_MS)
    await system._queues.sweeper.close()
    clock.advance_ms(HOUR_MS)

    assert [m.message_id for m in await system.claim("q")] == last


async def test_each_round_of_what_is_due_begins_where_the_last_one_ended(
    system: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a millisecond, and while what was taken is not durable yet."""
    steps_of_any_length(system, monkeypatch)
    await system.create_queue("q")
    ids = await publish(system, 1_800, delay_ms=HOUR_MS)
    database = system._queues.database
    limits: list[int | None] = []
    scan = database.scan

    def counted(start: bytes, end: bytes, *, limit: int | None = None) -> Any:
        limits.append(limit)
        return scan(start, end, limit=limit)

    monkeypatch.setattr(database, "scan", counted)
    await pass_time(system, clock, HOUR_MS)

    assert limits == [501] * 4
    assert (await system.stats("q")).available == 1_800
    assert [m.message_id for m in await system.claim("q", 3)] == ids[:3]
