"""Whether the WAL holds all that it has to, before SlateDB is opened (RFC 0013).

SlateDB takes a file that is missing or empty for the end of a writer that was replaced: it would
open without the rows, and leave an empty file in the gap. Files are numbered without gaps, and so
are the commits in them, so both can be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import slatedb.uniffi as slatedb

from odq_encodings import JournalMark
from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.store.files.durable import is_cut, set_aside
from opendata_queue.store.journal.seen_files import check_of
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.problems import Problem, problem_of
from opendata_queue.store.slatedb_files.manifests import admin_of, manifest_name, wal_name
from opendata_queue.store.slatedb_files.ssts import (
    DamagedSst,
    begins_with_sst,
    check_bytes,
    describe_file,
    describe_sst,
    last_sequence,
    last_sequence_in,
)

_READS_AT_MOST: Final = 5
_EVERYTHING: Final = 1 << 40
_EMPTY: Final = "is empty, though it held commits"
_MISSING: Final = "is missing"
_OF_ANOTHER: Final = "holds commits of another file"
# A power cut can take the newest WAL files, and leave the manifest that knows of what was in them.
# So many commits were never without a sync.
_FAR: Final = 1 << 20


class Replay(NamedTuple):
    """What a manifest says of the WAL."""

    manifest: int
    after: int
    """What is in files up to this number is in SSTs, too."""
    last_sequence: int
    """Commits up to here are in SSTs."""
    is_noted: bool
    """Whether it is known to be as it was written."""

    @classmethod
    def of(cls, manifest: slatedb.VersionedManifest, mark: JournalMark | None) -> Replay:
        return cls(
            manifest=int(manifest.id),
            after=int(manifest.replay_after_wal_id),
            last_sequence=int(manifest.last_l0_seq),
            is_noted=mark is not None and mark.manifest == int(manifest.id),
        )


class Commits(NamedTuple):
    """The sequence numbers of the first and of the last commit in a WAL file."""

    first: int
    last: int


class _Wrong(NamedTuple):
    """A file in the folder of a database, what is wrong with it, and what may be lost."""

    file: str
    wrong: str
    lost: str = ""


async def check_wal(
    objects: Objects, path: str, mark: JournalMark | None, acknowledged: int = 0
) -> list[Path]:
    """See that no WAL file is missing or damaged that has to be replayed.

    ``CorruptStoreError`` names the one that is. ``acknowledged`` is a sequence number up to which
    earlier owners have said that commits are durable. The newest files that are not whole, not in
    the ``mark`` and not needed for that are set aside: they were never synced, and what they held
    is in the journal, or was never acknowledged. Returns where they are now.
    """
    admin = admin_of(objects, path)
    manifest = await admin.read_manifest(None)
    if manifest is None:
        await _check_nothing_there(objects, path)
        if acknowledged:
            raise refusal(objects, path, lost_database(path, acknowledged))
        return []
    for read in range(_READS_AT_MOST):
        replay = Replay.of(manifest, mark)
        aside: list[Path] = []
        if objects.location.kind is StoreKind.FILE:
            folder = objects.location.folder / path
            aside = await asyncio.to_thread(_set_torn_aside, folder, replay, mark, acknowledged)
        wrong = await _wrong_in_wal(objects, path, replay, mark, acknowledged)
        if wrong is None:
            return aside
        newer = await admin.read_manifest(None)
        if newer is None or newer.id == manifest.id or read == _READS_AT_MOST - 1:
            break
        manifest = newer  # an owner is at work, and has removed what this one does not need
    assert wrong is not None
    if mark is not None and mark.manifest > replay.manifest:
        # With it, the older WAL files would not be needed.
        wrong = _Wrong(f"manifest/{manifest_name(mark.manifest)}", _MISSING)
    raise refused(objects, path, *wrong)


async def wal_problems(
    objects: Objects, path: str, mark: JournalMark | None, acknowledged: int = 0
) -> list[Problem]:
    """What an open would find wrong with the WAL of a database; nothing is set aside."""
    manifest = await admin_of(objects, path).read_manifest(None)
    if manifest is None:
        return []
    replay = Replay.of(manifest, mark)
    found = await _wrong_in_wal(objects, path, replay, mark, acknowledged)
    if found is None and replay.is_noted and mark is not None:
        name = manifest_name(replay.manifest)
        check = check_of(objects.location.folder / path / "manifest" / name)
        if check not in (None, mark.manifest_check):
            found = _Wrong(f"manifest/{name}", "is not as it was written")
    return [] if found is None else [problem_of(path, *found)]


async def damaged_wal_file(objects: Objects, path: str) -> Problem | None:
    """The first WAL file that has to be replayed and can't be, if SlateDB has failed to do it.

    An open reads only the ends of the files before: SlateDB reads the rest. It does not always name
    the file that it could not read.
    """
    manifest = await admin_of(objects, path).read_manifest(None)
    if manifest is None:
        return None
    replay, commits = Replay.of(manifest, None), {}
    listed = await objects.list_from(f"{path}/wal", wal_name(replay.after), _EVERYTHING)
    for name, size in listed:
        if not size:
            continue
        number = int(PurePosixPath(name).stem)
        try:
            data = await objects.read(f"{path}/wal/{wal_name(number)}")
            commits[number] = await asyncio.to_thread(commits_in, data or b"")
        except DamagedSst as error:
            return problem_of(path, f"wal/{wal_name(number)}", str(error))
    return out_of_place(path, commits, replay)


def commits_in(data: bytes) -> Commits:
    """Which commits a WAL file holds; ``DamagedSst`` if it is not whole."""
    description = check_bytes(data)
    if description is None:
        raise DamagedSst("is empty")
    last = last_sequence(len(data), lambda offset, size: data[offset : offset + size])
    return Commits(description.first_sequence, last)


def out_of_place(path: str, commits: dict[int, Commits], replay: Replay) -> Problem | None:
    """The WAL file whose commits are not those between the ones of its neighbours, if one is."""
    firsts = {number: commits[number].first for number in sorted(commits)}
    found = _out_of_place(firsts, lambda number: commits[number].last, replay)
    return None if found is None else problem_of(path, *found)


def lost_database(path: str, acknowledged: int) -> Problem:
    """That nothing is left of a database which an owner has written to."""
    wrong = f"is missing, though an owner has said that commits up to number {acknowledged} are"
    return problem_of(path, "manifest/", f"{wrong} durable", "all rows of the database")


def refused(
    objects: Objects, path: str, file: str, wrong: str, lost: str = ""
) -> CorruptStoreError:
    """Why a database is not opened."""
    return refusal(objects, path, problem_of(path, file, wrong, lost))


def refusal(objects: Objects, path: str, problem: Problem) -> CorruptStoreError:
    return CorruptStoreError(f"could not open {objects.location.url_of(path)}: {problem}")


async def _check_nothing_there(objects: Objects, path: str) -> None:
    """SlateDB would begin a new database among the files of one that has lost its manifests."""
    for folder in ("wal", "compacted"):
        if await objects.list_from(f"{path}/{folder}", "", 1):
            wrong = f"has no manifest, though there are files in {folder}/"
            raise refused(objects, path, "manifest/", wrong)


def wal_sizes(folder: Path) -> dict[int, int]:
    """The sizes of all WAL files, by their numbers."""
    sizes = {}
    try:
        with os.scandir(folder / "wal") as entries:
            for entry in entries:
                stem, _, suffix = entry.name.partition(".")
                if suffix == "sst" and stem.isdigit():
                    try:
                        sizes[int(stem)] = entry.stat().st_size
                    except FileNotFoundError:  # the owner before us collects garbage
                        continue
    except FileNotFoundError:
        return {}
    return sizes


def _set_torn_aside(
    folder: Path, replay: Replay, mark: JournalMark | None, acknowledged: int
) -> list[Path]:
    up_to = 0 if mark is None else mark.wal
    sizes = wal_sizes(folder)
    torn = []
    for number in sorted(sizes, reverse=True):
        if number <= up_to or not _is_torn(folder / "wal" / wal_name(number), mark):
            break
        torn.append(wal_name(number))
        del sizes[number]
    if not sizes or not torn:
        return []  # without any it was no power cut: the first one is always a fence
    with contextlib.suppress(DamagedSst, FileNotFoundError):
        if _last_in_files(folder, _with_rows(sizes, replay), replay) < acknowledged:
            return []  # their rows were acknowledged: they were whole
    return set_aside(folder, "wal", torn)


def _is_torn(path: Path, mark: JournalMark | None) -> bool:
    """Whether a WAL file was never synced, as far as that can be known.

    What is not in the mark is in the journal. Without one, only what a power cut does is passed
    over: a file that was whole once may have been acknowledged. A power cut adds no bytes.
    """
    try:
        if mark is None or mark.is_closed:
            return is_cut(path) and not begins_with_sst(path)
        describe_file(path)
    except FileNotFoundError:
        return False
    except DamagedSst:
        return True
    return False


async def _wrong_in_wal(
    objects: Objects, path: str, replay: Replay, mark: JournalMark | None, acknowledged: int
) -> _Wrong | None:
    """The judgement of opens, checks and repairs: what is wrong with the WAL, if anything is."""
    if objects.location.kind is StoreKind.FILE:
        folder = objects.location.folder / path
        return await asyncio.to_thread(_wrong_in_files, folder, replay, mark, acknowledged)
    return await _wrong_in_objects(objects, path, replay, mark, acknowledged)


def _with_rows(sizes: dict[int, int], replay: Replay) -> list[int]:
    """The files that are to be replayed, in their order, without those that are empty."""
    return [number for number in sorted(sizes) if number > replay.after and sizes[number]]


def _last_in_files(folder: Path, with_rows: list[int], replay: Replay) -> int:
    """The sequence number of the last commit that is there."""
    if not with_rows:
        return replay.last_sequence
    last = last_sequence_in(folder / "wal" / wal_name(with_rows[-1]))
    return max(last, replay.last_sequence)


def _wrong_end(
    sizes: dict[int, int], with_rows: list[int], replay: Replay, last: int, acknowledged: int
) -> _Wrong | None:
    """Where the WAL ends before the last commit that is known to have been durable."""
    if last >= acknowledged:
        return None
    number = (with_rows[-1] if with_rows else replay.after) + 1
    how = f"{_one_of(number, max(sizes))}is empty" if number in sizes else "is missing"
    return _Wrong(
        f"wal/{wal_name(number)}",
        f"{how}, though an owner has said that commits up to number {acknowledged} are durable, "
        f"and there are those up to {last}",
        f"the commits from number {last + 1} on",
    )


def _wrong_in_files(
    folder: Path, replay: Replay, mark: JournalMark | None, acknowledged: int
) -> _Wrong | None:
    sizes = wal_sizes(folder)
    found = _gap(sizes, replay, mark)
    if found is not None:
        return found
    with_rows = _with_rows(sizes, replay)
    firsts = {}
    try:
        for number in with_rows:
            at_fault = number
            description = describe_file(folder / "wal" / wal_name(number))
            assert description is not None
            firsts[number] = description.first_sequence

        def last_of(number: int) -> int:
            nonlocal at_fault
            at_fault = number
            return last_sequence_in(folder / "wal" / wal_name(number))

        found = _out_of_place(firsts, last_of, replay)
        if found is not None:
            return found
        for number, following in _around_fences(with_rows):
            if firsts[following] > max(last_of(number), replay.last_sequence) + 1:
                return _emptied(number + 1, following - 1)
        found = _wrong_begin(with_rows, firsts, replay)
        if found is None and not replay.is_noted:
            at_fault = max((one for one in sizes if sizes[one]), default=0)
            found = _wrong_manifest(folder, sizes, replay)
        if found is None and acknowledged > replay.last_sequence:
            at_fault = max(with_rows, default=0)
            last = _last_in_files(folder, with_rows, replay)
            found = _wrong_end(sizes, with_rows, replay, last, acknowledged)
    except DamagedSst as error:
        return _Wrong(f"wal/{wal_name(at_fault)}", str(error))
    except FileNotFoundError:
        return _Wrong(f"wal/{wal_name(at_fault)}", _MISSING)
    return found


def _gap(sizes: dict[int, int], replay: Replay, mark: JournalMark | None) -> _Wrong | None:
    up_to = 0 if mark is None else mark.wal
    for number in range(replay.after + 1, max(max(sizes, default=0), up_to) + 1):
        if number not in sizes:
            return _Wrong(f"wal/{wal_name(number)}", missing_file(number, replay))
    if up_to > replay.after and not sizes[up_to]:
        return _Wrong(f"wal/{wal_name(up_to)}", _EMPTY)
    return None


def missing_file(number: int, replay: Replay) -> str:
    """What is wrong where a WAL file is not there that the newest manifest needs.

    If it is the first one that is needed, it may have been collected after a newer manifest was
    written, and that manifest is what is missing.
    """
    if number > replay.after + 1:
        return _MISSING
    newer = manifest_name(replay.manifest + 1)
    return f"{_MISSING}, or else manifest/{newer}, with which it would not be needed"


def _emptied(first: int, last: int) -> _Wrong:
    """Of several empty files in a row any may have been a fence, and any may have held commits."""
    return _Wrong(f"wal/{wal_name(first)}", f"{_one_of(first, last)}{_EMPTY}")


def _one_of(first: int, last: int) -> str:
    return "" if first == last else f"or one of those after it up to {wal_name(last)} "


def _around_fences(with_rows: list[int]) -> Iterator[tuple[int, int]]:
    """Files with rows that have empty ones between them."""
    for one, following in pairwise(with_rows):
        if following > one + 1:
            yield one, following


def _out_of_place(
    firsts: dict[int, int], last_of: Callable[[int], int], replay: Replay
) -> _Wrong | None:
    """Whether a WAL file that is whole is in the place of another one.

    ``firsts`` are the first commits of the files that are replayed, in their order: commits are
    numbered in that order. Of two files that break it, the one that does not continue the files
    before them is wrong. Older commits in the first file break no order, but leave a gap behind it.
    """
    numbers = list(firsts)
    for place, (one, following) in enumerate(pairwise(numbers)):
        if firsts[following] <= firsts[one]:
            before = last_of(numbers[place - 1]) if place else 0
            continues = firsts[one] <= max(before, replay.last_sequence) + 1
            wrong = following if continues else one
            return _Wrong(f"wal/{wal_name(wrong)}", _OF_ANOTHER)
    if len(numbers) > 1 and numbers[1] == numbers[0] + 1:
        first, second = numbers[:2]
        last = max(last_of(first), replay.last_sequence)
        if firsts[second] > last + 1:
            return _Wrong(f"wal/{wal_name(first)}", _OF_ANOTHER)
    return None


def _wrong_begin(with_rows: list[int], firsts: dict[int, int], replay: Replay) -> _Wrong | None:
    """What is between the SSTs and the first commit that is to be replayed."""
    if not with_rows or firsts[with_rows[0]] <= replay.last_sequence + 1:
        return None
    if with_rows[0] > replay.after + 1:
        return _emptied(replay.after + 1, with_rows[0] - 1)
    return _not_as_written(replay)


def _wrong_manifest(folder: Path, sizes: dict[int, int], replay: Replay) -> _Wrong | None:
    """Whether what a manifest says can't be, by the WAL files that are there."""
    with_rows = [number for number in sizes if sizes[number]]
    if not with_rows:
        return None
    replayed = max((number for number in with_rows if number <= replay.after), default=0)
    # One that is damaged tells nothing here, and is not missed: its rows are in SSTs.
    with contextlib.suppress(DamagedSst, FileNotFoundError):
        if (
            replayed
            and last_sequence_in(folder / "wal" / wal_name(replayed)) > replay.last_sequence
        ):
            return _not_as_written(replay)
    newest = last_sequence_in(folder / "wal" / wal_name(max(with_rows)))
    if replay.last_sequence > newest + _FAR:
        return _not_as_written(replay)
    return None


