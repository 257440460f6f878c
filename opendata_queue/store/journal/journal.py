"""The journal of a database on files: where its commits are durable first (RFC 0011).

A file for each owner, numbered without gaps. Two regions of it take turns: while SlateDB makes what
is in one of them durable, the next commits go to the other. So the same blocks of the disk are
written again and again, and a sync has nothing to do but that.

The next owner makes the file with the next number before it reads this one. An owner that finds
that file, or its own removed, after it has synced a record was replaced, and must not acknowledge
it. If it finds neither, a next owner reads its file later, and finds the record. A number is never
used again: the last file stays when it is closed, with one record that says so.

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
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from odq_encodings import JOURNAL_HEAD_BYTES, JournalMark, JournalState, encode_journal_head
from opendata_queue.model.errors import FencedError
from opendata_queue.store.files.durable import make_folder, sync_file
from opendata_queue.store.files.local import file_mode
from opendata_queue.store.journal import layout
from opendata_queue.store.journal.contents import check_begun, unflushed
from opendata_queue.store.journal.layout import FOLDER, numbers_in, path_of
from opendata_queue.store.native.jobs import NotWritten, not_written
from opendata_queue.store.rows.writer import Tier, active_tier, native_jobs
from opendata_queue.store.workers import in_worker

logger = logging.getLogger(__name__)

_TRY_AGAIN_MS: Final = 100
_PASSING_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE))


class Journal:
    """What one owner has committed since SlateDB last made everything durable."""

    def __init__(self, folder: Path, number: int, *, sync: bool, name: str) -> None:
        """Make the file; from now on the owner before finds itself replaced."""
        self.path = path_of(folder, number)
        self._next_path = os.fsencode(path_of(folder, number + 1))
        self._sync = sync
        self._name = name
        self.number = number
        self.mark = JournalMark()
        """What each record says of the other files of the database."""
        self._salt = secrets.randbits(32)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = os.open(self.path, flags, file_mode(folder))
        try:
            os.ftruncate(self._descriptor, 2 * layout.REGION_BYTES)
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
        if size > layout.MAX_RECORD_BYTES:
            return False
        # And of one without rows behind it, which says what is flushed.
        return self._used[self._region] + 2 * JOURNAL_HEAD_BYTES + size <= layout.REGION_BYTES

    async def append(self, rows: bytes, on_start: Callable[[], None] | None = None) -> None:
        """Write a record; when this returns it is durable, and will not be missed.

        If it raises or is cancelled, nothing may be appended any more.
        """
        self._sequence += 1
        flushed = self._flushed  # by the time that it is on the disk, more may be
        mark = self.mark
        head = encode_journal_head(self._salt, self._sequence, flushed, mark.encode(), rows)
        offset = self._region * layout.REGION_BYTES + self._used[self._region]
        while True:
            try:
                in_time = await self._write(offset, head, rows, on_start)
            except NotWritten as error:
                if error.errno not in _PASSING_ERRORS:
                    raise
                # As SlateDB does it, until the caller gives up.
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
        if self._used[self._region] + JOURNAL_HEAD_BYTES > layout.REGION_BYTES:
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
        """Write and sync a record; false if another owner had taken over by then."""
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
        from a damaged one. By its mark, the next owner knows the files that were there.
        """
        # Taken first: if it is closed meanwhile, its number may soon be that of another file.
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
        numbers = set(numbers_in(self.folder))
        closed = 0
        if state is not None:
            if state.is_closed:
                closed = state.number
            else:
                check_begun(path_of(self.folder, state.number))
        self.next_number = max(numbers, default=0) + 1
        if state is not None:
            self.next_number = max(self.next_number, state.number + 1)
        self._paths = [path_of(self.folder, number) for number in sorted(numbers)]
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
