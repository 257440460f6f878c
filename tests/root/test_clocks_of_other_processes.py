"""Messages of processes whose clocks are not the owner's (RFC 0012)."""

from __future__ import annotations

import asyncio

import pytest

from opendata_queue import ClaimedMessage, Engine, Ingest, NewMessage
from opendata_queue.log.bulk_writer import BulkShard
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.root.timekeeping import FOLLOWED_EVERY_MS, continued_clock, last_root_time
from opendata_queue.store import Objects, StoreSettings
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.root.shifted import ShiftedClock

MINUTE_MS = 60_000
MOST_LOST_MS = 20_000
SKEW = pytest.mark.parametrize("ahead_ms", [5 * MINUTE_MS, -5 * MINUTE_MS], ids=["ahead", "behind"])
MESSAGES = [
    NewMessage(b"plain"),
    NewMessage(b"short", retention_seconds=60),
    NewMessage(b"delayed", delay_ms=MINUTE_MS),
    NewMessage(b"delayed and short", delay_ms=MINUTE_MS, retention_seconds=90),
]


async def check(owner: Engine) -> list[ClaimedMessage]:
    """What takes a minute has not ended, and ends in a minute; what is there already."""
    await owner.all_is_routed()
    claimed = await owner.claim("q", 10)
    assert [one.payload for one in claimed] == [b"plain", b"short"]
    stats = await owner.stats("q")
    assert (stats.available, stats.delayed, stats.expired) == (0, 2, 0)
    clock = owner.stores.queues.clock
    state = owner.stores.queues.queue("q").state
    left_ms = state.schedule.due_from - clock.now_ms()
    assert MINUTE_MS - MOST_LOST_MS <= left_ms <= MINUTE_MS
    return claimed


async def check_with_times(owner: Engine) -> None:
    """The same, and the messages say the time of the root themselves: none had to be corrected."""
    claimed = await check(owner)
    now_ms = owner.stores.queues.clock.now_ms()
    for one in claimed:
        assert 0 <= now_ms - one.received_at_ms <= MOST_LOST_MS


@SKEW
async def test_an_ingest_process_goes_by_the_time_of_the_root(
    new_memory_root: NewRoot, ahead_ms: int
) -> None:
    root = new_memory_root()
    async with await Engine.open(root, clock=ShiftedClock(0)) as owner:
        await owner.create_queue("q")
        async with await Ingest.open(root, clock=ShiftedClock(ahead_ms)) as ingest:
            await ingest.publish_many(MESSAGES)
            await check_with_times(owner)


async def test_a_message_from_the_future_is_received_when_it_is_routed(
    new_memory_root: NewRoot,
) -> None:
    root = new_memory_root()
    # There is no owner yet whose clock it could go by.
    async with (
        await Ingest.open(root, clock=ShiftedClock(5 * MINUTE_MS)) as ingest,
        await Engine.open(root, clock=ShiftedClock(0)) as owner,
    ):
        await owner.create_queue("q")
        await ingest.publish_many(MESSAGES)
        await check(owner)
        await owner.create_queue("again", start="beginning")
        await owner._replay.finished()
        assert (await owner.stats("again")).available == 2


async def test_an_ingest_process_that_was_first_takes_the_time_of_the_root_later(
    new_memory_root: NewRoot,
) -> None:
    root, clock = new_memory_root(), ManualClock()
    behind = ManualClock(clock.now_ms())
    behind.set_wall_ms(clock.now_ms() - 5 * MINUTE_MS)
    async with (
        await Ingest.open(root, clock=behind) as ingest,
        await Engine.open(root, clock=clock) as owner,
    ):
        await owner.create_queue("q")
        for one in (clock, behind):
            one.advance_ms(FOLLOWED_EVERY_MS)
        async with asyncio.timeout(60):
            while ingest.shard.clock.now_ms() < clock.now_ms():
                await asyncio.sleep(0)
        await ingest.publish_many(MESSAGES)
        await check(owner)


@SKEW
async def test_a_bulk_job_goes_by_the_time_of_the_root(
    new_memory_root: NewRoot, ahead_ms: int
) -> None:
    root, executor = new_memory_root(), ShiftedClock(ahead_ms)
    async with await Engine.open(root, clock=ShiftedClock(0)) as owner:
        await owner.create_queue("q")
        objects = Objects.open(root, StoreSettings())
        files = ShardFiles(objects)
        known = await last_root_time(objects)
        reserved = await files.reserve_bulk(job="job", now_ms=executor.now_ms())
        path = files.path_of(reserved.shard)
        clock = await continued_clock(objects, executor, known, path)
        shard = await BulkShard.create(objects, reserved.shard, clock)
        in_a_minute = NewMessage(b"delayed", visible_at_ms=executor.now_ms() + MINUTE_MS)
        await shard.add([*MESSAGES[:2], in_a_minute, MESSAGES[3]])
        result = await shard.finish()
        committed = CommittedShard(**{name: getattr(result, name) for name in result.__slots__})
        await CommitFiles(objects).create(Commit.new("job", [committed], now_ms=executor.now_ms()))
        await owner._following.bulk.look()
        await owner._following.bulk.finished()
        await check_with_times(owner)
