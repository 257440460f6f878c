"""The clock of a root: it goes on by the time that passes, and comes to agree with the wall."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_queue import SystemClock
from opendata_queue.root.clock import RootClock
from opendata_queue.testing import ManualClock

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000

STEPS = st.lists(
    st.tuples(st.integers(0, 10 * HOUR_MS), st.none() | st.integers(-100 * HOUR_MS, 100 * HOUR_MS)),
    max_size=20,
)


@given(steps=STEPS, ahead_ms=st.integers(-HOUR_MS, HOUR_MS))
def test_it_never_stands_still_jumps_or_goes_back(
    steps: list[tuple[int, int | None]], ahead_ms: int
) -> None:
    machine = ManualClock(START_MS)
    clock = RootClock(machine, START_MS + ahead_ms)

    for passed_ms, set_by_ms in steps:
        before_ms = clock.now_ms()
        machine.advance_ms(passed_ms)
        shown_ms = clock.now_ms() - before_ms
        assert passed_ms * 50 // 51 - 1 <= shown_ms <= passed_ms * 1_000 // 999 + 1
        if set_by_ms is not None:
            before_ms = clock.now_ms()
            machine.set_wall_ms(machine.now_ms() + set_by_ms)
            assert clock.now_ms() == before_ms


@given(ahead_ms=st.integers(-HOUR_MS, HOUR_MS), looks=st.integers(1, 50))
def test_it_comes_to_agree_and_stays_so_however_often_it_is_asked(
    ahead_ms: int, looks: int
) -> None:
    machine = ManualClock(START_MS)
    clock = RootClock(machine, START_MS + ahead_ms)

    for _ in range(looks):
        machine.advance_ms(abs(ahead_ms) * (51 if ahead_ms > 0 else 999) // looks + 1)
        clock.now_ms()
    assert abs(clock.ahead_ms) <= 3
    for _ in range(looks):
        machine.advance_ms(HOUR_MS)
        assert abs(clock.ahead_ms) <= 3


def test_with_the_clock_of_a_machine_that_is_right_it_shows_the_same() -> None:
    clock = RootClock(SystemClock())

    assert abs(clock.ahead_ms) <= 1_000  # it is read a moment later
    assert clock.ahead_for_callers_ms() == 0


async def test_a_wait_ends_when_the_time_has_come_and_not_before() -> None:
    machine = ManualClock(START_MS)
    clock = RootClock(machine, START_MS + 10_000)
    waiting = asyncio.create_task(clock.wait_until(START_MS + 10_000 + 64_000))

    async def advanced(milliseconds: int) -> bool:
        for _ in range(5):
            await asyncio.sleep(0)
        machine.advance_ms(milliseconds)
        for _ in range(5):
            await asyncio.sleep(0)
        return waiting.done()

    # It is ahead, and so it takes a little longer.
    assert not await advanced(60_000)
    machine.set_wall_ms(START_MS - HOUR_MS)
    assert not await advanced(4_000)
    assert await advanced(2_000)


def test_it_does_not_follow_a_wall_clock_that_is_right_past_that() -> None:
    machine = ManualClock(START_MS)
    clock = RootClock(machine, START_MS + 1)
    assert clock.ahead_ms == 1

    machine.advance_ms(1_000 * HOUR_MS)

    assert clock.ahead_ms == 1


@pytest.mark.parametrize("ahead_ms", [5_000, -5_000], ids=["ahead", "behind"])
def test_it_agrees_and_goes_no_further_when_it_is_not_asked_for_long(ahead_ms: int) -> None:
    machine = ManualClock(START_MS)
    clock = RootClock(machine, START_MS + ahead_ms)

    machine.advance_ms(1_000 * HOUR_MS)

    assert abs(clock.ahead_ms) <= 3


def test_it_may_agree_with_another_clock_than_that_of_its_machine() -> None:
    machine = ManualClock(START_MS)
    clock = RootClock(machine, START_MS + 5_000)
    clock.follow(5_000)

    machine.advance_ms(1_000 * HOUR_MS)

    assert clock.ahead_ms == 5_000
