"""Finding files that are not whole: SlateDB asks for ever for what they lack."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import slatedb.uniffi as slatedb

from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects import Objects


async def cut_file(objects: Objects, path: str) -> Path | None:
    """An SST of the database ``path`` that is shorter than the manifest says, if there is one.

    There are such only among files: S3 has an object whole, or not at all.
    """
    if objects.location.kind is not StoreKind.FILE:
        return None
    admin = slatedb.AdminBuilder(objects.location.join(path), objects.slatedb_store).build()
    manifest = await admin.read_manifest(None)
    if manifest is None:
        return None
    folder = objects.location.folder / path / "compacted"
    return await asyncio.to_thread(_first_cut, folder, _views(manifest))


def _views(manifest: slatedb.VersionedManifest) -> list[slatedb.SsTableView]:
    in_runs = (view for run in manifest.compacted for view in run.sst_views)
    return [*manifest.l0, *in_runs]


def _first_cut(folder: Path, views: Iterable[slatedb.SsTableView]) -> Path | None:
    for view in views:
        file = folder / f"{view.sst.id.value}.sst"
        # One that is missing SlateDB finds by itself.
        if file.exists() and file.stat().st_size < _least_bytes(view.sst.info):
            return file
    return None


def _least_bytes(info: slatedb.SsTableInfo) -> int:
    """Where the last of the parts ends that the manifest knows of."""
    return max(
        int(info.index_offset + info.index_len),
        int(info.filter_offset + info.filter_len),
        int(info.stats_offset + info.stats_len),
    )
