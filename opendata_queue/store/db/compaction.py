"""Asking SlateDB to rewrite a database."""

from __future__ import annotations

import asyncio
from typing import Final

import slatedb.uniffi as slatedb

from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.store.errors import is_clock_behind
from opendata_queue.store.slatedb_files.manifests import FINISHED, under_way
from opendata_queue.store.waiting import in_time

_POLL_SECONDS: Final = 0.5
# A compaction that has made no progress for so long has no process that works on it.
_STUCK_SECONDS: Final = 120.0


async def rewrite_everything(admin: slatedb.Admin, name: str, timeout_ms: int) -> bool:
    """Compact all files into one run, and wait for it; false if that can't be done now.

    Whichever process has the database open does the work. It is safe while its writer is at work.
    """
    doing = f"compact {name}"
    view = await in_time(admin.read_compactor_state_view(), timeout_ms, doing)
    if view.compactions is not None and under_way(view.compactions):
        return False
    manifest = view.manifest
    sources = [
        *(slatedb.SourceId.SST_VIEW(one.id) for one in manifest.l0),
        *(slatedb.SourceId.SORTED_RUN(run.id) for run in manifest.compacted),
    ]
    if not sources:
        return False
    into = manifest.compacted[-1].id if manifest.compacted else 0
    spec = slatedb.CompactionSpec.TIERED(segment=b"", sources=sources, destination=into)
    try:
        submitted = await in_time(admin.submit_compaction(spec), timeout_ms, doing)
    except slatedb.Error.Invalid as error:
        if not is_clock_behind(error):
            raise
        return False
    return await _finished(admin, submitted.id, doing, timeout_ms)


async def is_compacting(admin: slatedb.Admin) -> bool:
    """Whether a compaction is under way, or is going to be."""
    compactions = await admin.read_compactions(None)
    return compactions is not None and bool(under_way(compactions))


async def _finished(admin: slatedb.Admin, compaction_id: str, doing: str, timeout_ms: int) -> bool:
    waited = 0.0
    progress = None
    while True:
        found = await in_time(admin.read_compaction(compaction_id, None), timeout_ms, doing)
        if found is None:  # finished so long ago that it is forgotten
            return True
        if found.status in FINISHED:
            return bool(found.status is slatedb.CompactionStatus.COMPLETED)
        if progress != (found.status, found.bytes_processed):
            progress, waited = (found.status, found.bytes_processed), 0.0
        if waited > _STUCK_SECONDS:
            raise StoreUnavailableError(
                f"could not {doing}: compaction {compaction_id} makes no progress for "
                f"{_STUCK_SECONDS:.0f} s"
            )
        await asyncio.sleep(_POLL_SECONDS)
        waited += _POLL_SECONDS
