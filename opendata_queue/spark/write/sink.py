"""Writing: each task attempt fills a shard of its own, and the driver commits them all at once.

Nothing of a job exists before its commit, a file that is created once: so tasks may fail, run
twice, or come back from the dead. A job that was committed before is recognised by its name, by
the tasks, which then write nothing, and by the driver, which then abandons what they wrote. A task
with few rows makes no shard: it sends them to the driver with its report.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from opendata_queue.log.bulk_writer import BulkResult, BulkShard
from opendata_queue.log.cache import CheckedMessage
from opendata_queue.model.clock import Clock, SystemClock
from opendata_queue.model.errors import InvalidInputError, StoreUnavailableError
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.descriptor import open_root
from opendata_queue.root.features import CHECKED_BLOBS, checked_features
from opendata_queue.root.shard_files import COMMITTED_WITHIN_MS, ShardFiles, earliest_bulk_shard
from opendata_queue.root.timekeeping import continued_clock, last_root_time
from opendata_queue.spark.options import SinkOptions
from opendata_queue.spark.rows.columns import (
    BadRow,
    Batch,
    Layout,
    checked_messages,
    plain_messages,
)
from opendata_queue.spark.rows.few import decode_batches, encode_batches, few_bytes
from opendata_queue.spark.rows.plain_messages import PlainMessages
from opendata_queue.spark.visible import registered_job, root_now_ms
from opendata_queue.spark.write.rejects import (
    RejectedFiles,
    Rejects,
    choose_rejects,
    describe,
    publish_rejects,
)
from opendata_queue.store import Objects, StoreSettings

logger = logging.getLogger(__name__)

_COMMIT_TRIES: Final = 3
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(kw_only=True)
class TaskReport(WriterCommitMessage):
    """What a task attempt has done."""

    job: str
    partition: int
    result: BulkResult | None = None
    """Its shard, if it has one."""
    few: bytes = b""
    """Its rows, if they were too few for a shard."""
    rejected: RejectedFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkTask:
    """What every task of a job must know."""

    options: SinkOptions
    layout: Layout
    repeated: bool = False
    """The job was committed before: nothing is to be written."""

    async def run(self, batches: Iterator[Batch], job: str, partition: int) -> TaskReport:
        objects = Objects.open(self.options.root, StoreSettings())
        features = await checked_features(objects)
        report = TaskReport(job=job, partition=partition, rejected=RejectedFiles())
        if self.repeated or await CommitFiles(objects).read(job) is not None:
            for _ in batches:
                pass
            return report
        rejects = None
        if self.options.rejects is not None:
            rejects = Rejects(self.options.rejects, job, partition, secrets.token_hex(8))
        filling = _Filling(objects, self.layout, job, SystemClock(), few_bytes(partition), features)
        try:
            first_row = 0
            for batch in batches:
                await filling.add(await self._checked(batch, first_row, partition, rejects))
                first_row += batch.num_rows
            report.result, report.few = await filling.finish()
        except BaseException:
            await filling.abandon()
            raise
        if rejects is not None:
            report.rejected = await rejects.finish()
        return report

    async def _checked(
        self, batch: Batch, first_row: int, partition: int, rejects: Rejects | None
    ) -> _Checked:
        """The messages of a batch; rows that can't be messages are rejected, or an error."""
        found = _Checked.of(batch, self.layout)
        if found.bad and rejects is None:
            bad = found.bad[0]
            raise InvalidInputError(
                f"row {first_row + bad.place} of partition {partition}: {bad.reason}; the row is "
                f"{describe(batch, bad)}. Mend it, or collect such rows with rejectsPath"
            )
        if found.bad and rejects is not None:
            await rejects.add(batch, first_row, found.bad)
            places = {one.place for one in found.bad}
            good = batch.filter(pa.array([n not in places for n in range(batch.num_rows)]))
            return replace(found, batch=good, bad=())
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checked:
    """A batch, and the messages that it holds: in the fast form if all of them are plain."""

    batch: Batch
    plain: PlainMessages | None
    others: Sequence[CheckedMessage] = ()
    bad: Sequence[BadRow] = ()

    @classmethod
    def of(cls, batch: Batch, layout: Layout) -> _Checked:
        plain = plain_messages(batch, layout)
        if plain is not None:
            return cls(batch=batch, plain=plain)
        others, bad = checked_messages(batch, layout)
        return cls(batch=batch, plain=None, others=others, bad=bad)

    async def add_to(self, shard: BulkShard) -> None:
        if self.plain is not None:
            await shard.add_columns(self.plain)
        else:
            await shard.add_checked(self.others)


