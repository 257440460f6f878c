"""Messages of bulk jobs: found without a restart, routed exactly once, read like any others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.log.bulk_writer import BulkShard
from opendata_queue.log.remote_log import FollowedLog
from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.routing import bulk as bulk_routing
from opendata_queue.routing.bulk import SHARDS_AT_ONCE
from opendata_queue.store import Objects, Rows, StoreSettings
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.support.bulk_jobs import append, commit, write_shard

PATIENCE_MS = 60_000


def messages(*payloads: str, **headers: str) -> list[NewMessage]:
    return [NewMessage(payload=one.encode(), headers=headers) for one in payloads]


def numbered(first: int, behind: int) -> list[NewMessage]:
    return messages(*(str(one) for one in range(first, behind)))


async def drain(system: Engine, queue: str, count: int) -> list[str]:
    """Claim and acknowledge so many messages; those who wait too long find fewer."""
    found: list[str] = []
    while len(found) < count:
        claimed = await system.claim(queue, min(count, 1_000), wait_ms=PATIENCE_MS)
        if not claimed:
            break
        await system.ack(queue, *(one.receipt for one in claimed))
        found += [(one.payload or b"").decode() for one in claimed]
    return found


async def all_is_quiet(system: Engine) -> None:
    await system._following.bulk.look()
    await system._following.bulk.finished()


def same(found: Iterable[str], first: int, behind: int) -> bool:
    return sorted(map(int, found)) == list(range(first, behind))


async def test_a_running_engine_finds_a_commit_by_itself(root: str) -> None:
    async with await Engine.open(root) as system:
        await system.create_queue("all")
        await append(root, "load", numbered(0, 50), numbered(50, 120))

        assert same(await drain(system, "all", 120), 0, 120)
        assert (await system.stats("all")).available == 0


async def test_what_is_not_committed_does_not_exist(root: str) -> None:
    async with await Engine.open(root) as system:
        await system.create_queue("all")
        shard = await write_shard(root, numbered(0, 5))
        await all_is_quiet(system)

        assert (await system.stats("all")).available == 0
        assert await system.read(shard.shard << 32) is None
        assert await system.history(shard.shard << 32) is None

        await commit(root, "load", [shard])
        await all_is_quiet(system)

        found = await system.read(shard.shard << 32)
        assert found is not None
        assert found.payload == b"0"
        history = await system.history(shard.shard << 32)
        assert history is not None
        assert [entry.queue for entry in history.entries] == ["all"]


async def test_each_job_is_registered_once_whoever_commits_it_again(root: str) -> None:
    async with await Engine.open(root) as system:
        await system.create_queue("all")
        first = await append(root, "load", numbered(0, 5))
        await all_is_quiet(system)

        assert await append(root, "load", numbered(5, 10)) == first
        await all_is_quiet(system)
        # Even when its file was removed, and somebody does it again.
        await CommitFiles(Objects.open(root, StoreSettings())).remove("load")
        await all_is_quiet(system)
        await append(root, "load", numbered(10, 15))
        await all_is_quiet(system)

        assert (await system.stats("all")).available == 5
    async with await Engine.open(root) as system:
        await all_is_quiet(system)
        assert (await system.stats("all")).available == 5


async def test_a_job_without_messages_is_registered(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with await Engine.open(root) as system:
        await system.create_queue("all")
        await append(root, "nothing")
        await append(root, "empty", [])
        await append(root, "load", numbered(0, 3))

        assert same(await drain(system, "all", 3), 0, 3)


async def test_filters_priorities_and_delays_count_for_bulk_messages(
    new_memory_root: NewRoot,
) -> None:
    root = new_memory_root()
    clock = ManualClock()
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("emea", filter="region = 'emea'")
        shard = await write_shard(
            root,
            [
                *messages("late", region="emea", priority="200"),
                *messages("urgent", region="emea", priority="1"),
                *messages("other", region="apj"),
                NewMessage(payload=b"delayed", headers={"region": "emea"}, delay_ms=60_000),
                NewMessage(payload=bytes(100_000), headers={"region": "emea"}),
            ],
            clock=clock,
        )
        await commit(root, "load", [shard])
        await all_is_quiet(system)

        claimed = await system.claim("emea", 10)
        stats = await system.stats("emea")

        assert [one.payload for one in claimed] == [b"urgent", bytes(100_000), b"late"]
        assert (stats.delayed, stats.in_flight) == (1, 3)


async def test_a_queue_gets_the_bulk_shards_that_are_registered_after_it(root: str) -> None:
    async with await Engine.open(root) as system:
        await system.create_queue("old")
        await append(root, "first", numbered(0, 5))
        await system.create_queue("now")
        await system.create_queue("all", start="beginning")
        await append(root, "second", numbered(5, 10))

        assert same(await drain(system, "old", 10), 0, 10)
        assert same(await drain(system, "now", 5), 5, 10)
        assert same(await drain(system, "all", 10), 0, 10)
        for name in ("old", "now", "all"):
            assert (await system.stats(name)).available == 0


async def test_a_queue_that_begins_in_the_past_replays_all_bulk_shards_once(root: str) -> None:
    async with await Engine.open(root) as system:
        await system.publish_many(numbered(0, 10))
        for job in range(6):
            first = 10 + 10 * job
            await append(
                root, f"job-{job}", numbered(first, first + 5), numbered(first + 5, first + 10)
            )
        await system.create_queue("all", start="beginning")
        assert (await system.stats("all")).replaying > 0

    # Closed in the middle of it.
    async with await Engine.open(root) as system:
        await system._replay.finished()

        assert (await system.stats("all")).replaying == 0
        assert same(await drain(system, "all", 70), 0, 70)
        assert (await system.stats("all")).available == 0


async def test_a_queue_that_begins_at_a_time_passes_over_older_jobs(
    new_memory_root: NewRoot,
) -> None:
    root = new_memory_root()
    clock = ManualClock()
    async with await Engine.open(root, clock=clock) as system:
        old = await write_shard(root, numbered(0, 5), clock=clock)
        await commit(root, "old", [old], now_ms=clock.now_ms())
        clock.advance_ms(3_600_000)
        since = clock.now_ms()
        new = await write_shard(root, numbered(5, 10), clock=clock)
        await commit(root, "new", [new], now_ms=clock.now_ms())
        await system.create_queue("since", start=since)
        await system._replay.finished()

        opened = system._readers.opened
        assert (await system.stats("since")).available == 5
        assert opened == 1


async def test_routing_goes_on_where_it_was_cut_off(root: str) -> None:
    async with await Engine.open(root) as system:
        await system.create_queue("all")
        await append(root, "load", *(numbered(100 * i, 100 * i + 100) for i in range(6)))
        await system._following.bulk.look()
        await asyncio.sleep(0)  # some of it is under way

    async with await Engine.open(root) as system:
        await system._following.bulk.finished()

        assert same(await drain(system, "all", 600), 0, 600)
        assert (await system.stats("all")).available == 0


async def test_jobs_are_routed_in_the_order_of_their_commits(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with await Engine.open(root) as system:
        await system.create_queue("all")
        for name, at in (("b", 3), ("c", 1), ("a", 3)):
            shard = await write_shard(root, messages(name))
            await commit(root, name, [shard], now_ms=at)
        await all_is_quiet(system)

        rows = await system._queues.bulk.from_number(0, 10)

    assert [(number, row.job) for number, row in rows] == [(0, "c"), (1, "a"), (2, "b")]
    assert [row.state for _, row in rows] == [1, 1, 1]


async def test_a_shard_whose_registration_has_not_returned_is_taken_once_when_it_has(
    new_memory_root: NewRoot,
) -> None:
    async with await Engine.open(new_memory_root(), clock=ManualClock()) as system:
        registry = system._queues.bulk
        for number in range(2):
            shard = CommittedShard(shard=70_000 + number, messages=1, next_sequence=1, bytes=1)
            await registry.register(Commit.new(f"job-{number}", [shard], now_ms=1), 1)
        # The row of the second one is durable, and whoever registers it does not know that yet.
        registry.next_number = 1
        before = await registry.unfinished(-1, 4)
        registry.next_number = 2
        after = await registry.unfinished(0, 4)

    assert [number for number, _ in before] == [0]
    assert [number for number, _ in after] == [1]


async def test_a_damaged_commit_stops_nobody(
    new_memory_root: NewRoot, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_memory_root()
    async with await Engine.open(root) as system:
        await system.create_queue("all")
        await Objects.open(root, StoreSettings()).create("commits/broken.json", b"{")
        await append(root, "load", numbered(0, 3))

        assert same(await drain(system, "all", 3), 0, 3)
    assert "broken.json" in caplog.text


async def test_a_shard_that_its_commit_does_not_fit_is_not_finished(
    new_memory_root: NewRoot, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_memory_root()
    clock = ManualClock()
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("all")
        short = await write_shard(root, numbered(0, 3), clock=clock)
        await commit(root, "short", [short.model_copy(update={"next_sequence": 9})])
        await system._following.bulk.look()
        while "its commit says 9" not in caplog.text:
            await asyncio.sleep(0.01)
        await commit(root, "load", [await write_shard(root, numbered(3, 6), clock=clock)])
        await system._following.bulk.look()

        assert same(await drain(system, "all", 6), 0, 6)


async def test_shards_that_can_not_be_read_keep_no_others_waiting_and_are_tried_again(
    new_memory_root: NewRoot, caplog: pytest.LogCaptureFixture
) -> None:
    root, clock = new_memory_root(), ManualClock()
    objects = Objects.open(root, StoreSettings())
    lost = [
        CommittedShard(shard=70_000 + one, messages=1, next_sequence=1, bytes=1)
        for one in range(SHARDS_AT_ONCE + 1)
    ]
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("all")
        await commit(root, "lost", lost)
        await system._following.bulk.look()
        await until(lambda: caplog.text.count("of lost waits") == len(lost))
        good = [await write_shard(root, numbered(n, n + 1), clock=clock) for n in range(6)]
        await commit(root, "good", good)
        await system._following.bulk.look()

        assert same(await drain(system, "all", 6), 0, 6)

        for one in lost:
            late = await BulkShard.create(objects, one.shard, clock)
            await late.add(numbered(one.shard, one.shard + 1))
            await late.finish()
        clock.advance_ms(60_000)
        await system._following.bulk.finished()

        assert same(await drain(system, "all", len(lost)), 70_000, 70_000 + len(lost))
        rows = await system._queues.bulk.from_number(0, 20)
        assert [row.state for _, row in rows] == [1] * (len(lost) + len(good))


async def test_more_shards_that_can_not_be_read_than_are_kept_take_turns_and_stop_nobody(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_routing, "_FAILING_AT_MOST", 3)
    monkeypatch.setattr(bulk_routing, "_ASIDE_AT_ONCE", 2)
    root, clock = new_memory_root(), ManualClock()
    objects = Objects.open(root, StoreSettings())
    lost = [
        CommittedShard(shard=70_000 + one, messages=1, next_sequence=1, bytes=1) for one in range(8)
    ]
    good = [await write_shard(root, numbered(n, n + 1), clock=clock) for n in range(6)]

    async def is_set_aside(system: Engine, count: int) -> None:
        while len(await system._queues.bulk.waiting(-1, 100)) != count:
            await asyncio.sleep(0.01)

    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("all")
        await commit(root, "lost", lost)
        await system._following.bulk.look()
        await is_set_aside(system, len(lost))
        assert len(system._following.bulk._failing) <= 3
        await commit(root, "good", good)
        await system._following.bulk.look()
        assert same(await drain(system, "all", 6), 0, 6)

    # Who opens it looks at those that wait and at no others: the good ones are passed.
    async with await Engine.open(root, clock=clock) as system:
        registry = system._queues.bulk
        assert await registry.unfinished(-1, 100) == []
        assert [number for number, _ in await registry.waiting(-1, 100)] == list(range(8))
        for one in lost:
            late = await BulkShard.create(objects, one.shard, clock)
            await late.add(numbered(one.shard, one.shard + 1))
            await late.finish()
        finished = asyncio.create_task(system._following.bulk.finished())
        while not finished.done():
            clock.advance_ms(60_000)
            await asyncio.sleep(0.01)
        await finished

        assert same(await drain(system, "all", len(lost)), 70_000, 70_000 + len(lost))
        assert await registry.waiting(-1, 100) == []
        rows = await registry.from_number(0, 20)
        assert [row.state for _, row in rows] == [1] * (len(lost) + len(good))


async def test_many_small_shards_leave_few_readers_open(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with await Engine.open(root) as system:
        await system.create_queue("all")
        await append(root, "load", *(numbered(i, i + 1) for i in range(60)))
        await all_is_quiet(system)

        assert same(await drain(system, "all", 60), 0, 60)
        assert len(system._readers) <= 32


async def test_failed_bulk_messages_can_be_filtered_and_replayed(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with await Engine.open(root) as system:
        await system.create_queue("all", options=QueueOptions(max_attempts=1))
        await append(root, "load", messages("a", kind="x"), messages("b", kind="y"))
        await all_is_quiet(system)
        claimed = await system.claim("all", 2)
        await system.nack("all", *(one.receipt for one in claimed), error="no")

        failed = await system.failed("all", filter="kind = 'y'")
        again = await system.replay("all", filter="kind = 'y'")

        assert [dict(one.headers) for one in failed] == [{"kind": "y"}]
        assert len(again) == 1
        assert await drain(system, "all", 1) == ["b"]
        assert [one.payload for one in await system.peek("all", 5)] == []


async def test_what_was_routed_but_is_not_durable_is_not_routed_again_when_reading_fails(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root, clock = new_memory_root(), ManualClock()
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("all")
        database = system._queues.database
        write, read = database.commit, FollowedLog.chunks
        goes_on = asyncio.Event()

        async def commit_later(rows: Rows, **options: Any) -> None:
            await goes_on.wait()
            await write(rows, **options)

        async def read_some(log: FollowedLog, *args: Any, **options: Any) -> Any:
            async for chunk in read(log, *args, **options):
                yield chunk
                if not goes_on.is_set():
                    monkeypatch.setattr(database, "commit", commit_later)
                    raise StoreUnavailableError("it is gone")

        monkeypatch.setattr(FollowedLog, "chunks", read_some)
        await commit(root, "load", [await write_shard(root, numbered(0, 5), clock=clock)])
        await system._following.bulk.look()
        await until(lambda: "waits: it is gone" in caplog.text)
        clock.advance_ms(1_000)
        await asyncio.sleep(0.05)  # it tries again, and the first batch is not durable yet
        goes_on.set()
        clock.advance_ms(2_000)
        await system._following.bulk.finished()

        assert (await system.stats("all")).available == 5
        assert same(await drain(system, "all", 5), 0, 5)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)
