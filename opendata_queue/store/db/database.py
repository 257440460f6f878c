"""One SlateDB database: rows in, rows out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import slatedb.uniffi as slatedb

from odq_encodings import JOURNAL_STATE_KEY, EncodingError, JournalState
from opendata_queue.model.allowance import RowBudget
from opendata_queue.model.errors import (
    ClosedError,
    CorruptStoreError,
    FencedError,
    InvalidInputError,
    OdqError,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.model.figures import Figure
from opendata_queue.runtime.aio import end_tasks
from opendata_queue.store.damage.bulk_proof import check_proof
from opendata_queue.store.damage.check import read_journal_state
from opendata_queue.store.damage.wal import check_wal, damaged_wal_file, refusal
from opendata_queue.store.damage.whole_files import (
    cut_file,
    damaged_list,
    set_unfounded_files_aside,
)
from opendata_queue.store.db.figures import slatedb_figures
from opendata_queue.store.db.garbage_schedule import GarbagePace
from opendata_queue.store.db.recorder import new_recorder
from opendata_queue.store.db.replay_length import ReplayLength
from opendata_queue.store.db.standstill import Standstill
from opendata_queue.store.db.upkeep import Upkeep
from opendata_queue.store.errors import LostRaceError, has_no_database, translated
from opendata_queue.store.files.durable import WalSync, is_on_network, make_folder
from opendata_queue.store.journal.journal import LeftJournals, newest_mark, until_flushed
from opendata_queue.store.journal.seen_files import FileNotes
from opendata_queue.store.journal.writes import JournaledWrites, bring_in
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.problems import Problem
from opendata_queue.store.rows.rows import Rows
from opendata_queue.store.rows.scan import (
    Row,
    ScannedRows,
    first_packed,
    first_rows,
    next_packed,
    next_rows,
    rows_within,
)
from opendata_queue.store.rows.writer import active_tier, commit_rows
from opendata_queue.store.settings import StoreSettings
from opendata_queue.store.waiting import in_time

logger = logging.getLogger(__name__)

SCAN_ROWS: Final = 1_000
"""Rows that a scan hands over at a time."""

_REQUESTS: Final = "slatedb.object_store.request_count"
_READS_AT_ONCE: Final = 32
_LARGE_READS_AT_ONCE: Final = 16
"""Of rows that may be large, and are counted when they are read."""
_TRIES_TO_MAKE: Final = 4
_NEVER_MS: Final = 24 * 3_600_000
_INSTANT_KEPT_MS: Final = 10 * 60_000
_PROBE_BYTES: Final = 64 * 1024
_PROBE_TIMEOUT_MS: Final = 1_000
_DAMAGED_TIMEOUT_MS: Final = 1_000
# Rows this close together are read with one scan, as those of a queue that takes one message in ten
# are. The rows in between, of 64 KiB at most, are read faster than S3 answers another request.
_SCAN_GAP: Final = 16
_SCAN_LEAST: Final = 4
_SHORT_SCAN_ROWS: Final = 4 * SCAN_ROWS

T = TypeVar("T")


class _Options:
    """How rows are read that are durable at a level of SlateDB's."""

    __slots__ = ("backwards", "get", "scan", "short_scan")

    def __init__(self, level: slatedb.DurabilityLevel) -> None:
        self.get = slatedb.ReadOptions(durability_filter=level, dirty=False, cache_blocks=True)
        # With SlateDB's own defaults a scan on S3 makes thousands of tiny requests.
        self.scan = slatedb.ScanOptions(
            durability_filter=level,
            dirty=False,
            read_ahead_bytes=4 * 1024 * 1024,
            cache_blocks=False,
            max_fetch_tasks=4,
        )
        # A few rows: reading 4 MiB ahead in every file would be most of the work, and the next
        # scan is likely to want the same blocks.
        self.short_scan = slatedb.ScanOptions(
            durability_filter=level,
            dirty=False,
            read_ahead_bytes=64 * 1024,
            cache_blocks=True,
            max_fetch_tasks=2,
        )
        self.backwards = slatedb.ScanOptions(
            durability_filter=level,
            dirty=False,
            read_ahead_bytes=64 * 1024,
            cache_blocks=True,
            max_fetch_tasks=2,
            order=slatedb.IterationOrder.DESCENDING,
        )


