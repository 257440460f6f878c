"""Messages whose retention is over, and blobs that nothing leads to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from odq_compactor.options import CompactorOptions
from odq_compactor.pace import Pace
from odq_compactor.plan import Ids, Run, batches, expired_runs, old_blobs
from odq_compactor.positions import Position
from odq_compactor.queues import expire_in_backlogs
from odq_compactor.report import RetentionReport
from odq_encodings import (
    BLOB_ID_BYTES,
    BlobReferenceKey,
    Expiry,
    ExpiryKey,
    MessageBlob,
    MessageBlobKey,
    encode_attempts_key,
    encode_expiry_key,
    encode_metadata_log_key,
    encode_payload_key,
)
from opendata_queue.log.writer import MessageShard
from opendata_queue.model.ids import SEQUENCE_MASK
from opendata_queue.model.paths import blobs_path
from opendata_queue.queues.store import QueueStore
from opendata_queue.store import DatabaseReads, Objects, Rows

RUNS_AT_ONCE: Final = 1_000
BLOBS_AT_ONCE: Final = 1_000
_REQUESTS_AT_ONCE: Final = 16
EARLIEST_MS: Final = -(1 << 63)
_SEQUENCE: Final = SEQUENCE_MASK
# Blobs are few: reading over the ids between two runs costs less than another scan.
_BLOB_GAP: Final = 100_000


async def due_runs(
    database: DatabaseReads, now: int, *, since: int = EARLIEST_MS, at_once: int = RUNS_AT_ONCE
) -> AsyncIterator[list[Run]]:
    """What was to expire before ``now``, the oldest first, in lists of a bounded size.

    Nothing is to be left that was to expire before ``since``.
    """
    start = encode_expiry_key(since)
    while True:
        runs = await next_runs(database, start, now, at_once)
        if runs:
            yield runs
        if len(runs) < at_once:
            return
        start = encode_expiry_key(runs[-1].deadline, runs[-1].first_id) + b"\x00"


async def runs_between(
    database: DatabaseReads, start: bytes, end: bytes, limit: int | None = None
) -> AsyncIterator[Run]:
    async for chunk in database.scan(start, end, limit=limit):
        for key, value in chunk:
            where = database.decode(ExpiryKey.decode, key, key)
            yield Run.of(where, database.decode(Expiry.decode, key, value))


async def next_runs(database: DatabaseReads, start: bytes, before: int, limit: int) -> list[Run]:
    """The next runs from a key on whose deadlines are below ``before``."""
    end = encode_expiry_key(before)
    return [run async for run in runs_between(database, start, end, limit)]


async def next_due(database: DatabaseReads, now: int, *, since: int) -> bool:
    """Whether anything was to expire before ``now``."""
    return bool(await next_runs(database, encode_expiry_key(since), now, 1))


async def blobs_between(
    database: DatabaseReads, first_id: int, last_id: int
) -> AsyncIterator[list[tuple[int, bytes]]]:
    """Messages that have a blob, and its id, by ascending id of the message."""
    start = MessageBlobKey(message_id=first_id).encode()
    end = MessageBlobKey(message_id=last_id).encode() + b"\x00"
    async for chunk in database.scan(start, end):
        yield [
            (
                database.decode(MessageBlobKey.decode, key, key).message_id,
                database.decode(MessageBlob.decode, key, value).blob_id,
            )
            for key, value in chunk
        ]


async def blobs_of(database: DatabaseReads, ids: Ids) -> list[tuple[int, bytes]]:
    """Those of some messages that have a blob."""
    return [
        (message_id, blob_id)
        for first, last in ids.spans(_BLOB_GAP)
        async for chunk in blobs_between(database, first, last)
        for message_id, blob_id in chunk
        if message_id in ids
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedBlobs:
    """Which of some blobs have no message, and where to go on."""

    orphans: list[tuple[bytes, int]]
    """Their ids and sizes."""

    last_blob: bytes | None
    """No blob up to this one has to be checked again; none if there was none to check."""

    more_after: str | None
    """Behind which name to go on; none if nothing behind it is old enough."""


async def orphans_after(
    database: DatabaseReads, objects: Objects, shard: int, after: str, *, now: int, age_ms: int
) -> CheckedBlobs:
    """Check the next blobs behind a name that are old enough."""
    listed = await objects.list_from(blobs_path(shard), after, BLOBS_AT_ONCE)
    old, young_ones_follow = old_blobs(listed, now=now, age_ms=age_ms)
    found = await database.get_many([BlobReferenceKey(blob_id=one).encode() for one, _ in old])
    is_all = young_ones_follow or len(listed) < BLOBS_AT_ONCE
    return CheckedBlobs(
        orphans=[blob for blob, reference in zip(old, found, strict=True) if reference is None],
        last_blob=old[-1][0] if old else None,
        more_after=None if is_all else listed[-1][0],
    )


def first_name(blob_id: bytes) -> str:
    """The name behind which blobs were not checked yet, given the last one that was."""
    return blob_id.hex() if any(blob_id) else ""


async def size_of_blobs(objects: Objects, shard: int, blob_ids: Sequence[bytes]) -> int:
    """How many bytes some blobs have. Nothing else knows it, so each is asked for its own."""
    size_bytes = 0
    for start in range(0, len(blob_ids), _REQUESTS_AT_ONCE):
        some = blob_ids[start : start + _REQUESTS_AT_ONCE]
        size_bytes += sum(
            await asyncio.gather(*(objects.size_of(_path(shard, one)) for one in some))
        )
    return size_bytes


def _path(shard: int, blob_id: bytes) -> str:
    return f"{blobs_path(shard)}/{blob_id.hex()}"


class ShardRetention:
    """Removes expired messages of one shard that this process writes.

    Without the queue store it is up to another process to take them out of queues before.
    """

    def __init__(
        self,
        shard: MessageShard,
        queues: QueueStore | None,
        position: Position,
        *,
        number: int,
        options: CompactorOptions,
    ) -> None:
        self._shard = shard
        self._queues = queues
        self._position = position
        self._number = number
        self._options = options
        self._pace = Pace(options.work_share)
        self._objects = shard.objects
        self._ttl_grace_ms = shard.objects.settings.ttl_grace_ms

    # --- messages past their retention ------------------------------------------------------------

    async def expire(
        self, report: RetentionReport, *, routed_up_to: int, before: int, thorough: bool = False
    ) -> None:
        """Remove what was to expire before a time, as far as it is routed.

        A thorough pass begins with the first row there is, whatever is known.
        """
        published_until = self._shard.clock.now_ms()
        since = EARLIEST_MS if thorough else self._position.due_from
        left = before
        async for due in self._pace.each(due_runs(self._shard.database, before, since=since)):
            expired = expired_runs(due, now=before, routed_up_to=routed_up_to)
            for batch in batches(expired, self._options.batch_messages):
                async with self._pace.work():
                    await self._expire(batch, report)
            left = min([left, *(run.deadline for run in due if run not in expired)])
            # Of the last deadline there may be more runs.
            self._position.passed(min(left, due[-1].deadline), published_until=published_until)
        self._position.passed(left, published_until=published_until)

    async def _expire(self, runs: Sequence[Run], report: RetentionReport) -> None:
        """Each step may be the last one before a crash: the runs themselves go at the end."""
        ids = Ids(runs)
        if self._queues is not None:
            await expire_in_backlogs(self._queues, ids, report, self._pace)
        blobs = await blobs_of(self._shard.database, ids)
        erased = list(ids) if self._options.erase else [message_id for message_id, _ in blobs]
        await self.delete_rows(erased, [blob_id for _, blob_id in blobs])
        if self._options.erase:
            await self.delete_attempts(erased)
        await self.delete_blobs(blobs, report)
        rows = Rows()
        for run in runs:
            rows.delete(encode_expiry_key(run.deadline, run.first_id))
            aged_at = run.deadline + self._ttl_grace_ms
            is_aged = self._options.erase or aged_at < report.now_ms
            self._position.freeable.add(run.size_bytes, aged_at=0 if is_aged else aged_at)
            report.row_bytes += run.size_bytes
            report.aging_bytes += 0 if is_aged else run.size_bytes
        for message_id, _ in blobs:
            rows.delete(MessageBlobKey(message_id=message_id).encode())
        self._position.put(rows)
        await self._shard.commit(rows)
        report.count("expired messages", sum(run.messages for run in runs))

    async def delete_rows(
        self, message_ids: Sequence[int], blob_ids: Sequence[bytes], rows: Rows | None = None
    ) -> None:
        """Payload, metadata and blob reference: a message goes whole or not at all.

        In one batch with other ``rows`` that must not outlive them.
        """
        if not message_ids:
            return
        rows = Rows() if rows is None else rows
        for message_id in message_ids:
            rows.delete(encode_payload_key(message_id))
            rows.delete(encode_metadata_log_key(message_id & _SEQUENCE))
        for blob_id in blob_ids:
            rows.delete(BlobReferenceKey(blob_id=blob_id).encode())
        self._shard.recent.forget(message_ids)
        await self._shard.commit(rows)

    async def delete_attempts(self, message_ids: Sequence[int]) -> None:
        """Forget who has claimed messages that are gone, if the queue store is ours."""
        if self._queues is not None:
            await delete_attempts(self._queues, message_ids)

    async def delete_blobs(
        self, blobs: Sequence[tuple[int, bytes]], report: RetentionReport
    ) -> None:
        """Delete blobs of messages whose rows are gone; the way to them stays until then."""
        blob_ids = [blob_id for _, blob_id in blobs]
        report.blob_bytes += await size_of_blobs(self._objects, self._number, blob_ids)
        await self._delete_objects(blob_ids)
        report.count("blobs", len(blobs))

    async def _delete_objects(self, blob_ids: Sequence[bytes]) -> None:
        for start in range(0, len(blob_ids), _REQUESTS_AT_ONCE):
            some = blob_ids[start : start + _REQUESTS_AT_ONCE]
            paths = [_path(self._number, one) for one in some]
            await asyncio.gather(*(self._objects.delete(path) for path in paths))

    # --- blobs without a message ------------------------------------------------------------------

    async def collect_orphans(self, report: RetentionReport) -> None:
        more: str | None = first_name(self._position.record.blob_id)
        while more is not None:
            async with self._pace.work():
                more = await self._collect_some(more, report)

    async def _collect_some(self, after: str, report: RetentionReport) -> str | None:
        """Check some blobs behind a name; where to go on, if there are more."""
        checked = await orphans_after(
            self._shard.database,
            self._objects,
            self._number,
            after,
            now=report.now_ms,
            age_ms=self._options.orphan_age_ms,
        )
        await self._delete_objects([blob_id for blob_id, _ in checked.orphans])
        if checked.last_blob is not None:
            assert len(checked.last_blob) == BLOB_ID_BYTES
            await self._position.write(blob_id=checked.last_blob)
        report.count("orphaned blobs", len(checked.orphans))
        report.blob_bytes += sum(size_bytes for _, size_bytes in checked.orphans)
        return checked.more_after


async def delete_attempts(queues: QueueStore, message_ids: Sequence[int]) -> None:
    """Forget who has claimed messages that are gone."""
    if not message_ids:
        return
    committer = queues.committer
    await committer.room()
    for message_id in message_ids:
        committer.rows.delete(encode_attempts_key(message_id))
    await committer.wait(committer.commit())
