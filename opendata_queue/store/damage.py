"""Finding files that are not whole: SlateDB asks for ever for what they lack."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final

import slatedb.uniffi as slatedb

from opendata_queue.errors import CorruptStoreError
from opendata_queue.store.durable_files import is_cut, names_in, set_aside
from opendata_queue.store.location import StoreKind
from opendata_queue.store.manifests import admin_of, pending_ssts_of, sst_name, ssts_of
from opendata_queue.store.objects import Objects
from opendata_queue.store.translation import translated

logger = logging.getLogger(__name__)

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
    """Set the newest manifests and lists of compactions aside that a power cut has torn, or that
    name SSTs which it has taken.

    They are synced some time after SlateDB has written them, and the disk may have got them before
    the SSTs, or a part of them.
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
    unfounded = []
    for name in _newest_first(folder, "compactions"):
        compactions = await _read(admin.read_compactions, name)
        if compactions is not None:
            ssts = pending_ssts_of(compactions)
            if await asyncio.to_thread(_first_torn, folder, ssts) is None:
                break
        unfounded.append(name)
    return await asyncio.to_thread(set_aside, folder, "compactions", unfounded)


async def _set_manifests_aside(admin: slatedb.Admin, folder: Path) -> list[Path]:
    """Nothing is removed before what replaces it is synced. So what such an SST held is in the WAL
    or in other SSTs, and SlateDB goes on from the manifest before. If that is not so, the database
    is damaged, and stays as it is: whoever opens or reads it is told where.
    """
    for _ in range(_LOOKS_AT_MOST):
        names = _newest_first(folder, "manifest")
        unfounded: list[str] = []
        replayed_after = 0
        for name in names:
            manifest = await _read(admin.read_manifest, name)
            if manifest is not None:
                replayed_after = max(replayed_after, int(manifest.replay_after_wal_id))
                if await asyncio.to_thread(_first_torn, folder, ssts_of(manifest)) is None:
                    break
            unfounded.append(name)
        else:
            return []
        if not unfounded:
            return []
        if _newest_first(folder, "manifest")[:1] != names[:1]:
            continue  # an owner is at work, and removes what newer manifests don't need
        if not _has_wal(folder, int(manifest.replay_after_wal_id), replayed_after):
            return []
        return await asyncio.to_thread(set_aside, folder, "manifest", unfounded)
    return []


def _newest_first(folder: Path, kind: str) -> list[str]:
    return sorted(names_in(folder, kind), reverse=True)


async def _read(read: Callable[[int], Awaitable[Any]], name: str) -> Any:
    """A manifest or a list by the name of its file; none if it can't be understood, or is gone."""
    try:
        with translated(f"read {name}"):
            return await read(int(Path(name).stem))
    except CorruptStoreError as error:
        logger.info("%s", error)
        return None


def _has_wal(folder: Path, after: int, up_to: int) -> bool:
    """Whether all WAL files are there from behind a number up to another one, and all newer ones.

    The newest one is never collected. Without it something else has removed files.
    """
    present = {int(Path(name).stem) for name in names_in(folder, "wal")}
    newest = max(present, default=0)
    return newest >= max(1, after) and present.issuperset(range(after + 1, max(newest, up_to) + 1))


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
