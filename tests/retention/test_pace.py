"""The compactor works a part of the time, whatever takes it how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from odq_compactor import CompactorOptions, RetentionCompactor, RetentionReport, pace, queues
from odq_compactor.entries import FollowedEntries
from odq_compactor.pace import Pace
from odq_compactor.plan import Ids, Run, parts
from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.queues.rows.indexes import Indexes
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.retention.test_bulk_history import filled, routed
from tests.support.bulk_jobs import commit

T = TypeVar("T")


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


class Pieces(Pace):
    """Notes how much of something was done in each piece of work."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.sizes: list[int] = []

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        self.sizes.append(0)
        async with super().work():
            yield

    def counted(self, call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        async def one_more(*args: Any) -> T:
            self.sizes[-1] += 1
            return await call(*args)

        return one_more


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


async def test_many_scans_of_many_backlogs_are_many_pieces(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with await Engine.open(new_memory_root(), clock=clock) as engine:
        for number in range(3):
            await engine.create_queue(f"q{number}", options=QueueOptions(window=2))
        # So far apart that each one is found with a scan of its own.
        between = [NewMessage(b"y")] * (queues.BACKLOG_GAP + 1)
        apart = [NewMessage(b"x", retention_seconds=60), *between]
        ids = await engine.publish_many(apart * 6)
        await engine.all_is_routed()
        clock.advance_ms(60_001)
        monkeypatch.setattr(queues, "SPANS_AT_ONCE", 2)
        pieces, report = Pieces(), RetentionReport(now_ms=clock.now_ms())
        monkeypatch.setattr(Indexes, "backlog_between", pieces.counted(Indexes.backlog_between))
        runs = [Run(1, one, 1, 1) for one in ids[:: len(apart)]]
        await queues.expire_in_backlogs(engine.stores.queues, Ids(runs), report, pieces)

        assert report.total("expired entries") == 3 * 5  # one in each window
        assert len(pieces.sizes) == 3 * 3
        assert max(pieces.sizes) == 2


def test_a_run_of_any_size_is_cut_into_parts() -> None:
    assert parts(Run(9, 100, 7, 50), 3) == [Run(9, 100, 3, 0), Run(9, 103, 3, 0), Run(9, 106, 1, 0)]
    assert parts(Run(9, 100, 2, 50), 3) == [Run(9, 100, 2, 0)]


async def test_one_run_of_a_whole_bulk_shard_leaves_queues_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, clock = f"file://{tmp_path}/root", ManualClock(1_790_000_000_000)
    options = CompactorOptions(work_share=1.0, space=False, batch_messages=10)
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q", options=QueueOptions(window=2))
        shard = await filled(url, clock, *[60] * 95, 0)
        await commit(url, "job", [shard], now_ms=clock.now_ms())
        await routed(engine)
        clock.advance_ms(60_001)
        sizes: list[int] = []
        expire = FollowedEntries._expire

        async def noted(self: FollowedEntries, runs: list[Run], report: RetentionReport) -> None:
            sizes.append(sum(run.messages for run in runs))
            await expire(self, runs, report)

        monkeypatch.setattr(FollowedEntries, "_expire", noted)
        report = await RetentionCompactor(engine, options).run_once()

        assert report.total("expired entries") == 95
        assert sizes == [*[10] * 9, 5]
        assert (await engine.stats("q")).available == 1