def _not_as_written(replay: Replay) -> _Wrong:
    wrong = "is not as it was written: what it says of the WAL does not fit the files"
    return _Wrong(f"manifest/{manifest_name(replay.manifest)}", wrong)


async def _wrong_in_objects(
    objects: Objects, path: str, replay: Replay, mark: JournalMark | None, acknowledged: int
) -> _Wrong | None:
    """The same as far as it applies to a store in which objects are written whole.

    One that is damaged is found by SlateDB, which reads all of them. It is never set aside: no put
    leaves a part of an object.
    """
    if objects.location.kind is StoreKind.MEMORY:
        return None  # where nothing can be damaged, nor seen from here
    listed = await objects.list_from(f"{path}/wal", wal_name(replay.after), _EVERYTHING)
    sizes = {int(PurePosixPath(name).stem): size for name, size in listed}
    found = _gap(sizes, replay, mark)
    if found is not None:
        return found
    with_rows = _with_rows(sizes, replay)
    at_fault = 0
    try:
        for number, following in _around_fences(with_rows):
            at_fault = number
            last = await _last_sequence(objects, path, number)
            at_fault = following
            first = await _first_sequence(objects, path, following)
            if first > max(last, replay.last_sequence) + 1:
                return _emptied(number + 1, following - 1)
        if with_rows and with_rows[0] > replay.after + 1:
            at_fault = with_rows[0]
            first = await _first_sequence(objects, path, at_fault)
            found = _wrong_begin(with_rows, {at_fault: first}, replay)
            if found is not None:
                return found
        if acknowledged > replay.last_sequence:
            last = replay.last_sequence
            if with_rows:
                at_fault = with_rows[-1]
                last = max(last, await _last_sequence(objects, path, at_fault))
            return _wrong_end(sizes, with_rows, replay, last, acknowledged)
    except DamagedSst as error:
        return _Wrong(f"wal/{wal_name(at_fault)}", str(error))
    return None