# Nothing is shown that could still be lost: what SlateDB has flushed or, where it is given only
# what is in a journal, whatever it has.
_FLUSHED: Final = _Options(slatedb.DurabilityLevel.REMOTE)
_WRITTEN: Final = _Options(slatedb.DurabilityLevel.MEMORY)


class _Readable(Protocol):
    async def get_with_options(self, key: bytes, options: slatedb.ReadOptions) -> bytes | None: ...
    async def scan_with_options(
        self, range: slatedb.KeyRange, options: slatedb.ScanOptions
    ) -> slatedb.DbIterator: ...


class DatabaseReads:
    """Point reads and bounded scans, the same for a writer and for a reader."""

    def __init__(
        self, handle: _Readable, objects: Objects, path: str, options: _Options = _FLUSHED
    ) -> None:
        self._reads = handle
        self._options = options
        self._objects = objects
        self._path = path
        self._outage_timeout_ms = objects.settings.outage_timeout_ms
        self._cut: Problem | None = None
        """A file that is not whole, if one was found when a read got no answer."""
        self.name = objects.location.url_of(path)

    def decode(self, decoder: Callable[[bytes], T], key: bytes, value: bytes) -> T:
        """Decode the value of a row; one that can't be is a corrupt row of this database."""
        try:
            return decoder(value)
        except EncodingError as error:
            raise CorruptStoreError(f"{self.name}: {error}", key=key) from error

    async def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, if it has one that is durable."""
        doing = f"read {self.name}"
        return await self._answer(
            lambda: self._reads.get_with_options(key, self._options.get), doing, key
        )

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys``, in their order, a bounded number of reads at a time."""
        values: list[bytes | None] = []
        for start in range(0, len(keys), _READS_AT_ONCE):
            some = keys[start : start + _READS_AT_ONCE]
            values += await asyncio.gather(*(self.get(key) for key in some))
        return values

    async def get_by_id(
        self,
        ids: Iterable[int],
        key_of: Callable[[int], bytes],
        keys_of: Callable[[range], list[bytes]] | None = None,
        budget: RowBudget | None = None,
    ) -> dict[int, bytes]:
        """The values of rows that are keyed by ids, where they have one.

        Ids that lie close together are read with one scan, the others with a point read each.
        ``keys_of`` makes many keys for less than ``key_of`` does.
        """
        found: dict[int, bytes] = {}
        alone: list[int] = []
        ordered = sorted(set(ids))
        for run in _runs(ordered):
            if len(run) < _SCAN_LEAST:
                alone += run
                continue
            span = range(run[0], run[-1] + 1)
            if keys_of is not None and len(span) == len(run):
                keys = keys_of(span)
            else:
                keys = [key_of(one) for one in run]
            if budget is not None:
                found |= await self._run_within(run, keys, budget)
                continue
            rows: list[Row] = []
            async for chunk in self.scan(keys[0], keys[-1] + b"\x00", limit=len(span)):
                rows += chunk
            if [key for key, _ in rows] == keys:  # most often all are there, and no others
                found.update(zip(run, [value for _, value in rows], strict=True))
            else:
                wanted = dict(zip(keys, run, strict=True))
                found |= {wanted[key]: value for key, value in rows if key in wanted}
        if budget is not None:
            if len(ordered) == 1:
                budget = RowBudget(1, budget.unread)  # there must be progress
            return found | await self._get_within(alone, key_of, budget)
        values = await self.get_many([key_of(one) for one in alone])
        found |= {one: value for one, value in zip(alone, values, strict=True) if value is not None}
        return found

    async def _run_within(
        self, run: list[int], keys: list[bytes], budget: RowBudget
    ) -> dict[int, bytes]:
        """Rows with ids close to each other, as far as the budget goes."""
        found: dict[int, bytes] = {}
        wanted: dict[bytes, int] = {}
        place = 0
        while place < len(run):
            if not budget.left_bytes:
                budget.unread.update(run[place:])
                break
            start, end = keys[place], keys[-1] + b"\x00"
            limit = run[-1] + 1 - run[place]
            most_bytes, options = budget.left_bytes, self._options.short_scan
            reading = partial(rows_within, self._reads, start, end, options, limit, most_bytes)
            rows, more = await self._answer(reading, f"scan {self.name}", start)
            if not place and [key for key, _ in rows] == keys:  # most often
                found = dict(zip(run, [value for _, value in rows], strict=True))
                budget.count(found.values())
                break
            wanted = wanted or dict(zip(keys, run, strict=True))
            # What lies between them was read as well, and goes.
            some = {wanted[key]: value for key, value in rows if key in wanted}
            budget.count(some.values())
            found |= some
            if not more:
                break
            place = bisect_right(keys, rows[-1][0])
        return found

    async def _get_within(
        self, ids: list[int], key_of: Callable[[int], bytes], budget: RowBudget
    ) -> dict[int, bytes]:
        """Rows with ids far from each other, as far as the budget goes."""
        found: dict[int, bytes] = {}
        for start in range(0, len(ids), _LARGE_READS_AT_ONCE):
            if not budget.left_bytes:
                budget.unread.update(ids[start:])
                break
            some = ids[start : start + _LARGE_READS_AT_ONCE]
            values = await self.get_many([key_of(one) for one in some])
            read = {one: row for one, row in zip(some, values, strict=True) if row is not None}
            budget.count(read.values())
            found |= read
        return found

    async def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None
    ) -> AsyncIterator[list[Row]]:
        """The durable rows from ``start`` up to, not including, ``end``, in chunks of up to 1,000.

        ``limit`` bounds the rows in all.
        """
        if start >= end or limit == 0:  # SlateDB refuses to scan nothing
            return
        doing = f"scan {self.name}"
        if limit is not None and limit <= _SHORT_SCAN_ROWS:
            wanted = limit
            rows = await self._answer(
                lambda: first_rows(self._reads, start, end, self._options.short_scan, wanted),
                doing,
                start,
            )
            for place in range(0, len(rows), SCAN_ROWS):
                yield rows[place : place + SCAN_ROWS]
            return
        span = slatedb.KeyRange(start=start, start_inclusive=True, end=end, end_inclusive=False)
        iterator = await self._answer(
            lambda: self._reads.scan_with_options(span, self._options.scan), doing, start
        )
        left = limit
        while left is None or left > 0:
            wanted = SCAN_ROWS if left is None else min(SCAN_ROWS, left)
            chunk = await self._answer(partial(next_rows, iterator, wanted), doing, start)
            if chunk:
                yield chunk
            if len(chunk) < wanted:  # there are no more; asking again would only cost a call
                return
            if left is not None:
                left -= len(chunk)

    async def scan_packed(
        self, start: bytes, end: bytes, *, limit: int | None = None
    ) -> AsyncIterator[ScannedRows]:
        """``scan``, its chunks as they came: for a reader that takes them apart by column."""
        doing, options = f"scan {self.name}", self._options
        if limit is not None and limit <= SCAN_ROWS:
            if start < end and limit > 0:
                yield await self._answer(
                    lambda: first_packed(self._reads, start, end, options.short_scan, limit),
                    doing,
                    start,
                )
            return
        span = slatedb.KeyRange(start=start, start_inclusive=True, end=end, end_inclusive=False)
        iterator = await self._answer(
            lambda: self._reads.scan_with_options(span, options.scan), doing, start
        )
        while limit is None or limit > 0:
            wanted = SCAN_ROWS if limit is None else min(SCAN_ROWS, limit)
            chunk = await self._answer(partial(next_packed, iterator, wanted), doing, start)
            yield chunk
            if len(chunk) < wanted:
                return
            if limit is not None:
                limit -= len(chunk)

    async def last(self, start: bytes, end: bytes) -> Row | None:
        """The last durable row from ``start`` up to, not including, ``end``."""
        span = slatedb.KeyRange(start=start, start_inclusive=True, end=end, end_inclusive=False)
        doing = f"scan {self.name}"
        iterator = await self._answer(
            lambda: self._reads.scan_with_options(span, self._options.backwards), doing, end
        )
        rows = await self._answer(lambda: next_rows(iterator, 1), doing, end)
        return rows[0] if rows else None

    async def _answer(self, read: Callable[[], Awaitable[T]], doing: str, key: bytes) -> T:
        """What SlateDB answers; a file that is not whole is why it does not, if there is one."""
        timeout_ms = self._outage_timeout_ms
        if self._cut is not None:  # many reads may follow: none of them is worth a long wait
            timeout_ms = min(timeout_ms, _DAMAGED_TIMEOUT_MS)
        try:
            with translated(doing, key=key):
                return await in_time(self._read(read), timeout_ms, doing)
        except StoreUnavailableError as error:
            self._cut = await self._find_cut_file()
            if self._cut is None:
                raise
            raise CorruptStoreError(f"could not {doing}: {self._cut}", key=key) from error

    async def _read(self, read: Callable[[], Awaitable[T]]) -> T:
        return await read()

    async def _find_cut_file(self) -> Problem | None:
        looking = f"look at the files of {self.name}"
        with contextlib.suppress(OdqError), translated(looking):
            return await in_time(cut_file(self._objects, self._path), _PROBE_TIMEOUT_MS, looking)
        return None


