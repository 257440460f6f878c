"""Commits that are durable in a journal first, and go to SlateDB many at a time (RFC 0011)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import slatedb.uniffi as slatedb

from odq_encodings import JOURNAL_STATE_KEY, JournalState
from opendata_queue.model.errors import ClosedError, OdqError, StoreUnavailableError
from opendata_queue.store.errors import translated
from opendata_queue.store.files.durable import WalSync
from opendata_queue.store.journal.journal import Journal, LeftJournals
from opendata_queue.store.journal.seen_files import FileNotes
from opendata_queue.store.rows.packed import PackedRows
from opendata_queue.store.rows.rows import Rows
from opendata_queue.store.rows.writer import commit_rows, write_rows

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_MS: Final = 1_000
"""How long after the last flush files are noted that SlateDB has written in the background."""
_BROUGHT_IN_AT_ONCE: Final = 64
"""Commits, of 1 MiB at most each."""


class JournaledWrites:
    """The way of commits into one database.

    Rows are handed to SlateDB, in the order of their commits, before a read, and
    every few milliseconds to be flushed. What SlateDB is given is durable already, so all that it
    shows may be shown.
    """

    def __init__(
        self,
        db: slatedb.Db,
        journal: Journal,
        wal_sync: WalSync | None,
        notes: FileNotes,
        *,
        flush_ms: int,
        name: str,
    ) -> None:
        self._db = db
        self._notes = notes
        self._journal = journal
        self._wal_sync = wal_sync
        self._flush_ms = flush_ms
        self._name = name
        self._pending: list[PackedRows] = []
        """Commits that are in the journal, and not handed to SlateDB yet."""
        self._failure: OdqError | None = None
        # What needs both of them takes them in this order.
        self._writing = asyncio.Lock()
        """Held while rows are handed to SlateDB: they go there in order."""
        self._appending = asyncio.Lock()
        """Held while the journal is written."""
        self._timer: asyncio.TimerHandle | None = None
        self._poll_timer: asyncio.TimerHandle | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Writes that go on to their end, even if their caller is cancelled."""
        self._next_apply: asyncio.Task[None] | None = None
        """One that has not begun yet: it will hand over all that is durable by now."""
        self._closed: ClosedError | None = None
        self._reads = 0
        """How many reads are under way."""
        self._no_reads: asyncio.Future[None] | None = None
        self._unseen: asyncio.Future[None] | None = None
        """There if SlateDB has something that is not durable; done when that is over."""

    async def commit(self, rows: Rows, on_start: Callable[[], None] | None = None) -> None:
        """Write rows as one atomic batch; when this returns they are durable.

        If it raises or is cancelled, they may be or not, and nothing is written any more.
        """
        packed = PackedRows(rows.packed(), len(rows))
        async with self._appending:
            self._check_open()
            if not packed:  # and all before was durable when its commit returned
                return
            if self._journal.has_room(len(packed.data)):
                await self._append(packed, on_start)
                return
        async with self._writing, self._appending:
            self._check_open()
            await self._flush(await self._take_all())
            if self._journal.has_room(len(packed.data)):
                await self._append(packed, on_start)
            else:
                await self._commit_past_journal(packed, on_start)

    async def _commit_past_journal(
        self, packed: PackedRows, on_start: Callable[[], None] | None
    ) -> None:
        """Commit what is too large for the journal. Hold both locks.

        No read may run meanwhile: SlateDB would show what is not durable yet. If it fails, there
        are no reads any more.
        """
        loop = asyncio.get_running_loop()
        with self._stopping():
            await self._journal.tell_flushed()
            self._unseen = unseen = loop.create_future()
            try:
                while self._reads:
                    self._no_reads = loop.create_future()
                    await self._no_reads
                await commit_rows(self._db, packed, after_flush=self._wal_sync, on_start=on_start)
                # Only that file has it: from now on the file would be missed.
                self._journal.mark = self._notes.has_flushed()
                await self._journal.tell_mark()
                self._unseen = None
            finally:
                unseen.set_result(None)

    async def read(self, read: Callable[[], Awaitable[T]]) -> T:
        """Read what is durable by now, and nothing that is not."""
        await self._settled()
        while self._unseen is not None:
            self._check()
            await asyncio.wait([self._unseen])
        self._reads += 1
        try:
            return await read()
        finally:
            self._reads -= 1
            if not self._reads and self._no_reads is not None:
                if not self._no_reads.done():  # the commit that waited may have been cancelled
                    self._no_reads.set_result(None)
                self._no_reads = None

    async def _settled(self) -> None:
        """Wait until all that was durable when this was called can be read."""
        if self._pending or self._writing.locked():
            if self._next_apply is None:
                self._next_apply = self._begin(self._apply())
            await asyncio.shield(self._next_apply)

    async def show_others(self) -> None:
        """Wait until readers in other processes can see all that is durable."""
        self._check_open()
        await asyncio.shield(self._begin(self.flush()))

    async def flush(self) -> None:
        """Have SlateDB make everything durable."""
        async with self._writing:
            async with self._appending:
                self._check()
                if self._journal.flushed == self._journal.last:
                    with self._stopping():
                        await self._journal.tell_flushed()
                        await self._journal.tell_mark()
                    return
                to_flush = await self._take_all()
            await self._flush(to_flush)

    async def close(self) -> None:
        """Flush, and have the database say that it holds everything.

        The journal is finished afterwards. After a failure it is left to the next owner.
        """
        self._closed = ClosedError(f"could not write {self._name}: it is closed")
        for timer in (self._timer, self._poll_timer):
            if timer is not None:
                timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.flush()
        state = JournalState(number=self._journal.number, is_closed=True)
        with self._stopping():
            await commit_rows(self._db, state_row(state), after_flush=self._wal_sync)

    def finish(self) -> None:
        """Leave a record that says what there is, now that the database is closed."""
        self._journal.mark = self._notes.has_flushed()
        self._journal.finish()

    def leave(self) -> None:
        """Leave the journal as it is; nothing happens if it is finished."""
        self._journal.close()

    def _check_open(self) -> None:
        self._check()
        if self._closed is not None:
            raise self._closed.with_traceback(None)

    def _check(self) -> None:
        if self._failure is not None:
            # Without its traceback, which would grow with every caller that gets it.
            raise self._failure.with_traceback(None)

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Whatever goes wrong in here, nothing is written afterwards: it would be out of order."""
        try:
            with translated(f"write {self._name}"):
                yield
        except OdqError as error:
            self._failure = self._failure or error
            raise
        except BaseException as error:
            stopped = StoreUnavailableError(f"a write to {self._name} was given up: {error!r}")
            self._failure = self._failure or stopped
            raise

    async def _append(self, packed: PackedRows, on_start: Callable[[], None] | None) -> None:
        with self._stopping():
            await self._journal.append(packed.data, on_start)
        self._pending.append(packed)
        flushing = self._timer is not None or not (self._flusher is None or self._flusher.done())
        if not flushing and self._closed is None:
            self._flush_later()

    async def _apply(self) -> None:
        async with self._writing:
            self._next_apply = None
            self._check()
            taken, self._pending = self._pending, []
            if taken:
                with self._stopping():
                    await write_rows(self._db, _joined(taken))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something in a task of its own: who gives up waiting must not stop it half-way."""
        task = asyncio.create_task(work, name=f"write {self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even if those who waited have gone

    async def _take_all(self) -> tuple[list[PackedRows], int]:
        """What is to be flushed, and up to where in the journal that is. Hold both locks."""
        with self._stopping():
            last = await self._journal.switch()
        taken, self._pending = self._pending, []
        return taken, last

    async def _flush(self, to_flush: tuple[list[PackedRows], int]) -> None:
        taken, last = to_flush
        if self._journal.flushed < last:
            with self._stopping():
                await commit_rows(self._db, _joined(taken), after_flush=self._wal_sync)
            self._journal.mark = self._notes.has_flushed()
            self._journal.is_flushed(last)

    def _flush_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._flush_ms / 1000, self._begin_flush)

    def _begin_flush(self) -> None:
        self._timer = None
        self._flusher = self._begin(self._flush_now())

    async def _flush_now(self) -> None:
        try:
            await self.flush()
        except Exception as error:  # whatever it is, the next commit raises it, too
            logger.info("%s was not flushed: %s", self._name, error)
            return
        if self._closed is not None:
            return
        # If no commit comes before that, the journal tells readers elsewhere that they see all.
        if not self._journal.is_settled:
            self._flush_later()
        elif self._poll_timer is None:
            self._poll_later()

    def _poll_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._poll_timer = loop.call_later(_POLL_MS / 1000, self._begin_poll)

    def _begin_poll(self) -> None:
        self._poll_timer = None
        if self._notes.poll() != self._journal.mark and self._closed is None:
            self._begin(self._tell_mark())

    async def _tell_mark(self) -> None:
        """Note files that SlateDB has written since the last flush; there may be more to come."""
        async with self._writing, self._appending:
            if self._failure is None and self._closed is None:
                self._journal.mark = self._notes.poll()
                with self._stopping():
                    await self._journal.tell_mark()
                self._poll_later()


def state_row(state: JournalState) -> Rows:
    """The row by which a database says which journal it has."""
    row = Rows()
    row.put(JOURNAL_STATE_KEY, state.encode())
    return row


async def bring_in(
    db: slatedb.Db, left: LeftJournals, state: JournalState, wal_sync: WalSync | None, name: str
) -> None:
    """Hand the commits to SlateDB that only the journals of earlier owners have, and the state.

    So something is written even if there are none: an owner that was replaced before it had made
    its journal left no trace of it, and must find out now.
    """
    commits = await asyncio.to_thread(left.commits)
    for place in range(0, len(commits), _BROUGHT_IN_AT_ONCE):
        some = [_unpacked(data) for data in commits[place : place + _BROUGHT_IN_AT_ONCE]]
        await write_rows(db, _joined(some))
    await commit_rows(db, state_row(state), after_flush=wal_sync)
    if commits:
        logger.info("brought in %d commits from the journal of %s", len(commits), name)


def _unpacked(data: bytes) -> PackedRows:
    return PackedRows(data, sum(1 for _ in PackedRows(data, 0)))


def _joined(commits: Sequence[PackedRows]) -> PackedRows:
    return PackedRows(b"".join([one.data for one in commits]), sum(map(len, commits)))
