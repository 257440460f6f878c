"""What SlateDB's manifests and lists of compactions say about files."""

from __future__ import annotations

from typing import Final

import slatedb.uniffi as slatedb

from opendata_queue.store.objects import Objects

FINISHED: Final = (slatedb.CompactionStatus.COMPLETED, slatedb.CompactionStatus.FAILED)


def admin_of(objects: Objects, path: str) -> slatedb.Admin:
    """Looks at the database ``path`` of a root, and opens nothing."""
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
    """The compactions that are not finished, those included that nobody has begun yet."""
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
