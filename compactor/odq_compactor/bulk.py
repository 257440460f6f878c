"""Bulk shards whose messages expire (RFC 0009): only those that are due are read.

Each shard is *filed* once: it gets a row in the queue store that says when its next messages
expire. So a pass costs what is due, however many shards are registered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from odq_compactor.attempts import forget_attempts
from odq_compactor.bulk_files import BulkFiles, RemovedObjects, remove_objects
from odq_compactor.entries import FollowedEntries
from odq_compactor.messages import EARLIEST_MS
from odq_compactor.options import CompactorOptions
from odq_compactor.pace import Pace
from odq_compactor.plan import Run
from odq_compactor.report import RetentionReport
from odq_encodings import (
    FINISHED,
    BulkExpiry,
    BulkExpiryKey,
    BulkFiled,
    BulkFiledKey,
    BulkShard,
    BulkShardKey,
    CursorKey,
    encode_bulk_expiry_key,
)
from opendata_queue.log.readers import is_not_there
from opendata_queue.model.errors import ClosedError, CorruptStoreError, FencedError, OdqError
from opendata_queue.model.ids import SHARD_SEQUENCES, first_id_of
from opendata_queue.root.commit_files import CommitFiles, CommittedShard
from opendata_queue.routing.router import retention_deadline
from opendata_queue.store import DatabaseReads
from opendata_queue.systems.owned import OwnedStores

logger = logging.getLogger(__name__)

_FILED_KEY: Final = BulkFiledKey().encode()
_FILED_AT_ONCE: Final = 100
_DUE_AT_ONCE: Final = 100
_AT_ONCE: Final = 16
"""Objects of so many shards are read or removed at a time."""
_ALWAYS_PAST: Final = 1
"""The deadline of a shard without messages."""


class DueShard(NamedTuple):
    """A bulk shard that a pass has to read."""

    deadline: int
    number: int
    shard: int
    last_deadline: int
    """When all of it is past; 0 for never."""

    def is_past(self, now: int) -> bool:
        return 0 < self.last_deadline < now

    @property
    def key(self) -> bytes:
        return encode_bulk_expiry_key(self.deadline, self.number)


async def due_shards(
    queues: DatabaseReads, start: bytes, before: int, limit: int = _DUE_AT_ONCE
) -> list[DueShard]:
    """The next shards from a key on of which messages expire before a time."""
    found = []
    async for chunk in queues.scan(start, encode_bulk_expiry_key(before), limit=limit):
        for key, value in chunk:
            where = queues.decode(BulkExpiryKey.decode, key, key)
            what = queues.decode(BulkExpiry.decode, key, value)
            found.append(DueShard(where.deadline, where.number, what.shard, what.last_deadline))
    return found


async def filed_up_to(queues: DatabaseReads) -> int:
    """The number of the first shard that may have no expiry row yet."""
    value = await queues.get(_FILED_KEY)
    return 0 if value is None else queues.decode(BulkFiled.decode, _FILED_KEY, value).next_number


async def shard_rows(queues: DatabaseReads, numbers: Iterable[int]) -> list[BulkShard | None]:
    """What is registered under some numbers; none where nothing is any more."""
    keys = [BulkShardKey(number=number).encode() for number in numbers]
    rows = zip(keys, await queues.get_many(keys), strict=True)
    return [
        None if value is None else queues.decode(BulkShard.decode, key, value)
        for key, value in rows
    ]


async def committed_shards(commits: CommitFiles, job: str) -> tuple[CommittedShard, ...]:
    """What the commit of a registered job says, if it is still there."""
    try:
        commit = await commits.read(job)
    except CorruptStoreError:  # it was whole when it was registered: the log says the same
        return ()
    return () if commit is None else commit.shards


class BulkRetention:
    """Takes expired messages of bulk shards out of queues, and removes shards that are past."""

    def __init__(
        self, stores: OwnedStores, entries: FollowedEntries, options: CompactorOptions
    ) -> None:
        self._stores = stores
        self._entries = entries
        self._options = options
        self._pace = Pace(options.work_share)
        self._commits = CommitFiles(stores.objects)
        self._files = BulkFiles(stores, options)
        self._filed: int | None = None
        # What is gone leaves tombstones: no pass reads those of the pass before.
        self._due_from = EARLIEST_MS

    async def run(self, report: RetentionReport, *, rarely: bool) -> None:
        """One pass; with ``rarely``, control files that are old are listed and removed, too."""
        await self._file(report)
        await self._expire_due(report)
        await self._files.run(report, rarely=rarely)

    # --- filing: once in the life of a shard ------------------------------------------------------

    async def _file(self, report: RetentionReport) -> None:
        """Give new shards their expiry rows. Most commits say when; of others the log is read."""
        queues = self._stores.queues
        if self._filed is None:
            self._filed = await filed_up_to(queues.database)
        may_read = self._options.bulk_shards_read
        committed: dict[int, CommittedShard] = {}
        while self._filed < (behind := queues.bulk.next_number):
            some = await queues.bulk.from_number(self._filed, _FILED_AT_ONCE)
            if any(shard.shard not in committed for _, shard in some):
                committed = await self._committed({shard.job for _, shard in some})
            rows: list[tuple[int, int, BulkExpiry]] = []
            # Numbers may be missing: what is gone needs no row.
            next_number = some[-1][0] + 1 if len(some) == _FILED_AT_ONCE else behind
            for number, shard in some:
                deadlines = committed_deadlines(shard, committed.get(shard.shard))
                if deadlines is None and not may_read:
                    next_number = number  # another time: each takes a scan of its log
                    break
                if deadlines is None:
                    may_read -= 1
                    async with self._pace.work():
                        deadlines = await self._deadlines_read(shard.shard)
                first, last = deadlines
                if first:
                    rows.append((first, number, BulkExpiry(shard=shard.shard, last_deadline=last)))
            if next_number == self._filed:
                return
            await self._write_filed(rows, next_number)
            self._files.saw({shard.job for number, shard in some if number < next_number})

    async def _write_filed(self, rows: list[tuple[int, int, BulkExpiry]], next_number: int) -> None:
        committer = self._stores.queues.committer
        await committer.room()
        for deadline, number, row in rows:
            self._put(deadline, number, row)
        committer.rows.put(_FILED_KEY, BulkFiled(next_number=next_number).encode())
        await committer.wait(committer.commit())
        self._filed = next_number

    def _put(self, deadline: int, number: int, row: BulkExpiry) -> None:
        rows = self._stores.queues.committer.rows
        rows.put(encode_bulk_expiry_key(deadline, number), row.encode())
        self._due_from = min(self._due_from, deadline)

    async def _committed(self, jobs: set[str]) -> dict[int, CommittedShard]:
        """What the commits of some jobs say, by shard."""
        committed: dict[int, CommittedShard] = {}
        in_order = sorted(jobs)
        for start in range(0, len(in_order), _AT_ONCE):
            async with self._pace.work():
                found = await asyncio.gather(
                    *(
                        committed_shards(self._commits, job)
                        for job in in_order[start : start + _AT_ONCE]
                    )
                )
            committed |= {shard.shard: shard for shards in found for shard in shards}
        return committed

    async def _deadlines_read(self, shard: int) -> tuple[int, int]:
        """When the first and the last message of a shard expire, out of the shard itself."""
        first, last = 0, 0
        for_ever = False
        try:
            async with self._stores.readers.using(shard) as reader:
                async for chunk in reader.log.scan():
                    for entry in chunk:
                        deadline = retention_deadline(entry.received_at, entry.retention_seconds)
                        for_ever = for_ever or not deadline
                        first = min(first or deadline, deadline or first)
                        last = max(last, deadline)
        except CorruptStoreError as error:  # it would hold up all others, in every pass
            logger.error("bulk shard %d is damaged, and does not expire: %s", shard, error)
            return 0, 0
        except OdqError as error:
            if not is_not_there(error):
                raise
        return first, 0 if for_ever else last

    # --- what is due ------------------------------------------------------------------------------

    async def _expire_due(self, report: RetentionReport) -> None:
        now, database = report.now_ms, self._stores.queues.database
        start = encode_bulk_expiry_key(self._due_from)
        left = now
        while True:
            due = await due_shards(database, start, now)
            shards = await shard_rows(database, [one.number for one in due])
            past: list[tuple[DueShard, BulkShard | None]] = []
            for one, shard in zip(due, shards, strict=True):
                if shard is None:  # all that is left are its objects
                    past.append((one, shard))
                elif not self._may_handle(one, shard, now):
                    left = min(left, one.deadline)
                elif one.is_past(now):
                    # All of it: its expiry rows need not be read.
                    every = Run(one.deadline, first_id_of(shard.shard), shard.next_sequence, 0)
                    await self._entries.expire_runs([every], report)
                    past.append((one, shard))
                elif not await self._expire_some(one, shard, report):
                    left = min(left, one.deadline)
            for place in range(0, len(past), _AT_ONCE):
                kept = await self._drop(past[place : place + _AT_ONCE], report)
                left = min([left, *(one.deadline for one in kept)])
            if len(due) < _DUE_AT_ONCE:
                break
            start = due[-1].key + b"\x00"
        self._due_from = left

    def _may_handle(self, one: DueShard, shard: BulkShard, now: int) -> bool:
        """Whether a pass may handle a shard: one that is routed, and can go if it is past.

        A shard that is replayed for a queue can't go.
        """
        if shard.state != FINISHED:
            return False
        return not (one.is_past(now) and self._stores.queues.replaying(shard.shard))

    async def _expire_some(self, one: DueShard, shard: BulkShard, report: RetentionReport) -> bool:
        """Take what has expired out of queues, and file the shard anew.

        False if that is for a later pass: one shard that can't be read holds no other one up.
        """
        queues = self._stores.queues
        try:
            following = await self._expire_read(shard, report)
        except (FencedError, ClosedError):
            raise
        except OdqError as error:
            queues.committer.check_open()  # if it was a commit that failed, it is over
            if not is_not_there(error):
                logger.warning("bulk shard %d expires later: %s", shard.shard, error)
                return False
            # Its messages can't be had. Its rows go when all of them are past.
            logger.error("bulk shard %d is registered, but lost: %s", shard.shard, error)
            following = None
        following = following or one.last_deadline
        await queues.committer.room()
        queues.committer.rows.delete(one.key)
        if following:
            row = BulkExpiry(shard=shard.shard, last_deadline=one.last_deadline)
            self._put(following, one.number, row)
        await queues.committer.wait(queues.committer.commit())
        return True

    async def _expire_read(self, shard: BulkShard, report: RetentionReport) -> int | None:
        """Take out what a shard says has expired; when does the next of it?"""
        try:
            await self._entries.expire(shard.shard, report, routed_up_to=shard.next_sequence)
            return await self._entries.next_deadline(shard.shard)
        finally:
            self._entries.release(shard.shard)

    async def drop_finished(
        self,
        some: Sequence[tuple[int, BulkShard]],
        expired: Mapping[int, int],
        report: RetentionReport,
        *,
        wanted: Callable[[], bool],
    ) -> bool:
        """Remove shards that no queue needs, given how many messages of each had expired.

        False if they are wanted by now: then nothing has happened.
        """
        filed = [await self._filed_key(number, shard.shard) for number, shard in some]
        going = [
            DueShard(_ALWAYS_PAST, number, shard.shard, _ALWAYS_PAST) for number, shard in some
        ]
        committer = self._stores.queues.committer
        async with self._pace.work():
            await committer.room()
            # Nothing is awaited between the question and the batch: no queue can be made there.
            if wanted():
                return False
            for one, key in zip(going, filed, strict=True):
                if key is not None:
                    committer.rows.delete(key)
                row = BulkExpiry(shard=one.shard, last_deadline=one.last_deadline)
                self._put(one.deadline, one.number, row)
                self._delete_rows(one)
            await committer.wait(committer.commit())
        await self._remove(going, report)
        for _, shard in some:
            _count(shard, report, expired=expired[shard.shard])
        return True

    async def _drop(
        self, past: list[tuple[DueShard, BulkShard | None]], report: RetentionReport
    ) -> list[DueShard]:
        """Remove shards that are past; those that are replayed for a queue by now are kept.

        Their rows first: without a cursor they do not exist. The expiry row is the last to go.
        So a pass that is killed in between leaves it, and the next one finishes the work.
        """
        queues = self._stores.queues
        async with self._pace.work():
            await queues.committer.room()
            # Nothing is awaited between the question and the batch: no queue can be made there.
            kept = [one for one, row in past if row is not None and queues.replaying(one.shard)]
            going = [(one, row) for one, row in past if one not in kept]
            for one, row in going:
                if row is not None:
                    self._delete_rows(one)
            await queues.committer.wait(queues.committer.commit())
        removed = await self._remove([one for one, _ in going], report)
        for (_, row), objects in zip(going, removed, strict=True):
            if row is not None:
                _count(row, report, expired=row.messages)
            else:  # the pass that began with it was killed, and has reported nothing
                report.count("bulk shards", objects.were_there)
        return kept

    def _delete_rows(self, one: DueShard) -> None:
        rows = self._stores.queues.committer.rows
        rows.delete(BulkShardKey(number=one.number).encode())
        rows.delete(CursorKey(shard=one.shard).encode())
        self._entries.forget(one.shard)

    async def _filed_key(self, number: int, shard: int) -> bytes | None:
        """The key of the expiry row that a finished shard has, if it has one."""
        try:
            deadline = await self._entries.next_deadline(shard)
        except OdqError as error:
            if not is_lost(error):
                raise
            return None  # if it has one, that one is deleted when it is due
        finally:
            self._entries.release(shard)
        return None if deadline is None else encode_bulk_expiry_key(deadline, number)

    async def _remove(
        self, going: Sequence[DueShard], report: RetentionReport
    ) -> list[RemovedObjects]:
        """Remove what is left of shards that have no rows but their expiry rows any more."""
        for one in going:
            if one.deadline == _ALWAYS_PAST:  # the attempts of others go by themselves
                await forget_attempts(
                    self._stores.queues, first_id_of(one.shard), SHARD_SEQUENCES, self._options
                )
        objects, committer = self._stores.objects, self._stores.queues.committer
        # Readers that begin from now on must not be led to them any more.
        await self._stores.queues.database.show_others()
        async with self._pace.work():
            removed = await asyncio.gather(*(remove_objects(objects, one.shard) for one in going))
            await committer.room()
            for one in going:
                committer.rows.delete(one.key)
            await committer.wait(committer.commit())
        report.blob_bytes += sum(one.blob_bytes for one in removed)
        return removed


def is_lost(error: OdqError) -> bool:
    """Whether the messages of a shard can't be had any more: it is damaged, or not there."""
    return isinstance(error, CorruptStoreError) or is_not_there(error)


def _count(shard: BulkShard, report: RetentionReport, *, expired: int) -> None:
    report.count("bulk shards", 1)
    report.count("expired messages", expired)
    report.count("finished messages", shard.messages - expired)
    report.row_bytes += shard.size_bytes


def committed_deadlines(
    shard: BulkShard, committed: CommittedShard | None
) -> tuple[int, int] | None:
    """When the first and the last message expire, 0 for never; none if the commit does not say."""
    if not shard.messages:
        return _ALWAYS_PAST, _ALWAYS_PAST
    if committed is None or committed.expires_from is None or committed.expires_at is None:
        return None
    return committed.expires_from, committed.expires_at
