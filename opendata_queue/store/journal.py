"""The journal of a database on files: where its commits are durable first (RFC 0011).

A file for each owner, numbered without gaps. Two regions of it take turns: while SlateDB makes what
is in one of them durable, the next commits go to the other. So the same blocks of the disk are
written again and again, and a sync has nothing to do but that.

Whoever takes over makes the file with the next number before it reads this one. An owner that finds
that file, or its own removed, after it has synced a record was replaced, and must not acknowledge
it. One that finds neither was read later than its record was written. A number is never used again:
the last file stays, empty, when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from odq_encodings import (
    JOURNAL_HEAD_BYTES,
    JournalRecord,
    encode_journal_head,
    read_journal_records,
)
from opendata_queue.errors import CorruptStoreError, FencedError
from opendata_queue.store.batch_writer import Tier, active_tier, in_worker, native_jobs
from opendata_queue.store.durable_files import make_folder, sync_file
from opendata_queue.store.local_files import file_mode
from opendata_queue.store.location import JOURNAL_SUFFIX, StoreKind
from opendata_queue.store.native_jobs import NotWritten, not_written
from opendata_queue.store.objects import Objects

logger = logging.getLogger(__name__)

REGION_BYTES: Final = 8 * 1024 * 1024
MAX_RECORD_BYTES: Final = 1024 * 1024
"""Larger commits are worth a file of SlateDB's own."""

FOLDER: Final = "journal"
_NAME: Final = re.compile(rf"(\d{{20}}){re.escape(JOURNAL_SUFFIX)}")
_READ_BYTES: Final = 2 * (MAX_RECORD_BYTES + JOURNAL_HEAD_BYTES)
_TRY_AGAIN_MS: Final = 100
_PASSING_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE))
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
        self._salt = secrets.randbits(32)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = os.open(self.path, flags, file_mode(folder))
        try:
            if sync:
                sync_file(folder)
        except BaseException:
            self.close()
            raise
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
        return self._known_to_disk == self._flushed == self._sequence

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
        head = encode_journal_head(self._salt, self._sequence, flushed, rows)
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
        self._known_to_disk = flushed

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
        if self._known_to_disk == self._flushed:
            return
        is_everything = self._flushed == self._sequence
        await self.append(b"")
        if is_everything:  # and so is this record, which has no rows
            self._flushed = self._known_to_disk = self._sequence

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

    def empty(self) -> None:
        """Close it when SlateDB holds everything."""
        # Ours from now on, whoever closes it meanwhile: its number may soon be another file's.
        descriptor, self._descriptor = self._descriptor, -1
        try:
            os.ftruncate(descriptor, 0)
            if self._sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


class LeftJournals:
    """What earlier owners have left, for the one that has just replaced them."""

    def __init__(self, database_folder: Path) -> None:
        self.folder = database_folder / FOLDER
        numbers = _numbers(self.folder)
        self.next_number = max(numbers, default=0) + 1
        self._paths = [_path(self.folder, number) for number in sorted(numbers)]

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
        return [record.rows for path in self._paths for record in unflushed(path) if record.rows]

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
    return any(_size(_path(folder, number)) for number in _numbers(folder))


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
    """The records of a journal that are not known to be flushed, in order."""
    records = _records(path)
    if not records:
        return []
    last = records[max(records)]
    wanted = range(last.flushed + 1, last.sequence + 1)
    missing = next((sequence for sequence in wanted if sequence not in records), None)
    if missing is not None:
        raise CorruptStoreError(
            f"{path} is damaged: it has record {last.sequence}, and not {missing}, which no other "
            "file has; without that file the database opens as it was before it"
        )
    return [records[sequence] for sequence in wanted]


def _records(path: Path) -> dict[int, JournalRecord]:
    try:
        with path.open("rb") as file:
            regions = [_region(file, 0), _region(file, REGION_BYTES)]
            if not os.fstat(file.fileno()).st_size:
                # Its owner was closed while we read: all is flushed. What we have may be the older
                # half, and not what says so.
                return {}
    except FileNotFoundError:  # somebody has brought it in just now
        return {}
    return {one.sequence: one for region in regions for one in region}


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
        at += sum(JOURNAL_HEAD_BYTES + len(one.rows) for one in found)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # somebody has brought it in just now
        return 0


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:020}{JOURNAL_SUFFIX}"


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]
