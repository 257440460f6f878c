"""Passes on a root that nobody serves: what they rewrite, and what they wait for."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import odq_compactor.alone
import odq_compactor.space
from odq_compactor import CompactorOptions, compact_root, plan_root
from odq_compactor.plan import NEW_POSITION, Freeable
from opendata_queue import CorruptStoreError, Engine, NewMessage, StoreSettings
from opendata_queue.routing.replay import LogReplay
from opendata_queue.store import Objects, Upkeep
from opendata_queue.testing import ManualClock
from tests.support.bulk_jobs import commit, write_shard

ERASING = CompactorOptions(work_share=1.0, erase=True)
SETTINGS = StoreSettings(fsync=False)
MINUTE_MS = 60_000


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(odq_compactor.alone, "_KEPT_MS", 10)
    return f"file://{tmp_path}/root"


async def fill(url: str, clock: ManualClock, *, short: int, long: int, queue: bool = False) -> None:
    """So many messages of a thousand bytes that stay for a minute, and for ever."""
    async with await Engine.open(url, settings=SETTINGS, clock=clock) as engine:
        if queue:
            await engine.create_queue("q")
        await engine.publish_many([NewMessage(bytes(1_000), retention_seconds=60)] * short)
        await engine.publish_many([NewMessage(bytes(1_000))] * long)


async def test_a_database_is_rewritten_only_if_enough_of_it_can_be_freed(url: str) -> None:
    clock = ManualClock()
    await fill(url, clock, short=1_500, long=500)
    clock.advance_ms(MINUTE_MS + 1)

    first = await compact_root(url, options=ERASING, settings=SETTINGS, clock=clock)
    second = await compact_root(url, options=ERASING, settings=SETTINGS, clock=clock)
    await fill(url, clock, short=100, long=0)
    clock.advance_ms(MINUTE_MS + 1)
    third = await compact_root(url, options=ERASING, settings=SETTINGS, clock=clock)

    assert first.total("expired messages") == 1_500
    assert [one.rpartition("/root/")[2] for one in first.rewritten] == ["messages/00000"]
    assert (first.bytes_freed or 0) > 1_000_000
    assert second.rewritten == []
    assert third.total("expired messages") == 100
    assert third.rewritten == []


async def test_what_has_outlived_its_time_to_live_is_freed_in_the_same_pass(url: str) -> None:
    clock = ManualClock()
    await fill(url, clock, short=1_500, long=0)
    clock.advance_ms(MINUTE_MS + SETTINGS.ttl_grace_ms + 1)

    report = await compact_root(url, settings=SETTINGS, clock=clock)

    assert [one.rpartition("/root/")[2] for one in report.rewritten] == ["messages/00000"]


async def test_what_a_pass_asks_of_the_store_does_not_grow_with_what_stays(url: str) -> None:
    requests = []
    for times in (1, 8):
        clock = ManualClock()
        root = f"{url}/{times}"
        await fill(root, clock, short=100, long=times * 1_000)
        clock.advance_ms(MINUTE_MS + 1)
        report = await compact_root(root, options=ERASING, settings=SETTINGS, clock=clock)
        assert report.total("expired messages") == 100
        requests.append(report.requests)

    assert 0 < requests[1] < 1.5 * requests[0]


async def test_passes_that_find_nothing_leave_no_more_and_more_to_read_to_the_next_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(odq_compactor.space, "_REPLAYED_AT_MOST", 2)
    clock = ManualClock()
    await fill(url, clock, short=0, long=1)

    left = []
    for _ in range(6):
        await compact_root(url, settings=SETTINGS, clock=clock)
        objects = Objects.open(url, SETTINGS)
        left += [
            await Upkeep(objects, f"{one}/00000").wal_files() for one in ("queues", "messages")
        ]

    assert max(left) <= 3


async def test_a_bulk_job_that_nobody_has_seen_goes_in_the_first_pass(url: str) -> None:
    clock = ManualClock()
    await fill(url, clock, short=0, long=1, queue=True)
    for number in range(3):
        past = [NewMessage(b"x", retention_seconds=60)] * 5
        shards = [await write_shard(url, messages, clock=clock) for messages in (past, [], past)]
        stays = await write_shard(url, [*past, NewMessage(b"y")], clock=clock)
        await commit(url, f"job-{number}", [*shards, stays], now_ms=clock.now_ms())
    clock.advance_ms(MINUTE_MS + 1)
    planned = await plan_root(url, settings=SETTINGS, clock=clock)

    report = await compact_root(url, settings=SETTINGS, clock=clock)

    assert planned.removed == report.removed
    assert planned.row_bytes == report.row_bytes
    assert report.total("bulk shards") == 9
    assert report.total("expired messages") == 30
    again = await plan_root(url, settings=SETTINGS, clock=clock)
    assert again.is_empty
    assert (await compact_root(url, settings=SETTINGS, clock=clock)).is_empty


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_pass_comes_after_the_replay_for_queues_that_begin_in_the_past(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    clock = ManualClock()
    past = [NewMessage(b"x", retention_seconds=60)] * 5
    replay_part, finished = LogReplay._replay_part, LogReplay.finished
    somebody_waits = asyncio.Event()

    async def held(*arguments: Any) -> None:
        await somebody_waits.wait()
        if damaged:
            raise CorruptStoreError("the log is damaged", key=b"")
        await replay_part(*arguments)

    async def waited_for(self: LogReplay) -> None:
        somebody_waits.set()
        await finished(self)

    monkeypatch.setattr(LogReplay, "_replay_part", held)
    async with await Engine.open(url, settings=SETTINGS, clock=clock) as engine:
        shards = [await write_shard(url, past, clock=clock)]
        await commit(url, "job", shards, now_ms=clock.now_ms())
        await engine.publish_many([NewMessage(b"y", retention_seconds=60)] * 7)
        await engine.create_queue("q", start="beginning")
    clock.advance_ms(MINUTE_MS + 1)
    monkeypatch.setattr(LogReplay, "finished", waited_for)

    report = await compact_root(url, settings=SETTINGS, clock=clock)

    # A shard that can't be replayed may be wanted once more, by whoever mends it.
    assert report.total("bulk shards") == (0 if damaged else 1)
    assert report.total("expired messages") == (7 if damaged else 12)


async def test_a_bulk_shard_that_is_lost_keeps_no_pass_from_the_others(
    url: str, tmp_path: Path
) -> None:
    clock = ManualClock()
    await fill(url, clock, short=0, long=1, queue=True)
    past = [NewMessage(b"x", retention_seconds=60)] * 5
    lost, other = [await write_shard(url, past, clock=clock) for _ in range(2)]
    await commit(url, "job", [lost, other], now_ms=clock.now_ms())
    shutil.rmtree(tmp_path / f"root/messages/{lost.shard:05}")
    clock.advance_ms(MINUTE_MS + 1)

    for found in (1, 0):
        report = await compact_root(url, settings=SETTINGS, clock=clock)
        assert report.total("bulk shards") == found


async def test_a_dry_run_goes_by_the_time_of_a_pass_where_the_clock_is_behind(url: str) -> None:
    ahead = ManualClock()
    await fill(url, ahead, short=5, long=1, queue=True)
    ahead.advance_ms(MINUTE_MS + 1)
    async with await Engine.open(url, settings=SETTINGS, clock=ahead) as engine:
        await engine.publish(b"seen by an owner whose clock is ahead of ours")
        await engine.all_is_routed()
    behind = ManualClock()

    planned = await plan_root(url, settings=SETTINGS, clock=behind)
    report = await compact_root(url, settings=SETTINGS, clock=behind)

    assert report.total("expired messages") == 5
    assert planned.removed == report.removed


def test_what_can_be_freed_later_is_not_put_off_by_what_follows_it() -> None:
    position, now = NEW_POSITION, 0
    freed = []
    for _ in range(24):
        now += 10 * MINUTE_MS
        freeable = Freeable(position)  # each pass is another process
        freeable.add(100, aged_at=now + 60 * MINUTE_MS)
        freed.append(freeable.at(now))
        position = freeable.into(position)

    assert freed[5] == 0, "nothing is an hour old"
    assert 0 < freed[-1] <= 2_400
    assert freed[-1] >= 2_400 // 2
