"""The writer of one SlateDB database: rows in, rows out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import slatedb.uniffi as slatedb

from odq_encodings import JOURNAL_STATE_KEY, JournalState
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
from opendata_queue.store.damage.check import read_journal_state
from opendata_queue.store.db.figures import slatedb_figures
from opendata_queue.store.db.garbage_schedule import GarbagePace
from opendata_queue.store.db.opening import PROBE_BYTES, check_files, probe, with_file_named
from opendata_queue.store.db.reads import WRITTEN, DatabaseReads
from opendata_queue.store.db.recorder import new_recorder
from opendata_queue.store.db.replay_length import ReplayLength
from opendata_queue.store.db.upkeep import Upkeep
from opendata_queue.store.errors import LostRaceError, translated
from opendata_queue.store.files.durable import WalSync, is_on_network
from opendata_queue.store.journal.journal import LeftJournals
from opendata_queue.store.journal.seen_files import FileNotes
from opendata_queue.store.journal.writes import JournaledWrites, bring_in
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.rows.rows import Rows
from opendata_queue.store.rows.writer import active_tier, commit_rows
from opendata_queue.store.waiting import in_time

logger = logging.getLogger(__name__)

_REQUESTS: Final = "slatedb.object_store.request_count"
_TRIES_TO_MAKE: Final = 4
_PROBE_TIMEOUT_MS: Final = 1_000

T = TypeVar("T")


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
        checking = check_files(objects, path, acknowledged)
        try:
            await in_time(checking, settings.outage_timeout_ms, f"open {name}")
        except (CorruptStoreError, InvalidInputError) as error:
            raise await with_file_named(error, objects, path) from error
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
                raise await with_file_named(error, objects, path) from error
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
        """Flush what is in memory, so that the next open has less to read."""
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
        """Whether a commit is a request that has to be paid for."""
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
            size_bytes = max(size_bytes, PROBE_BYTES)
            probing = asyncio.to_thread(probe, location.folder / self._path, size_bytes)
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
        """Let go of what could not be opened; the caller raises why."""
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
        self._options = WRITTEN
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
                self._garbage.collected()
            except OdqError:  # noted, logged and counted there; garbage can wait
                continue


class _Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closeable)


async def _made_in_thread(make: Callable[[], C]) -> C:
    """What a thread makes; closed as soon as it is made, if the caller was cancelled meanwhile."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_made)
        raise


def _close_made(made: asyncio.Future[C]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()
