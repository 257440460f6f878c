"""Bulk jobs as Spark does them, without Spark: shards of their own, and one commit."""

from __future__ import annotations

from collections.abc import Sequence

from opendata_queue import NewMessage, PublishOptions, StoreSettings
from opendata_queue.log.writer import MessageShard
from opendata_queue.model.clock import Clock, SystemClock
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import Objects

# A memtable of one byte: each batch is in a file of its own, and none is in the WAL alone.
_SETTINGS = StoreSettings(memtable_bytes=1)


async def write_shard(
    url: str, messages: Sequence[NewMessage], *, job: str = "job", clock: Clock | None = None
) -> CommittedShard:
    """Write messages into a shard that nobody can see yet."""
    clock = clock or SystemClock()
    objects = Objects.open(url, _SETTINGS)
    reserved = await ShardFiles(objects).reserve_bulk(job=job, now_ms=clock.now_ms())
    writer = await MessageShard.open(
        objects, reserved.shard, clock=clock, options=PublishOptions(recent_bytes=0)
    )
    ids = await writer.publish_many(messages)
    await writer.close()
    return CommittedShard(
        shard=reserved.shard,
        messages=len(ids),
        next_sequence=(ids[-1] & 0xFFFF_FFFF) + 1 if ids else 0,
        bytes=sum(len(message.payload or b"") for message in messages),
    )


async def commit(
    url: str, job: str, shards: Sequence[CommittedShard], *, now_ms: int = 1
) -> Commit:
    """Make shards visible."""
    files = CommitFiles(Objects.open(url, StoreSettings()))
    return await files.create(Commit.new(job, shards, now_ms=now_ms))


async def append(url: str, job: str, *shards: Sequence[NewMessage], now_ms: int = 1) -> Commit:
    """Do a whole job."""
    written = [await write_shard(url, messages, job=job) for messages in shards]
    return await commit(url, job, written, now_ms=now_ms)
