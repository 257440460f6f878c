"""Which messages a root holds in one moment: its shards, and how far each of them goes.

Logs only grow, in the order of their sequences. So a moment of a shard is a bound on its
sequences, which every task of a read can keep, however long it takes, while writers go on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from odq_encodings import (
    BulkJob,
    BulkJobKey,
    BulkNumbers,
    BulkNumbersKey,
    BulkShardKey,
    CursorKey,
    encode_metadata_log_key,
)
from odq_encodings import BulkShard as BulkShardRow
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import StoreAccessError
from opendata_queue.model.ids import SHARD_SEQUENCES, first_id_of, is_bulk
from opendata_queue.model.paths import QUEUES_PATH, messages_path
from opendata_queue.root.commit_files import CommitFiles
from opendata_queue.root.descriptor import read_root
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.root.timekeeping import reading_clock
from opendata_queue.store import (
    DatabaseReader,
    Location,
    Objects,
    StoreKind,
    StoreSettings,
    has_no_database,
)

QUEUE_STORE: Final = QUEUES_PATH
# How long a reader goes without a second poll. Its checkpoint lives three times as long, and so
# does that of one that was killed: ten minutes, in which it keeps files from being collected.
_MOMENT_MS: Final = 200_000
_LAST_NUMBER: Final = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRange:
    """Sequences of one shard, from ``first`` up to, not including, ``end``."""

    shard: int
    first: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.first)

    def within(self, first_id: int, last_id: int) -> ShardRange:
        """What of it lies within these message ids, both included."""
        base = first_id_of(self.shard)
        return ShardRange(
            shard=self.shard,
            first=max(self.first, first_id - base),
            end=min(self.end, last_id - base + 1),
        )


@asynccontextmanager
async def moment_of(objects: Objects, path: str) -> AsyncIterator[DatabaseReader | None]:
    """A database as it is now, for as long as the block lasts; then its checkpoint is released.

    None if it is not there: it was not written to yet.
    """
    reader = await _if_there(DatabaseReader.open(objects, path, poll_interval_ms=_MOMENT_MS))
    try:
        yield reader
    finally:
        if reader is not None:
            await reader.close()


async def _if_there(opening: Awaitable[DatabaseReader]) -> DatabaseReader | None:
    try:
        return await opening
    except StoreAccessError as error:
        if has_no_database(error):
            return None
        raise


@asynccontextmanager
async def shard_reader(objects: Objects, shard: int) -> AsyncIterator[DatabaseReader]:
    """A shard as it is now. A bulk shard never changes, so nothing has to be pinned for it."""
    reader = await DatabaseReader.open(
        objects, messages_path(shard), poll_interval_ms=_MOMENT_MS, complete=is_bulk(shard)
    )
    try:
        yield reader
    finally:
        await reader.close()


def open_objects(root: str) -> Objects:
    return Objects.open(root, StoreSettings())


async def check_root(root: str) -> None:
    """Refuse a URL where there is no root: a mistyped one would be an empty one."""
    location = Location.parse(root)
    # Opening the store of a folder would make it.
    there = location.kind is not StoreKind.FILE or location.folder.is_dir()
    if not there or await read_root(open_objects(root)) is None:
        raise StoreAccessError(f"there is no root at {root}: check the path")


async def root_now_ms(objects: Objects, machine: Clock | None = None) -> int:
    """What the root's clock shows, which retentions go by: this machine's may be wrong."""
    return (await reading_clock(objects, machine_clock(machine))).now_ms()


async def visible_ranges(objects: Objects) -> list[ShardRange]:
    """All messages that are visible now: live shards, and bulk shards that were committed."""
    commits = CommitFiles(objects)
    # Jobs first: one that is registered meanwhile is then found among the registered ones.
    jobs = await commits.jobs()
    live = [await live_range(objects, shard) for shard in await live_shards(objects)]
    bulk: dict[int, int] = {}
    async with moment_of(objects, QUEUE_STORE) as queues:
        if queues is not None:
            # Before the shards: a job that is registered between the two reads is then found in
            # both of them. The other way round it could be missed by both.
            rows = await queues.get_many([BulkJobKey(job=job).encode() for job in jobs])
            # What is left of a registered job is among the shards; the rest was removed.
            jobs = [job for job, row in zip(jobs, rows, strict=True) if row is None]
            async for _, row in registered(queues):
                bulk[row.shard] = row.next_sequence
    for job in jobs:
        commit = await commits.read(job)
        for shard in commit.shards if commit is not None else ():
            bulk[shard.shard] = shard.next_sequence
    ranges = [ShardRange(shard=one, first=0, end=end) for one, end in sorted(bulk.items())]
    return [one for one in (*live, *ranges) if one.size]


async def registered_job(objects: Objects, job: str) -> BulkJob | None:
    """What the owner of queues knows of a job, also when its commit file is gone."""
    key = BulkJobKey(job=job).encode()
    async with moment_of(objects, QUEUE_STORE) as queues:
        value = None if queues is None else await queues.get(key)
        if queues is None or value is None:
            return None
        return queues.decode(BulkJob.decode, key, value)


async def is_visible(objects: Objects, bulk_shard: int) -> bool:
    """Whether a bulk shard still exists. Retention removes its rows before its objects."""
    async with moment_of(objects, QUEUE_STORE) as queues:
        if queues is None or await queues.get(CursorKey(shard=bulk_shard).encode()) is not None:
            return True
    # It may be committed, and not registered yet.
    return any(one.shard == bulk_shard for one in await visible_ranges(objects))


async def live_shards(objects: Objects) -> list[int]:
    return [0, *await ShardFiles(objects).live_shards()]


async def live_range(objects: Objects, shard: int) -> ShardRange:
    """From the oldest message of a live shard's log to the newest one that is durable."""
    span = encode_metadata_log_key(0), encode_metadata_log_key(SHARD_SEQUENCES)
    async with moment_of(objects, messages_path(shard)) as reader:
        if reader is not None:  # else it was reserved, and never written
            async for rows in reader.scan(*span, limit=1):
                last = await reader.last(*span)
                assert last is not None
                return ShardRange(
                    shard=shard, first=_sequence_of(rows[0][0]), end=_sequence_of(last[0]) + 1
                )
    return ShardRange(shard=shard, first=0, end=0)