class Database(DatabaseReads):
    """The one writer of a database. A second one, anywhere, fences it."""

    def __init__(
        self,
        handle: slatedb.Db,
        objects: Objects,
        path: str,
        metrics: slatedb.DefaultMetricsRecorder,
    ) -> None:
        super().__init__(handle, objects, path)
        self._metrics = metrics
        self._db = handle
        self._settings = objects.settings
        self._wal_sync: WalSync | None = None
        self._journaled: JournaledWrites | None = None
        self._upkeep = Upkeep(objects, path)
        self._housekeeping: asyncio.Task[None] | None = None
        settings = objects.settings
        old_ms = settings.garbage_age_ms + settings.replaced_files_kept_ms
        self._garbage = GarbagePace(old_ms // max(1, settings.garbage_interval_ms) + 2)
        self._closing = asyncio.Lock()
        self._replay = ReplayLength(metrics) if self.is_on_s3 else None
        self._shortening: asyncio.Task[None] | None = None
        self._under_way = 0
        """Commits that have begun and not succeeded: one that has failed is among them for ever."""
        self._durable = 0
        self._is_asked = False
        """Whether the number is to be noted as soon as no commit is under way."""

    @classmethod
    async def open(
        cls, objects: Objects, path: str, *, journaled: bool = False, acknowledged: int = 0
    ) -> Database:
        """Open the database ``path`` of a root for writing; it is created if it is not there.

        With ``journaled``, commits to files are durable in a journal first, as the settings say:
        not for databases that other processes have to see every commit of (RFC 0011).

        ``acknowledged`` is the ``durable_sequence`` of the owner before. If the database does not
        go as far as that, or has been damaged in another way, it is refused (RFC 0013).
        """
        settings = objects.settings
        name = objects.location.url_of(path)
        active_tier()  # complains now, not at the first commit, about a tier that can't be used
        checking = _check_files(objects, path, acknowledged)
        try:
            await in_time(checking, settings.outage_timeout_ms, f"open {name}")
        except (CorruptStoreError, InvalidInputError) as error:
            raise await _named(error, objects, path) from error
        on_s3 = objects.location.kind is StoreKind.S3
        waiting, _ = await in_time(
            Upkeep(objects, path).file_counts(), settings.outage_timeout_ms, f"open {name}"
        )
        tries = _TRIES_TO_MAKE
        while True:
            builder = slatedb.DbBuilder(objects.location.join(path), objects.slatedb_store)
            builder.with_settings(settings.for_slatedb(on_s3=on_s3, waiting_files=waiting))
            builder.with_db_cache(settings.block_cache(), 0)
            metrics = new_recorder()
            builder.with_metrics_recorder(metrics)
            try:
                with translated(f"open {name}"):
                    building = in_time(builder.build(), settings.outage_timeout_ms, f"open {name}")
                    handle = await building
                break
            except LostRaceError:
                tries -= 1
                if not tries:
                    raise
            except (CorruptStoreError, InvalidInputError) as error:
                raise await _named(error, objects, path) from error
        database = cls(handle, objects, path, metrics)
        try:
            await database._start(journaled=journaled)
        except BaseException:
            await database._give_up()
            raise
        return database

    async def commit(self, rows: Rows, *, on_start: Callable[[], None] | None = None) -> None:
        """Write ``rows`` as one atomic batch; when this returns they are durable.

        ``on_start`` is called when the store is at work and leaves the processor to others.

        If it raises or is cancelled, they may be durable or not: the caller must stop using the
        database.
        """
        doing = f"write {self.name}"
        self._garbage.committed()
        if self._journaled is not None:
            committing = self._journaled.commit(rows, on_start)
        else:
            committing = commit_rows(self._db, rows, after_flush=self._wal_sync, on_start=on_start)
        self._under_way += 1
        try:
            with translated(doing):
                await in_time(committing, self._outage_timeout_ms, doing)
        except (StoreUnavailableError, StoreAccessError) as error:
            reason = await self._why_unwritable(rows.size_bytes)
            raise StoreUnavailableError(f"{error}{reason}", in_doubt=True) from error
        self._under_way -= 1
        if self._is_asked:
            self.durable_sequence()
        if self._replay is not None and self._replay.committed() and self._shortening is None:
            self._shortening = asyncio.create_task(
                self._shorten_replay(self._replay), name=f"flush {self.name}"
            )

    async def _shorten_replay(self, replay: ReplayLength) -> None:
        """Flush what is in memory, so that the next one who opens has less to read."""
        replay.flushing()
        try:
            await self.flush_to_files()
        except OdqError as error:
            # It is in the WAL, and will be flushed with what comes next.
            logger.info("%s", error)
        finally:
            self._shortening = None

    def durable_sequence(self) -> int:
        """A sequence number up to which commits are known to be durable; 0 if none is known.

        It does not fall, and is known after the close, too. Where a journal has commits before
        SlateDB has them, its marks say more (RFC 0013).
        """
        kind = self._objects.location.kind
        is_synced = kind is StoreKind.S3 or (kind is StoreKind.FILE and self._wal_sync is not None)
        if self._journaled is not None or not is_synced:
            return 0
        # SlateDB calls a file durable before it is synced: then it is noted after that commit.
        self._is_asked = kind is StoreKind.FILE and self._under_way > 0
        if not self._is_asked:
            self._durable = int(self._db.status().durable_seq)
        return self._durable

    @property
    def requests(self) -> int:
        """How many requests it has made to the object store since it was opened."""
        return sum(int(metric.value[0]) for metric in self._metrics.metrics_by_name(_REQUESTS))

    @property
    def is_on_s3(self) -> bool:
        """Whether a commit is a request that somebody charges for."""
        return self._objects.location.kind is StoreKind.S3

    async def snapshot(self) -> DatabaseReads:
        """All rows as they are now, whatever is written from now on."""
        doing = f"read {self.name}"
        with translated(doing):
            taking = self._read(self._db.snapshot)
            snapshot = await in_time(taking, self._outage_timeout_ms, doing)
        return DatabaseReads(snapshot, self._objects, self._path, self._options)

    async def show_others(self) -> None:
        """Wait until readers in other processes can see all that is durable."""
        if self._journaled is not None:
            doing = f"flush {self.name}"
            await in_time(self._journaled.show_others(), self._outage_timeout_ms, doing)

    async def flush_to_files(self) -> None:
        """Write what is in memory to files of its own, where a compaction finds it."""
        doing = f"flush {self.name}"
        options = slatedb.FlushOptions(flush_type=slatedb.FlushType.MEM_TABLE)
        with translated(doing):
            flushing = self._read(lambda: self._db.flush_with_options(options))
            await in_time(flushing, self._outage_timeout_ms, doing)

    async def size_bytes(self) -> int:
        """The bytes of the files that hold its rows; what only the WAL has is not in it."""
        return await self._upkeep.size_bytes()

    async def compact(self) -> bool:
        """Have all files rewritten, as ``Upkeep.compact`` says."""
        return await self._upkeep.compact()

    async def collect_garbage(self, *, min_age_ms: int | None = None) -> None:
        """Remove files that are not needed any more; those of the last seconds are kept."""
        await self._upkeep.collect_garbage(min_age_ms=min_age_ms)

    def figures(self) -> Iterator[Figure]:
        """What SlateDB counts of itself and of its requests to the store, and we of its garbage."""
        yield from slatedb_figures(self._metrics, self.labels)
        yield from self._upkeep.record.figures(self.labels)

    @property
    def trouble(self) -> str | None:
        """What is wrong, for people, though it can be read and written."""
        return self._upkeep.record.trouble

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """Tells the figures of this database from those of others."""
        return (("database", self._path),)

    async def _why_unwritable(self, size_bytes: int) -> str:
        """What the system says of a folder that SlateDB could not write to, if it says anything.

        A disk may have room for a little, and not for what SlateDB tried to write.
        """
        location = self._objects.location
        if location.kind is not StoreKind.FILE:
            return ""
        try:
            size_bytes = max(size_bytes, _PROBE_BYTES)
            probing = asyncio.to_thread(_probe, location.folder / self._path, size_bytes)
            await in_time(probing, _PROBE_TIMEOUT_MS, "probe")
        except OdqError as error:
            return f"; {error}"
        return ""

    async def close(self) -> None:
        """Close. Closing twice does nothing.

        Every commit was durable before it returned, so nothing can be lost here: being fenced, or a
        store that does not answer, is logged and not raised.
        """
        async with self._closing:
            if self._housekeeping is None:
                return
            await end_tasks([self._housekeeping, self._shortening])
            self._housekeeping = None
            doing = f"close {self.name}"
            try:
                with translated(doing):
                    await self._shut_down()
                    if self._wal_sync is not None:
                        await self._upkeep.sync_in_use()
                    if self._journaled is not None:
                        await asyncio.to_thread(self._journaled.finish)
            except (FencedError, ClosedError) as error:
                logger.info("%s", error)
            except OdqError as error:
                logger.warning("%s", error)
            finally:
                if self._journaled is not None:
                    self._journaled.leave()
                if self._wal_sync:
                    self._wal_sync.close()

    async def _give_up(self) -> None:
        """Let go of what could not be opened; whoever opens it raises why."""
        doing = f"close {self.name}"
        try:
            with contextlib.suppress(OdqError), translated(doing):
                await in_time(self._db.shutdown(), self._outage_timeout_ms, doing)
        finally:
            if self._wal_sync:
                self._wal_sync.close()

    async def _shut_down(self) -> None:
        doing, timeout_ms = f"close {self.name}", self._outage_timeout_ms
        try:
            if self._journaled is not None:
                await in_time(self._journaled.close(), timeout_ms, doing)
        finally:
            await in_time(self._db.shutdown(), timeout_ms, doing)

    async def _read(self, read: Callable[[], Awaitable[T]]) -> T:
        """Read what is durable by now, though SlateDB may not have been given it yet."""
        if self._journaled is not None:
            return await self._journaled.read(read)
        return await read()

    async def _start(self, *, journaled: bool) -> None:
        location = self._objects.location
        if location.kind is StoreKind.FILE:
            folder = location.folder / self._path
            if self._settings.fsync:
                with translated(f"sync {self.name}"):
                    in_files = await self._upkeep.sync_in_use()
                    make = partial(WalSync, folder, replayed_after=in_files)
                    self._wal_sync = await _made_in_thread(make)
            wanted = journaled and self._settings.journal_ms > 0 and not is_on_network(folder)
            await self._start_journal(folder, wanted=wanted)
        self._housekeeping = asyncio.create_task(self._keep_house(), name=f"keep {self.name}")

    async def _start_journal(self, folder: Path, *, wanted: bool) -> None:
        """Bring in what earlier owners have left in theirs, and begin one if it is wanted."""
        sync = self._settings.fsync
        with translated(f"open {self.name}"):
            value = await self.get(JOURNAL_STATE_KEY)
            state = None if value is None else self._journal_state(value)
            try:
                left = await asyncio.to_thread(LeftJournals, folder, state)
            except CorruptStoreError:
                await self._check_is_still(state)
                raise
            if not left and not wanted:
                return
            make = partial(left.take_over, sync=sync, name=self.name)
            journal = await _made_in_thread(make)
            try:
                notes = await asyncio.to_thread(FileNotes, folder, self._wal_sync)
                journal.mark = notes.mark
                await journal.begin()
                # On a full disk SlateDB tries for ever.
                state = JournalState(number=journal.number, is_closed=not wanted)
                bringing = bring_in(self._db, left, state, self._wal_sync, self.name)
                await in_time(bringing, self._outage_timeout_ms, f"open {self.name}")
                journal.mark = notes.has_flushed()
                await journal.tell_mark()
                await asyncio.to_thread(partial(left.remove, sync=sync))
                if not wanted:
                    await asyncio.to_thread(journal.finish)
                    return
            except BaseException:
                journal.close()  # it stays: by it the owner before knows that it was replaced
                raise
        self._options = _WRITTEN
        self._journaled = JournaledWrites(
            self._db,
            journal,
            self._wal_sync,
            notes,
            flush_ms=self._settings.journal_ms,
            name=self.name,
        )

    async def _check_is_still(self, state: JournalState | None) -> None:
        """``FencedError`` if another process has replaced us, and begun a journal of its own.

        It has removed the journals before that: what we miss is then no damage.
        """
        try:
            state_now = await read_journal_state(self._objects, self._path)
        except OdqError:  # what was found first is reported
            return
        if state_now != state:
            raise FencedError(f"could not open {self.name}: another process has taken over")

    def _journal_state(self, value: bytes) -> JournalState:
        return self.decode(JournalState.decode, JOURNAL_STATE_KEY, value)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(self._settings.garbage_interval_ms / 1000)
            if not self._garbage.is_due():
                continue
            try:
                await self._upkeep.collect_garbage()
                self._garbage.looked()
            except OdqError:  # noted, logged and counted there; garbage can wait
                continue


class BlockCache:
    """Memory for blocks that several readers share."""

    __slots__ = ("handle",)

    def __init__(self, settings: StoreSettings) -> None:
        self.handle = settings.block_cache()


class DatabaseReader(DatabaseReads):
    """Reads a database that another process writes: durable rows, after a short delay."""

    def __init__(self, handle: slatedb.DbReader, objects: Objects, path: str) -> None:
        super().__init__(handle, objects, path)
        self._reader = handle
        self._standstill: Standstill | None = None

    @classmethod
    async def open(
        cls,
        objects: Objects,
        path: str,
        *,
        poll_interval_ms: int = 1_000,
        complete: bool = False,
        leave_no_trace: bool = False,
        cache: BlockCache | None = None,
        cache_number: int = 0,
    ) -> DatabaseReader:
        """Open a database for reading; ``StoreAccessError`` if it is not there.

        One that is ``complete``, and written without a WAL, is not watched, and nobody is told
        that it is being read. A ``cache`` that is shared with readers of other databases needs a
        number for each of them.

        It shows at least what was durable when it was opened.

        With ``leave_no_trace`` nothing is written: there is no checkpoint that keeps files from
        being collected while they are read, and a read that meets this fails.
        """
        settings = objects.settings
        name = objects.location.url_of(path)
        if not complete:
            with translated(f"read {name}"):
                await until_flushed(objects, path)
        builder = slatedb.DbReaderBuilder(objects.location.join(path), objects.slatedb_store)
        builder.with_db_cache((cache or BlockCache(settings)).handle, cache_number)
        if complete or leave_no_trace:
            builder.with_reader_mode(slatedb.ReaderMode.FOLLOW_LATEST())
        if complete:
            poll_interval_ms = _NEVER_MS
        builder.with_options(
            slatedb.ReaderOptions(
                manifest_poll_interval_ms=poll_interval_ms,
                # Renewed by a poll when half of it is over. Who is killed leaves it behind.
                checkpoint_lifetime_ms=max(60_000, 3 * poll_interval_ms),
                max_memtable_bytes=settings.memtable_bytes,
                skip_wal_replay=complete,
            )
        )
        with translated(f"read {name}"):
            opening = in_time(builder.build(), settings.outage_timeout_ms, f"read {name}")
            handle = await (_proven(opening, objects, path) if complete else opening)
        reader = cls(handle, objects, path)
        if not complete and Standstill.can_come(objects, poll_interval_ms):
            reader._standstill = Standstill(
                objects, path, lambda: reader.position, poll_interval_ms=poll_interval_ms
            )
        return reader

    @classmethod
    async def look(cls, objects: Objects, path: str) -> DatabaseReader | None:
        """Follow a database without a trace; none if it is not there: nobody has written to it."""
        try:
            return await cls.open(objects, path, leave_no_trace=True)
        except StoreAccessError as error:
            if has_no_database(error):
                return None
            raise

    @classmethod
    @contextlib.asynccontextmanager
    async def at_one_instant(cls, objects: Objects, path: str) -> AsyncIterator[DatabaseReader]:
        """Read a database as it was when its writer last wrote files.

        Rows that move from one place to another are neither missed nor seen twice.
        What only the WAL has is not in it. Those files are kept until this ends, or for a while if
        this process is killed. Every other reader moves on when it likes, once right after it was
        opened.
        """
        name = objects.location.url_of(path)
        where, timeout_ms = objects.location.join(path), objects.settings.outage_timeout_ms
        admin = slatedb.AdminBuilder(where, objects.slatedb_store).build()
        options = slatedb.CheckpointOptions(lifetime_ms=_INSTANT_KEPT_MS, source=None, name=None)
        builder = slatedb.DbReaderBuilder(where, objects.slatedb_store)
        builder.with_db_cache(BlockCache(objects.settings).handle, 0)
        doing = f"read {name}"
        with translated(doing):
            checkpoint = await in_time(admin.create_detached_checkpoint(options), timeout_ms, doing)
            builder.with_reader_mode(slatedb.ReaderMode.CHECKPOINT(checkpoint.id))
            handle = await in_time(builder.build(), timeout_ms, doing)
        reader = cls(handle, objects, path)
        try:
            yield reader
        finally:
            await reader.close()
            with translated(doing):
                await in_time(admin.delete_checkpoint(checkpoint.id), timeout_ms, doing)

    @property
    def position(self) -> int | None:
        """Grows when there is more to be read; none if it has failed and must be opened again."""
        status = self._reader.status()
        if self._standstill is not None and self._standstill.found is not None:
            return None
        return status.durable_seq if status.close_reason is None else None

    async def check_moving(self) -> None:
        """``StoreUnavailableError`` if it does not follow its database any more. So does a read."""
        if self._standstill is not None:
            await self._standstill.check()

    async def _answer(self, read: Callable[[], Awaitable[T]], doing: str, key: bytes) -> T:
        await self.check_moving()
        return await super()._answer(read, doing, key)

    async def close(self) -> None:
        doing = f"close {self.name}"
        with translated(doing):
            await in_time(self._reader.shutdown(), self._outage_timeout_ms, doing)


async def _proven(
    opening: Awaitable[slatedb.DbReader], objects: Objects, path: str
) -> slatedb.DbReader:
    """A reader of a bulk shard that is proven to be whole; that is found out beside its opening."""
    outcomes: tuple[slatedb.DbReader | BaseException, BaseException | None] = await asyncio.gather(
        opening, check_proof(objects, path), return_exceptions=True
    )
    handle, proof = outcomes
    if isinstance(proof, BaseException):  # which says what file it is, if both fail
        if not isinstance(handle, BaseException):
            await in_time(handle.shutdown(), objects.settings.outage_timeout_ms, f"close {path}")
        raise proof
    if isinstance(handle, BaseException):
        raise handle
    assert isinstance(handle, slatedb.DbReader)
    return handle


class _Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closeable)


