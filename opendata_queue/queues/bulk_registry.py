"""The bulk shards that the queue store knows: registered once, routed once (RFC 0009)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from odq_encodings import (
    FINISHED,
    ROUTING,
    BulkJob,
    BulkJobKey,
    BulkNumbers,
    BulkNumbersKey,
    BulkShard,
    BulkShardKey,
    BulkWaiting,
    BulkWaitingKey,
    Cursor,
    CursorKey,
    RecordType,
)
from opendata_queue.root.commit_files import Commit
from opendata_queue.store import DatabaseReads
from opendata_queue.store.group_commit import GroupCommitter

_NUMBERS_KEY: Final = BulkNumbersKey().encode()
_BEHIND: Final = RecordType.BULK_JOB.prefix
_BEHIND_WAITING: Final = BulkWaitingKey(number=(1 << 64) - 1).encode() + b"\x00"


class BulkRegistry:
    """Registers jobs, numbers their shards, and knows which of them are not routed yet."""

    def __init__(self, database: DatabaseReads, committer: GroupCommitter) -> None:
        self._database = database
        self._committer = committer
        self.next_number = 0
        """What the next shard that is registered gets; all smaller ones are in the past."""
        self._registered = 0
        self._loaded = 0
        """Shards with a smaller number may have been set aside by who was here before."""
        self._first_unfinished = 0
        self._passed: set[int] = set()
        """Shards behind the first unfinished one that are finished or set aside: few, since those
        that can't be finished are set aside."""

    async def load(self) -> None:
        value = await self._database.get(_NUMBERS_KEY)
        if value is not None:
            numbers = self._database.decode(BulkNumbers.decode, _NUMBERS_KEY, value)
            self.next_number = self._registered = numbers.next_number
            self._first_unfinished = numbers.first_unfinished
            self._loaded = numbers.next_number

    async def knows(self, job: str) -> bool:
        """Whether a job is registered."""
        return await self._database.get(BulkJobKey(job=job).encode()) is not None

    async def register(self, commit: Commit, now_ms: int) -> None:
        """Register the shards of a job that is not known yet, all of them or none."""
        await self._committer.room()
        # Nothing is awaited from here on: all of it is in one batch.
        rows = self._committer.rows
        first_number = self.next_number
        for number, one in enumerate(commit.shards, first_number):
            shard = BulkShard(
                shard=one.shard,
                state=ROUTING,
                registered_at=now_ms,
                committed_at=commit.committed_at,
                messages=one.messages,
                next_sequence=one.next_sequence,
                size_bytes=one.bytes,
                job=commit.job,
            )
            rows.put(BulkShardKey(number=number).encode(), shard.encode())
            rows.put(CursorKey(shard=one.shard).encode(), Cursor(next_sequence=0).encode())
        job = BulkJob(
            committed_at=commit.committed_at,
            registered_at=now_ms,
            first_number=first_number,
            shards=len(commit.shards),
        )
        rows.put(BulkJobKey(job=commit.job).encode(), job.encode())
        self._put_numbers(first_number + len(commit.shards))
        await self._committer.wait(self._committer.commit())
        # Not before: a search for unfinished shards must find their rows.
        self.next_number = first_number + len(commit.shards)

    def finish(self, number: int, shard: BulkShard, *, waits: bool = False) -> None:
        """Say, in the batch that gathers, that all of a shard is routed."""
        done = replace(shard, state=FINISHED)
        self._committer.rows.put(BulkShardKey(number=number).encode(), done.encode())
        if waits or number < self._loaded:
            self._committer.rows.delete(BulkWaitingKey(number=number).encode())
        self._pass(number)

    def set_aside(self, number: int, now_ms: int) -> None:
        """Note, in the batch that gathers, that a shard can't be routed now.

        Its row leads back to it. So the next owner need not search all shards that were registered
        since, and nothing of them is kept in memory.
        """
        row = BulkWaiting(since=now_ms)
        self._committer.rows.put(BulkWaitingKey(number=number).encode(), row.encode())
        self._pass(number)

    def _pass(self, number: int) -> None:
        """Leave a shard out of the next searches for unfinished ones."""
        if number >= self._first_unfinished:
            self._passed.add(number)
        self._move_to(self._first_unfinished)
        self._put_numbers(self._registered)

    async def waiting(self, after: int, limit: int) -> list[tuple[int, BulkShard]]:
        """Shards that were set aside, behind a number, in their order."""
        start = BulkWaitingKey(number=after + 1).encode()
        numbers = []
        async for chunk in self._database.scan(start, _BEHIND_WAITING, limit=limit):
            numbers += [
                self._database.decode(BulkWaitingKey.decode, key, key).number for key, _ in chunk
            ]
        keys = [BulkShardKey(number=number).encode() for number in numbers]
        rows = zip(numbers, keys, await self._database.get_many(keys), strict=True)
        return [
            (number, self._database.decode(BulkShard.decode, key, value))
            for number, key, value in rows
            if value is not None
        ]

    async def unfinished(self, after: int, limit: int) -> list[tuple[int, BulkShard]]:
        """Shards that are not routed yet, behind a number, in their order."""
        first, behind = self._first_unfinished, self.next_number
        found: list[tuple[int, BulkShard]] = []
        number = max(after + 1, first)
        while number < behind and len(found) < limit:
            some = await self.from_number(number, limit)
            # A job may be durable whose registration has not returned yet: its turn comes, once.
            found += [(n, shard) for n, shard in some if shard.state == ROUTING and n < behind]
            # Numbers may be missing: what is finished may be removed.
            number = some[-1][0] + 1 if len(some) == limit else behind
        if after < first:
            # Nothing before these is unfinished: the next search begins here.
            self._move_to(found[0][0] if found else behind)
        return found[:limit]

    async def from_number(self, number: int, limit: int = 1) -> list[tuple[int, BulkShard]]:
        """The registered shards from a number on, in their order."""
        start = BulkShardKey(number=number).encode()
        found = []
        async for chunk in self._database.scan(start, _BEHIND, limit=limit):
            for key, value in chunk:
                where = self._database.decode(BulkShardKey.decode, key, key)
                found.append((where.number, self._database.decode(BulkShard.decode, key, value)))
        return found

    def _move_to(self, number: int) -> None:
        number = max(number, self._first_unfinished)
        while number in self._passed:
            number += 1
        if number == self._first_unfinished:
            return  # many may be finished behind a large one: don't go through them each time
        self._first_unfinished = number
        self._passed = {one for one in self._passed if one > number}

    def _put_numbers(self, next_number: int) -> None:
        self._registered = next_number
        numbers = BulkNumbers(next_number=next_number, first_unfinished=self._first_unfinished)
        self._committer.rows.put(_NUMBERS_KEY, numbers.encode())
