"""Readers of a database that another process writes, or has written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import slatedb.uniffi as slatedb

from opendata_queue.model.errors import StoreAccessError
from opendata_queue.store.damage.bulk_proof import check_proof
from opendata_queue.store.db.reads import DatabaseReads
from opendata_queue.store.db.standstill import Standstill
from opendata_queue.store.errors import has_no_database, translated
from opendata_queue.store.journal.inspection import until_flushed
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.settings import StoreSettings
from opendata_queue.store.waiting import in_time

_NEVER_MS: Final = 24 * 3_600_000
_INSTANT_KEPT_MS: Final = 10 * 60_000

T = TypeVar("T")


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

        One that is ``complete``, and written without a WAL, is not watched, and has no checkpoint
        while it is read. A ``cache`` that is shared with readers of other databases needs a number
        for each of them.

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
                # Renewed by a poll when half of it is over. A killed process leaves it behind.
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
        """Follow a database without a trace; none if it is not there: it was never written to."""
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
        this process is killed. Every other reader moves on by itself, and once right after it was
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
    """A reader of a bulk shard that is proven to be whole: it is checked while it is opened."""
    outcomes: tuple[slatedb.DbReader | BaseException, BaseException | None] = await asyncio.gather(
        opening, check_proof(objects, path), return_exceptions=True
    )
    handle, proof = outcomes
    if isinstance(proof, BaseException):  # it names the file, so it comes first if both fail
        if not isinstance(handle, BaseException):
            await in_time(handle.shutdown(), objects.settings.outage_timeout_ms, f"close {path}")
        raise proof
    if isinstance(handle, BaseException):
        raise handle
    assert isinstance(handle, slatedb.DbReader)
    return handle