class _Filling:
    """Where the rows of a task attempt go: a shard, which is reserved when they are enough."""

    def __init__(
        self,
        objects: Objects,
        layout: Layout,
        job: str,
        clock: Clock,
        few_bytes: int,
        features: frozenset[str],
    ) -> None:
        self._objects = objects
        self._checked_blobs = CHECKED_BLOBS in features
        self._layout = layout
        self._job = job
        self._clock = clock
        self._few_bytes = few_bytes
        self._few: list[Batch] = []
        self._shard: BulkShard | None = None

    async def add(self, found: _Checked) -> None:
        if not found.batch.num_rows:
            return
        if self._shard is None:
            size_bytes = found.batch.nbytes + sum(one.nbytes for one in self._few)
            if size_bytes <= self._few_bytes:
                self._few.append(found.batch)
                return
            await self._begin()
        assert self._shard is not None
        await found.add_to(self._shard)

    async def _begin(self) -> None:
        known = await last_root_time(self._objects)
        files = ShardFiles(self._objects)
        reservation = await files.reserve_bulk(job=self._job, now_ms=self._clock.now_ms())
        # Executors have clocks of their own; retentions and delays are by the root's.
        path = files.path_of(reservation.shard)
        clock = await continued_clock(self._objects, self._clock, known, path)
        self._shard = await BulkShard.create(
            self._objects, reservation.shard, clock, checked_blobs=self._checked_blobs
        )
        few, self._few = self._few, []
        for batch in few:
            await _Checked.of(batch, self._layout).add_to(self._shard)

    async def finish(self) -> tuple[BulkResult | None, bytes]:
        """The shard, or else the rows that were too few for one."""
        if self._shard is not None:
            return await self._shard.finish(), b""
        return None, encode_batches(self._few) if self._few else b""

    async def abandon(self) -> None:
        if self._shard is not None:
            await self._shard.abandon()


async def prepare_root(root: str) -> None:
    """Refuse a root that can't be used before any task starts; a new one gets its descriptor."""
    await open_root(Objects.open(root, StoreSettings()), SystemClock())


async def was_committed(options: SinkOptions, job: str) -> bool:
    """Whether a job was committed before, also when its commit was removed since.

    Names that were drawn are new, so the store need not be asked. The batch of a stream that is run
    again is the last one of its query, whose commit is read. If that is gone, another one is made,
    which the owner of queues does not register.
    """
    objects = Objects.open(options.root, StoreSettings())
    if await CommitFiles(objects).read(job) is not None:
        return True
    return options.named and await registered_job(objects, job) is not None


async def commit_job(task: SinkTask, job: str, reports: Sequence[TaskReport]) -> bool:
    """Make all rows of a job visible at once; false if the job was committed before.

    When it raises, the job may be committed or not: running it again under its name settles that.
    """
    options = task.options
    ours = None
    if task.repeated or await was_committed(options, job):
        logger.warning("job %s was committed before: nothing was added", job)
    else:
        ours = await _commit(task, job, reports)
    files = CommitFiles(Objects.open(options.root, StoreSettings()))
    winner = await files.read(job)
    if winner is not None and options.rejects is not None:
        await publish_rejects(options.rejects, job, winner.holder)
    return ours is not None and winner is not None and winner.holder == ours


async def _commit(task: SinkTask, job: str, reports: Sequence[TaskReport]) -> str:
    """Try to commit, unless another driver does it first; returns our holder."""
    options = task.options
    objects = Objects.open(options.root, StoreSettings())
    results = [one.result for one in reports if one.result is not None]
    few = [one for one in sorted(reports, key=lambda one: one.partition) if one.few]
    if few:
        results.append(await _shard_of(few, task.layout, objects, job))
    shards = [CommittedShard(**asdict(one)) for one in results]
    now_ms = SystemClock().now_ms()
    _check_young(job, shards, now_ms)
    _check_expired(job, shards, await root_now_ms(objects))
    commit = Commit.new(job, shards, now_ms=now_ms)
    if options.rejects is not None:
        rejected = [(one.partition, one.rejected) for one in reports]
        await choose_rejects(options.rejects, job, commit.holder, rejected)
    for left in reversed(range(_COMMIT_TRIES)):
        try:
            await CommitFiles(objects).create(commit)
            break
        except StoreUnavailableError:
            # In doubt: creating the very same commit again finds out whether it is there.
            if not left:
                raise
    return commit.holder


