"""A long history of bulk shards costs nothing: only what is due is looked at (RFC 0009)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.counting import counted
from odq_compactor import CompactorOptions, RetentionCompactor, plan_root
from opendata_queue import Engine, NewMessage, QueueOptions, StoreSettings
from opendata_queue.log.bulk_writer import BulkShard
from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.root.commit_files import CommitFiles, CommittedShard
from opendata_queue.root.shard_files import ShardFiles, earliest_bulk_shard
from opendata_queue.runtime.aio import end_tasks
from opendata_queue.store import DatabaseReads, Objects
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.retention.rows import QUICK, queue_rows
from tests.support.bulk_jobs import commit, write_shard

DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS
START_MS = 1_790_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


async def filled(
    url: str, clock: ManualClock, *retentions: int, payload: bytes = b"x"
) -> CommittedShard:
    """A shard as Spark's tasks write it: its commit will say when it expires."""
    objects = Objects.open(url, StoreSettings())
    reserved = await ShardFiles(objects).reserve_bulk(job="job", now_ms=clock.now_ms())
    shard = await BulkShard.create(objects, reserved.shard, clock)
    await shard.add([NewMessage(payload, retention_seconds=one) for one in retentions])
    return CommittedShard(**asdict(await shard.finish()))


async def routed(engine: Engine) -> None:
    await engine.parts.following.bulk.look()
    await engine.parts.following.bulk.finished()


