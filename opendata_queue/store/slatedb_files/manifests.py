"""What SlateDB's manifests and lists of compactions say about files."""

from __future__ import annotations

from typing import Final

import slatedb.uniffi as slatedb

from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.slatedb_files.ssts import SstDescription

FINISHED: Final = (slatedb.CompactionStatus.COMPLETED, slatedb.CompactionStatus.FAILED)


def admin_of(objects: Objects, path: str) -> slatedb.Admin:
    """Reads the manifests of the database ``path`` of a root, and opens nothing."""
    return slatedb.AdminBuilder(objects.location.join(path), objects.slatedb_store).build()


def ssts_of(manifest: slatedb.VersionedManifest) -> list[slatedb.SsTableHandle]:
    """The SSTs that hold the rows of a manifest; what is newer is in the WAL."""
    trees = [manifest, *manifest.segments]
    in_runs = [view.sst for tree in trees for run in tree.compacted for view in run.sst_views]
    return [*(view.sst for tree in trees for view in tree.l0), *in_runs]


def pending_ssts_of(compactions: slatedb.VersionedCompactions) -> list[slatedb.SsTableHandle]:
    """The SSTs that a list of compactions names, and that the manifest is yet to name."""
    return [sst for one in under_way(compactions) for sst in one.output_ssts]


def under_way(compactions: slatedb.VersionedCompactions) -> list[slatedb.Compaction]:
    """The compactions that are not finished, those included that have not begun yet."""
    return [one for one in compactions.recent_compactions if one.status not in FINISHED]


def sst_name(sst: slatedb.SsTableHandle) -> str:
    """Its file, in the folder ``compacted``."""
    return f"{sst.id.value}.sst"


def manifest_name(number: int) -> str:
    """Its file, in the folder ``manifest``."""
    return f"{number:020}.manifest"


def compactions_name(number: int) -> str:
    """The file of a list of compactions, in the folder ``compactions``."""
    return f"{number:020}.compactions"


def wal_name(number: int) -> str:
    """The file of the WAL with a number, in the folder ``wal``."""
    return f"{number:020}.sst"


def least_bytes(info: slatedb.SsTableInfo) -> int:
    """Where the last of the parts of an SST ends that the manifest knows of."""
    return max(
        int(info.index_offset + info.index_len),
        int(info.filter_offset + info.filter_len),
        int(info.stats_offset + info.stats_len),
    )


def is_described_by(info: slatedb.SsTableInfo, found: SstDescription) -> bool:
    """Whether a manifest says of an SST what the SST says of itself."""
    return (
        (info.first_entry or b"") == found.first_entry
        and (info.last_entry or b"") == found.last_entry
        and (info.index_offset, info.index_len) == found.index
        and (info.filter_offset, info.filter_len) == found.filter
        and (info.stats_offset, info.stats_len) == found.stats
    )
