"""One SlateDB database: rows in, rows out."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

import slatedb.uniffi as slatedb

from odq_encodings import EncodingError
from opendata_queue.errors import (
    ClosedError,
    CorruptStoreError,
    FencedError,
    OdqError,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.store.batch_writer import active_tier, commit_rows
from opendata_queue.store.durable_files import (
    TreeSync,
    WalSync,
    make_folder,
    set_torn_files_aside,
)
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects import Objects
from opendata_queue.store.rows import Rows
from opendata_queue.store.translation import translated

logger = logging.getLogger(__name__)

SCAN_ROWS: Final = 1_000
"""Rows that a scan hands over at a time."""

_READS_AT_ONCE: Final = 32
_PROBE_BYTES: Final = 64 * 1024
_PROBE_TIMEOUT_MS: Final = 1_000
# Rows this close together are read with one scan.
_SCAN_GAP: Final = 8
_SCAN_LEAST: Final = 4
# Nothing is shown that could still be lost.
_READ_OPTIONS: Final = slatedb.ReadOptions(
    durability_filter=slatedb.DurabilityLevel.REMOTE, dirty=False, cache_blocks=True
)
# With SlateDB's own defaults a scan on S3 makes thousands of tiny requests.
_SCAN_OPTIONS: Final = slatedb.ScanOptions(
    durability_filter=slatedb.DurabilityLevel.REMOTE,
    dirty=False,
    read_ahead_bytes=4 * 1024 * 1024,
    cache_blocks=False,
    max_fetch_tasks=4,
)

Row = tuple[bytes, bytes]
T = TypeVar("T")


class _Readable(Protocol):
    async def get_with_options(self, key: bytes, options: slatedb.ReadOptions) -> bytes | None: ...
    async def scan_with_options(
        self, range: slatedb.KeyRange, options: slatedb.ScanOptions
    ) -> slatedb.DbIterator: ...
    async def shutdown(self) -> None: ...


class DatabaseReads:
    """Point reads and bounded scans, the same for a writer and for a reader."""

    def __init__(self, handle: _Readable, name: str, outage_timeout_ms: int) -> None:
        self._reads = handle
        self._outage_timeout_ms = outage_timeout_ms
        self.name = name

    def decode(self, decoder: Callable[[bytes], T], key: bytes, value: bytes) -> T:
        """Decode the value of a row; one that can't be is a corrupt row of this database."""
        try:
            return decoder(value)
        except EncodingError as error:
            raise CorruptStoreError(f"{self.name}: {error}", key=key) from error

    async def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, if it has one that is durable."""
        doing = f"read {self.name}"
        with translated(doing, key=key):
            return await _in_time(
                self._reads.get_with_options(key, _READ_OPTIONS), self._outage_timeout_ms, doing
            )

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys``, in their order, a bounded number of reads at a time."""
        values: list[bytes | None] = []
        for start in range(0, len(keys), _READS_AT_ONCE):
            some = keys[start : start + _READS_AT_ONCE]
            values += await asyncio.gather(*(self.get(key) for key in some))
        return values

    async def get_by_id(
        self, ids: Iterable[int], key_of: Callable[[int], bytes]
    ) -> dict[int, bytes]:
        """The values of rows that are keyed by ids, where they have one.

        Ids that lie close together are read with one scan, the others with a point read each.
        """
        found: dict[int, bytes] = {}
        alone: list[int] = []
        for run in _runs(sorted(set(ids))):
            if len(run) < _SCAN_LEAST:
                alone += run
                continue
            wanted = {key_of(one): one for one in run}
            async for chunk in self.scan(key_of(run[0]), key_of(run[-1]) + b"\x00"):
                found |= {wanted[key]: value for key, value in chunk if key in wanted}
        values = await self.get_many([key_of(one) for one in alone])
        found |= {one: value for one, value in zip(alone, values, strict=True) if value is not None}
        return found

    async def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None
    ) -> AsyncIterator[list[Row]]:
        """The durable rows from ``start`` up to, not including, ``end``, in chunks of up to 1,000.

        ``limit`` bounds the rows in all.
        """
        if start >= end:  # SlateDB refuses to scan nothing
            return
        span = slatedb.KeyRange(start=start, start_inclusive=True, end=end, end_inclusive=False)
        doing = f"scan {self.name}"
        with translated(doing, key=start):
            iterator = await _in_time(
                self._reads.scan_with_options(span, _SCAN_OPTIONS), self._outage_timeout_ms, doing
            )
        left = limit
        while left is None or left > 0:
            wanted = SCAN_ROWS if left is None else min(SCAN_ROWS, left)
            with translated(doing, key=start):
                rows = await _in_time(iterator.next_batch(wanted), self._outage_timeout_ms, doing)
            chunk = [(row.key, row.value) for row in rows]
            if not chunk:
                return
            yield chunk
            if left is not None:
                left -= len(chunk)