async def free_sequence(objects: Objects, path: str, number: int) -> int | None:
    """A sequence number that a commit in the WAL file ``number`` had, for a file in its place.

    None if there is no commit between those of the files around it: then that file was empty.
    """
    manifest = await admin_of(objects, path).read_manifest(None)
    listed = await objects.list_from(f"{path}/wal", "", _EVERYTHING)
    with_rows = [int(PurePosixPath(name).stem) for name, size in listed if size]
    last = 0 if manifest is None else int(manifest.last_l0_seq)
    before = max((one for one in with_rows if one < number), default=None)
    following = min((one for one in with_rows if one > number), default=None)
    with contextlib.suppress(DamagedSst):
        if before is not None:
            last = await _last_sequence(objects, path, before)
    with contextlib.suppress(DamagedSst):
        if following is not None and await _first_sequence(objects, path, following) <= last + 1:
            return None
    return last + 1


async def _last_sequence(objects: Objects, path: str, number: int) -> int:
    data = await objects.read(f"{path}/wal/{wal_name(number)}") or b""
    return last_sequence(len(data), lambda offset, size: data[offset : offset + size])


async def _first_sequence(objects: Objects, path: str, number: int) -> int:
    data = await objects.read(f"{path}/wal/{wal_name(number)}") or b""
    return describe_sst(len(data), lambda offset, size: data[offset : offset + size]).first_sequence