async def registered(
    queues: DatabaseReader, first: int = 0, end: int = _LAST_NUMBER
) -> AsyncIterator[tuple[int, BulkShardRow]]:
    """The bulk shards that the owner of queues has registered, with their numbers."""
    span = BulkShardKey(number=first).encode(), BulkShardKey(number=end).encode()
    async for rows in queues.scan(*span):
        for key, value in rows:
            number = queues.decode(BulkShardKey.decode, key, key).number
            yield number, queues.decode(BulkShardRow.decode, key, value)


async def next_number(objects: Objects) -> int:
    """The number that the next bulk shard will be registered under."""
    key = BulkNumbersKey().encode()
    async with moment_of(objects, QUEUE_STORE) as queues:
        value = None if queues is None else await queues.get(key)
        if queues is None or value is None:
            return 0
        return queues.decode(BulkNumbers.decode, key, value).next_number


def grouped(ranges: Iterable[ShardRange], size: int) -> list[tuple[ShardRange, ...]]:
    """Ranges for one task each: large shards are cut, small ones are put together."""
    groups: list[tuple[ShardRange, ...]] = []
    group: list[ShardRange] = []
    room = size
    for one in ranges:
        first = one.first
        while first < one.end:
            end = min(one.end, first + room)
            group.append(ShardRange(shard=one.shard, first=first, end=end))
            room -= end - first
            first = end
            if not room:
                groups.append(tuple(group))
                group, room = [], size
    return [*groups, tuple(group)] if group else groups


def _sequence_of(log_key: bytes) -> int:
    return int.from_bytes(log_key[-8:], "big")
