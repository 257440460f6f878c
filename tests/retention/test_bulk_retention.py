"""Bulk shards go whole: when all of their messages are past, or when no job has committed them."""

from __future__ import annotations

from pathlib import Path

import pytest

from odq_compactor import CompactorOptions, RetentionCompactor, plan_root, set_delete_when_done
from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.model.errors import InvalidInputError, StoreUnavailableError
from opendata_queue.root.commit_files import CommitFiles
from opendata_queue.root.shard_files import COMMITTED_WITHIN_MS, ShardFiles
from opendata_queue.store import Objects
from opendata_queue.testing import ManualClock
from tests.retention.rows import QUICK, queue_rows
from tests.retention.test_bulk_history import filled, routed
from tests.support.bulk_jobs import commit, write_shard

DAY_MS = 86_400_000
START_MS = 1_790_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


async def files_of(objects: Objects, shard: int) -> int:
    return await objects.size_bytes(f"messages/{shard:05}")


async def test_a_bulk_shard_goes_whole_when_its_last_message_is_past_its_time(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q")
        objects = engine.stores.objects
        short = await write_shard(
            url, [NewMessage(b"x", retention_seconds=n) for n in (60, 3_600)], clock=clock
        )
        long = await write_shard(
            url, [NewMessage(b"x", retention_seconds=60), NewMessage(b"y")], clock=clock
        )
        await commit(url, "a", [short], now_ms=clock.now_ms())
        await commit(url, "b", [long], now_ms=clock.now_ms())
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()
        compactor = RetentionCompactor(engine, QUICK)
        clock.advance_ms(3_600_000)
        assert not (await compactor.run_once(thorough=True)).total("bulk shards")
        clock.advance_ms(1)
        planned = await plan_root(url, options=QUICK, clock=clock)

        report = await compactor.run_once(thorough=True)

        assert planned.removed == report.removed
        assert planned.row_bytes == report.row_bytes
        assert report.total("bulk shards") == 1
        assert await files_of(objects, short.shard) == 0
        assert await files_of(objects, long.shard) > 0
        rows = await queue_rows(engine)
        assert rows["bulk shard"] == 1
        assert (await engine.stats("q")).available == 1
        (left,) = await engine.claim("q", 10)
        assert left.payload == b"y"
        assert not (await compactor.run_once(thorough=True)).total("bulk shards")


async def test_shards_that_no_job_committed_and_old_commits_go_after_seven_days(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q")
        objects = engine.stores.objects
        kept = await write_shard(url, [NewMessage(b"x")], clock=clock)
        lost = await write_shard(url, [NewMessage(bytes(70_000))], clock=clock)
        await commit(url, "a", [kept], now_ms=clock.now_ms())
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()
        compactor = RetentionCompactor(engine, QUICK)
        clock.advance_ms(7 * DAY_MS - 3_600_000)
        assert (await compactor.run_once(thorough=True)).is_empty
        clock.advance_ms(2 * 3_600_000)
        planned = await plan_root(url, options=QUICK, clock=clock)

        report = await compactor.run_once(thorough=True)

        assert planned.removed == report.removed
        assert planned.blob_bytes == report.blob_bytes == 70_000
        assert report.total("bulk shards") == 1
        assert report.total("control files") == 3
        assert await files_of(objects, lost.shard) == 0
        assert await objects.size_bytes(f"blobs/{lost.shard:05}") == 0
        assert await files_of(objects, kept.shard) > 0
        assert await CommitFiles(objects).jobs() == []
        assert await ShardFiles(objects).bulk_shards() == []
        (left,) = await engine.claim("q", 10)
        assert left.payload == b"x"
        assert (await compactor.run_once(thorough=True)).is_empty


def test_shards_that_may_still_be_committed_can_not_be_configured_away() -> None:
    with pytest.raises(InvalidInputError, match=r"bulk_kept_ms is .*may still be committed"):
        CompactorOptions(bulk_kept_ms=7 * DAY_MS - 1)

    assert CompactorOptions(bulk_kept_ms=7 * DAY_MS).bulk_kept_ms - COMMITTED_WITHIN_MS == DAY_MS


async def test_what_has_expired_of_a_bulk_shard_leaves_queues_while_the_shard_stays(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q", options=QueueOptions(window=2))
        written = await write_shard(
            url, [NewMessage(b"x", retention_seconds=60)] * 8 + [NewMessage(b"y")], clock=clock
        )
        await commit(url, "a", [written], now_ms=clock.now_ms())
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()
        compactor = RetentionCompactor(engine, QUICK)
        clock.advance_ms(60_000)
        assert (await compactor.run_once(thorough=True)).is_empty
        clock.advance_ms(1)
        planned = await plan_root(url, options=QUICK, clock=clock)

        report = await compactor.run_once(thorough=True)

        assert planned.removed == report.removed
        assert planned.row_bytes == report.row_bytes
        assert report.total("expired entries") == 8
        assert not report.total("bulk shards")
        stats = await engine.stats("q")
        assert (stats.available, stats.expired) == (1, 8)
        assert (await compactor.run_once(thorough=True)).is_empty
        opened = engine.stores.readers.opened
        assert (await RetentionCompactor(engine, QUICK).run_once(thorough=True)).is_empty
        assert engine.stores.readers.opened == opened


async def test_a_bulk_shard_goes_whole_when_every_queue_has_finished_with_it(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        await set_delete_when_done(engine.stores.queues, True)
        for name in ("a", "b"):
            await engine.create_queue(name, options=QueueOptions(window=2))
        large = bytes(70_000)
        mixed = [NewMessage(large), *[NewMessage(b"x", retention_seconds=60)] * 3]
        finished = await write_shard(url, [*mixed, NewMessage(b"y")], clock=clock)
        waiting = await write_shard(url, [NewMessage(b"z")] * 3, clock=clock)
        await commit(url, "a", [finished, waiting], now_ms=clock.now_ms())
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()
        objects = engine.stores.objects
        compactor = RetentionCompactor(engine, QUICK)

        async def handle(name: str, shard: int, count: int) -> None:
            messages = [one for one in await engine.claim(name, 8) if one.message_id >> 32 == shard]
            assert len(messages) == count
            await engine.ack(name, *(one.receipt for one in messages))

        await handle("a", finished.shard, 5)
        # Queue b has all of the first one, and what a has claimed of the second is in flight.
        assert not (await compactor.run_once(thorough=True)).total("bulk shards")
        clock.advance_ms(60_001)
        await handle("b", finished.shard, 2)
        attempts = (await queue_rows(engine))["attempts"]
        planned = await plan_root(url, options=QUICK, clock=clock)

        report = await compactor.run_once(thorough=True)

        assert planned.removed == report.removed
        assert planned.row_bytes == report.row_bytes
        assert planned.blob_bytes == report.blob_bytes == len(large)
        assert report.total("bulk shards") == 1
        assert report.total("finished messages") == 2
        assert report.total("expired messages") == 3
        assert await files_of(objects, finished.shard) == 0
        assert await objects.size_bytes(f"blobs/{finished.shard:05}") == 0
        assert await files_of(objects, waiting.shard) > 0
        rows = await queue_rows(engine)
        assert rows["bulk shard"] == 1
        assert attempts == 8
        assert rows["attempts"] == 3
        assert (await compactor.run_once(thorough=True)).is_empty
        (left, *_) = await engine.read_many([waiting.shard << 32])
        assert left is not None


async def test_a_bulk_shard_stays_while_a_queue_is_made_from_the_past_or_has_failed_it(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        await set_delete_when_done(engine.stores.queues, True)
        compactor = RetentionCompactor(engine, QUICK)
        written = await write_shard(url, [NewMessage(b"x")], clock=clock)
        await commit(url, "a", [written], now_ms=clock.now_ms())
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()
        assert (await compactor.run_once(thorough=True)).is_empty, "there are no queues"
        await engine.create_queue("q", start="beginning", options=QueueOptions(max_attempts=1))
        (claimed,) = await engine.claim("q", 10, wait_ms=60_000)
        assert (await compactor.run_once(thorough=True)).is_empty
        await engine.nack("q", claimed.receipt)
        assert (await compactor.run_once(thorough=True)).is_empty
        await engine.purge_failed("q", all=True)

        report = await compactor.run_once(thorough=True)

        assert report.total("bulk shards") == report.total("finished messages") == 1
        assert (await queue_rows(engine))["attempts"] == 0


@pytest.mark.parametrize("removed", [1, 2], ids=["no manifest", "no blobs"])
async def test_a_shard_that_a_kill_left_half_removed_is_gone_for_readers_and_is_reported(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q", options=QueueOptions(max_attempts=1))
        await set_delete_when_done(engine.stores.queues, True)
        large = bytes(70_000)
        messages = [NewMessage(large, retention_seconds=60), NewMessage(large)]
        written = await write_shard(url, messages, clock=clock)
        await commit(url, "a", [written], now_ms=clock.now_ms())
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()
        ids = [written.shard << 32 | number for number in range(2)]
        await engine.ack("q", *(one.receipt for one in await engine.claim("q", 2)))
        assert None not in await engine.read_many(ids)
        delete_under, left = Objects.delete_under, removed

        async def killed(self: Objects, folder: str) -> int:
            nonlocal left
            left -= 1
            if left < 0:
                raise StoreUnavailableError("killed")
            return await delete_under(self, folder)

        with monkeypatch.context() as patched:
            patched.setattr(Objects, "delete_under", killed)
            with pytest.raises(StoreUnavailableError):
                await RetentionCompactor(engine, QUICK).run_once(thorough=True)

        assert await engine.read_many(ids) == [None, None]
    async with await Engine.open(url, clock=clock) as engine:
        assert await engine.read_many(ids) == [None, None]
        planned = await plan_root(url, options=QUICK, clock=clock)
        report = await RetentionCompactor(engine, QUICK).run_once()
        assert report.removed == {("bulk shards", None): 1}
        assert planned.removed == report.removed
        assert planned.blob_bytes == report.blob_bytes == (0 if removed > 1 else 2 * len(large))
        assert await files_of(engine.stores.objects, written.shard) == 0
        assert (await RetentionCompactor(engine, QUICK).run_once(thorough=True)).is_empty


def damage(folder: Path, shard: int) -> None:
    """Let nobody read a shard any more."""
    for file in (folder / f"root/messages/{shard:05}").rglob("*.sst"):
        file.write_bytes(bytes(file.stat().st_size))


async def test_a_damaged_shard_holds_up_no_other_and_goes_when_nobody_needs_it(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q")
        shards = [await filled(url, clock, 60, 3_600), await filled(url, clock, 60, 0)]
        shards += [await filled(url, clock, 60), await filled(url, clock, 0)]
        await commit(url, "a", shards, now_ms=clock.now_ms())
        await routed(engine)
        await engine.ack("q", *(one.receipt for one in await engine.claim("q", 10)))
        await set_delete_when_done(engine.stores.queues, True)
    for shard in shards[:3]:
        damage(tmp_path, shard.shard)
    clock.advance_ms(60_001)
    async with await Engine.open(url, clock=clock) as engine:
        planned = await plan_root(url, options=QUICK, clock=clock)
        compactor = RetentionCompactor(engine, QUICK)

        report = await compactor.run_once(thorough=True)

        # How much of those that can't be read had expired, nobody can say.
        assert report.removed == {
            ("bulk shards", None): 4,
            ("expired messages", None): 1,
            ("finished messages", None): 5,
        }
        assert planned.removed == report.removed
        for shard in shards:
            assert await files_of(engine.stores.objects, shard.shard) == 0
        assert (await compactor.run_once(thorough=True)).is_empty
        # A row that nobody could find without the shard is deleted when it is due.
        clock.advance_ms(3_600_000)
        assert (await compactor.run_once(thorough=True)).is_empty
        assert (await queue_rows(engine))["bulk expiry"] == 0


async def test_a_damaged_shard_of_which_no_commit_says_when_it_expires_holds_up_no_other(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q")
        damaged, other = [
            await write_shard(url, [NewMessage(b"x", retention_seconds=60)] * 3, clock=clock)
            for _ in range(2)
        ]
        await commit(url, "a", [damaged, other], now_ms=clock.now_ms())
        await routed(engine)
    damage(tmp_path, damaged.shard)
    clock.advance_ms(60_001)
    async with await Engine.open(url, clock=clock) as engine:
        planned = await plan_root(url, options=QUICK, clock=clock)
        compactor = RetentionCompactor(engine, QUICK)

        report = await compactor.run_once(thorough=True)

        assert report.total("bulk shards") == 1
        assert planned.removed == report.removed
        assert await files_of(engine.stores.objects, damaged.shard) > 0
        assert (await compactor.run_once(thorough=True)).is_empty


async def test_a_dry_run_counts_all_shards_whose_commits_say_when_they_expire(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    options = CompactorOptions(work_share=1.0, space=False, bulk_shards_read=1)
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q", options=QueueOptions(window=2))
        told = [await filled(url, clock, 60) for _ in range(3)]
        not_told = [
            await write_shard(url, [NewMessage(b"x", retention_seconds=60)], clock=clock)
            for _ in range(2)
        ]
        await commit(url, "a", [*told, *not_told, await filled(url, clock, 60)])
        await routed(engine)
        clock.advance_ms(60_001)
        planned = await plan_root(url, options=options, clock=clock)

        report = await RetentionCompactor(engine, options).run_once()

        assert report.total("bulk shards") == 4
        assert planned.total("bulk shards") == 4
        assert planned.total("expired messages") == report.total("expired messages") == 4