class Database(DatabaseReads):
    """The one writer of a database. A second one, anywhere, fences it."""

    def __init__(self, handle: slatedb.Db, objects: Objects, path: str) -> None:
        super().__init__(handle, objects.location.url_of(path), objects.settings.outage_timeout_ms)
        self._db = handle
        self._objects = objects
        self._settings = objects.settings
        self._path = path
        self._wal_sync: WalSync | None = None
        self._tree_sync: TreeSync | None = None
        self._housekeeping: asyncio.Task[None] | None = None
        self._closing = asyncio.Lock()

    @classmethod
    async def open(cls, objects: Objects, path: str) -> Database:
        """Open the database ``path`` of a root for writing; it is created if it is not there."""
        settings = objects.settings
        name = objects.location.url_of(path)
        active_tier()  # complains now, not at the first commit, about a tier that can't be used
        _prepare_folder(objects, path)
        builder = slatedb.DbBuilder(objects.location.join(path), objects.slatedb_store)
        builder.with_settings(settings.for_slatedb())
        builder.with_db_cache(settings.block_cache(), 0)
        with translated(f"open {name}"):
            handle = await _in_time(builder.build(), settings.outage_timeout_ms, f"open {name}")
        database = cls(handle, objects, path)
        try:
            await database._start()
        except BaseException:
            await handle.shutdown()
            raise
        return database

    async def commit(self, rows: Rows) -> None:
        """Write ``rows`` as one atomic batch; when this returns they are durable.

        If it raises, they may be durable or not: the caller must stop using the database. If the
        caller is cancelled the commit goes on.
        """
        after_flush = self._wal_sync.sync_commit if self._wal_sync else None
        doing = f"write {self.name}"
        try:
            with translated(doing):
                await _in_time(
                    commit_rows(self._db, rows, after_flush=after_flush),
                    self._outage_timeout_ms,
                    doing,
                )
        except (StoreUnavailableError, StoreAccessError) as error:
            reason = await self._why_unwritable()
            raise StoreUnavailableError(f"{error}{reason}", in_doubt=True) from error

    async def _why_unwritable(self) -> str:
        """What the system says of a folder that SlateDB could not write to, if it says anything."""
        location = self._objects.location
        if location.kind is not StoreKind.FILE:
            return ""
        try:
            probing = asyncio.to_thread(_probe, location.folder / self._path)
            await _in_time(probing, _PROBE_TIMEOUT_MS, "probe")
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
            if not self._housekeeping.done():
                self._housekeeping.cancel()
                await asyncio.wait([self._housekeeping])
            self._housekeeping = None
            doing = f"close {self.name}"
            try:
                with translated(doing):
                    await _in_time(self._db.shutdown(), self._outage_timeout_ms, doing)
                    await asyncio.to_thread(self._sync_tree)
            except (FencedError, ClosedError) as error:
                logger.info("%s", error)
            except OdqError as error:
                logger.warning("%s", error)
            if self._wal_sync:
                self._wal_sync.close()

    async def _start(self) -> None:
        location = self._objects.location
        if location.kind is StoreKind.FILE and self._settings.fsync:
            folder = location.folder / self._path
            self._tree_sync = TreeSync(folder)
            with translated(f"sync {self.name}"):
                self._wal_sync = await asyncio.to_thread(WalSync, folder)
                await asyncio.to_thread(self._sync_tree)
        self._housekeeping = asyncio.create_task(self._keep_house(), name=f"keep {self.name}")

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(self._settings.garbage_interval_ms / 1000)
            try:
                with translated(f"collect garbage of {self.name}"):
                    await self._collect_garbage()
            except OdqError as error:
                # Garbage can wait; a store that is really gone shows at the next commit.
                logger.warning("%s", error)

    async def _collect_garbage(self) -> None:
        """Remove files that are not needed any more, after what replaces them is on the disk.

        SlateDB decides by the newest manifest. One that it writes in the instant between our sync
        and that decision is synced right afterwards; only a power cut in between could hurt.
        """
        admin = slatedb.AdminBuilder(
            self._objects.location.join(self._path), self._objects.slatedb_store
        ).build()
        if self._tree_sync is not None:
            await self._sync_newest_manifest(admin)
        await admin.run_gc_once(self._settings.garbage_options())
        await asyncio.to_thread(self._sync_tree)

    async def _sync_newest_manifest(self, admin: slatedb.Admin) -> None:
        """Sync until no manifest was written while that was done."""
        synced = None
        while (newest := await admin.read_manifest(None)) is not None and newest.id != synced:
            synced = newest.id
            await asyncio.to_thread(self._sync_tree)

    def _sync_tree(self) -> None:
        if self._tree_sync:
            self._tree_sync.sync_new_files()


