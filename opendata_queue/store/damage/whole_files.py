"""Finding files that are not whole: SlateDB asks for ever for what they lack."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Final

import slatedb.uniffi as slatedb

from odq_encodings import JournalMark
from opendata_queue.model.errors import CorruptStoreError, InvalidInputError
from opendata_queue.store.damage.wal import refused
from opendata_queue.store.errors import PanicError, translated
from opendata_queue.store.files.durable import is_cut, names_in, set_aside
from opendata_queue.store.journal.seen_files import check_of
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.problems import Problem, problem_of
from opendata_queue.store.slatedb_files.manifests import (
    admin_of,
    is_described_by,
    least_bytes,
    pending_ssts_of,
    sst_name,
    ssts_of,
)
from opendata_queue.store.slatedb_files.ssts import DamagedSst, describe_file

logger = logging.getLogger(__name__)

_READS_AT_MOST: Final = 5
_EVERYTHING: Final = 1 << 40
_CUT: Final = "is cut off"


async def cut_file(objects: Objects, path: str) -> Problem | None:
    """An SST of the database ``path`` that is shorter than the manifest says, if there is one."""
    manifest = await admin_of(objects, path).read_manifest(None)
    if manifest is None or objects.location.kind is StoreKind.MEMORY:
        return None
    ssts = ssts_of(manifest)
    if objects.location.kind is StoreKind.FILE:
        folder = objects.location.folder / path
        torn = await asyncio.to_thread(_first_torn, folder, ssts, missing=False)
        return None if torn is None else problem_of(str(folder), f"compacted/{torn.name}", _CUT)
    listed = await objects.list_from(f"{path}/compacted", "", _EVERYTHING)
    sizes = {PurePosixPath(name).name: size for name, size in listed}
    for sst in ssts:
        name = sst_name(sst)
        if name in sizes and sizes[name] < least_bytes(sst.info):
            return problem_of(path, f"compacted/{name}", _CUT)
    return None


async def damaged_list(objects: Objects, path: str) -> Problem | None:
    """The newest manifest or list of compactions that can't be read: SlateDB does not name it."""
    admin = admin_of(objects, path)
    readers: dict[str, Callable[[int], Awaitable[Any]]] = {
        "manifest": admin.read_manifest,
        "compactions": admin.read_compactions,
    }
    for folder, read in readers.items():
        name = max(await objects.names(f"{path}/{folder}"), default="")
        if not PurePosixPath(name).stem.isdigit():
            continue
        try:
            with translated(f"read {name}"):
                await read(int(PurePosixPath(name).stem))
        except (CorruptStoreError, InvalidInputError, PanicError):
            return problem_of(path, f"{folder}/{name}", "can't be read")
    return None


async def set_unfounded_files_aside(
    objects: Objects, path: str, mark: JournalMark | None = None
) -> list[Path]:
    """Set the newest manifests and lists of compactions aside that a power cut has torn, that
    name SSTs which it has taken, or that are not as they were written.

    They are synced some time after SlateDB has written them, and the disk may have got them before
    the SSTs, or a part of them. They have no checksum: that of the newest ones is in the ``mark``.
    """
    if objects.location.kind is not StoreKind.FILE:
        return []
    admin, folder = admin_of(objects, path), objects.location.folder / path
    # The lists first: what is not in the newest one any more by then, the manifest has.
    return [
        *await _set_lists_aside(admin, folder, mark),
        *await _set_manifests_aside(admin, objects, path, mark),
        *await _set_lists_from_later_aside(admin, folder),
    ]


async def _set_lists_from_later_aside(admin: slatedb.Admin, folder: Path) -> list[Path]:
    """A list is written by who has written its epoch to a manifest before.

    Where that manifest is gone, SlateDB would take itself for a writer that was replaced.
    """
    lists = [
        (name, await _read(admin.read_compactions, name))
        for name in _newest_first(folder, "compactions")
    ]
    manifest = await admin.read_manifest(None)
    if manifest is None:
        return []
    from_later = [
        name
        for name, compactions in lists
        if compactions is not None and compactions.compactor_epoch > manifest.compactor_epoch
    ]
    return await asyncio.to_thread(set_aside, folder, "compactions", from_later)


