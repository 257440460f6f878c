"""Messages that every queue has finished with (RFC 0010, Delete when done)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from typing import Final

from odq_compactor.messages import EARLIEST_MS, ShardRetention, blobs_between, runs_between
from odq_compactor.options import CompactorOptions
from odq_compactor.pace import Pace
from odq_compactor.plan import LiveIds, Run, sweep_is_due, without
from odq_compactor.positions import Position, Written
from odq_compactor.report import RetentionReport
from odq_encodings import (
    DELETE_WHEN_DONE,
    ActiveMessages,
    BacklogEntry,
    BacklogKey,
    Cursor,
    CursorKey,
    FailureKey,
    Finished,
    FinishedKey,
    MessageBlobKey,
    RecordType,
    Replay,
    ReplayKey,
    ScheduleKey,
    SystemOptions,
    SystemOptionsKey,
    encode_expiry_key,
    encode_metadata_log_key,
    message_metadata_fields,
)
from opendata_queue.log.rows import put_expiry
from opendata_queue.log.writer import MAX_MESSAGES_AT_ONCE, MessageShard
from opendata_queue.model.ids import SEQUENCE_BITS, SEQUENCE_MASK, message_id_of
from opendata_queue.queues.store import QueueStore
from opendata_queue.routing.router import retention_deadline
from opendata_queue.store import DatabaseReads, Row, Rows

_OPTIONS_KEY: Final = SystemOptionsKey().encode()
_SEQUENCE: Final = SEQUENCE_MASK


async def deletes_when_done(database: DatabaseReads) -> bool:
    """Whether a system deletes what all of its queues have finished with."""
    value = await database.get(_OPTIONS_KEY)
    if value is None:
        return False
    options = database.decode(SystemOptions.decode, _OPTIONS_KEY, value)
    return bool(options.flags & DELETE_WHEN_DONE)


async def set_delete_when_done(queues: QueueStore, wanted: bool) -> None:
    """Configure whether a system deletes what is finished, from the next pass on."""
    committer = queues.committer
    await committer.room()
    flags = DELETE_WHEN_DONE if wanted else 0
    committer.rows.put(_OPTIONS_KEY, SystemOptions(flags=flags).encode())
    await committer.wait(committer.commit())


async def read_finished(database: DatabaseReads, shard: int) -> Finished | None:
    key = FinishedKey(shard=shard).encode()
    value = await database.get(key)
    return None if value is None else database.decode(Finished.decode, key, value)


async def waiting_ids(
    database: DatabaseReads,
    pace: Pace,
    *,
    now: int = EARLIEST_MS,
    forgotten: Container[FailureKey] = (),
) -> AsyncIterator[int]:
    """The messages that wait in queues, are held or have failed, of whatever shards.

    Those that wait and were to expire before ``now`` are left out, and failures that a pass would
    have ``forgotten`` before it asks. There may be millions, so there are rests between.
    """
    active_rows = _rows(database, RecordType.ACTIVE_MESSAGES, RecordType.DONE_MESSAGES, pace)
    async for key, value in active_rows:
        active = database.decode(ActiveMessages.decode, key, value)
        for available in active.available:
            if not 0 < available.retention_deadline < now:
                yield available.message_id
        for held in active.in_flight:
            yield held.message_id
    async for key, value in _rows(database, RecordType.BACKLOG, RecordType.SCHEDULE, pace):
        deadline = 0
        if now > EARLIEST_MS:
            deadline = database.decode(BacklogEntry.decode, key, value).retention_deadline
        if not 0 < deadline < now:
            yield database.decode(BacklogKey.decode, key, key).message_id
    async for key, _ in _rows(database, RecordType.SCHEDULE, RecordType.FAILURE, pace):
        yield database.decode(ScheduleKey.decode, key, key).message_id
    behind = RecordType(RecordType.FAILURE + 1)
    async for key, _ in _rows(database, RecordType.FAILURE, behind, pace):
        failure = database.decode(FailureKey.decode, key, key)
        if failure not in forgotten:
            yield failure.message_id


async def live_ids(
    database: DatabaseReads, shard: int, pace: Pace, *, forgotten: Container[FailureKey] = ()
) -> tuple[LiveIds, int]:
    """Which messages of a shard a snapshot of the queue store still needs, and up to where.

    From there on no queue has seen them all.
    """
    live = LiveIds()
    async for message_id in waiting_ids(database, pace, forgotten=forgotten):
        if message_id >> SEQUENCE_BITS == shard:
            live.add(message_id & _SEQUENCE)
    key = CursorKey(shard=shard).encode()
    cursor = await database.get(key)
    behind = 0
    if cursor is not None:
        behind = database.decode(Cursor.decode, key, cursor).next_sequence
    async for key, value in _rows(database, RecordType.REPLAY, RecordType.CLOCK, pace):
        if database.decode(ReplayKey.decode, key, key).shard == shard:
            behind = min(behind, database.decode(Replay.decode, key, value).next_sequence)
    return live, behind


def deadlines_of(
    database: DatabaseReads, shard: int, chunk: Iterable[Row], live: LiveIds
) -> dict[int, int]:
    """Of a part of the log, the messages that are not live, and when they expire; 0 for never."""
    gone = {}
    for key, value in chunk:
        sequence = int.from_bytes(key[-8:], "big")
        if sequence not in live:
            fields = database.decode(message_metadata_fields, key, value)
            gone[message_id_of(shard, sequence)] = retention_deadline(fields[2], fields[4])
    return gone


def not_expired(deadlines: Mapping[int, int], now: int) -> list[int]:
    """Those that are not past their time: the others were counted when they expired."""
    return [one for one, deadline in deadlines.items() if not deadline or deadline >= now]


async def _rows(
    database: DatabaseReads, first: RecordType, behind: RecordType, pace: Pace
) -> AsyncIterator[tuple[bytes, bytes]]:
    """Rows, with rests; what is done with them is a part of the work."""
    async for chunk in pace.each(database.scan(first.prefix, behind.prefix)):
        async with pace.work():
            for row in chunk:
                yield row


class FinishedMessages:
    """Deletes the finished messages of one shard."""

    def __init__(
        self,
        shard: MessageShard,
        retention: ShardRetention,
        position: Position,
        home: Written,
        *,
        number: int,
        options: CompactorOptions,
    ) -> None:
        """``home`` is where the store keeps how far it is: the shard, if its writer is not always
        the one of the queue store."""
        self._shard = shard
        self._queues: QueueStore | None = None
        self._known: set[tuple[str, int]] = set()
        self._retention = retention
        self._position = position
        self._home = home
        self._number = number
        self._options = options
        self._pace = Pace(options.work_share)
        self._deleted = 0

    async def sweep(self, queues: QueueStore, report: RetentionReport, *, anyway: bool) -> None:
        """Delete what is finished, if there may be enough of it, or ``anyway``."""
        self._queues = queues
        self._known = _made(queues)
        if not self._known or self._has_new_queue():
            return
        before = await read_finished(self._home.database, self._number)
        waiting = sum(
            len(queue.state.ready)
            + queue.state.schedule.count
            + len(queue.state.in_flight)
            + queue.state.finished.failed
            for queue in queues.queues()
        )
        if not anyway and not sweep_is_due(
            before,
            routed_up_to=await queues.cursor(self._number) or 0,
            live=waiting,
            now=report.now_ms,
            every_ms=self._options.sweep_interval_ms,
        ):
            return
        await queues.all_durable()
        snapshot = await queues.database.snapshot()
        await self._sweep(before, snapshot, report)

    async def sweep_seen(self, queues: DatabaseReads, report: RetentionReport) -> None:
        """As ``sweep``, by a snapshot of the queue store.

        A queue that is made from the past meanwhile may find none of what is finished for all
        others; what it finds and what goes then, it drops like what has expired.
        """
        first, behind = RecordType.QUEUE_CONFIG.prefix, RecordType.IDEMPOTENCY.prefix
        if [chunk async for chunk in queues.scan(first, behind, limit=1)]:
            before = await read_finished(self._home.database, self._number)
            await self._sweep(before, queues, report)
        # Without queues nothing is finished.

    async def _sweep(
        self, before: Finished | None, queues: DatabaseReads, report: RetentionReport
    ) -> None:
        live, behind = await live_ids(queues, self._number, self._pace)
        start = 0 if before is None else before.first_sequence
        if start >= behind:
            return
        self._deleted = 0
        if not await self._delete(live, start, behind, report):
            return
        if self._deleted:
            part = self._deleted / (self._deleted + live.count)
            size_bytes = await self._shard.database.size_bytes()
            self._position.freeable.add(int(size_bytes * part))
        first = await self._first_left(start, behind)
        finished = Finished(
            first_sequence=first,
            next_sequence=behind,
            messages_left=live.count,
            swept_at=report.now_ms,
        )
        rows = Rows()
        rows.put(FinishedKey(shard=self._number).encode(), finished.encode())
        await self._home.commit(rows)

    def _has_new_queue(self) -> bool:
        """Whether a queue may want what is finished for others, as far as this process knows.

        One that was made since the sweep began may have been given the past already.
        """
        if self._queues is None:
            return False
        return bool(self._queues.replaying(self._number)) or not _made(self._queues) <= self._known

    async def _delete(
        self, live: LiveIds, start: int, behind: int, report: RetentionReport
    ) -> bool:
        """Delete all others; false if a queue that begins in the past came in between."""
        database = self._shard.database
        first, end = encode_metadata_log_key(start), encode_metadata_log_key(behind)
        first_id = self._number << SEQUENCE_BITS
        async for chunk in self._pace.each(database.scan(first, end)):
            gone = deadlines_of(database, self._number, chunk, live)
            if gone and not await self._delete_some(gone, report):
                return False
        # After the log: what a crash has left of a message is its way to the blob.
        async for blobs in blobs_between(database, first_id | start, (first_id | behind) - 1):
            over = [one for one in blobs if one[0] & _SEQUENCE not in live]
            if not over:
                continue
            if self._has_new_queue():
                return False
            async with self._pace.work():
                await self._delete_blobs(over, {}, report)
        return True

    async def _delete_some(self, gone: dict[int, int], report: RetentionReport) -> bool:
        """Delete messages, given by their ids with their deadlines; false for a new queue."""
        async with self._pace.work():
            message_ids = list(gone)
            blobs = [
                (message_id, blob_id)
                async for chunk in blobs_between(
                    self._shard.database, message_ids[0], message_ids[-1]
                )
                for message_id, blob_id in chunk
                if message_id in gone
            ]
            blob_ids = dict(blobs)
            # Of a message with a blob, the expiry row goes when the blob is gone: it leads there.
            plain = {one: deadline for one, deadline in gone.items() if one not in blob_ids}
            rows = Rows()
            await self._cut_runs(plain, rows)
            if self._has_new_queue():
                return False
            # Before the rows of their messages, without which nothing would lead to them.
            await self._retention.delete_attempts(message_ids)
            if self._has_new_queue():
                return False
            await self._retention.delete_rows(message_ids, list(blob_ids.values()), rows)
            await self._delete_blobs(blobs, {one: gone[one] for one in blob_ids}, report)
            self._deleted += len(gone)
            report.count("finished messages", len(not_expired(gone, report.now_ms)))
        return True

    async def _delete_blobs(
        self,
        blobs: Sequence[tuple[int, bytes]],
        gone: Mapping[int, int],
        report: RetentionReport,
    ) -> None:
        """Delete blobs, then what leads to them, and what says when their messages expire."""
        await self._retention.delete_blobs(blobs, report)
        rows = Rows()
        for message_id, _ in blobs:
            rows.delete(MessageBlobKey(message_id=message_id).encode())
        await self._cut_runs(gone, rows)
        if len(rows):
            await self._shard.commit(rows)

    async def _cut_runs(self, gone: Mapping[int, int], rows: Rows) -> None:
        """Leave messages out of what says when they expire."""
        for run in await self._runs_of(gone):
            rows.delete(encode_expiry_key(run.deadline, run.first_id))
            for left in without(run, gone):
                put_expiry(rows, left.first_id, left.messages, left.deadline, left.size_bytes)

    async def _runs_of(self, gone: Mapping[int, int]) -> list[Run]:
        """The expiry rows of messages: without them, they would be counted again as expired."""
        by_deadline: dict[int, list[int]] = {}
        for message_id, deadline in gone.items():
            if deadline:
                by_deadline.setdefault(deadline, []).append(message_id)
        found: list[Run] = []
        for deadline, ids in by_deadline.items():
            start = encode_expiry_key(deadline, max(0, ids[0] - MAX_MESSAGES_AT_ONCE))
            async for run in runs_between(
                self._shard.database, start, encode_expiry_key(deadline, ids[-1] + 1)
            ):
                if run.last_id >= ids[0]:
                    found.append(run)
        return found

    async def _first_left(self, start: int, behind: int) -> int:
        database = self._shard.database
        first, end = encode_metadata_log_key(start), encode_metadata_log_key(behind)
        async for chunk in database.scan(first, end, limit=1):
            for key, _ in chunk:
                return int.from_bytes(key[-8:], "big")
        return behind


def _made(queues: QueueStore) -> set[tuple[str, int]]:
    """The queues there are. One that was deleted and made anew is another one."""
    return {(queue.name, queue.created_at_ms) for queue in queues.queues()}
