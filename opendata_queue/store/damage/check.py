"""Checking the files of one database, and mending what an open refuses to pass over (RFC 0013).

Nothing is written by a check, and the owner of the database is not disturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

import slatedb.uniffi as slatedb

from odq_encodings import JOURNAL_STATE_KEY, JournalMark, JournalState
from opendata_queue.model.errors import CorruptStoreError, StoreUnavailableError
from opendata_queue.store.damage.wal import (
    Commits,
    Replay,
    commits_in,
    damaged_wal_file,
    free_sequence,
    lost_database,
    missing_file,
    out_of_place,
    wal_problems,
)
from opendata_queue.store.errors import PanicError, translated
from opendata_queue.store.journal.inspection import (
    check_journals,
    newest_mark,
    set_journal_aside,
)
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.problems import Problem, problem_of
from opendata_queue.store.settings import StoreSettings
from opendata_queue.store.slatedb_files.manifests import (
    admin_of,
    is_described_by,
    least_bytes,
    sst_name,
    ssts_of,
    wal_name,
)
from opendata_queue.store.slatedb_files.ssts import (
    DamagedSst,
    check_bytes,
    describe_file,
    renumbered,
)
from opendata_queue.store.waiting import in_time

_EVERYTHING: Final = 1 << 40
_CHECKS_AT_MOST: Final = 5
_READ_AT_ONCE: Final = 4
_NO_ROW: Final = JOURNAL_STATE_KEY + b"\x00"


async def check_database(
    objects: Objects, path: str, *, deep: bool, acknowledged: int = 0
) -> list[Problem]:
    """What is wrong with the files of the database ``path`` of a root; nothing if all is well.

    With ``deep`` every file that is in use is read to its end, and compared with what refers to
    it. Else only its size is compared, if it is there. A database that is not there is well,
    unless owners have ``acknowledged`` commits up to a sequence number.
    """
    for _ in range(_CHECKS_AT_MOST - 1):
        reading = _OneCheck(objects, path, acknowledged)
        problems = await reading.all_problems(deep=deep)
        if not problems or not await reading.has_moved():
            return problems
        # An owner is at work, and has removed what its newest manifest does not need.
    return await _OneCheck(objects, path, acknowledged).all_problems(deep=deep)


class _OneCheck:
    """One check of all files of a database."""

    def __init__(self, objects: Objects, path: str, acknowledged: int) -> None:
        self._objects = objects
        self._path = path
        self._acknowledged = acknowledged
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
            elif not problems and self._acknowledged:
                problems.append(lost_database(self._path, self._acknowledged))
            return problems
        problems += await self._check_ssts(ssts_of(manifest), deep=deep)
        problems += await self._check_wal(manifest, deep=deep)
        if problems:
            return problems
        mark: JournalMark | None = None
        if self._objects.location.kind is StoreKind.FILE:
            problems += await self._check_journals()
            if problems:
                return problems
            mark = await asyncio.to_thread(newest_mark, self._objects.location.folder / self._path)
        return await wal_problems(self._objects, self._path, mark, self._acknowledged)

    async def _check_journals(self) -> list[Problem]:
        """The journals, by what the database says of them; what it says has to be readable."""
        folder = self._objects.location.folder / self._path
        try:
            state = await read_journal_state(self._objects, self._path)
        except (CorruptStoreError, StoreUnavailableError, PanicError) as error:
            problem = await damaged_wal_file(self._objects, self._path)
            wrong = f"can't be used: {error}"
            return [problem or self._list_problem("manifest", self._newest, wrong)]
        return [
            replace(one, file=f"{self._path}/journal/{PurePosixPath(one.file).name}")
            for one in await asyncio.to_thread(check_journals, folder, state)
        ]

    async def has_moved(self) -> bool:
        """Whether a newer manifest was written meanwhile."""
        return max(await self._objects.names(f"{self._path}/manifest"), default="") != self._newest

    async def _newest_manifest(self) -> slatedb.VersionedManifest | None:
        try:
            with translated(f"read {self._path}"):
                return await self._admin.read_manifest(None)
        except (CorruptStoreError, StoreUnavailableError, PanicError):
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
            except (CorruptStoreError, StoreUnavailableError, PanicError) as error:
                wrong = f"can't be read: {error}"
            if wrong:  # those that are gone by now were collected
                problems.append(self._list_problem(folder, name, wrong))
        return problems

    def _list_problem(self, folder: str, name: str, wrong: str) -> Problem:
        """Of a manifest, or of a list of compactions."""
        lost = "nothing, as far as newer ones are whole"
        if folder == "manifest" and name == self._newest:
            lost = "what it says of files, unless an older one and the WAL have it"
        return problem_of(self._path, f"{folder}/{name}", wrong, lost)

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
            elif size < least_bytes(sst.info):
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
        return problem_of(self._path, f"compacted/{name}", wrong)

    async def _check_wal(self, manifest: slatedb.VersionedManifest, *, deep: bool) -> list[Problem]:
        replay = Replay.of(manifest, None)
        sizes = {int(PurePosixPath(name).stem): size for name, size in self._wal_files()}
        newest = max(sizes, default=0)
        problems: list[Problem] = []
        commits: dict[int, Commits] = {}
        for number in range(replay.after + 1, newest + 1):
            name = wal_name(number)
            if number not in sizes:
                missing = f"{missing_file(number, replay)}, and newer ones are there"
                problems.append(self._wal_problem(name, missing))
            elif sizes[number]:
                try:
                    found = await self._read_wal_file(name, deep=deep)
                except DamagedSst as error:
                    problems.append(self._wal_problem(name, str(error)))
                else:
                    if found is not None:
                        commits[number] = found
        if not problems:
            misplaced = out_of_place(self._path, commits, replay)
            problems += [] if misplaced is None else [misplaced]
        return problems

    def _wal_files(self) -> Iterable[tuple[str, int]]:
        return [
            (name, size)
            for name, size in self._sizes["wal"].items()
            if PurePosixPath(name).stem.isdigit()
        ]

    async def _read_wal_file(self, name: str, *, deep: bool) -> Commits | None:
        """Which commits a file holds, if all of it is read; ``DamagedSst`` if it is not whole."""
        if deep:
            data = await self._objects.read(f"{self._path}/wal/{name}")
            return None if data is None else await asyncio.to_thread(commits_in, data)
        if self._objects.location.kind is StoreKind.FILE:
            folder = self._objects.location.folder / self._path / "wal"
            with contextlib.suppress(FileNotFoundError):  # collected meanwhile
                await asyncio.to_thread(describe_file, folder / name)
        return None

    def _wal_problem(self, name: str, wrong: str) -> Problem:
        return problem_of(self._path, f"wal/{name}", wrong)


async def read_journal_state(objects: Objects, path: str) -> JournalState | None:
    """What a database says of its journal, as a reader sees it."""
    name = objects.location.url_of(path)
    builder = slatedb.DbReaderBuilder(objects.location.join(path), objects.slatedb_store)
    builder.with_reader_mode(slatedb.ReaderMode.FOLLOW_LATEST())

    async def read() -> bytes | None:
        reader = await builder.build()
        try:
            value: bytes | None = await reader.get(JOURNAL_STATE_KEY)
            return value
        finally:
            await reader.shutdown()

    with translated(f"read {name}"):
        value = await in_time(read(), objects.settings.outage_timeout_ms, f"read {name}")
    return None if value is None else JournalState.decode(value)


async def repair_database(objects: Objects, path: str, *, acknowledged: int = 0) -> list[Problem]:
    """Have the database ``path`` open with what is there; returns what is not.

    What can't be used is moved to the folder ``torn`` of the database, and nothing is removed. No
    process may have the database open. Only for those who ask for it: rows that were acknowledged
    may be gone afterwards, and no open does this by itself.

    What can't be mended like this, as an SST that the newest manifest names, is returned as well.
    So is the end of a WAL that is missing, though it was ``acknowledged``: what is there can be
    opened once that is forgotten, and there is nothing to set aside.
    """
    problems: list[Problem] = []
    manifests: list[str] = []
    for _ in range(_CHECKS_AT_MOST):
        found = await check_database(objects, path, deep=True)
        new = [one for one in found if one not in problems]
        if not new:
            break
        problems += new
        for problem in new:
            folder, _, name = problem.file.removeprefix(f"{path}/").rpartition("/")
            if folder in ("manifest", "compactions", "wal", "journal") and name:
                await _set_aside(objects, path, folder, name)
                if folder == "manifest":
                    manifests.append(name)
    left = await check_database(objects, path, deep=False)
    if any(one.file.startswith(f"{path}/manifest/") for one in left):
        await _put_back(objects, path, manifests)
    elif not left:
        problems += await check_database(objects, path, deep=False, acknowledged=acknowledged)
    return problems


async def _set_aside(objects: Objects, path: str, folder: str, name: str) -> None:
    if folder == "journal":
        await asyncio.to_thread(set_journal_aside, objects.location.folder / path, name)
        return
    data = await objects.read(f"{path}/{folder}/{name}")
    if data is not None:
        await objects.write(f"{path}/torn/{name}", data)
        await objects.delete(f"{path}/{folder}/{name}")
    if folder == "wal":
        number = int(PurePosixPath(name).stem)
        sequence = await free_sequence(objects, path, number)
        filler = b"" if sequence is None else renumbered(await _filler(), 1, sequence)
        await objects.create(f"{path}/wal/{name}", filler)


async def _put_back(objects: Objects, path: str, manifests: list[str]) -> None:
    """Undo what has mended nothing: without its newest manifests a database is only worse off."""
    for name in manifests:
        data = await objects.read(f"{path}/torn/{name}")
        if data is not None:
            await objects.write(f"{path}/manifest/{name}", data)
            await objects.delete(f"{path}/torn/{name}")


async def _filler() -> bytes:
    """A WAL file that says nothing: it deletes a key that no row has.

    An empty one would be missed by the next open. It is the first one of a new database, and so the
    sequence number of its row is 1.
    """
    with tempfile.TemporaryDirectory(prefix="odq-repair-") as folder:
        objects = Objects.open(Path(folder).as_uri(), StoreSettings(fsync=False))
        builder = slatedb.DbBuilder("db", objects.slatedb_store)
        builder.with_settings(objects.settings.for_slatedb(on_s3=False))
        with translated("repair"):
            database = await builder.build()
            await database.delete(_NO_ROW)
            await database.flush()
            data = await objects.read(f"db/wal/{wal_name(2)}")
            await database.shutdown()
    assert data is not None
    return data
