"""What SlateDB's manifests say about files."""

from __future__ import annotations

import slatedb.uniffi as slatedb

from opendata_queue.store.objects import Objects


def admin_of(objects: Objects, path: str) -> slatedb.Admin:
    """Looks at the database ``path`` of a root, and opens nothing."""
    return slatedb.AdminBuilder(objects.location.join(path), objects.slatedb_store).build()


def ssts_of(manifest: slatedb.VersionedManifest) -> list[slatedb.SsTableHandle]:
    """The SSTs that hold the rows of a manifest; what is newer is in the WAL."""
    trees = [manifest, *manifest.segments]
    in_runs = [view.sst for tree in trees for run in tree.compacted for view in run.sst_views]
    return [*(view.sst for tree in trees for view in tree.l0), *in_runs]


def sst_name(sst: slatedb.SsTableHandle) -> str:
    """Its file, in the folder ``compacted``."""
    return f"{sst.id.value}.sst"


def manifest_name(number: int) -> str:
    """Its file, in the folder ``manifest``."""
    return f"{number:020}.manifest"
