"""The control files of bulk jobs, and shards that no job has committed (RFC 0009)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from odq_compactor.options import CompactorOptions
from odq_compactor.pace import Pace
from odq_compactor.report import RetentionReport
from odq_encodings import BulkJob, BulkJobKey, CursorKey
from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.model.paths import blobs_path, messages_path
from opendata_queue.root.commit_files import Commit, CommitFiles
from opendata_queue.root.shard_files import ShardFiles, earliest_bulk_shard
from opendata_queue.store import DatabaseReads, Objects, withdraw_proof
from opendata_queue.systems.owned import OwnedStores

logger = logging.getLogger(__name__)

_LISTED_AT_ONCE: Final = 1_000
_AT_ONCE: Final = 16

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovedObjects:
    """What was there of a shard."""

    blob_bytes: int
    file_bytes: int

    @property
    def were_there(self) -> bool:
        return self.blob_bytes + self.file_bytes > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OldReservation:
    """A number that is not given out again."""

    shard: int
    committed: bool
    """Whether the shard is visible. If not, it goes with its reservation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedCommits:
    """The commits of a root."""

    there: int
    old: list[str]
    """Jobs whose commits are not needed: they are registered, and old or too many."""
    unseen: list[Commit] | None
    """Those of jobs that are not registered yet; none if one of them can't be read."""

    @property
    def named(self) -> set[int] | None:
        """The shards of jobs that are not registered yet; none if a commit can't be read."""
        if self.unseen is None:
            return None
        return {shard.shard for commit in self.unseen for shard in commit.shards}


async def remove_objects(objects: Objects, shard: int) -> RemovedObjects:
    """Remove the database and the blobs of a shard.

    The proof and the manifests first: without them there is no database. A shard that is half
    removed would seem damaged to callers that still have the id of a message.
    """
    database = messages_path(shard)
    await withdraw_proof(objects, database)
    file_bytes = await objects.delete_under(f"{database}/manifest")
    blob_bytes = await objects.delete_under(blobs_path(shard))
    file_bytes += await objects.delete_under(database)
    return RemovedObjects(blob_bytes=blob_bytes, file_bytes=file_bytes)


async def judged_commits(
    commits: CommitFiles, queues: DatabaseReads, kept_since: int, keep_at_most: int
) -> JudgedCommits:
    """Judge all commits that are kept."""
    jobs = await commits.jobs()
    keys = [BulkJobKey(job=job).encode() for job in jobs]
    values = await queues.get_many(keys)
    registered: list[tuple[int, str]] = []
    unseen: list[str] = []
    for job, key, value in zip(jobs, keys, values, strict=True):
        if value is None:
            unseen.append(job)
        else:
            committed_at = queues.decode(BulkJob.decode, key, value).committed_at
            registered.append((committed_at, job))
    registered.sort()
    too_many = len(registered) - keep_at_most
    old = [
        job
        for place, (committed_at, job) in enumerate(registered)
        if committed_at < kept_since or place < too_many
    ]
    read: list[Commit | None] | None
    try:
        read = await _by_some(unseen, commits.read)
    except CorruptStoreError as error:
        logger.error("shards without a commit are kept: %s", error)
        read = None
    found = None if read is None else [commit for commit in read if commit is not None]
    return JudgedCommits(there=len(jobs), old=old, unseen=found)


async def old_reservations(
    files: ShardFiles, queues: DatabaseReads, kept_since: int, named: set[int] | None
) -> AsyncIterator[list[OldReservation]]:
    """Reservations of a time in which every job has ended, but for shards of new commits.

    They are the first ones in their folder, and removed: so there is one list more than needed.
    """
    behind = earliest_bulk_shard(kept_since)
    after = 0
    while found := await files.bulk_shards(after=after, limit=_LISTED_AT_ONCE):
        after = found[-1]
        old = [one for one in found if one < behind]
        cursors = await queues.get_many([CursorKey(shard=one).encode() for one in old])
        yield [
            OldReservation(shard=shard, committed=cursor is not None)
            for shard, cursor in zip(old, cursors, strict=True)
            if cursor is not None or (named is not None and shard not in named)
        ]
        if len(old) < len(found):
            return


class BulkFiles:
    """Keeps commits and reservations few."""

    def __init__(self, stores: OwnedStores, options: CompactorOptions) -> None:
        self._stores = stores
        self._options = options
        self._pace = Pace(options.work_share)
        self._commits = CommitFiles(stores.objects)
        self._files = ShardFiles(stores.objects)
        self._there = 0
        """About how many commits there are: listed now and then, and counted on by ``saw``."""

    def saw(self, jobs: set[str]) -> None:
        """Some jobs were registered."""
        self._there += len(jobs)

    async def run(self, report: RetentionReport, *, rarely: bool) -> None:
        """Forget commits that are old or too many; rarely, also what was reserved long ago."""
        if not rarely and self._there <= self._options.bulk_commits_kept:
            return
        queues = self._stores.queues.database
        kept_since = report.now_ms - self._options.bulk_kept_ms
        judged = await judged_commits(
            self._commits, queues, kept_since, self._options.bulk_commits_kept
        )
        for start in range(0, len(judged.old), _AT_ONCE):
            async with self._pace.work():
                await _by_some(judged.old[start : start + _AT_ONCE], self._commits.remove)
        report.count("control files", len(judged.old))
        self._there = judged.there - len(judged.old)
        if rarely:
            async for some in old_reservations(self._files, queues, kept_since, judged.named):
                for start in range(0, len(some), _AT_ONCE):
                    async with self._pace.work():
                        await self._remove(some[start : start + _AT_ONCE], report)

    async def _remove(self, some: list[OldReservation], report: RetentionReport) -> None:
        """The reservation last: it is what leads to objects that nothing else names."""
        lost = [one.shard for one in some if not one.committed]
        for removed in await _by_some(lost, self._remove_objects):
            # Nothing is left of those that were dropped when they were past.
            report.count("bulk shards", removed.were_there)
            report.blob_bytes += removed.blob_bytes
        await _by_some([one.shard for one in some], self._files.remove)
        report.count("control files", len(some))

    async def _remove_objects(self, shard: int) -> RemovedObjects:
        return await remove_objects(self._stores.objects, shard)


async def _by_some(given: Sequence[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    """Do something for each, a few at a time."""
    done: list[R] = []
    for start in range(0, len(given), _AT_ONCE):
        done += await asyncio.gather(*(work(one) for one in given[start : start + _AT_ONCE]))
    return done
