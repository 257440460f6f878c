"""Space of one database: what SlateDB allows while a writer is at work, here or elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

import slatedb.uniffi as slatedb

from opendata_queue.model.errors import OdqError
from opendata_queue.store.db.boundaries import Boundaries
from opendata_queue.store.db.compaction import is_compacting, rewrite_everything
from opendata_queue.store.db.garbage_record import GarbageRecord
from opendata_queue.store.errors import translated
from opendata_queue.store.files.durable import TreeSync
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.abilities import Overwrite
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.slatedb_files.manifests import (
    admin_of,
    compactions_name,
    manifest_name,
    pending_ssts_of,
    sst_name,
    ssts_of,
)
from opendata_queue.store.waiting import in_time

T = TypeVar("T")

_GARBAGE_TIMEOUTS: Final = 5
"""In timeouts of an outage. A round may have much to remove, and goes on where the last one was
cut off."""


class Upkeep:
    """Asks for compactions and collects garbage. It writes no rows, and fences no writer."""

    def __init__(self, objects: Objects, path: str) -> None:
        self.name = objects.location.url_of(path)
        self._objects = objects
        self._path = path
        self._timeout_ms = objects.settings.outage_timeout_ms
        self._doubted = False
        """The store did not do what it is said to be able to: find out anew."""
        self.record = GarbageRecord(self.name)
        self._tree_sync: TreeSync | None = None
        if objects.location.kind is StoreKind.FILE and objects.settings.fsync:
            self._tree_sync = TreeSync(objects.location.folder / path)

    async def size_bytes(self) -> int:
        """The bytes of the files that hold its rows; what only the WAL has is not in it."""
        manifest = await self._in_time(f"read {self.name}", self._admin().read_manifest(None))
        if manifest is None:
            return 0
        files = [*manifest.l0, *manifest.compacted]
        return sum(int(one.estimated_size_bytes) for one in files)

    async def file_counts(self) -> tuple[int, int]:
        """How many files wait for a compaction, and how many runs compactions have made."""
        manifest = await self._in_time(f"read {self.name}", self._admin().read_manifest(None))
        return (0, 0) if manifest is None else (len(manifest.l0), len(manifest.compacted))

    async def is_compacting(self) -> bool:
        """Whether files are being merged, or are about to be."""
        return await self._in_time(f"read {self.name}", is_compacting(self._admin()))

    async def wal_files(self) -> int:
        """How many WAL files were written since the last flush, when it was last opened."""
        manifest = await self._in_time(f"read {self.name}", self._admin().read_manifest(None))
        if manifest is None:
            return 0
        return int(manifest.next_wal_sst_id - 1 - manifest.replay_after_wal_id)

    async def first_needed_wal_file(self) -> int:
        """The number of the first WAL file that the next open has to read."""
        manifest = await self._in_time(f"read {self.name}", self._admin().read_manifest(None))
        return 0 if manifest is None else int(manifest.replay_after_wal_id)

    async def compact(self) -> bool:
        """Have all files rewritten as one run, without what was deleted or is past its time.

        What decides on the latter is the time of the newest row in files. Whichever process has
        the database open does the work. False if there is nothing to rewrite, or SlateDB is busy
        with some of it.
        """
        with translated(f"compact {self.name}"):
            return await rewrite_everything(self._admin(), self.name, self._timeout_ms)

    async def collect_garbage(self, *, min_age_ms: int | None = None) -> None:
        """Remove files that are not needed any more, after what replaces them is on the disk.

        SlateDB decides by the newest manifest. One that it writes in the instant between our sync
        and that decision is synced right afterwards; only a power cut in between could hurt.
        """
        doing = f"collect garbage of {self.name}"
        timeout_ms = _GARBAGE_TIMEOUTS * self._timeout_ms
        try:
            with translated(doing):
                await in_time(self._collect(min_age_ms), timeout_ms, doing)
        except OdqError as error:
            self._doubted = True
            self.record.failed(error)
            raise
        self.record.succeeded()

    async def _collect(self, min_age_ms: int | None) -> None:
        admin, settings = self._admin(), self._objects.settings
        options = settings.garbage_options(min_age_ms)
        boundaries = await self._boundaries(min_age_ms)
        if self._objects.location.kind is StoreKind.FILE:
            self._leave_boundaries_out(options, min_age_ms)
        if self._tree_sync is not None:
            await self._sync_newest_manifest(admin)
        if boundaries is None:
            await admin.run_gc_once(options)
        else:
            await boundaries.move()
            least = settings.garbage_options(boundaries.age_for_slatedb_ms)
            options.manifest_options = least.manifest_options
            options.compactions_options = least.compactions_options
            await boundaries.moved_during(admin.run_gc_once(options))
        await asyncio.to_thread(self.sync_tree)

    async def _boundaries(self, min_age_ms: int | None) -> Boundaries | None:
        """Those of SlateDB, where it can't move them itself (RFC 0015).

        A boundary says up to which number manifests and lists of compactions may be gone, so that a
        process which has stood still meanwhile can't write one of those anew and take that for a
        success. To move it takes a conditional overwrite.
        """
        if self._objects.location.kind is not StoreKind.S3:
            return None
        abilities = await (self._objects.probe() if self._doubted else self._objects.abilities())
        self._doubted = False
        if abilities.overwrite is Overwrite.QUOTED:
            return None
        settings = self._objects.settings
        age_ms = settings.garbage_age_ms if min_age_ms is None else min_age_ms
        if abilities.overwrite is Overwrite.NONE:
            age_ms = max(age_ms, settings.unguarded_age_ms)
        return Boundaries(self._objects, self._path, how=abilities.overwrite, age_ms=age_ms)

    async def sync_in_use(self) -> int:
        """Sync the files that the newest manifest and the newest list of compactions need, and
        these two.

        Returns the number of a WAL file: what it and those before it hold is in these files, too.
        """
        return await self._in_time(f"sync {self.name}", self._sync_in_use())

    async def _sync_in_use(self) -> int:
        admin = self._admin()
        # The list first: what is not in it any more by then, the manifest has.
        compactions = await admin.read_compactions(None)
        manifest = await admin.read_manifest(None)
        if manifest is None:
            return 0
        if self._tree_sync is not None:
            files = _files_of(manifest, compactions)
            await asyncio.to_thread(self._tree_sync.sync_in_use, files)
        return int(manifest.replay_after_wal_id)

    def sync_tree(self) -> None:
        """Sync the files that were written in the background."""
        if self._tree_sync is not None:
            self._tree_sync.sync_new_files()

    def _leave_boundaries_out(
        self, options: slatedb.GarbageCollectorOptions, min_age_ms: int | None
    ) -> None:
        """In files, collect manifests and lists of compactions without a boundary.

        Files have no conditional overwrite: SlateDB writes the boundary once, and then removes none
        of them any more. So on files their age alone must be enough, and it is never below the one
        that is set, however short replaced files are kept. A process that stands still for longer
        in the middle of such a write does no harm: the newest number counts, and is kept. A writer
        that was replaced finds out with its next commit, for the WAL file that fences it is kept,
        too. A reader may lose the files that it reads, and says so.
        """
        settings = self._objects.settings
        options.disable_boundary_files = True
        least = settings.garbage_options(max(min_age_ms or 0, settings.garbage_age_ms))
        options.manifest_options = least.manifest_options
        options.compactions_options = least.compactions_options

    async def _sync_newest_manifest(self, admin: slatedb.Admin) -> None:
        """Sync until no manifest was written while that was done."""
        synced = None
        while (newest := await admin.read_manifest(None)) is not None and newest.id != synced:
            synced = newest.id
            await asyncio.to_thread(self.sync_tree)

    async def _in_time(self, doing: str, asking: Awaitable[T]) -> T:
        with translated(doing):
            return await in_time(asking, self._timeout_ms, doing)

    def _admin(self) -> slatedb.Admin:
        return admin_of(self._objects, self._path)


def _files_of(
    manifest: slatedb.VersionedManifest, compactions: slatedb.VersionedCompactions | None
) -> dict[str, list[str]]:
    """The files that a manifest and a list of compactions need, by their folders, and they.

    The manifests that a manifest names are those of checkpoints. What compactions have made so far
    is taken over when the database is opened next.
    """
    numbers = {manifest.id, *(one.manifest_id for one in manifest.checkpoints)}
    ssts, lists = ssts_of(manifest), []
    if compactions is not None:
        ssts += pending_ssts_of(compactions)
        lists.append(compactions_name(compactions.id))
    return {
        "compacted": [sst_name(sst) for sst in ssts],
        "compactions": lists,
        "manifest": [manifest_name(number) for number in sorted(numbers)],
    }
