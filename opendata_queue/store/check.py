"""Checking the files of one database, and mending what an open refuses to pass over (RFC 0013).

Nothing is written by a check, and the owner of the database is not disturbed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Final

import slatedb.uniffi as slatedb

from opendata_queue.errors import CorruptStoreError, StoreUnavailableError
from opendata_queue.store.location import StoreKind
from opendata_queue.store.manifests import admin_of, sst_name, ssts_of
from opendata_queue.store.objects import Objects
from opendata_queue.store.problems import REPAIR, Problem
from opendata_queue.store.sst_files import DamagedSst, SstDescription, check_bytes, describe_file
from opendata_queue.store.translation import translated

_EVERYTHING: Final = 1 << 40
_LOOKS_AT_MOST: Final = 5
_READ_AT_ONCE: Final = 4


async def check_database(objects: Objects, path: str, *, deep: bool) -> list[Problem]:
    """What is wrong with the files of the database ``path`` of a root; nothing if all is well.

    With ``deep`` every file that is in use is read to its end, and compared with what refers to
    it. Else it is looked for, and its size is compared. A database that is not there is well.
    """
    for _ in range(_LOOKS_AT_MOST - 1):
        look = _Look(objects, path)
        problems = await look.all_problems(deep=deep)
        if not problems or not await look.has_moved():
            return problems
        # An owner is at work, and has removed what its newest manifest does not need.
    return await _Look(objects, path).all_problems(deep=deep)


class _Look:
    """One look at all files of a database."""

    def __init__(self, objects: Objects, path: str) -> None:
        self._objects = objects
        self._path = path
        self._admin = admin_of(objects, path)
        self._newest = ""
        """The name of the newest manifest when this began."""
        self._sizes: dict[str, dict[str, int]] = {}

    async def all_problems(self, *, deep: bool) -> list[Problem]:
        for folder in ("manifest", "compactions", "wal", "compacted"):
            listed = await self._objects.list_from(f"{self._path}/{folder}", "", _EVERYTHING)
            self._sizes[folder] = dict(listed)
        self._newest = max(self._sizes["manifest"], default="")
        problems = await self._check_lists("manifest", self._admin.read_manifest, deep=deep)
        problems += await self._check_lists("compactions", self._admin.read_compactions, deep=deep)
        manifest = await self._newest_manifest()
        if manifest is None:
            if not problems and (self._sizes["wal"] or self._sizes["compacted"]):
                problems.append(self._no_manifest())
            return problems
        problems += await self._check_ssts(ssts_of(manifest), deep=deep)
        problems += await self._check_wal(manifest, deep=deep)
        return problems

    async def has_moved(self) -> bool:
        """Whether a newer manifest was written meanwhile."""
        return max(await self._objects.names(f"{self._path}/manifest"), default="") != self._newest

    async def _newest_manifest(self) -> slatedb.VersionedManifest | None:
        try:
            with translated(f"read {self._path}"):
                return await self._admin.read_manifest(None)
        except (CorruptStoreError, StoreUnavailableError):
            return None  # which is among the problems by now

    def _no_manifest(self) -> Problem:
        return Problem(
            file=f"{self._path}/manifest/",
            wrong="is empty, though there are other files of the database",
            lost="all rows of the database",
            advice="restore the folder from a backup",
        )

    async def _check_lists(self, folder: str, read: Any, *, deep: bool) -> list[Problem]:
        """The newest manifest or list of compactions, and with ``deep`` all of them."""
        names = sorted(self._sizes[folder], reverse=True)
        problems = []
        for name in names if deep else names[:1]:
            stem = PurePosixPath(name).stem
            if not stem.isdigit():
                continue
            try:
                with translated(f"read {name}"):
                    found = await read(int(stem))
                wrong = "" if found is not None else None
            except (CorruptStoreError, StoreUnavailableError) as error:
                wrong = f"can't be read: {error}"
            if wrong:  # those that are gone by now were collected
                newest = name == names[0]
                problems.append(
                    Problem(
                        file=f"{self._path}/{folder}/{name}",
                        wrong=wrong,
                        lost="what it says of files, unless an older one and the WAL have it"
                        if newest and folder == "manifest"
                        else "nothing, as far as newer ones are whole",
                        advice=REPAIR,
                    )
                )
        return problems

    async def _check_ssts(
        self, ssts: Iterable[slatedb.SsTableHandle], *, deep: bool
    ) -> list[Problem]:
        problems: list[Problem] = []
        checks = []
        for sst in {sst_name(one): one for one in ssts}.values():
            name = sst_name(sst)
            size = self._sizes["compacted"].get(name)
            if size is None:
                problems.append(self._sst_problem(name, "is missing"))
            elif size < _least_bytes(sst.info):
                problems.append(self._sst_problem(name, "is cut off"))
            else:
                checks.append((name, sst.info))
        if deep:
            limit = asyncio.Semaphore(_READ_AT_ONCE)
            found = await asyncio.gather(*(self._check_sst(*one, limit) for one in checks))
            problems += [one for one in found if one is not None]
        return problems

    async def _check_sst(
        self, name: str, info: slatedb.SsTableInfo, limit: asyncio.Semaphore
    ) -> Problem | None:
        async with limit:
            data = await self._objects.read(f"{self._path}/compacted/{name}")
            if data is None:
                return self._sst_problem(name, "is missing")
            try:
                found = await asyncio.to_thread(check_bytes, data)
            except DamagedSst as error:
                return self._sst_problem(name, str(error))
        if found is None:
            return self._sst_problem(name, "is empty")
        if not is_described_by(info, found):
            return self._sst_problem(name, f"is not what {self._newest} says of it")
        return None

    def _sst_problem(self, name: str, wrong: str) -> Problem:
        return Problem(
            file=f"{self._path}/compacted/{name}",
            wrong=wrong,
            lost="the rows that it held",
            advice=REPAIR,
        )

    async def _check_wal(self, manifest: slatedb.VersionedManifest, *, deep: bool) -> list[Problem]:
        after = int(manifest.replay_after_wal_id)
        sizes = {int(PurePosixPath(name).stem): size for name, size in self._wal_files()}
        newest = max(sizes, default=0)
        problems = []
        for number in range(after + 1, newest + 1):
            name = wal_name(number)
            if number not in sizes:
                problems.append(self._wal_problem(name, "is missing, and newer ones are there"))
            elif sizes[number]:
                wrong = await self._wrong_in_wal(name, deep=deep)
                if wrong:
                    problems.append(self._wal_problem(name, wrong))
        return problems

    def _wal_files(self) -> Iterable[tuple[str, int]]:
        return [
            (name, size)
            for name, size in self._sizes["wal"].items()
            if PurePosixPath(name).stem.isdigit()
        ]

    async def _wrong_in_wal(self, name: str, *, deep: bool) -> str | None:
        try:
            if deep:
                data = await self._objects.read(f"{self._path}/wal/{name}")
                await asyncio.to_thread(check_bytes, data or b"")
            elif self._objects.location.kind is StoreKind.FILE:
                folder = self._objects.location.folder / self._path / "wal"
                await asyncio.to_thread(describe_file, folder / name)
        except DamagedSst as error:
            return str(error)
        except FileNotFoundError:  # collected meanwhile
            return None
        return None

    def _wal_problem(self, name: str, wrong: str) -> Problem:
        return Problem(
            file=f"{self._path}/wal/{name}",
            wrong=wrong,
            lost="the commits that it held",
            advice=REPAIR,
        )


def wal_name(number: int) -> str:
    """The file of the WAL with a number, in the folder ``wal``."""
    return f"{number:020}.sst"


def is_described_by(info: slatedb.SsTableInfo, found: SstDescription) -> bool:
    """Whether a manifest says of an SST what the SST says of itself."""
    return (
        (info.first_entry or b"") == found.first_entry
        and (info.last_entry or b"") == found.last_entry
        and (info.index_offset, info.index_len) == found.index
        and (info.filter_offset, info.filter_len) == found.filter
        and (info.stats_offset, info.stats_len) == found.stats
    )


def _least_bytes(info: slatedb.SsTableInfo) -> int:
    """Where the last of the parts ends that the manifest knows of."""
    return max(
        int(info.index_offset + info.index_len),
        int(info.filter_offset + info.filter_len),
        int(info.stats_offset + info.stats_len),
    )


async def repair_database(objects: Objects, path: str) -> list[Problem]:
    """Have the database ``path`` open with what is there; returns what is not.

    What can't be used is moved to the folder ``torn`` of the database, and nothing is removed. No
    process may have the database open. Only for those who ask for it: rows that were acknowledged
    may be gone afterwards, and no open does this by itself.
    """
    problems = await check_database(objects, path, deep=True)
    for problem in problems:
        folder, _, name = problem.file.removeprefix(f"{path}/").rpartition("/")
        if not name:
            continue
        await _set_aside(objects, path, folder, name)
        if folder == "wal":
            # Where an empty file is, SlateDB goes on with the next one.
            await objects.create(f"{path}/wal/{name}", b"")
    return problems


async def _set_aside(objects: Objects, path: str, folder: str, name: str) -> None:
    data = await objects.read(f"{path}/{folder}/{name}")
    if data is not None:
        await objects.write(f"{path}/torn/{name}", data)
        await objects.delete(f"{path}/{folder}/{name}")
