"""Bulk shards go while queues are made from the past: nothing is lost, and nothing stands still."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import odq_compactor.bulk
from odq_compactor import RetentionCompactor, set_delete_when_done
from odq_compactor.bulk import BulkRetention, due_shards
from odq_compactor.entries import FollowedEntries
from odq_compactor.finished_bulk import FinishedBulk
from odq_encodings import Replay
from opendata_queue import Engine, QueueOptions
from opendata_queue.model.errors import CorruptStoreError, StoreUnavailableError
from opendata_queue.queues.bulk_registry import BulkRegistry
from opendata_queue.queues.store import QueueStore
from opendata_queue.routing.replay import LogReplay
from opendata_queue.store import Database, Rows
from opendata_queue.testing import ManualClock
from tests.retention.rows import QUICK, queue_rows
from tests.retention.test_bulk_history import DAY_MS, START_MS, filled, routed
from tests.support.bulk_jobs import commit


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/root"


async def appended(engine: Engine, url: str, clock: ManualClock, *retentions: int) -> int:
    """A shard that is routed, with messages of these retentions."""
    shard = await filled(url, clock, *retentions)
    await commit(url, f"job-{shard.shard}", [shard], now_ms=clock.now_ms())
    await routed(engine)
    return shard.shard


async def done(engine: Engine, url: str, clock: ManualClock, *retentions: int) -> int:
    """A shard that the queue q, the only one, is done with, on a system that deletes such ones."""
    await set_delete_when_done(engine.stores.queues, True)
    await engine.create_queue("q")
    shard = await appended(engine, url, clock, *retentions)
    claimed = await engine.claim("q", len(retentions), wait_ms=60_000)
    assert len(claimed) == len(retentions)
    await engine.ack("q", *(one.receipt for one in claimed))
    return shard


# --- shards that are past -------------------------------------------------------------------------


async def test_a_shard_that_is_past_stays_while_a_queue_made_during_the_pass_replays_it(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q")
        await appended(engine, url, clock, 60)
        compactor = RetentionCompactor(engine, QUICK)
        await compactor.run_once()
        clock.advance_ms(DAY_MS)
        replay_part, expire_runs = LogReplay._replay_part, FollowedEntries.expire_runs
        replaying, may_replay = asyncio.Event(), asyncio.Event()

        async def held(*args: Any) -> None:
            replaying.set()
            await may_replay.wait()
            await replay_part(*args)

        async def meanwhile(*args: Any) -> None:
            await expire_runs(*args)
            await engine.create_queue("late", start="beginning")
            await replaying.wait()

        with monkeypatch.context() as patched:
            patched.setattr(LogReplay, "_replay_part", held)
            patched.setattr(FollowedEntries, "expire_runs", meanwhile)
            report = await compactor.run_once()
            # Asked first: the replay of a shard that is gone would wait for it for ever.
            assert not report.total("bulk shards")
            may_replay.set()
            await engine.parts.replay.finished()

        assert (await queue_rows(engine))["bulk expiry"] == 1
        assert (await compactor.run_once()).total("bulk shards") == 1
        rows = await queue_rows(engine)
        assert (rows["bulk shard"], rows["bulk expiry"], rows["replay"]) == (0, 0, 0)


async def test_what_is_left_of_the_replay_of_a_shard_that_is_gone_is_forgotten(
    url: str, clock: ManualClock
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q")
        queues = engine.stores.queues
        queue = queues.queue("q")
        queue.put_replay(70_000, Replay(next_sequence=1_000, end_sequence=2_500, from_time=0))
        await queues.all_durable()
        assert (await queue_rows(engine))["replay"] == 1

        # Not by its task: where it does not get on, nothing else does, the test included.
        more = await engine.parts.replay._replay_some(queue)

        assert not more
        assert not queue.replays
        assert (await queue_rows(engine))["replay"] == 0


async def test_a_queue_that_begins_at_a_time_copes_with_older_shards_that_go_meanwhile(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await appended(engine, url, clock, 0)
        clock.advance_ms(DAY_MS)
        since = clock.now_ms()
        await appended(engine, url, clock, 0)
        behind_nothing = LogReplay._behind_nothing
        from_number = BulkRegistry.from_number

        async def without_the_first(
            self: BulkRegistry, number: int, limit: int = 1
        ) -> list[tuple[int, Any]]:
            return [one for one in await from_number(self, number, limit) if one[0] > 1]

        async def meanwhile(*args: Any) -> Replay:
            with monkeypatch.context() as patched:
                patched.setattr(BulkRegistry, "from_number", without_the_first)
                return await behind_nothing(*args)

        monkeypatch.setattr(LogReplay, "_behind_nothing", meanwhile)
        await engine.create_queue("q", start=since)
        await engine.parts.replay.finished()

        assert (await engine.stats("q")).available == 1


async def test_a_queue_made_while_the_rows_of_a_shard_are_being_deleted_does_not_see_the_shard(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await done(engine, url, clock, 0, 0)
        queues = engine.stores.queues
        delete_rows, write = BulkRetention._delete_rows, Database.commit
        replay_part = LogReplay._replay_part
        from_number, all_durable = BulkRegistry.from_number, QueueStore.all_durable
        deleting, may_write = asyncio.Event(), asyncio.Event()
        parts = 0

        def noticed(*args: Any) -> None:
            delete_rows(*args)
            deleting.set()

        async def held(self: Database, rows: Rows, **kwargs: Any) -> None:
            if deleting.is_set() and self is queues.database:
                await may_write.wait()
            await write(self, rows, **kwargs)

        # The replay looks, or it waits for the batch: either way it has begun.
        async def looked(*args: Any) -> list[tuple[int, Any]]:
            found = await from_number(*args)
            if deleting.is_set():
                may_write.set()
            return found

        async def waited(self: QueueStore) -> None:
            if deleting.is_set():
                may_write.set()
            await all_durable(self)

        async def counted(*args: Any) -> None:
            nonlocal parts
            parts += 1
            await replay_part(*args)

        monkeypatch.setattr(BulkRetention, "_delete_rows", noticed)
        monkeypatch.setattr(Database, "commit", held)
        monkeypatch.setattr(BulkRegistry, "from_number", looked)
        monkeypatch.setattr(QueueStore, "all_durable", waited)
        monkeypatch.setattr(LogReplay, "_replay_part", counted)
        passing = asyncio.create_task(RetentionCompactor(engine, QUICK).run_once(thorough=True))
        await deleting.wait()
        await engine.create_queue("late", start="beginning")
        report = await passing
        await engine.parts.replay.finished()

        assert report.total("bulk shards") == 1
        assert parts == 0
        assert (await engine.stats("late")).available == 0


# --- shards that are finished ---------------------------------------------------------------------


async def test_a_queue_deleted_and_made_again_from_the_beginning_keeps_what_it_was_done_with(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await done(engine, url, clock, 0, 0, 0)
        expired_of = FinishedBulk._expired_of

        async def meanwhile(*args: Any) -> int:
            await engine.delete_queue("q")
            await engine.create_queue("q", start="beginning")
            await engine.parts.replay.finished()
            return await expired_of(*args)

        monkeypatch.setattr(FinishedBulk, "_expired_of", meanwhile)
        report = await RetentionCompactor(engine, QUICK).run_once(thorough=True)

        assert not report.total("bulk shards")
        assert len(await engine.claim("q", 10)) == 3


async def test_a_queue_made_right_before_the_batch_keeps_the_shard_and_its_attempts(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await done(engine, url, clock, 0, 0, 0)
        next_deadline = FollowedEntries.next_deadline
        expired_of = FinishedBulk._expired_of
        made = False

        async def make() -> None:
            nonlocal made
            if not made:
                made = True
                await engine.create_queue("late", start="beginning")
                assert len(await engine.claim("late", 10, wait_ms=60_000)) == 3

        async def while_counted(*args: Any) -> int:
            expired = await expired_of(*args)
            await make()
            return expired

        async def while_looked_up(*args: Any) -> int | None:
            deadline = await next_deadline(*args)
            await make()
            return deadline

        for owner, name, meanwhile in (
            (FinishedBulk, "_expired_of", while_counted),
            (FollowedEntries, "next_deadline", while_looked_up),
        ):
            made = False
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, meanwhile)
                report = await RetentionCompactor(engine, QUICK).run_once(thorough=True)
            assert made
            assert not report.total("bulk shards")
            rows = await queue_rows(engine)
            assert (rows["bulk shard"], rows["attempts"], rows["bulk expiry"]) == (1, 3, 0)
            await engine.delete_queue("late")


async def test_attempts_that_a_pass_left_when_it_failed_are_forgotten_by_the_next(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        shard = await done(engine, url, clock, 0, 0, 0)

        async def refuse(*_: Any) -> None:
            raise StoreUnavailableError("not now")

        with monkeypatch.context() as patched:
            patched.setattr(odq_compactor.bulk, "forget_attempts", refuse)
            with pytest.raises(StoreUnavailableError):
                await RetentionCompactor(engine, QUICK).run_once(thorough=True)
        rows = await queue_rows(engine)
        assert (rows["bulk shard"], rows["attempts"], rows["bulk expiry"]) == (0, 3, 1)

        await RetentionCompactor(engine, QUICK).run_once()

        rows = await queue_rows(engine)
        assert (rows["attempts"], rows["bulk expiry"]) == (0, 0)
        assert await engine.stores.objects.size_bytes(f"messages/{shard:05}") == 0


@pytest.mark.parametrize("later_ms", [0, 60_001], ids=["first", "moved"])
async def test_the_expiry_row_of_a_shard_goes_with_the_shard_when_all_queues_are_done(
    url: str, clock: ManualClock, later_ms: int
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q")
        await appended(engine, url, clock, 60, 3_600)
        compactor = RetentionCompactor(engine, QUICK)
        await compactor.run_once()
        clock.advance_ms(later_ms)
        await compactor.run_once()
        assert (await queue_rows(engine))["bulk expiry"] == 1
        claimed = await engine.claim("q", 10)
        await engine.ack("q", *(one.receipt for one in claimed))
        await set_delete_when_done(engine.stores.queues, True)

        report = await compactor.run_once(thorough=True)

        assert report.total("bulk shards") == 1
        assert (await queue_rows(engine))["bulk expiry"] == 0


# --- shards that can't be read --------------------------------------------------------------------


async def test_a_shard_that_is_lost_holds_up_no_other_and_its_rows_go_when_it_is_past(
    url: str, clock: ManualClock
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q", options=QueueOptions(window=2))
        lost = await appended(engine, url, clock, 60, 3_600)
        for_ever = await appended(engine, url, clock, 60, 0)
        await appended(engine, url, clock, 61, 3_600)
        compactor = RetentionCompactor(engine, QUICK)
        await compactor.run_once()
        for shard in (lost, for_ever):
            await engine.stores.objects.delete_under(f"messages/{shard:05}")
        # Nobody has a reader open that could still have it.
        await engine.stores.readers.close()
        clock.advance_ms(62_000)

        report = await compactor.run_once()

        assert report.total("expired entries") > 0
        assert (await queue_rows(engine))["bulk expiry"] == 2
        clock.advance_ms(3_600_000)
        assert (await compactor.run_once()).total("bulk shards") == 2
        rows = await queue_rows(engine)
        assert (rows["bulk shard"], rows["bulk expiry"]) == (1, 0)


async def test_a_shard_that_can_not_be_read_is_tried_again_and_holds_up_no_other(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q")
        damaged = await appended(engine, url, clock, 60, 3_600)
        await appended(engine, url, clock, 61)
        compactor = RetentionCompactor(engine, QUICK)
        await compactor.run_once()
        clock.advance_ms(62_000)
        expire = FollowedEntries.expire

        async def refuse(self: FollowedEntries, shard: int, *args: Any, **kwargs: Any) -> None:
            if shard == damaged:
                raise CorruptStoreError("it is damaged", key=b"")
            await expire(self, shard, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(FollowedEntries, "expire", refuse)
            assert (await compactor.run_once()).total("bulk shards") == 1
        assert (await queue_rows(engine))["bulk expiry"] == 1

        await compactor.run_once()

        due = await due_shards(engine.stores.queues.database, b"\x01\x1b", clock.now_ms())
        assert due == []
        clock.advance_ms(3_600_000)
        assert (await compactor.run_once()).total("bulk shards") == 1