async def _set_lists_aside(
    admin: slatedb.Admin, folder: Path, mark: JournalMark | None
) -> list[Path]:
    """SlateDB begins again what is missing in an older list, and drops what is too much."""
    unfounded = []
    for name in _newest_first(folder, "compactions"):
        compactions = await _read(admin.read_compactions, name)
        if compactions is not None and not _is_altered(folder, "compactions", name, mark):
            ssts = pending_ssts_of(compactions)
            if await asyncio.to_thread(_first_torn, folder, ssts) is None:
                break
        unfounded.append(name)
    return await asyncio.to_thread(set_aside, folder, "compactions", unfounded)


async def _set_manifests_aside(
    admin: slatedb.Admin, objects: Objects, path: str, mark: JournalMark | None
) -> list[Path]:
    """Nothing is removed before what replaces it is synced. So what such an SST held is in the WAL
    or in other SSTs, and SlateDB goes on from the manifest before. If that is not so, the database
    is damaged, and stays as it is: an error says where when it is opened or read.
    """
    folder = objects.location.folder / path
    for _ in range(_READS_AT_MOST):
        names = _newest_first(folder, "manifest")
        unfounded: list[str] = []
        wrong: tuple[str, str] | None = None
        replayed_after = 0 if mark is None else mark.wal
        for name in names:
            altered = _is_altered(folder, "manifest", name, mark)
            manifest = None if altered else await _read(admin.read_manifest, name)
            if manifest is None and not altered:
                wrong = wrong or (f"manifest/{name}", "can't be read")
            elif manifest is None or _is_absurd(manifest):
                wrong = wrong or (f"manifest/{name}", "is not as it was written")
            else:
                replayed_after = max(replayed_after, int(manifest.replay_after_wal_id))
                ssts = ssts_of(manifest)
                if await asyncio.to_thread(_other_description, folder, ssts) is not None:
                    wrong = wrong or (f"manifest/{name}", "is not as it was written: SSTs differ")
                else:
                    torn = await asyncio.to_thread(_first_torn, folder, ssts)
                    if torn is None:
                        break
                    wrong = wrong or (f"compacted/{torn.name}", "is missing or cut off")
            unfounded.append(name)
        else:
            manifest = None
        if not unfounded:
            return []
        if _newest_first(folder, "manifest")[:1] != names[:1]:
            continue  # an owner is at work, and removes what newer manifests don't need
        if manifest is None or not _has_wal(
            folder, int(manifest.replay_after_wal_id), replayed_after
        ):
            if wrong is not None:
                raise refused(objects, path, *wrong)
            return []
        return await asyncio.to_thread(set_aside, folder, "manifest", unfounded)
    return []


def _is_altered(folder: Path, kind: str, name: str, mark: JournalMark | None) -> bool:
    """Whether a file is not the one that its owner has noted under its number."""
    if mark is None:
        return False
    number = mark.manifest if kind == "manifest" else mark.compactions
    check = mark.manifest_check if kind == "manifest" else mark.compactions_check
    return number == int(Path(name).stem) and check_of(folder / kind / name) != check


def _is_absurd(manifest: slatedb.VersionedManifest) -> bool:
    """Whether a manifest says what none does, though it can be read."""
    return (
        int(manifest.replay_after_wal_id) >= max(1, int(manifest.next_wal_sst_id))
        or not manifest.initialized
        or manifest.wal_object_store_uri is not None
        or bool(manifest.external_dbs)
        or bool(manifest.segments)
    )


def _other_description(folder: Path, ssts: Iterable[slatedb.SsTableHandle]) -> Path | None:
    """The first SST of which a manifest says something else than it does itself."""
    for sst in ssts:
        file = folder / "compacted" / sst_name(sst)
        try:
            found = describe_file(file)
        except (FileNotFoundError, DamagedSst):
            continue  # that is another matter
        if found is not None and not is_described_by(sst.info, found):
            return file
    return None


def _newest_first(folder: Path, kind: str) -> list[str]:
    return sorted(names_in(folder, kind), reverse=True)


async def _read(read: Callable[[int], Awaitable[Any]], name: str) -> Any:
    """A manifest or a list by the name of its file; none if it can't be understood, or is gone."""
    try:
        with translated(f"read {name}"):
            return await read(int(Path(name).stem))
    except (CorruptStoreError, InvalidInputError, PanicError) as error:
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
            if file.stat().st_size < least_bytes(sst.info) or is_cut(file):
                return file
        except FileNotFoundError:
            if missing:
                return file
    return None
