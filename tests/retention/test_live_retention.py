"""Shards of ingest processes: their writers and the owner of the queues remove what is past."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from odq_compactor import (
    IngestRetention,
    RetentionCompactor,
    compact_root,
    plan_root,
    set_delete_when_done,
)
from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.store import DatabaseReader, Objects, Rows, StoreSettings
from opendata_queue.systems.ingest import Ingest
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.retention.rows import ERASING, QUICK, decoded, queue_rows

MINUTE_MS = 60_000
HOUR_MS = 3_600_000
LARGE = bytes(70_000)


@pytest.fixture
def url(new_memory_root: NewRoot) -> str:
    return new_memory_root()


@pytest.fixture
async def owner(url: str, clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open(url, clock=clock, publishes=False) as engine:
        yield engine


@pytest.fixture
async def ingest(url: str, clock: ManualClock, owner: Engine) -> AsyncIterator[Ingest]:
    async with await Ingest.open(url, clock=clock) as ingest:
        yield ingest


def short(payload: bytes = b"x") -> NewMessage:
    return NewMessage(payload, retention_seconds=60)


async def rows_of(ingest: Ingest) -> Counter[str]:
    titles = Counter(title for title, _, _ in await decoded(ingest.shard.database))
    del titles["sequence block"], titles["retention position"], titles["finished messages"]
    return titles


async def blobs_of(ingest: Ingest) -> int:
    folder = f"blobs/{ingest.shard_number:05}"
    return len(await ingest.shard.objects.list_from(folder, "", 1_000))


async def test_the_writer_removes_what_the_owner_of_the_queues_is_done_with(
    owner: Engine, ingest: Ingest, clock: ManualClock
) -> None:
    await owner.create_queue("q", options=QueueOptions(window=2))
    ids = await ingest.publish_many([*[short()] * 8, short(LARGE), NewMessage(LARGE)])
    await owner.all_is_routed()
    of_queues, of_shard = RetentionCompactor(owner, QUICK), IngestRetention(ingest, QUICK)
    clock.advance_ms(MINUTE_MS)
    assert (await of_queues.run_once()).is_empty
    assert (await of_shard.run_once(thorough=True)).is_empty
    clock.advance_ms(1)
    # The queues come first: they go by the rows that the writer would delete.
    assert (await of_shard.run_once(thorough=True)).is_empty

    entries = await of_queues.run_once()
    removed = await of_shard.run_once()

    assert entries.total("expired entries") == 9
    stats = await owner.stats("q")
    assert (stats.available, stats.expired) == (1, 9)
    assert removed.total("expired messages") == 9
    assert removed.total("blobs") == 1
    assert await blobs_of(ingest) == 1
    assert (await rows_of(ingest))["expiry"] == 0
    assert (await rows_of(ingest))["blob of a message"] == 1
    assert (await of_queues.run_once()).is_empty
    assert (await of_shard.run_once(thorough=True)).is_empty
    (left,) = await owner.claim("q", 10)
    assert (left.message_id, left.payload) == (ids[-1], LARGE)


async def test_what_is_not_routed_is_left_until_it_is(
    url: str, owner: Engine, ingest: Ingest, clock: ManualClock
) -> None:
    await owner.create_queue("q")
    await owner.close()
    await ingest.publish_many([short(LARGE)] * 2)
    clock.advance_ms(MINUTE_MS + 1)
    of_shard = IngestRetention(ingest, QUICK)
    assert (await of_shard.run_once(thorough=True)).is_empty

    async with await Engine.open(url, clock=clock, publishes=False) as again:
        await again.all_is_routed()
        assert (await again.stats("q")).expired == 2
        await RetentionCompactor(again, QUICK).run_once()
        assert (await of_shard.run_once()).total("expired messages") == 2
    assert await blobs_of(ingest) == 0


async def test_rows_and_attempts_are_erased_at_the_deadline_if_both_are_told_to(
    owner: Engine, ingest: Ingest, clock: ManualClock
) -> None:
    await owner.create_queue("q")
    await ingest.publish_many([short()] * 3)
    await owner.all_is_routed()
    await owner.claim("q", 3)
    assert (await queue_rows(owner))["attempts"] == 3
    clock.advance_ms(MINUTE_MS + 1)

    await RetentionCompactor(owner, ERASING).run_once()
    await IngestRetention(ingest, ERASING).run_once()

    assert not await rows_of(ingest)
    assert (await queue_rows(owner))["attempts"] == 0


async def test_a_publisher_without_any_queues_is_rid_of_its_blobs_too(
    url: str, clock: ManualClock
) -> None:
    async with await Ingest.open(url, clock=clock) as ingest:
        await ingest.publish_many([short(LARGE), NewMessage(LARGE)])
        (orphan,) = await ingest.shard.payloads.store_blobs([LARGE])
        clock.advance_ms(24 * HOUR_MS + 1)

        report = await IngestRetention(ingest, QUICK).run_once()

        assert report.total("expired messages") == 1
        assert report.total("orphaned blobs") == 1
        assert await blobs_of(ingest) == 1
        assert orphan.blob_id.hex() not in await ingest.shard.objects.names("blobs/00001")


async def test_the_writer_deletes_what_all_queues_have_finished_with(
    url: str, owner: Engine, ingest: Ingest, clock: ManualClock
) -> None:
    await set_delete_when_done(owner.stores.queues, True)
    await owner.create_queue("q", options=QueueOptions(window=2))
    ids = await ingest.publish_many([NewMessage(LARGE), *[NewMessage(b"x")] * 9])
    await owner.all_is_routed()
    first = await owner.claim("q", 4)
    await owner.ack("q", *(one.receipt for one in first[:3]))
    await write_files(owner)
    of_shard = IngestRetention(ingest, QUICK)
    planned = await plan_root(url, options=QUICK, clock=clock)

    report = await of_shard.run_once()

    assert planned.removed == report.removed
    assert planned.blob_bytes == report.blob_bytes == len(LARGE)
    # 3 are done; 1 is in flight, 6 wait in the window and in the backlog.
    assert report.total("finished messages") == 3
    assert await blobs_of(ingest) == 0
    left = [one is not None for one in await ingest.read_many(ids)]
    assert left == [False] * 3 + [True] * 7
    assert (await of_shard.run_once(thorough=True)).is_empty
    rest = await owner.claim("q", 10)
    await owner.ack("q", first[3].receipt, *(one.receipt for one in rest))
    assert (await of_shard.run_once(thorough=True)).is_empty  # what it sees is older
    clock.advance_ms(HOUR_MS)
    # Who has claimed them is known to the owner of the queues, who learns what is gone from a
    # reader of the shard. That moves on by itself, sooner or later: a fresh one knows all.
    assert (await queue_rows(owner))["attempts"] == 10
    await read_anew(owner, ingest)
    await RetentionCompactor(owner, QUICK).run_once()
    assert (await queue_rows(owner))["attempts"] == 7
    assert (await of_shard.run_once()).total("finished messages") == 7
    assert not await rows_of(ingest)
    assert (await queue_rows(owner))["attempts"] == 7
    await read_anew(owner, ingest)
    assert (await RetentionCompactor(owner, QUICK).run_once(thorough=True)).is_empty
    assert (await queue_rows(owner))["attempts"] == 0


async def test_alone_on_a_root_all_shards_that_nobody_writes_are_looked_after(
    url: str, clock: ManualClock
) -> None:
    async with await Engine.open(url, clock=clock) as engine:
        await engine.create_queue("q", options=QueueOptions(window=2))
        async with (
            await Ingest.open(url, clock=clock) as gone,
            await Ingest.open(url, clock=clock) as stays,
        ):
            await gone.publish_many([short(LARGE)] * 3)
            await stays.publish_many([short(LARGE)] * 5)
            await engine.all_is_routed()
            await engine.close()
            await gone.close()
            clock.advance_ms(MINUTE_MS + 1)
            planned = await plan_root(url, options=QUICK, clock=clock)
            assert planned.total("expired messages") == planned.total("expired entries") == 8
            assert (planned.total("blobs"), planned.blob_bytes) == (8, 8 * len(LARGE))

            report = await compact_root(url, options=QUICK, clock=clock)

            assert report.blob_bytes == 3 * len(LARGE)

            assert report.total("expired messages") == 3
            assert report.total("expired entries") == 8
            assert report.total("blobs") == 3
            assert await blobs_of(gone) == 0
            assert await blobs_of(stays) == 5
            # It went on all the while.
            (one,) = await stays.publish_many([NewMessage(b"y")])
            assert (await IngestRetention(stays, QUICK).run_once()).total("blobs") == 5
            assert await stays.read(one) is not None


async def test_one_instant_shows_nothing_of_what_happens_meanwhile(owner: Engine, url: str) -> None:
    await owner.create_queue("before")
    await write_files(owner)
    objects = Objects.open(url, StoreSettings())
    async with DatabaseReader.at_one_instant(objects, "queues/00000") as view:

        async def count() -> int:
            return sum([len(chunk) async for chunk in view.scan(b"\x01", b"\xff")])

        before = await count()
        assert before
        for number in range(20):
            rows = Rows()
            rows.put(b"\x7fnew%d" % number, b"")
            committer = owner.stores.queues.committer
            await committer.wait(committer.add(rows))
            await write_files(owner)
            assert await count() == before


async def read_anew(owner: Engine, ingest: Ingest) -> None:
    """From now on the owner sees all that the writer of a shard has done so far."""
    readers = owner.stores.readers
    async with readers.using(ingest.shard_number) as reader:
        readers.renew(ingest.shard_number, reader)


async def write_files(owner: Engine) -> None:
    await owner.stores.queues.all_durable()
    await owner.stores.queues.database.flush_to_files()