async def _made_in_thread(make: Callable[[], C]) -> C:
    """What a thread makes; closed as soon as it is made, if nobody waits for it any more."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_made)
        raise


def _close_made(made: asyncio.Future[C]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


async def _named(error: OdqError, objects: Objects, path: str) -> OdqError:
    """Why a database could not be opened, with the name of the file if that can be found."""
    if not isinstance(error.__cause__, slatedb.Error):
        return error  # it is ours, and says everything
    doing = f"open {objects.location.url_of(path)}"
    with contextlib.suppress(OdqError), translated(doing):
        for look in (damaged_list, damaged_wal_file):
            problem = await in_time(look(objects, path), objects.settings.outage_timeout_ms, doing)
            if problem is not None:
                return refusal(objects, path, problem)
    return error


async def _check_files(objects: Objects, path: str, acknowledged: int) -> None:
    """See that the database has all that its owners have acknowledged (RFC 0013).

    Before SlateDB is opened: it makes a new file in any gap, and would not miss anything then.
    What was never synced is set aside.
    """
    location, mark = objects.location, None
    with translated(f"open {location.url_of(path)}"):
        if location.kind is StoreKind.FILE:
            mark = await asyncio.to_thread(newest_mark, location.folder / path)
        prepare_folder(objects, path)
        for aside in await set_unfounded_files_aside(objects, path, mark):
            logger.warning("set aside %s: it, or what it names, was never synced", aside)
        for aside in await check_wal(objects, path, mark, acknowledged):
            logger.warning("set aside %s: it is not whole, and was never synced", aside)


def prepare_folder(objects: Objects, path: str) -> None:
    """Make a database's folder, and see whether SlateDB can live in it: it would retry for ever."""
    location = objects.location
    if location.kind is not StoreKind.FILE:
        return
    folder = location.folder / path
    with translated(f"write to {folder}"):
        make_folder(folder, sync=objects.settings.fsync)
    _probe(folder)


def _probe(folder: Path, size_bytes: int = _PROBE_BYTES) -> None:
    with translated(f"write to {folder}"), tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(size_bytes))


def _runs(ids: list[int]) -> list[list[int]]:
    """Ascending ids, cut where the gap to the next one is large."""
    if ids and ids[-1] - ids[0] == len(ids) - 1:
        return [ids]
    runs: list[list[int]] = []
    for one in ids:
        if runs and one - runs[-1][-1] <= _SCAN_GAP:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs
