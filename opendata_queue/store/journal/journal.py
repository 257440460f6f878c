"""The journal of a database on files: where its commits are durable first (RFC 0011).

A file for each owner, numbered without gaps. Two regions of it take turns: while SlateDB makes what
is in one of them durable, the next commits go to the other. So the same blocks of the disk are
written again and again, and a sync has nothing to do but that.

Whoever takes over makes the file with the next number before it reads this one. An owner that finds
that file, or its own removed, after it has synced a record was replaced, and must not acknowledge
it. One that finds neither was read later than its record was written. A number is never used again:
the last file stays when it is closed, with one record that says so.

The file has its whole size from the beginning, so that it shows when it was cut, and a record as
soon as it is made. The database knows its number. So there is no doubt whether a journal that is
missing, empty or cut is damaged (RFC 0013).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from odq_encodings import (
    JOURNAL_HEAD_BYTES,
    JournalMark,
    JournalRecord,
    JournalState,
    encode_journal_head,
    find_journal_record,
    journal_records_in,
    read_journal_records,
)
from opendata_queue.model.errors import CorruptStoreError, FencedError, StoreUnavailableError
from opendata_queue.store.files.durable import make_folder, sync_file
from opendata_queue.store.files.local import file_mode
from opendata_queue.store.location import JOURNAL_SUFFIX, StoreKind
from opendata_queue.store.native.jobs import NotWritten, not_written
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.problems import REPAIR, Problem
from opendata_queue.store.rows.writer import Tier, active_tier, native_jobs
from opendata_queue.store.workers import in_worker

logger = logging.getLogger(__name__)

REGION_BYTES: Final = 8 * 1024 * 1024
MAX_RECORD_BYTES: Final = 1024 * 1024
"""Larger commits are worth a file of SlateDB's own."""

FOLDER: Final = "journal"
_NAME: Final = re.compile(rf"(\d{{20}}){re.escape(JOURNAL_SUFFIX)}")
_READ_BYTES: Final = 2 * (MAX_RECORD_BYTES + JOURNAL_HEAD_BYTES)
_TRY_AGAIN_MS: Final = 100
_PASSING_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE))
_NOT_CLOSED: Final = "and its owner has not closed it"
_READS_AT_MOST: Final = 5
"""An owner that was replaced writes one record more at most."""
_LOOK_MS: Final = 2
_PATIENCE_MS: Final = 250
"""How long a reader waits for an owner that may be gone."""
_LONGEST_PATIENCE_MS: Final = 3_000


class Journal:
    """What one owner has committed since SlateDB last made everything durable."""

    def __init__(self, folder: Path, number: int, *, sync: bool, name: str) -> None:
        """Make the file; from now on the owner before finds itself replaced."""
        self.path = _path(folder, number)
        self._next_path = os.fsencode(_path(folder, number + 1))
        self._sync = sync
        self._name = name
        self.number = number
        self.mark = JournalMark()
        """What each record says of the other files of the database."""
        self._salt = secrets.randbits(32)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = os.open(self.path, flags, file_mode(folder))
        try:
            os.ftruncate(self._descriptor, 2 * REGION_BYTES)
            if sync:
                sync_file(folder)
        except BaseException:
            self.close()
            raise
        self._told = self.mark
        """The mark in the last record."""
        self._region = 0
        self._used = [0, 0]
        """How many bytes of each region are in use."""
        self._sequence = 0
        self._flushed = 0
        self._known_to_disk = 0
        """What the last record says is flushed."""

    @property
    def last(self) -> int:
        """The sequence of the last record."""
        return self._sequence

    @property
    def flushed(self) -> int:
        """Up to which record SlateDB holds everything."""
        return self._flushed

    @property
    def is_settled(self) -> bool:
        """Whether SlateDB holds everything, and the disk says so."""
        return self._known_to_disk == self._flushed == self._sequence and self._told == self.mark

    def has_room(self, size: int) -> bool:
        """Whether a commit of so many bytes can be appended now."""
        if size > MAX_RECORD_BYTES:
            return False
        # And of one without rows behind it, which says what is flushed.
        return self._used[self._region] + 2 * JOURNAL_HEAD_BYTES + size <= REGION_BYTES

    async def append(self, rows: bytes, on_start: Callable[[], None] | None = None) -> None:
        """Write a record; when this returns it is durable, and will not be missed.

        If it raises or is cancelled, nothing may be appended any more.
        """
        self._sequence += 1
        flushed = self._flushed  # by the time that it is on the disk, more may be
        mark = self.mark
        head = encode_journal_head(self._salt, self._sequence, flushed, mark.encode(), rows)
        offset = self._region * REGION_BYTES + self._used[self._region]
        while True:
            try:
                in_time = await self._write(offset, head, rows, on_start)
            except NotWritten as error:
                if error.errno not in _PASSING_ERRORS:
                    raise
                # As SlateDB does it, until whoever waits has had enough.
                logger.info("%s is written again: %s", self.path, error)
                await asyncio.sleep(_TRY_AGAIN_MS / 1000)
            else:
                break
        if not in_time:
            raise FencedError(f"could not write {self._name}: another process has taken over")
        self._used[self._region] += len(head) + len(rows)
        self._known_to_disk, self._told = flushed, mark

    async def begin(self) -> None:
        """Write the first record, before the database says that this is its journal."""
        await self._append_no_rows()

    async def tell_mark(self) -> None:
        """Have the disk know which files there are, if the last record does not say it."""
        if self._told == self.mark:
            return
        if self._used[self._region] + JOURNAL_HEAD_BYTES > REGION_BYTES:
            await self.switch()
        await self._append_no_rows()

    async def _append_no_rows(self) -> None:
        is_everything = self._flushed == self._sequence
        await self.append(b"")
        if is_everything:  # and so is this record, which has no rows
            self._flushed = self._known_to_disk = self._sequence

    async def _write(
        self, offset: int, head: bytes, rows: bytes, on_start: Callable[[], None] | None
    ) -> bool:
        """Write and sync a record; false if somebody else had taken over by then."""
        if active_tier() is not Tier.compiled:
            return await self._append_in_thread(offset, head + rows, on_start)
        return await native_jobs().append(
            self._descriptor,
            offset,
            head,
            rows,
            sync=self._sync,
            next_path=self._next_path,
            on_start=on_start,
        )

    async def _append_in_thread(
        self, offset: int, record: bytes, on_start: Callable[[], None] | None
    ) -> bool:
        # Should ours be closed meanwhile, its number may soon be that of another file.
        try:
            descriptor = os.dup(self._descriptor)
        except OSError as error:
            raise not_written(error.errno or 0) from error
        outcome: list[bool] = []

        def work() -> None:
            try:
                outcome.append(self._append_now(descriptor, offset, record))
            finally:
                os.close(descriptor)

        await in_worker(work, on_start)
        return outcome[0]

    def _append_now(self, descriptor: int, offset: int, record: bytes) -> bool:
        left = memoryview(record)
        try:
            while left:
                written = os.pwrite(descriptor, left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            raise not_written(error.errno or 0) from error
        if self._sync:
            getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has none
        try:
            os.stat(self._next_path)
        except FileNotFoundError:
            return bool(os.fstat(descriptor).st_nlink)
        return False

    async def tell_flushed(self) -> None:
        """Have the disk know what is flushed, if the last record does not say it.

        Before records are written over, and before anything is committed past the journal: what is
        flushed must neither be missed there nor be laid over that.
        """
        if self._known_to_disk != self._flushed:
            await self._append_no_rows()

    async def switch(self) -> int:
        """Let the next records go to the other region; returns the last sequence before that.

        All that was in the other one is flushed. If nothing was written to this one, the last
        record is in the other, which is not written over then.
        """
        await self.tell_flushed()
        if self._used[self._region]:
            self._region = 1 - self._region
            self._used[self._region] = 0
        return self._sequence

    def is_flushed(self, sequence: int) -> None:
        """SlateDB holds everything up to there: the region that it is in can be used again."""
        self._flushed = sequence

    def close(self) -> None:
        """Leave it to the next owner."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def finish(self) -> None:
        """Close it when the database holds everything, and says that this journal is closed.

        One record is left, that says the same. It is not needed to tell a journal that was closed
        from a damaged one. By its mark, whoever opens the database next knows the files that were
        there.
        """
        # Ours from now on, whoever closes it meanwhile: its number may soon be another file's.
        descriptor, self._descriptor = self._descriptor, -1
        mark = replace(self.mark, is_closed=True)
        sequence = self._sequence + 1
        head = encode_journal_head(self._salt, sequence, sequence, mark.encode(), b"")
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, head, 0)
            if self._sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


class LeftJournals:
    """What earlier owners have left, for the one that has just replaced them."""

    def __init__(self, database_folder: Path, state: JournalState | None = None) -> None:
        """``state`` is what the database says; ``CorruptStoreError`` if that is not there.

        Up to the journal that it says is closed, it holds everything itself: those files do not
        matter any more. One that is in use must be there, and must have begun.
        """
        self.folder = database_folder / FOLDER
        numbers = set(_numbers(self.folder))
        closed = 0
        if state is not None:
            if state.is_closed:
                closed = state.number
            else:
                _check_begun(_path(self.folder, state.number))
        self.next_number = max(numbers, default=0) + 1
        if state is not None:
            self.next_number = max(self.next_number, state.number + 1)
        self._paths = [_path(self.folder, number) for number in sorted(numbers)]
        self._read_from = sum(number <= closed for number in numbers)

    def __bool__(self) -> bool:
        return bool(self._paths)

    def take_over(self, *, sync: bool, name: str) -> Journal:
        """Make the next journal: from then on nothing is acknowledged in those before it."""
        make_folder(self.folder, sync=sync)
        while True:
            try:
                return Journal(self.folder, self.next_number, sync=sync, name=name)
            except FileExistsError:  # of another process that opens the database, too
                self.next_number += 1

    def commits(self) -> list[bytes]:
        """The rows of all commits that SlateDB may not hold, in order. After ``take_over``."""
        paths = self._paths[self._read_from :]
        return [record.rows for path in paths for record in unflushed(path) if record.rows]

    def remove(self, *, sync: bool) -> None:
        """Remove them, the oldest first, when SlateDB holds what was in them."""
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        if sync and self._paths:
            sync_file(self.folder)


def has_journal(objects: Objects, path: str) -> bool:
    """Whether an owner of the database ``path`` is at work, or has left commits in its journal."""
    location = objects.location
    if location.kind is not StoreKind.FILE:
        return False
    folder = location.folder / path / FOLDER
    return any(not _is_closed(_path(folder, number)) for number in _numbers(folder))


async def until_flushed(objects: Objects, path: str) -> None:
    """Wait until readers of the database ``path`` see what was durable when this was called.

    An owner that is gone flushes nothing any more. Then they see it when somebody opens the
    database for writing.
    """
    location = objects.location
    if location.kind is not StoreKind.FILE:
        return
    folder = location.folder / path
    loop = asyncio.get_running_loop()
    waiting = await asyncio.to_thread(_unseen, folder)
    patience_ms = min(max(_PATIENCE_MS, 3 * objects.settings.journal_ms), _LONGEST_PATIENCE_MS)
    enough = loop.time() + patience_ms / 1000
    while waiting and loop.time() < enough:
        await asyncio.sleep(_LOOK_MS / 1000)
        now = await asyncio.to_thread(_unseen, folder)
        waiting = {
            number: before
            for number, before in waiting.items()
            if number in now and now[number].flushed < before.last
        }
    if waiting:
        logger.warning(
            "the last commits of %s are in its journal, for the next one who opens it to write",
            location.url_of(path),
        )


class _Unseen(NamedTuple):
    """What readers do not see of a journal: the sequences behind ``flushed``, up to ``last``."""

    flushed: int
    last: int


def _unseen(database_folder: Path) -> dict[int, _Unseen]:
    """The journals with commits that are not known to be flushed, by their numbers."""
    folder = database_folder / FOLDER
    found = {}
    for number in _numbers(folder):
        records = _records(_path(folder, number))
        if records:
            last = records[max(records)]
            if any(one > last.flushed and record.rows for one, record in records.items()):
                found[number] = _Unseen(last.flushed, last.sequence)
    return found


def unflushed(path: Path) -> list[JournalRecord]:
    """The records of a journal that are not known to be flushed, in order.

    ``CorruptStoreError`` if one of them is damaged. Only of the newest one it can't be known: it
    may just as well never have been finished, and then it was not acknowledged.

    ``StoreUnavailableError`` if it can't be judged, because its owner writes it all the time.
    """
    return _judged(path).unflushed


def newest_mark(database_folder: Path) -> JournalMark | None:
    """What the newest record of all journals says of the files of its database, if any does.

    ``CorruptStoreError`` if a journal is damaged; not, if it is being written at the same time.
    """
    folder = database_folder / FOLDER
    mark: JournalMark | None = None
    for number in sorted(_numbers(folder)):
        path = _path(folder, number)
        with contextlib.suppress(StoreUnavailableError):
            unflushed(path)
        found = max(_all_records(path), key=lambda one: one.sequence, default=None)
        if found is not None and found.mark is not None:
            mark = found.mark
    return mark


def check_journals(database_folder: Path, state: JournalState | None) -> list[Problem]:
    """What is wrong with the journals of a database that says ``state`` of them."""
    folder = database_folder / FOLDER
    problems = []
    closed = state.number if state is not None and state.is_closed else 0
    for number in sorted({*_numbers(folder), *([state.number] if state else [])}):
        path = _path(folder, number)
        try:
            if number > closed:
                unflushed(path)
                if state is not None and number == state.number:
                    _check_begun(path)
        except StoreUnavailableError:  # its owner is at work
            continue
        except CorruptStoreError:
            wrong = "is damaged" if path.exists() else "is missing"
            problems.append(_damaged(path, wrong))
    return problems


def set_journal_aside(database_folder: Path, name: str) -> None:
    """Move a damaged journal to the folder ``torn``, and leave one with all that is whole in it.

    For repairs alone: commits that were acknowledged may not be among them.
    """
    path = database_folder / FOLDER / name
    rows = _whole_rows(path) if path.exists() else []
    torn = database_folder / "torn"
    torn.mkdir(exist_ok=True)
    if path.exists():
        path.rename(torn / name)
    make_folder(path.parent, sync=True)
    mark, salt = JournalMark(), secrets.randbits(32)
    with path.open("xb") as file:
        file.truncate(2 * REGION_BYTES)
        at, region = 0, 0
        for sequence, one in enumerate([b"", *rows], 1):
            head = encode_journal_head(salt, sequence, 0, mark.encode(), one)
            if at + len(head) + len(one) > REGION_BYTES:
                at, region = 0, region + 1
            file.seek(region * REGION_BYTES + at)
            file.write(head + one)
            at += len(head) + len(one)
        file.flush()
        os.fsync(file.fileno())
    sync_file(path.parent)


def _whole_rows(path: Path) -> list[bytes]:
    """The rows of all records that are whole and not known to be flushed, wherever they are."""
    records: dict[int, JournalRecord] = {}
    data = path.read_bytes()
    halves = (data[:REGION_BYTES], data[REGION_BYTES : 2 * REGION_BYTES])
    begun = {one.sequence: one for half in halves for one in read_journal_records(half)}
    if begun:
        salt = begun[max(begun)].salt
        for half in halves:
            records |= {one.sequence: one for one in journal_records_in(half, salt)}
    flushed = max((one.flushed for one in records.values()), default=0)
    found = [one for sequence, one in sorted(records.items()) if sequence > flushed]
    return [one.rows for one in found if one.rows]


def _check_begun(path: Path) -> None:
    """Whoever was at work has left a journal with a record: that is there before anything else."""
    if not _all_records(path):
        _judged(path, has_begun=True)


def _damaged(path: Path, wrong: str) -> Problem:
    return Problem(
        file=str(path),
        wrong=wrong,
        lost="the last commits of the database, which no other file has",
        advice=REPAIR,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contents:
    """What one read of a whole journal has found."""

    unflushed: list[JournalRecord] = field(default_factory=list)
    wrong: str | None = None
    """Why it is damaged, unless it was written while it was read."""
    check: int = 0
    """CRC-32 of all its bytes, if it seems to be damaged."""


def _judged(path: Path, *, has_begun: bool = False) -> _Contents:
    """Read a journal; ``CorruptStoreError`` only if its owner can't have been writing meanwhile.

    A read takes some milliseconds. Of an owner that is at work it may get the beginning of a
    journal before a record was written, and the rest after the next ones were: then one seems to be
    missing or torn, with newer ones behind it. But all records before the newest that was seen were
    whole by the end of that read. So a second read has them whole, or has newer ones in their
    place. If it has the same bytes, it is no owner that has written them like this.
    """
    contents = _read(path, has_begun=has_begun)
    for _ in range(_READS_AT_MOST):
        if contents.wrong is None:
            return contents
        before, contents = contents, _read(path, has_begun=has_begun)
        if contents.wrong is not None and contents.check == before.check:
            raise CorruptStoreError(str(_damaged(path, contents.wrong)))
    raise StoreUnavailableError(f"{path} is being written all the time")


def _read(path: Path, *, has_begun: bool) -> _Contents:
    """Read all of a journal once; with ``has_begun`` it must have a record that is whole."""
    try:
        with path.open("rb") as file:
            halves = file.read(REGION_BYTES), file.read(REGION_BYTES)
            size = os.fstat(file.fileno()).st_size
            # Maybe its owner was closed while we read: then all is flushed, and what we have may be
            # older than what says so.
            if not size:
                halves = b"", b""
            elif _was_closed(file):
                return _Contents()
    except FileNotFoundError:
        missing = f"is missing, {_NOT_CLOSED}"
        return _Contents(wrong=missing if has_begun else None)  # else it was brought in just now
    contents = _contents(halves, size, has_begun=has_begun)
    if contents.wrong is None:
        return contents
    return replace(contents, check=zlib.crc32(halves[1], zlib.crc32(halves[0])))


def _contents(halves: tuple[bytes, bytes], size: int, *, has_begun: bool) -> _Contents:
    regions = [list(read_journal_records(half)) for half in halves]
    records = {one.sequence: one for region in regions for one in region}
    if not records:
        return _Contents(wrong=f"has no record that is whole, {_NOT_CLOSED}" if has_begun else None)
    last = records[max(records)]
    salts = {one.salt for one in records.values()}
    for start, half, region in zip((0, REGION_BYTES), halves, regions, strict=True):
        if region and region[-1].sequence < last.sequence:
            continue  # the other half is newer: what is behind these was flushed before
        at = sum(one.size for one in region)
        if any(find_journal_record(half[at:], salt, last.sequence) for salt in salts):
            lost = region[-1].sequence + 1 if region else 1
            return _Contents(wrong=f"is damaged at byte {start + at:,} (record {lost})")
    if last.mark is not None and not last.mark.is_closed and size != 2 * REGION_BYTES:
        return _Contents(wrong=f"has {size:,} bytes instead of {2 * REGION_BYTES:,}")
    wanted = range(last.flushed + 1, last.sequence + 1)
    missing = next((sequence for sequence in wanted if sequence not in records), None)
    if missing is not None:
        return _Contents(wrong=f"is damaged: it has record {last.sequence}, and not {missing}")
    return _Contents(unflushed=[records[sequence] for sequence in wanted])


def _records(path: Path) -> dict[int, JournalRecord]:
    return {one.sequence: one for one in _all_records(path)}


def _all_records(path: Path) -> list[JournalRecord]:
    """The records of both halves; what is behind them is not read."""
    try:
        with path.open("rb") as file:
            found = [*_region(file, 0), *_region(file, REGION_BYTES)]
            if _was_closed(file):
                # Its owner was closed while we read: all is flushed. What we have may be the older
                # half, and not what says so.
                return _region(file, 0)[:1]
    except FileNotFoundError:  # the next owner has brought it in just now
        return []
    return found


def _was_closed(file: BinaryIO) -> bool:
    size = os.fstat(file.fileno()).st_size
    if not size:
        return True
    file.seek(0)
    first = next(read_journal_records(file.read(JOURNAL_HEAD_BYTES)), None)
    return first is not None and first.mark is not None and first.mark.is_closed


def _is_closed(path: Path) -> bool:
    """Whether nothing in it matters any more: it was closed, or was never begun."""
    last = max(_all_records(path), key=lambda one: one.sequence, default=None)
    return last is None or (last.mark is not None and last.mark.is_closed)


def _region(file: BinaryIO, start: int) -> list[JournalRecord]:
    """The records of a region; what is behind them is not read."""
    records: list[JournalRecord] = []
    at = start
    while True:
        file.seek(at)
        size = min(_READ_BYTES, start + REGION_BYTES - at)
        data = file.read(size)
        before = records[-1] if records else None
        found = list(read_journal_records(data, before))
        if not found:
            return records
        records += found
        at += sum(one.size for one in found)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:020}{JOURNAL_SUFFIX}"


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]
