"""Finding files that are not whole: SlateDB asks for ever for what they lack."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import slatedb.uniffi as slatedb

from opendata_queue.store.durable_files import is_cut, names_in, set_aside
from opendata_queue.store.location import StoreKind
from opendata_queue.store.manifests import (
    admin_of,
    compactions_name,
    manifest_name,
    pending_ssts_of,
    sst_name,
    ssts_of,
)
from opendata_queue.store.objects import Objects

_LOOKS_AT_MOST: Final = 5


async def cut_file(objects: Objects, path: str) -> Path | None:
    """An SST of the database ``path`` that is shorter than the manifest says, if there is one.

    There are such only among files: S3 has an object whole, or not at all.
    """
    if objects.location.kind is not StoreKind.FILE:
        return None
    manifest = await admin_of(objects, path).read_manifest(None)
    if manifest is None:
        return None
    folder = objects.location.folder / path
    return await asyncio.to_thread(_first_torn, folder, ssts_of(manifest), missing=False)


async def set_unfounded_files_aside(objects: Objects, path: str) -> list[Path]:
    """Set the newest manifests and lists of compactions aside that name SSTs which a power cut has
    taken.

    They are synced some time after SlateDB has written them, and the disk may have got them before
    the SSTs.
    """
    if objects.location.kind is not StoreKind.FILE:
        return []
    admin, folder = admin_of(objects, path), objects.location.folder / path
    # The lists first: what is not in the newest one any more by then, the manifest has.
    return [
        *await _set_lists_aside(admin, folder),
        *await _set_manifests_aside(admin, folder),
    ]


async def _set_lists_aside(admin: slatedb.Admin, folder: Path) -> list[Path]:
    """SlateDB begins again what is missing in an older list, and drops what is too much."""
    unfounded: list[int] = []
    compactions = await admin.read_compactions(None)
    while compactions is not None:
        if await asyncio.to_thread(_first_torn, folder, pending_ssts_of(compactions)) is None:
            break
        unfounded.append(int(compactions.id))
        before = _number_before(folder, "compactions", compactions_name(compactions.id))
        compactions = None if before is None else await admin.read_compactions(before)
    names = map(compactions_name, unfounded)
    return await asyncio.to_thread(set_aside, folder, "compactions", names)


async def _set_manifests_aside(admin: slatedb.Admin, folder: Path) -> list[Path]:
    """Nothing is removed before what replaces it is synced. So what such an SST held is in the WAL
    or in other SSTs, and SlateDB goes on from the manifest before. If that is not so, the database
    is damaged, and stays as it is: reads will say where.
    """
    for _ in range(_LOOKS_AT_MOST):
        newest = manifest = await admin.read_manifest(None)
        unfounded: list[int] = []
        while manifest is not None:
            if await asyncio.to_thread(_first_torn, folder, ssts_of(manifest)) is None:
                break
            unfounded.append(int(manifest.id))
            before = _number_before(folder, "manifest", manifest_name(manifest.id))
            manifest = None if before is None else await admin.read_manifest(before)
        if not unfounded:
            return []
        now = await admin.read_manifest(None)
        if now.id != newest.id:
            continue  # an owner is at work, and removes what newer manifests don't need
        if manifest is None or not _has_wal(folder, manifest, newest):
            return []
        return await asyncio.to_thread(set_aside, folder, "manifest", map(manifest_name, unfounded))
    return []


def _number_before(folder: Path, kind: str, name: str) -> int | None:
    """The number of the file of a kind before another one."""
    older = [one for one in names_in(folder, kind) if one < name]
    return int(Path(max(older)).stem) if older else None


def _has_wal(
    folder: Path, older: slatedb.VersionedManifest, newer: slatedb.VersionedManifest
) -> bool:
    """Whether all is in the WAL that has come into files from one manifest to the other."""
    wanted = range(int(older.replay_after_wal_id) + 1, int(newer.replay_after_wal_id) + 1)
    present = set(names_in(folder, "wal"))
    return all(f"{number:020}.sst" in present for number in wanted)


def _first_torn(
    folder: Path, ssts: Iterable[slatedb.SsTableHandle], *, missing: bool = True
) -> Path | None:
    """The first SST that is not whole; SlateDB finds by itself those that are missing."""
    for sst in ssts:
        file = folder / "compacted" / sst_name(sst)
        try:
            if file.stat().st_size < _least_bytes(sst.info) or is_cut(file):
                return file
        except FileNotFoundError:
            if missing:
                return file
    return None


def _least_bytes(info: slatedb.SsTableInfo) -> int:
    """Where the last of the parts ends that the manifest knows of."""
    return max(
        int(info.index_offset + info.index_len),
        int(info.filter_offset + info.filter_len),
        int(info.stats_offset + info.stats_len),
    )
