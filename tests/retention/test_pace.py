"""The compactor works a part of the time, whatever takes it how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from odq_compactor import pace
from odq_compactor.pace import Pace


class Day:
    """Time that passes when somebody works or rests."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rested = 0.0

    def time(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds
        self.rested += seconds
        await asyncio.sleep(0)


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Day:
    day = Day()
    fake = SimpleNamespace(get_running_loop=lambda: day, sleep=day.sleep)
    monkeypatch.setattr(pace, "asyncio", fake)
    return day


@pytest.mark.parametrize("seconds", [0.001, 1, 60, 3_600])
async def test_a_piece_is_followed_by_a_rest_in_proportion_however_long_it_took(
    day: Day, seconds: float
) -> None:
    async with Pace(0.2).work():
        day.work(seconds)

    assert day.rested == pytest.approx(4 * seconds)


async def test_who_may_work_all_of_the_time_does_not_rest(day: Day) -> None:
    async with Pace(1.0).work():
        day.work(10)

    assert day.rested == 0


async def test_a_piece_within_a_piece_is_rested_for_once(day: Day) -> None:
    slow = Pace(0.5)
    async with slow.work():
        day.work(1)
        async with slow.work():
            day.work(2)
        async with slow.work():
            day.work(3)
        day.work(4)

    assert day.rested == pytest.approx(1 + 2 + 3 + 4)


async def test_to_get_something_is_work_too(day: Day) -> None:
    async def source() -> AsyncIterator[int]:
        for number in range(3):
            day.work(2)
            yield number

    slow = Pace(0.25)
    found = []
    async for one in slow.each(source()):
        found.append(one)
        async with slow.work():
            day.work(1)

    assert found == [0, 1, 2]
    assert day.rested == pytest.approx(3 * 3 * (2 + 1))
