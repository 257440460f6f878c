"""One SlateDB database that is filled in one go, by one process, and never written again."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import slatedb.uniffi as slatedb

from opendata_queue.model.errors import InvalidInputError, OdqError
from opendata_queue.store.damage.bulk_proof import leave_proof
from opendata_queue.store.db.opening import prepare_folder
from opendata_queue.store.errors import translated
from opendata_queue.store.files.durable import TreeSync
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.rows.packed import AnyRows
from opendata_queue.store.rows.rows import Rows
from opendata_queue.store.rows.writer import active_tier, commit_rows, write_rows
from opendata_queue.store.waiting import in_time

logger = logging.getLogger(__name__)

_NO_ROWS: Final = Rows()


class BulkDatabase:
    """The writer of a database that no other process may know of yet.

    There is no WAL, no compactor and no collector: rows go from memory into SST files, once. So
    nothing is durable before ``finish`` has returned, and a database that was not finished is
    worth nothing.
    """

    def __init__(self, handle: slatedb.Db, objects: Objects, path: str) -> None:
        self._db = handle
        self._objects = objects
        self._path = path
        self._timeout_ms = objects.settings.outage_timeout_ms
        self.name = objects.location.url_of(path)

    @classmethod
    async def create(cls, objects: Objects, path: str) -> BulkDatabase:
        """Create the database ``path`` of a root; ``InvalidInputError`` if it is there already."""
        settings = objects.settings
        name = objects.location.url_of(path)
        where = objects.location.join(path)
        doing = f"create {name}"
        admin = slatedb.AdminBuilder(where, objects.slatedb_store).build()
        with translated(doing):
            found = await in_time(admin.read_manifest(None), settings.outage_timeout_ms, doing)
        if found is not None:
            # SlateDB would open it, and what is written would replace what may be committed.
            raise InvalidInputError(
                f"{name} was written before, and is filled only once: reserve another shard"
            )
        active_tier()  # complains now about a tier that can't be used
        prepare_folder(objects, path)
        builder = slatedb.DbBuilder(where, objects.slatedb_store)
        builder.with_settings(settings.for_bulk_load())
        builder.with_db_cache_disabled()
        with translated(doing):
            handle = await in_time(builder.build(), settings.outage_timeout_ms, doing)
        return cls(handle, objects, path)

    async def write(self, rows: AnyRows) -> None:
        """Add rows; it waits while too many are on their way to the store."""
        doing = f"write {self.name}"
        with translated(doing):
            await in_time(write_rows(self._db, rows), self._timeout_ms, doing)

    async def finish(self) -> None:
        """Make all rows durable, and close. If it raises, the database is worth nothing."""
        doing = f"finish {self.name}"
        with translated(doing):
            await in_time(commit_rows(self._db, _NO_ROWS), self._timeout_ms, doing)
            await in_time(self._db.shutdown(), self._timeout_ms, doing)
            await asyncio.to_thread(self._sync)
        await leave_proof(self._objects, self._path)

    async def abandon(self) -> None:
        """Close without a promise; what goes wrong is only logged."""
        doing = f"abandon {self.name}"
        try:
            with translated(doing):
                await in_time(self._db.shutdown(), self._timeout_ms, doing)
        except OdqError as error:
            logger.info("%s", error)

    def _sync(self) -> None:
        location = self._objects.location
        if location.kind is StoreKind.FILE and self._objects.settings.fsync:
            # Opening a database leaves one empty WAL file, whatever the settings say.
            TreeSync(location.folder / self._path, with_wal=True).sync_new_files()
