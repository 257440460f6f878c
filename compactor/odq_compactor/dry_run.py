"""What a pass would remove. Nothing is written, and the owner of the root is not disturbed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final

from odq_compactor.bulk import (
    committed_deadlines,
    committed_shards,
    due_shards,
    filed_up_to,
    shard_rows,
)
from odq_compactor.bulk_files import judged_commits, old_reservations
from odq_compactor.finished import (
    deadlines_of,
    deletes_when_done,
    live_ids,
    not_expired,
    read_finished,
)
from odq_compactor.finished_bulk import expired_of, finished_shards
from odq_compactor.live_shard import cursor_of
from odq_compactor.messages import (
    EARLIEST_MS,
    blobs_between,
    blobs_of,
    due_runs,
    first_name,
    orphans_after,
    size_of_blobs,
)
from odq_compactor.options import CompactorOptions
from odq_compactor.pace import Pace
from odq_compactor.plan import Ids, PastBuckets, Run, expired_runs, past_buckets
from odq_compactor.positions import read_position
from odq_compactor.queues import BACKLOG_GAP, BUCKETS_AT_ONCE, read_floor
from odq_compactor.report import RetentionReport
from odq_encodings import (
    BulkShard,
    BulkShardKey,
    ClockKey,
    ClockMark,
    DoneMessages,
    FailedMessages,
    FailureKey,
    RecordType,
    encode_bulk_expiry_key,
    encode_metadata_log_key,
)
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import CorruptStoreError, StoreAccessError
from opendata_queue.model.ids import SHARD_SEQUENCES, first_id_of
from opendata_queue.model.paths import QUEUES_PATH, blobs_path, messages_path
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.snapshot import QueueSnapshot
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.descriptor import read_root
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.root.timekeeping import reading_clock
from opendata_queue.store import DatabaseReader, Objects, StoreSettings

logger = logging.getLogger(__name__)

_QUEUES: Final = QUEUES_PATH
_OWNERS_SHARD: Final = 0
_EVERYTHING: Final = SHARD_SEQUENCES
_SEQUENCE: Final = _EVERYTHING - 1
_NO_REST: Final = Pace(1.0)
_CLOCK_KEY: Final = ClockKey().encode()
_ALWAYS_DUE: Final = 1, 0
"""When the messages of a shard expire, if that is not known."""


async def plan_root(
    url: str,
    *,
    options: CompactorOptions | None = None,
    settings: StoreSettings | None = None,
    clock: Clock | None = None,
) -> RetentionReport:
    """What a pass on the root at ``url`` would remove now."""
    objects = Objects.open(url, settings or StoreSettings())
    if await read_root(objects) is None:
        raise StoreAccessError(f"there is no root at {url}")
    clock = await reading_clock(objects, machine_clock(clock))
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with AsyncExitStack() as stack:
        queues = await _opened(stack, objects, _QUEUES)
        # A pass goes by the clock of an owner, which is never behind that of those before it.
        now = max(clock.now_ms(), await _marked_ms(queues))
        report = RetentionReport(now_ms=now, dry_run=True)
        snapshot = QueueSnapshot(queues, clock)
        await snapshot.load(*await snapshot.filters())
        survey = _Survey(snapshot, queues, objects, report, options or CompactorOptions())
        await survey.run()
        report.bytes_before = await objects.size_bytes()
    report.requests = objects.requests
    report.duration_ms = round((loop.time() - started) * 1000)
    return report


async def _marked_ms(queues: DatabaseReader | None) -> int:
    """The latest time that an owner has seen."""
    value = None if queues is None else await queues.get(_CLOCK_KEY)
    if queues is None or value is None:
        return 0
    return queues.decode(ClockMark.decode, _CLOCK_KEY, value).now


async def _opened(stack: AsyncExitStack, objects: Objects, path: str) -> DatabaseReader | None:
    reader = await DatabaseReader.look(objects, path)
    if reader is not None:
        stack.push_async_callback(reader.close)
    return reader


class _Survey:
    """Goes where a pass goes, and only counts."""

    def __init__(
        self,
        snapshot: QueueSnapshot,
        queues: DatabaseReader | None,
        objects: Objects,
        report: RetentionReport,
        options: CompactorOptions,
    ) -> None:
        self._snapshot = snapshot
        self._queues = queues
        self._objects = objects
        self._report = report
        self._options = options
        self._forgotten: set[FailureKey] = set()
        """Failed entries that are past: a pass forgets them before it asks what is finished."""
        self._past: set[int] = set()
        """Bulk shards of which all is past."""

    async def run(self) -> None:
        for name in self._snapshot.names():
            queue = self._snapshot.queue(name)
            expired = sum(one.expired(self._report.now_ms) for one in queue.state.ready.window())
            self._report.count("expired entries", expired, name)
            await self._finished_entries(queue)
        for number in (_OWNERS_SHARD, *await ShardFiles(self._objects).live_shards()):
            async with AsyncExitStack() as stack:
                shard = await _opened(stack, self._objects, messages_path(number))
                if shard is not None:
                    await self._live_shard(number, shard)
        if self._queues is not None:
            await self._bulk_shards(self._queues)

    # --- shards -----------------------------------------------------------------------------------

    async def _live_shard(self, number: int, shard: DatabaseReader) -> None:
        names = self._snapshot.names()
        routed_up_to = _EVERYTHING
        if names and self._queues is not None:
            routed_up_to = await cursor_of(self._queues, number)
        expired: list[Run] = []
        async for runs in due_runs(shard, self._report.now_ms):
            some = expired_runs(runs, now=self._report.now_ms, routed_up_to=routed_up_to)
            if some:
                await self._expired(number, shard, some)
                expired += some
        await self._orphans(number, shard)
        if names and self._queues is not None and await deletes_when_done(self._queues):
            await self._finished_messages(number, shard, self._queues, Ids(expired))

    async def _bulk_shards(self, queues: DatabaseReader) -> None:
        async for bulk, is_past in self._bulk_to_look_at(queues):
            if is_past:
                await self._expired_entries(
                    Ids([Run(0, first_id_of(bulk.shard), bulk.next_sequence, 0)])
                )
            elif not await self._expired_of_bulk(bulk):
                continue
            self._past.add(bulk.shard)
            self._report.count("expired messages", bulk.messages)
            await self._whole_shard(bulk.shard, bulk.size_bytes)
        if self._snapshot.names() and await deletes_when_done(queues):
            await self._finished_bulk(queues)
        commits, files = CommitFiles(self._objects), ShardFiles(self._objects)
        kept_since = self._report.now_ms - self._options.bulk_kept_ms
        judged = await judged_commits(commits, queues, kept_since, self._options.bulk_commits_kept)
        self._report.count("control files", len(judged.old))
        await self._unregistered(judged.unseen or [])
        async for reservations in old_reservations(files, queues, kept_since, judged.named):
            self._report.count("control files", len(reservations))
            for one in reservations:
                if not one.committed:
                    await self._objects_of(one.shard)

    async def _bulk_to_look_at(
        self, queues: DatabaseReader
    ) -> AsyncIterator[tuple[BulkShard, bool]]:
        """Those that are due, and those of which it is not known yet.

        Also whether all of a shard is known to be past.
        """
        start = encode_bulk_expiry_key(EARLIEST_MS)
        while due := await due_shards(queues, start, self._report.now_ms):
            shards = await shard_rows(queues, [one.number for one in due])
            for one, shard in zip(due, shards, strict=True):
                if shard is not None:
                    yield shard, one.is_past(self._report.now_ms)
                else:  # a pass that was killed has left its objects
                    await self._objects_of(one.shard)
            start = due[-1].key + b"\x00"
        async for shard, (first, last) in self._not_filed(queues):
            if 0 < first < self._report.now_ms:
                yield shard, 0 < last < self._report.now_ms

    async def _not_filed(
        self, queues: DatabaseReader
    ) -> AsyncIterator[tuple[BulkShard, tuple[int, int]]]:
        """Shards that a pass would file, and when their first and last messages expire."""
        commits = CommitFiles(self._objects)
        job, committed = "", dict[int, CommittedShard]()
        may_read = self._options.bulk_shards_read
        first = BulkShardKey(number=await filed_up_to(queues)).encode()
        async for chunk in queues.scan(first, RecordType.BULK_JOB.prefix):
            for key, value in chunk:
                shard = queues.decode(BulkShard.decode, key, value)
                if shard.job != job:
                    job = shard.job
                    committed = {one.shard: one for one in await committed_shards(commits, job)}
                deadlines = committed_deadlines(shard, committed.get(shard.shard))
                if deadlines is None:
                    if not may_read:
                        return
                    may_read -= 1
                    deadlines = _ALWAYS_DUE  # its rows say when
                yield shard, deadlines

    async def _expired_of_bulk(self, bulk: BulkShard) -> bool:
        """Entries that have expired; whether all has, for rows go with the last one only."""
        gone = 0
        try:
            async with AsyncExitStack() as stack:
                shard = await _opened(stack, self._objects, messages_path(bulk.shard))
                if shard is None:
                    return False
                async for runs in due_runs(shard, self._report.now_ms):
                    gone += sum(run.messages for run in runs)
                    await self._expired_entries(Ids(runs))
        except CorruptStoreError as error:
            logger.warning("bulk shard %d can't be read: %s", bulk.shard, error)
        # Messages that never expire have no expiry row.
        return gone >= bulk.messages

    async def _unregistered(self, commits: list[Commit]) -> None:
        """What a pass would register and route first: nothing of it is in a queue yet."""
        for one in (shard for commit in commits for shard in commit.shards):
            if await self._is_past(one):
                self._report.count("expired messages", one.messages)
                await self._whole_shard(one.shard, one.bytes)

    async def _is_past(self, one: CommittedShard) -> bool:
        now = self._report.now_ms
        if not one.messages:
            return True
        if one.expires_at is not None:
            return 0 < one.expires_at < now
        return await self._how_many_expired(one.shard) >= one.messages

    async def _finished_bulk(self, queues: DatabaseReader) -> None:
        """Shards that no queue needs, but for those that go since they are past."""
        if any(self._snapshot.queue(name).replays for name in self._snapshot.names()):
            return
        async for one in finished_shards(
            queues, _NO_REST, now=self._report.now_ms, forgotten=self._forgotten
        ):
            if one.shard not in self._past:
                expired = await self._how_many_expired(one.shard)
                self._report.count("expired messages", expired)
                self._report.count("finished messages", one.row.messages - expired)
                await self._whole_shard(one.shard, one.row.size_bytes)

    async def _how_many_expired(self, bulk_shard: int) -> int:
        try:
            async with AsyncExitStack() as stack:
                shard = await _opened(stack, self._objects, messages_path(bulk_shard))
                return 0 if shard is None else await expired_of(shard, self._report.now_ms)
        except CorruptStoreError as error:
            logger.warning("bulk shard %d can't be read: %s", bulk_shard, error)
            return 0

    async def _whole_shard(self, shard: int, size_bytes: int) -> None:
        self._report.count("bulk shards", 1)
        self._report.row_bytes += size_bytes
        self._report.blob_bytes += await self._objects.size_bytes(blobs_path(shard))

    async def _objects_of(self, shard: int) -> None:
        """What is there of a shard that has no row."""
        file_bytes = await self._objects.size_bytes(messages_path(shard))
        blob_bytes = await self._objects.size_bytes(blobs_path(shard))
        self._report.count("bulk shards", file_bytes + blob_bytes > 0)
        self._report.blob_bytes += blob_bytes

    async def _expired(self, number: int, shard: DatabaseReader, runs: list[Run]) -> None:
        ids = Ids(runs)
        self._report.count("expired messages", sum(run.messages for run in runs))
        self._report.row_bytes += sum(run.size_bytes for run in runs)
        if not self._options.erase:
            aged_since = self._report.now_ms - self._objects.settings.ttl_grace_ms
            aging = [run.size_bytes for run in runs if run.deadline >= aged_since]
            self._report.aging_bytes += sum(aging)
        blob_ids = [blob_id for _, blob_id in await blobs_of(shard, ids)]
        self._report.count("blobs", len(blob_ids))
        self._report.blob_bytes += await size_of_blobs(self._objects, number, blob_ids)
        await self._expired_entries(ids)

    # --- queues -----------------------------------------------------------------------------------

    async def _expired_entries(self, ids: Ids) -> None:
        for name in self._snapshot.names():
            queue = self._snapshot.queue(name)
            if not queue.state.ready.backlog.total:
                continue
            for first, last in ids.spans(BACKLOG_GAP):
                async with queue.reading() as indexes:
                    found = await indexes.backlog_between(first, last)
                expired = sum(one.expired(self._report.now_ms) for one in found)
                self._report.count("expired entries", expired, name)

    async def _finished_entries(self, queue: StoredQueue) -> None:
        assert self._queues is not None
        floor = await read_floor(self._queues, queue.queue_id)
        now, state = self._report.now_ms, queue.state
        since = queue.options.done_since(now)
        done = [
            (state.finished.done_bucket, DoneMessages.decode(state.finished.done_record()).messages)
        ]
        start = floor.done_bucket
        while True:
            sealed = await queue.finished.oldest_done(start, BUCKETS_AT_ONCE)
            past = past_buckets([(number, one.messages) for number, one in sealed], since)
            self._report.count("done entries", len(past.forgotten), queue.name)
            if len(sealed) < BUCKETS_AT_ONCE or past.oldest_kept is not None:
                break
            start = sealed[-1][0] + 1
        self._report.count("done entries", len(past_buckets(done, since).forgotten), queue.name)
        since = queue.options.failed_since(now)
        failed = [
            (
                state.finished.failed_bucket,
                FailedMessages.decode(state.finished.failed_record()).messages,
            )
        ]
        start = floor.failed_bucket
        while True:
            async with queue.reading() as indexes:
                lost = await indexes.oldest_failed(start, BUCKETS_AT_ONCE)
            past = past_buckets([(number, one.messages) for number, one in lost], since)
            self._forget_failures(queue, past)
            if len(lost) < BUCKETS_AT_ONCE or past.oldest_kept is not None:
                break
            start = lost[-1][0] + 1
        self._forget_failures(queue, past_buckets(failed, since))

    def _forget_failures(self, queue: StoredQueue, past: PastBuckets) -> None:
        self._report.count("failed entries", len(past.forgotten), queue.name)
        self._forgotten.update(
            FailureKey(queue_id=queue.queue_id, message_id=one) for one in past.forgotten
        )

    # --- what is not needed any more --------------------------------------------------------------

    async def _orphans(self, number: int, shard: DatabaseReader) -> None:
        after: str | None = first_name((await read_position(shard)).blob_id)
        while after is not None:
            checked = await orphans_after(
                shard,
                self._objects,
                number,
                after,
                now=self._report.now_ms,
                age_ms=self._options.orphan_age_ms,
            )
            after = checked.more_after
            self._report.count("orphaned blobs", len(checked.orphans))
            self._report.blob_bytes += sum(size_bytes for _, size_bytes in checked.orphans)

    async def _finished_messages(
        self, number: int, shard: DatabaseReader, queues: DatabaseReader, expired: Ids
    ) -> None:
        if any(number in self._snapshot.queue(name).replays for name in self._snapshot.names()):
            return
        home = queues if number == _OWNERS_SHARD else shard
        before = await read_finished(home, number)
        live, behind = await live_ids(queues, number, _NO_REST, forgotten=self._forgotten)
        first = 0 if before is None else before.first_sequence
        if first >= behind:
            return
        start, end = encode_metadata_log_key(first), encode_metadata_log_key(behind)
        async for chunk in shard.scan(start, end):
            gone = deadlines_of(shard, number, chunk, live)
            counted = not_expired(gone, self._report.now_ms)
            self._report.count("finished messages", len(counted))
        # A kill may have left blobs of messages that are gone.
        first_id = first_id_of(number)
        async for blobs in blobs_between(shard, first_id | first, (first_id | behind) - 1):
            blob_ids = [
                blob_id
                for message_id, blob_id in blobs
                if message_id & _SEQUENCE not in live and message_id not in expired
            ]
            self._report.count("blobs", len(blob_ids))
            self._report.blob_bytes += await size_of_blobs(self._objects, number, blob_ids)
