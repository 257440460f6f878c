"""What queues hold past its time: entries that wait, done and failed ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from odq_compactor.options import CompactorOptions
from odq_compactor.pace import Pace
from odq_compactor.plan import Ids, PastBuckets, past_buckets
from odq_compactor.report import RetentionReport
from odq_encodings import RetentionFloor, RetentionFloorKey
from opendata_queue.model.errors import QueueNotFoundError
from opendata_queue.model.options import FOR_EVER_MS
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.store import QueueStore
from opendata_queue.store import DatabaseReads

BUCKETS_AT_ONCE: Final = 16
QUEUES_AT_ONCE: Final = 100
_NO_FLOOR: Final = RetentionFloor(done_bucket=0, failed_bucket=0)
# Rows of a backlog this close together are read with one scan.
BACKLOG_GAP: Final = 64
SPANS_AT_ONCE: Final = 100
"""After so many scans of a backlog there is a rest."""


async def read_floor(database: DatabaseReads, queue_id: bytes) -> RetentionFloor:
    """Where the sealed buckets of a queue begin."""
    key = RetentionFloorKey(queue_id=queue_id).encode()
    value = await database.get(key)
    return _NO_FLOOR if value is None else database.decode(RetentionFloor.decode, key, value)


async def expire_in_backlogs(
    queues: QueueStore, ids: Ids, report: RetentionReport, pace: Pace
) -> None:
    """Drop expired messages from the backlogs that they are in; idle queues cost nothing.

    Thousands of queues may have backlogs, and ids may lie far apart: there are rests in between.
    """
    changed = False
    spans = ids.spans(BACKLOG_GAP)
    for queue in queues.queues():
        if queue.state.ready.backlog.total:
            for start in range(0, len(spans), SPANS_AT_ONCE):
                some = spans[start : start + SPANS_AT_ONCE]
                try:
                    async with pace.work():
                        changed |= await _expire_in_backlog(queues, queue, some, report)
                except QueueNotFoundError:  # deleted meanwhile
                    break
    if changed:  # durable before the expiry rows that led to them are gone
        await queues.all_durable()


async def _expire_in_backlog(
    queues: QueueStore,
    queue: StoredQueue,
    spans: Sequence[tuple[int, int]],
    report: RetentionReport,
) -> bool:
    changed = False
    for first, last in spans:
        if not any(start <= last for _, start, _ in queue.state.ready.backlog.ranges()):
            continue
        async with queue.reading() as indexes:
            await queues.committer.room()
            found = await indexes.backlog_between(first, last)
            queue.check()
            expired = [message for message in found if message.expired(report.now_ms)]
            if expired:
                queue.state.expire_backlog(expired)
                queue.changed()
                queues.committer.commit()
                changed = True
        report.count("expired entries", len(expired), queue.name)
    return changed


@dataclass(slots=True)
class _Known:
    """What is remembered of a queue, so that one with nothing to remove costs no read."""

    floor: RetentionFloor
    oldest_done: int | None = None
    oldest_failed: int | None = None


class QueueRetention:
    """Removes expired entries from the queues of an owner."""

    def __init__(self, queues: QueueStore, options: CompactorOptions) -> None:
        self._queues = queues
        self._pace = Pace(options.work_share)
        self._known: weakref.WeakKeyDictionary[StoredQueue, _Known] = weakref.WeakKeyDictionary()

    async def expire_windows(self, report: RetentionReport) -> None:
        """Drop what has expired in windows: from there it could get into a backlog again."""
        for some in self._by_some():
            async with self._pace.work():
                for queue in some:
                    with suppress(QueueNotFoundError):  # deleted meanwhile
                        await self._expire_window(queue, report)

    async def forget_finished(self, report: RetentionReport) -> None:
        """Forget done and failed entries that are past the retention of their queues."""
        for some in self._by_some():
            async with self._pace.work():
                for queue in some:
                    with suppress(QueueNotFoundError):  # deleted meanwhile
                        await self._forget_done(queue, report)
                        await self._forget_failed(queue, report)

    def _by_some(self) -> list[list[StoredQueue]]:
        """All queues, some at a time: most have nothing to remove, but there may be thousands."""
        queues = self._queues.queues()
        return [
            queues[start : start + QUEUES_AT_ONCE]
            for start in range(0, len(queues), QUEUES_AT_ONCE)
        ]

    async def _expire_window(self, queue: StoredQueue, report: RetentionReport) -> None:
        if not any(one.expired(report.now_ms) for one in queue.state.ready.window()):
            return
        await self._queues.room_for(queue)
        expired = queue.state.expire_window(report.now_ms)
        if expired:
            queue.changed()
            await self._queues.committer.wait(self._queues.committer.commit())
        report.count("expired entries", expired, queue.name)

    async def _knows(self, queue: StoredQueue) -> _Known:
        known = self._known.get(queue)
        if known is None:
            floor = await read_floor(self._queues.database, queue.queue_id)
            known = self._known[queue] = _Known(floor)
        return known

    # --- done -------------------------------------------------------------------------------------

    async def _forget_done(self, queue: StoredQueue, report: RetentionReport) -> None:
        since = queue.options.done_since(report.now_ms)
        if since == FOR_EVER_MS:
            return
        if queue.state.finished.done_bucket:
            known = await self._knows(queue)
            while known.floor.done_bucket < queue.state.finished.done_bucket and (
                known.oldest_done is None or known.oldest_done < since
            ):
                async with self._pace.work():
                    more = await self._forget_sealed_done(queue, known, since, report)
                if not more:
                    break
        await self._queues.room_for(queue)
        forgotten = queue.state.trim_done(since)
        if forgotten:
            queue.changed()
            await self._queues.committer.wait(self._queues.committer.commit())
        report.count("done entries", forgotten, queue.name)

    async def _forget_sealed_done(
        self, queue: StoredQueue, known: _Known, since: int, report: RetentionReport
    ) -> bool:
        """One batch; whether there may be more."""
        await self._queues.all_durable()
        sealed = await queue.finished.oldest_done(known.floor.done_bucket, BUCKETS_AT_ONCE)
        past = past_buckets([(number, bucket.messages) for number, bucket in sealed], since)
        await self._queues.room_for(queue)
        for number in past.dropped:
            queue.finished.rewrite_done(number, ())
        if past.rewritten is not None:
            number, kept = past.rewritten
            queue.finished.rewrite_done(number, [entry.encode() for entry in kept])
        known.oldest_done = past.oldest_kept
        if past.forgotten:
            queue.state.forget_done(len(past.forgotten))
            floor = RetentionFloor(
                done_bucket=_behind(past, known.floor.done_bucket),
                failed_bucket=known.floor.failed_bucket,
            )
            await self._write_floor(queue, known, floor)
        report.count("done entries", len(past.forgotten), queue.name)
        return len(sealed) == BUCKETS_AT_ONCE and past.oldest_kept is None

    # --- failed -----------------------------------------------------------------------------------

    async def _forget_failed(self, queue: StoredQueue, report: RetentionReport) -> None:
        since = queue.options.failed_since(report.now_ms)
        if since == FOR_EVER_MS:
            return
        if queue.state.finished.failed_bucket:
            known = await self._knows(queue)
            while known.floor.failed_bucket < queue.state.finished.failed_bucket and (
                known.oldest_failed is None or known.oldest_failed < since
            ):
                async with self._pace.work():
                    more = await self._forget_sealed_failed(queue, known, since, report)
                if not more:
                    break
        # Replays hold it, too: each must find what the other has left.
        async with queue.reading():
            await self._queues.room_for(queue)
            forgotten = queue.state.trim_failed(since)
            if forgotten:
                queue.changed()
                await self._queues.committer.wait(self._queues.committer.commit())
        report.count("failed entries", forgotten, queue.name)

    async def _forget_sealed_failed(
        self, queue: StoredQueue, known: _Known, since: int, report: RetentionReport
    ) -> bool:
        """One batch; whether there may be more."""
        async with queue.reading() as indexes:
            await self._queues.all_durable()
            sealed = await indexes.oldest_failed(known.floor.failed_bucket, BUCKETS_AT_ONCE)
            past = past_buckets([(number, bucket.messages) for number, bucket in sealed], since)
            await self._queues.room_for(queue)
            for number in past.dropped:
                indexes.rewrite_failed(number, {})
            if past.rewritten is not None:
                number, kept = past.rewritten
                indexes.rewrite_failed(number, {one.message_id: one.encode() for one in kept})
            # The oldest one may be replayed, but then only younger ones are left.
            known.oldest_failed = past.oldest_kept
            if past.forgotten:
                queue.state.forget_failures(past.forgotten)
                floor = RetentionFloor(
                    done_bucket=known.floor.done_bucket,
                    failed_bucket=_behind(past, known.floor.failed_bucket),
                )
                await self._write_floor(queue, known, floor)
        report.count("failed entries", len(past.forgotten), queue.name)
        return len(sealed) == BUCKETS_AT_ONCE and past.oldest_kept is None

    async def _write_floor(self, queue: StoredQueue, known: _Known, floor: RetentionFloor) -> None:
        queue.finished.put_floor(floor)
        queue.changed()
        await self._queues.committer.wait(self._queues.committer.commit())
        known.floor = floor


def _behind(past: PastBuckets, floor: int) -> int:
    """The number that buckets begin with when those were dropped."""
    if past.rewritten is not None:
        return past.rewritten[0]
    return past.dropped[-1] + 1 if past.dropped else floor
