"""A machine's clock is set, under a running process or between two (RFC 0012)."""

from __future__ import annotations

import asyncio

import pytest

from opendata_queue import Engine, NewMessage, PublishOptions, QueueOptions
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.root.shifted import set_apart

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
QUEUE = QueueOptions(lease_ms=MINUTE_MS, backoff_ms=MINUTE_MS, backoff_jitter=0)
PUBLISHING = PublishOptions(idempotency_window_seconds=60)
KEYED = NewMessage(payload=b"short", retention_seconds=60, idempotency_key="once")

SET_BY = pytest.mark.parametrize("set_by_ms", [-HOUR_MS, HOUR_MS], ids=["back", "forward"])
# A clock that is ahead or behind runs slower or faster: by what a minute may be off.
SLOWER_MS = MINUTE_MS // 50 + 2
FASTER_MS = MINUTE_MS // 1_000 + 2


async def fill(system: Engine) -> None:
    """Everything takes a minute."""
    await system.create_queue("q", options=QUEUE)
    await system.publish(b"claimed")
    await system.claim("q")
    await system.publish(b"failed")
    (failed,) = await system.claim("q")
    await system.nack("q", failed)
    await system.publish(b"delayed", delay_ms=MINUTE_MS)
    await system.publish_many([KEYED])


async def check(system: Engine, clock: ManualClock) -> None:
    """After less than a minute nothing has ended, and a little later everything has."""
    stats = await system.stats("q")
    assert (stats.available, stats.in_flight, stats.delayed, stats.expired) == (1, 1, 2, 0)
    (first,) = await system.publish_many([KEYED])
    assert first == 3
    clock.advance_ms(MINUTE_MS - FASTER_MS)
    stats = await system.stats("q")
    assert (stats.available, stats.in_flight, stats.delayed, stats.expired) == (1, 1, 2, 0)
    assert await system.publish_many([KEYED]) == [first]
    clock.advance_ms(FASTER_MS + SLOWER_MS)
    await system.stores.queues.sweeper.caught_up()
    # The claimed one rests for another minute, since its lease ran out.
    found = await system.claim("q", 10)
    assert [one.payload for one in found] == [b"failed", b"delayed"]
    assert await system.publish_many([KEYED]) != [first]
    clock.advance_ms(MINUTE_MS + SLOWER_MS)
    assert b"claimed" in [one.payload for one in await system.claim("q", 10)]


@SET_BY
async def test_a_clock_that_is_set_under_a_process_changes_no_duration(set_by_ms: int) -> None:
    clock = ManualClock()
    async with await Engine.open("memory:///", clock=clock, options=PUBLISHING) as system:
        await fill(system)
        clock.set_wall_ms(clock.now_ms() + set_by_ms)
        await check(system, clock)


@SET_BY
async def test_a_clock_that_is_set_between_two_owners_changes_no_duration(
    new_memory_root: NewRoot, set_by_ms: int
) -> None:
    root, clock = new_memory_root(), ManualClock()
    async with await Engine.open(root, clock=clock, options=PUBLISHING) as system:
        await fill(system)

    other = set_apart(clock, set_by_ms)
    async with await Engine.open(root, clock=other, options=PUBLISHING) as system:
        await check(system, other)


async def test_what_passes_between_two_owners_counts(new_memory_root: NewRoot) -> None:
    root, clock = new_memory_root(), ManualClock()
    async with await Engine.open(root, clock=clock, options=PUBLISHING) as system:
        await fill(system)

    clock.advance_ms(MINUTE_MS + 1)
    clock.set_wall_ms(clock.now_ms() - HOUR_MS)
    async with await Engine.open(root, clock=clock, options=PUBLISHING) as system:
        found = await system.claim("q", 10)
        assert [one.payload for one in found] == [b"failed", b"delayed"]


@SET_BY
async def test_who_waits_for_a_message_waits_as_long_as_it_wanted(set_by_ms: int) -> None:
    clock = ManualClock()
    async with await Engine.open("memory:///", clock=clock) as system:
        await system.create_queue("q")
        began_ms = clock.now_ms()
        waiting = asyncio.create_task(system.claim("q", wait_ms=MINUTE_MS))
        while MINUTE_MS not in clock.waits_ms:
            await asyncio.sleep(0)
        clock.set_wall_ms(clock.now_ms() + set_by_ms)
        while not waiting.done():
            clock.advance_ms(SLOWER_MS)
            await asyncio.sleep(0)
        waited_ms = clock.now_ms() - began_ms - set_by_ms
        assert MINUTE_MS - FASTER_MS <= waited_ms < 2 * MINUTE_MS
        assert await waiting == []


async def test_an_owner_whose_time_is_an_hour_behind_takes_that_of_its_machine(
    new_memory_root: NewRoot, caplog: pytest.LogCaptureFixture
) -> None:
    root, clock = new_memory_root(), ManualClock()
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("q")
        await system.publish(b"x", delay_ms=HOUR_MS)

    other = set_apart(clock, 2 * HOUR_MS)
    async with await Engine.open(root, clock=other) as system:
        assert "behind this machine's clock" in caplog.text
        assert [one.payload for one in await system.claim("q")] == [b"x"]