class Reads:
    """Counts rows that are read, of whatever database, and requests of an engine."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self._engine = engine
        scan, get = DatabaseReads.scan, DatabaseReads.get

        async def counting_scan(
            self_: DatabaseReads, *args: Any, **kwargs: Any
        ) -> AsyncIterator[Any]:
            self.counts["scans"] += 1
            async for chunk in scan(self_, *args, **kwargs):
                self.counts["rows"] += len(chunk)
                yield chunk

        async def counting_get(self_: DatabaseReads, key: bytes) -> bytes | None:
            self.counts["gets"] += 1
            return await get(self_, key)

        monkeypatch.setattr(DatabaseReads, "scan", counting_scan)
        monkeypatch.setattr(DatabaseReads, "get", counting_get)

    async def of(self, compactor: RetentionCompactor, *, thorough: bool) -> dict[str, int]:
        objects = self._engine.stores.objects
        self.counts.clear()
        requests, opened = objects.requests, self._engine.stores.readers.opened
        await compactor.run_once(thorough=thorough)
        self.counts["requests"] = objects.requests - requests
        self.counts["readers"] = self._engine.stores.readers.opened - opened
        return dict(self.counts)


async def cost_of_passes(
    url: str, clock: ManualClock, registered: int, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, int]]:
    """What passes cost on a root with so many shards: idle ones, and one with three that end."""
    async with await Engine.open(url, clock=clock) as engine:
        objects = engine.stores.objects
        first = earliest_bulk_shard(START_MS - WEEK_MS)
        year = START_MS + 365 * DAY_MS
        old = [
            CommittedShard(
                shard=first - 1 - n,
                messages=1,
                next_sequence=1,
                bytes=1,
                expires_from=year,
                expires_at=year,
            )
            for n in range(registered)
        ]
        for one in old:
            await objects.write(f"shards/bulk/{one.shard:010}.json", b"{}")
        await commit(url, "history", old, now_ms=START_MS)
        await routed(engine)
        for number in range(3):
            shard = await filled(url, clock, 3_600 + number)
            await commit(url, f"new-{number}", [shard], now_ms=START_MS)
        await routed(engine)
        compactor = RetentionCompactor(engine, QUICK)
        await compactor.run_once(thorough=True)
        # They go by themselves, one of them by real time, and their requests are not the pass's.
        await end_tasks([engine.parts.following._discovering, engine._ownership._keeping])
        reads = Reads(engine, monkeypatch)
        costs = [await reads.of(compactor, thorough=thorough) for thorough in (False, True)]
        clock.advance_ms(2 * 3_600_000)
        costs += [await reads.of(compactor, thorough=thorough) for thorough in (False, True)]
        assert await objects.names("shards/bulk") != []
        assert (await queue_rows(engine))["bulk shard"] == registered
        monkeypatch.undo()
        return costs


async def test_a_pass_costs_the_same_however_many_shards_are_registered(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = await cost_of_passes(new_memory_root(), ManualClock(START_MS), 100, monkeypatch)
    many = await cost_of_passes(new_memory_root(), ManualClock(START_MS), 2_000, monkeypatch)

    assert many == few
    idle, _, due, _ = few
    assert idle["requests"] == idle.get("rows", 0) == 0
    # Nobody opens what goes whole: its commit has said when.
    assert due["readers"] == 0
    assert due["rows"] == 3


@pytest.mark.parametrize("told", [True, False], ids=["by the commit", "by the log"])
async def test_a_shard_is_filed_once_by_what_its_commit_says_or_else_by_its_log(
    new_memory_root: NewRoot, clock: ManualClock, told: bool
) -> None:
    url = new_memory_root()
    options = CompactorOptions(work_share=1.0, space=False, bulk_shards_read=2)
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q", options=QueueOptions(window=2))
        for number in range(5):
            shard = await filled(url, clock, 60, 120, 600)
            if not told:
                shard = CommittedShard(**shard.model_dump(exclude={"expires_from", "expires_at"}))
            await commit(url, f"job-{number}", [shard], now_ms=clock.now_ms())
        for_ever = await filled(url, clock, 60, 0)
        await commit(url, "kept", [for_ever], now_ms=clock.now_ms())
        await routed(engine)
        compactor = RetentionCompactor(engine, options)
        filed = []
        for _ in range(3):
            assert (await compactor.run_once()).is_empty
            filed.append((await queue_rows(engine))["bulk expiry"])
        removed: Counter[str] = Counter()
        for later_ms in (60_001, 60_000, 480_000):
            clock.advance_ms(later_ms)
            planned = await plan_root(url, options=options, clock=clock)
            report = await compactor.run_once()
            assert planned.total("bulk shards") == report.total("bulk shards")
            removed += Counter({kind: count for (kind, _), count in report.removed.items()})

        assert filed == ([6, 6, 6] if told else [2, 4, 6])
        assert removed["bulk shards"] == 5
        assert removed["expired messages"] == 15
        assert removed["expired entries"] == 16
        rows = await queue_rows(engine)
        assert (rows["bulk shard"], rows["bulk expiry"], rows["cursor"]) == (1, 0, 2)
        assert (await engine.stats("q")).available == 1


async def test_a_pass_that_fails_between_rows_and_objects_is_finished_by_the_next(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        objects = engine.stores.objects
        shard = await filled(url, clock, 8 * 86_400, payload=bytes(70_000))
        await commit(url, "job", [shard], now_ms=clock.now_ms())
        await routed(engine)
        # So long that nothing leads to it any more: neither a commit nor a reservation.
        clock.advance_ms(7 * DAY_MS + 3_600_000)
        await RetentionCompactor(engine, QUICK).run_once(thorough=True)
        assert await ShardFiles(objects).bulk_shards() == []
        assert await CommitFiles(objects).jobs() == []
        clock.advance_ms(DAY_MS)

        async def refuse(_: Objects, folder: str) -> int:
            raise StoreUnavailableError(f"could not delete {folder}")

        with monkeypatch.context() as patched:
            patched.setattr(Objects, "delete_under", refuse)
            with pytest.raises(StoreUnavailableError):
                await RetentionCompactor(engine, QUICK).run_once()
        rows = await queue_rows(engine)
        assert (rows["bulk shard"], rows["bulk expiry"]) == (0, 1)
        assert await objects.size_bytes(f"messages/{shard.shard:05}") > 0

        report = await RetentionCompactor(engine, QUICK).run_once()

        assert report.blob_bytes == 70_000
        assert await objects.size_bytes(f"messages/{shard.shard:05}") == 0
        assert await objects.size_bytes(f"blobs/{shard.shard:05}") == 0
        assert (await queue_rows(engine))["bulk expiry"] == 0


async def test_few_commits_are_kept_and_a_job_whose_commit_is_gone_still_adds_nothing(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    url = new_memory_root()
    options = CompactorOptions(work_share=1.0, space=False, bulk_commits_kept=3)
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q")
        files = CommitFiles(engine.stores.objects)
        compactor = RetentionCompactor(engine, options)
        await compactor.run_once()
        for number in range(6):
            # Names are in another order than time.
            job = f"batch-{9 - number}"
            await commit(url, job, [await filled(url, clock, 0)], now_ms=clock.now_ms())
            clock.advance_ms(1)
        waiting = await filled(url, clock, 0)
        await routed(engine)
        await commit(url, "not-registered", [waiting], now_ms=clock.now_ms())

        report = await compactor.run_once()

        assert report.total("control files") == 3
        assert await files.jobs() == ["batch-4", "batch-5", "batch-6", "not-registered"]
        assert (await compactor.run_once()).is_empty
        again = await filled(url, clock, 0)
        await commit(url, "batch-9", [again], now_ms=clock.now_ms())
        await routed(engine)
        assert (await engine.stats("q")).available == 7
        assert not await engine._reading.is_visible(again.shard)


async def test_a_damaged_commit_keeps_uncommitted_shards_and_stops_nothing_else(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        objects = engine.stores.objects
        lost = await write_shard(url, [NewMessage(b"x")], clock=clock)
        short = await filled(url, clock, 60)
        await commit(url, "job", [short], now_ms=clock.now_ms())
        await routed(engine)
        await objects.create("commits/damaged.json", b"{")
        clock.advance_ms(8 * DAY_MS)
        compactor = RetentionCompactor(engine, QUICK)

        report = await compactor.run_once(thorough=True)

        assert report.total("bulk shards") == 1
        assert await objects.size_bytes(f"messages/{lost.shard:05}") > 0
        await objects.delete("commits/damaged.json")
        assert (await compactor.run_once(thorough=True)).total("bulk shards") == 1
        assert await objects.size_bytes(f"messages/{lost.shard:05}") == 0


async def test_a_queue_that_begins_at_a_time_passes_over_all_older_shards_with_one_commit(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    url = new_memory_root()
    async with await Engine.open(url, clock=clock) as engine:
        first = earliest_bulk_shard(START_MS)
        old = [
            CommittedShard(shard=first + n, messages=1, next_sequence=1, bytes=1)
            for n in range(500)
        ]
        await commit(url, "old", old, now_ms=clock.now_ms())
        await routed(engine)
        clock.advance_ms(DAY_MS)
        since = clock.now_ms()
        await commit(url, "new", [await filled(url, clock, 0)], now_ms=clock.now_ms())
        await routed(engine)
        with counted() as counters:
            await engine.create_queue("q", start=since)
            await engine.parts.replay.finished()

        assert counters["queues.commits"] < 10
        assert (await engine.stats("q")).available == 1