class DatabaseReader(DatabaseReads):
    """Reads a database that another process writes: durable rows, after a short delay."""

    @classmethod
    async def open(
        cls, objects: Objects, path: str, *, poll_interval_ms: int = 1_000
    ) -> DatabaseReader:
        settings = objects.settings
        name = objects.location.url_of(path)
        builder = slatedb.DbReaderBuilder(objects.location.join(path), objects.slatedb_store)
        builder.with_db_cache(settings.block_cache(), 0)
        builder.with_options(
            slatedb.ReaderOptions(
                manifest_poll_interval_ms=poll_interval_ms,
                checkpoint_lifetime_ms=max(60_000, 10 * poll_interval_ms),
                max_memtable_bytes=settings.memtable_bytes,
                skip_wal_replay=False,
            )
        )
        with translated(f"read {name}"):
            handle = await _in_time(builder.build(), settings.outage_timeout_ms, f"read {name}")
        return cls(handle, name, settings.outage_timeout_ms)

    async def close(self) -> None:
        doing = f"close {self.name}"
        with translated(doing):
            await _in_time(self._reads.shutdown(), self._outage_timeout_ms, doing)


async def _in_time(work: Awaitable[T], timeout_ms: int, doing: str) -> T:
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            return await work
    except TimeoutError:
        raise StoreUnavailableError(
            f"could not {doing}: no answer within {timeout_ms} ms"
        ) from None


def _prepare_folder(objects: Objects, path: str) -> None:
    """Make a database's folder, and see whether SlateDB can live in it: it would retry for ever."""
    location = objects.location
    if location.kind is not StoreKind.FILE:
        return
    folder = location.folder / path
    with translated(f"write to {folder}"):
        make_folder(folder, sync=objects.settings.fsync)
        for torn in set_torn_files_aside(folder):
            logger.warning("set aside %s: it is empty, and was never synced", torn)
    _probe(folder)


def _probe(folder: Path) -> None:
    with translated(f"write to {folder}"), tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(_PROBE_BYTES))


def _runs(ids: list[int]) -> list[list[int]]:
    """Ascending ids, cut where the gap to the next one is large."""
    runs: list[list[int]] = []
    for one in ids:
        if runs and one - runs[-1][-1] <= _SCAN_GAP:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs
