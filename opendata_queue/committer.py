"""Group commit: callers that arrive while a commit is under way share the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass

from opendata_queue.errors import ClosedError, OdqError
from opendata_queue.store import Database, Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitLimits:
    """What bounds a commit, and what waits for one."""

    batch_rows: int = 20_000
    batch_bytes: int = 16 * 1024 * 1024
    """A commit takes no more than this, unless a single call alone brings more."""

    pending_bytes: int = 64 * 1024 * 1024
    """Callers wait while this much is waiting to be committed."""

    linger_ms: float = 0
    """How long a commit waits for company. On S3 it bounds the number of requests."""


class _Batch:
    __slots__ = ("done", "rows")

    def __init__(self) -> None:
        self.rows = Rows()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class GroupCommitter:
    """Gathers rows and commits them, one batch at a time, in the order in which they came.

    A commit that fails stops it: whether that batch is durable is not guessed, and nothing may be
    written after it. All callers get the error.
    """

    def __init__(self, database: Database, limits: CommitLimits) -> None:
        self._database = database
        self._limits = limits
        self._batches: deque[_Batch] = deque()
        self._pending_bytes = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._full = asyncio.Event()
        self._failure: OdqError | None = None
        self._closing = False
        self._runner = asyncio.create_task(self._run(), name=f"commit {database.name}")

    async def room(self) -> None:
        """Wait until more may be added. Add without awaiting anything in between."""
        self.check_open()
        while not self._room.is_set():
            await self._room.wait()
            self.check_open()

    def add(self, rows: Rows) -> asyncio.Future[None]:
        """Add rows that must be committed together; the future is done when they are durable.

        It is shared with other callers: await it through ``wait``.
        """
        self.check_open()
        batch = self._batch_for(rows)
        batch.rows.extend(rows)
        self._pending_bytes += rows.size_bytes
        if self._pending_bytes >= self._limits.pending_bytes:
            self._room.clear()
        if self._is_full(batch.rows):
            self._full.set()
        self._work.set()
        return batch.done

    @staticmethod
    async def wait(done: asyncio.Future[None]) -> None:
        """Wait for a batch; a caller that is cancelled does not take the batch with it."""
        await asyncio.shield(done)

    def check_open(self) -> None:
        """Raise what stopped the committer, if something did."""
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise ClosedError(f"{self._database.name} is closed")

    async def close(self) -> None:
        """Commit what is pending, then stop. Callers get their results."""
        self._closing = True
        self._full.set()
        self._work.set()
        await self._runner

    def _batch_for(self, rows: Rows) -> _Batch:
        limits = self._limits
        if self._batches:
            last = self._batches[-1]
            if (
                len(last.rows) + len(rows) <= limits.batch_rows
                and last.rows.size_bytes + rows.size_bytes <= limits.batch_bytes
            ):
                return last
        self._batches.append(_Batch())
        return self._batches[-1]

    def _is_full(self, rows: Rows) -> bool:
        limits = self._limits
        return (
            len(self._batches) > 1
            or len(rows) >= limits.batch_rows
            or rows.size_bytes >= limits.batch_bytes
        )

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            if not self._batches:
                if self._closing:
                    return
                self._work.clear()
                continue
            if self._limits.linger_ms and not self._closing:
                await self._linger()
            batch = self._batches.popleft()
            try:
                await self._database.commit(batch.rows)
            except OdqError as error:
                self._stop(batch, error)
                return
            self._pending_bytes -= batch.rows.size_bytes
            if self._pending_bytes < self._limits.pending_bytes:
                self._room.set()
            batch.done.set_result(None)

    async def _linger(self) -> None:
        if len(self._batches) == 1 and not self._is_full(self._batches[0].rows):
            self._full.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_ms / 1000):
                await self._full.wait()

    def _stop(self, batch: _Batch, error: OdqError) -> None:
        self._failure = error
        for failed in (batch, *self._batches):
            failed.done.set_exception(error)
            failed.done.exception()  # seen, even if its callers were all cancelled
        self._batches.clear()
        self._room.set()
