"""What is checked before a database is opened for writing, and why it could not be opened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from pathlib import Path
from typing import Final

import slatedb.uniffi as slatedb

from opendata_queue.model.errors import OdqError
from opendata_queue.store.damage.wal import check_wal, damaged_wal_file, refusal
from opendata_queue.store.damage.whole_files import damaged_list, set_unfounded_files_aside
from opendata_queue.store.errors import translated
from opendata_queue.store.files.durable import make_folder
from opendata_queue.store.journal.inspection import newest_mark
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.waiting import in_time

logger = logging.getLogger(__name__)

PROBE_BYTES: Final = 64 * 1024


async def with_file_named(error: OdqError, objects: Objects, path: str) -> OdqError:
    """Why a database could not be opened, with the name of the file if that can be found."""
    if not isinstance(error.__cause__, slatedb.Error):
        return error  # it is ours, and says everything
    doing = f"open {objects.location.url_of(path)}"
    with contextlib.suppress(OdqError), translated(doing):
        for find in (damaged_list, damaged_wal_file):
            problem = await in_time(find(objects, path), objects.settings.outage_timeout_ms, doing)
            if problem is not None:
                return refusal(objects, path, problem)
    return error


async def check_files(objects: Objects, path: str, acknowledged: int) -> None:
    """See that the database has all that its owners have acknowledged (RFC 0013).

    Before SlateDB is opened: it fills any gap with a new file, and no gap is found after that.
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
    """Make a database's folder, and write to it once: where it can't, SlateDB retries for ever."""
    location = objects.location
    if location.kind is not StoreKind.FILE:
        return
    folder = location.folder / path
    with translated(f"write to {folder}"):
        make_folder(folder, sync=objects.settings.fsync)
    probe(folder)


def probe(folder: Path, size_bytes: int = PROBE_BYTES) -> None:
    """Write so many bytes to a file that is removed at once; raises what the system says."""
    with translated(f"write to {folder}"), tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(size_bytes))