async def _shard_of(
    few: Sequence[TaskReport], layout: Layout, objects: Objects, job: str
) -> BulkResult:
    """One shard for the rows of all tasks that had few."""
    features = await checked_features(objects)
    filling = _Filling(objects, layout, job, SystemClock(), few_bytes=0, features=features)
    try:
        for one in few:
            for batch in decode_batches(one.few):
                await filling.add(_Checked.of(batch, layout))
        result, _ = await filling.finish()
    except BaseException:
        await filling.abandon()
        raise
    assert result is not None
    return result


def _check_young(job: str, shards: Sequence[CommittedShard], now_ms: int) -> None:
    """Retention goes by the numbers of shards: a commit must name none that may be gone."""
    earliest = earliest_bulk_shard(now_ms - COMMITTED_WITHIN_MS)
    old = [one.shard for one in shards if one.shard < earliest]
    if old:
        raise InvalidInputError(
            f"job {job} can't be committed: its shard {old[0]} was begun more than 6 days ago, and "
            "may have been removed. Nothing was added: run it again, in smaller parts"
        )


def _check_expired(job: str, shards: Sequence[CommittedShard], now_ms: int) -> None:
    """Retention runs from when a row was written: a long job may have outlived its rows.

    Both times are of the root's clock.
    """
    messages = sum(one.messages for one in shards)
    if messages and all(0 < (one.expires_at or 0) < now_ms for one in shards if one.messages):
        raise InvalidInputError(
            f"job {job} can't be committed: it took longer than the retention of its rows, and all "
            f"{messages} have expired. Nothing was added: give them a longer retention"
        )
    expired = expired_at_most(shards, now_ms)
    if expired:
        logger.warning(
            "job %s took longer than the retention of some of its rows: up to %d of %d have "
            "expired before the commit, and no consumer will get them",
            job,
            expired,
            messages,
        )


def expired_at_most(shards: Sequence[CommittedShard], committed_at: int) -> int:
    """How many messages had expired at a commit: all those of shards in which one had."""
    return sum(one.messages for one in shards if 0 < (one.expires_from or 0) < committed_at)


def _reports(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    return [one for one in messages if isinstance(one, TaskReport)]


class BatchWriter(DataSourceArrowWriter):
    """``df.write.format("opendata_queue")``."""

    def __init__(self, task: SinkTask) -> None:
        self._task = task

    def write(self, iterator: Iterator[Batch]) -> TaskReport:
        job = self._task.options.job
        assert job is not None
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        return asyncio.run(self._task.run(iterator, job, partition))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        job = self._task.options.job
        assert job is not None
        asyncio.run(commit_job(self._task, job, _reports(messages)))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing to undo: what no commit names does not exist.

        Spark calls it too when a commit's outcome is in doubt, so nothing may be removed here. The
        retention compactor removes shards that were not committed in time.
        """


class StreamWriter(DataSourceStreamArrowWriter):
    """``df.writeStream.format("opendata_queue")``: exactly once.

    Every batch is a job that is named after the query's id, which lives in its checkpoint, and the
    batch's id. A batch that Spark runs again after a crash finds its commit; a query with a fresh
    checkpoint has a new id.
    """

    def __init__(self, task: SinkTask) -> None:
        self._task = task

    def write(self, iterator: Iterator[Batch]) -> TaskReport:
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY_ID) if context is not None else None
        batch = context.getLocalProperty(_BATCH_ID) if context is not None else None
        if context is None or not query or batch is None:
            raise InvalidInputError("this is no task of a streaming query that has an id")
        job = stream_job(query, int(batch))
        return asyncio.run(self._task.run(iterator, job, context.partitionId()))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        reports = _reports(messages)
        wrote = any(one.result or one.few or one.rejected.files for one in reports)
        if not reports or not (wrote or self._task.options.rejects):
            return  # an empty batch, or one that was committed before: doing it again is no harm
        job = reports[0].job
        if not job.endswith(f"-{batchId}"):
            raise InvalidInputError(f"the tasks wrote {job}, and batch {batchId} is committed")
        asyncio.run(commit_job(self._task, job, reports))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """As for a batch: nothing to undo, and nothing may be removed."""


def stream_job(query_id: str, batch_id: int) -> str:
    """The name of a batch of a query."""
    return f"stream-{query_id}-{batch_id}"
