"""Reading shards that others write: bounded, shared, and opened again when their files are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from opendata_queue import (
    NewMessage,
    OdqError,
    PublishOptions,
    StoreAccessError,
    StoreSettings,
)
from opendata_queue.log.readers import ShardReaders, is_not_there
from opendata_queue.log.writer import MessageShard
from opendata_queue.model.ids import FIRST_BULK_SHARD
from opendata_queue.store import Objects
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot

SMALL_FILES = StoreSettings(memtable_bytes=4_096)


@asynccontextmanager
async def writing(objects: Objects, shard: int, clock: ManualClock) -> AsyncIterator[MessageShard]:
    opened = await MessageShard.open(objects, shard, clock=clock, options=PublishOptions())
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture
async def readers(root: str, clock: ManualClock) -> AsyncIterator[ShardReaders]:
    opened = ShardReaders(Objects.open(root, StoreSettings()), clock, open_at_most=2)
    yield opened
    await opened.close()


async def test_messages_of_several_shards_are_read_by_their_ids(
    root: str, readers: ShardReaders, clock: ManualClock
) -> None:
    objects = Objects.open(root, StoreSettings())
    ids = []
    for shard in (1, 2, 3):
        async with writing(objects, shard, clock) as writer:
            ids += await writer.publish_many(
                [
                    NewMessage(payload=f"{shard}".encode(), headers={"of": str(shard)}),
                    NewMessage(payload=bytes(100_000)),
                ]
            )

    found = await readers.read_messages([*ids, 1 << 32 | 999, 4 << 32])
    metadata = await readers.read_metadata(ids)

    assert set(found) == set(ids)
    assert [found[one].payload for one in ids[::2]] == [b"1", b"2", b"3"]
    assert found[ids[1]].payload == bytes(100_000)
    assert [dict(metadata[one].headers) for one in ids[::2]] == [{"of": s} for s in "123"]
    assert len(readers) == 2


async def test_a_reader_is_opened_once_for_all_who_want_it(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    objects = Objects.open(new_memory_root(), StoreSettings())
    async with writing(objects, 1, clock) as writer:
        ids = await writer.publish_many([NewMessage(payload=b"x")])
    readers = ShardReaders(objects, clock)

    found = await asyncio.gather(*(readers.read_messages(ids) for _ in range(10)))

    assert all(ids[0] in one for one in found)
    assert readers.opened == 1
    await readers.close()


async def test_a_reader_in_use_is_not_closed_for_others(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    objects = Objects.open(new_memory_root(), StoreSettings())
    for shard in (1, 2, 3):
        async with writing(objects, shard, clock) as writer:
            await writer.publish_many([NewMessage(payload=b"x")])
    readers = ShardReaders(objects, clock, open_at_most=1)

    async with readers.using(1) as first:
        await readers.read_messages([2 << 32, 3 << 32])
        found = await first.stored.read([1 << 32])

    assert 1 << 32 in found
    await readers.close()
    assert len(readers) == 0


async def test_a_shard_without_a_database_has_no_messages_until_it_has_one(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    objects = Objects.open(new_memory_root(), StoreSettings())
    readers = ShardReaders(objects, clock)

    assert await readers.read_messages([1 << 32]) == {}
    with pytest.raises(StoreAccessError) as caught:
        async with readers.using(1):
            pass
    assert is_not_there(caught.value)
    async with writing(objects, 1, clock) as writer:
        await writer.publish_many([NewMessage(payload=b"x")])

    assert 1 << 32 in await readers.read_messages([1 << 32])
    await readers.close()


async def test_a_reader_whose_files_were_removed_is_opened_again(
    tmp_path: Path, clock: ManualClock
) -> None:
    objects = Objects.open(f"file://{tmp_path}", SMALL_FILES)
    readers = ShardReaders(objects, clock)
    shard = FIRST_BULK_SHARD  # nobody protects what its readers see
    folder = tmp_path / f"messages/{shard:05}"

    async def write() -> list[int]:
        async with writing(objects, shard, clock) as writer:
            batches = [[NewMessage(payload=bytes(1_000))] * 8] * 3
            return [one for batch in batches for one in await writer.publish_many(batch)]

    ids = await write()
    async with readers.using(shard) as stale:
        folder.rename(tmp_path / "removed")
        await write()  # the same messages, in other files
        with pytest.raises(OdqError):
            await stale.stored.read(ids[:8])

    found = await readers.read_messages(ids[:8])

    assert set(found) == set(ids[:8])
    assert readers.opened == 2
    await readers.close()


async def test_a_fresh_reader_sees_all_that_is_durable(
    root: str, readers: ShardReaders, clock: ManualClock
) -> None:
    objects = Objects.open(root, StoreSettings())
    async with writing(objects, 1, clock) as writer:
        await writer.publish_many([NewMessage(payload=b"1")])
        async with readers.using(1) as stale:
            second = await writer.publish_many([NewMessage(payload=b"2")])
            readers.renew(1, stale)
            # Who has it keeps it.
            assert await stale.stored.read([1 << 32])

        async with readers.using(1) as fresh:
            assert fresh is not stale
            assert await fresh.stored.read(second)
            assert await fresh.end() > 1


async def test_a_reader_follows_its_writer(
    root: str, readers: ShardReaders, clock: ManualClock
) -> None:
    objects = Objects.open(root, StoreSettings())
    async with writing(objects, 1, clock) as writer:
        await writer.publish_many([NewMessage(payload=b"1")])
        async with readers.using(1) as reader:
            before = reader.position
            assert before is not None
            second = await writer.publish_many([NewMessage(payload=b"2")])
            async with asyncio.timeout(120):
                while reader.position == before:
                    await asyncio.sleep(0.01)

            assert await reader.stored.read(second)
