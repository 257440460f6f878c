"""Group commit: callers that arrive while a commit is under way share the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from opendata_queue.errors import ClosedError, InvalidInputError, OdqError, StoreUnavailableError
from opendata_queue.store import Database, Rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitLimits:
    """What bounds a commit. One is under way while the next one gathers: that is all there is."""

    batch_rows: int = 20_000
    batch_bytes: int = 16 * 1024 * 1024
    """Callers wait while the next commit has gathered this much; a single call may bring more."""

    linger_ms: float = 0
    """How long a commit waits for company. On S3 it bounds the number of requests."""

    def __post_init__(self) -> None:
        if self.batch_rows < 1 or self.batch_bytes < 1 or self.linger_ms < 0:
            raise InvalidInputError(f"{self} has a limit that is too small")


class _Batch:
    __slots__ = ("done", "number", "rows")

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows = Rows()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class GroupCommitter:
    """Gathers rows and commits them, one batch after the other.

    A commit that fails stops it: whether that batch is durable is not guessed, and nothing may be
    written after it. All callers get the error.

    ``prepare`` is called with the rows of a batch right before it is committed, to add what is
    only worth encoding once for all callers of the batch. ``on_stop`` is called when a failure has
    stopped it.
    """

    def __init__(
        self,
        database: Database,
        limits: CommitLimits,
        prepare: Callable[[Rows], None] | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        self._database = database
        self._on_stop = on_stop
        self._limits = limits
        self._prepare = prepare
        self._batch = _Batch(1)
        self._under_way: _Batch | None = None
        self._wanted = asyncio.Event()
        self._full = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._failure: OdqError | None = None
        self._closing = False
        self.durable_batch = 0
        self._runner = asyncio.create_task(self._run(), name=f"commit {database.name}")

    @property
    def rows(self) -> Rows:
        """The rows of the next commit, to add to. Ask for the commit without awaiting first."""
        self.check_open()
        return self._batch.rows

    @property
    def batch(self) -> int:
        """The number of the batch that is gathering."""
        return self._batch.number

    async def room(self) -> None:
        """Wait until more may be added. Add without awaiting anything in between."""
        self.check_open()
        while not self._room.is_set():
            await self._room.wait()
            self.check_open()

    def commit(self, *, urgent: bool = False) -> asyncio.Future[None]:
        """Ask for the next commit; the future is done when its rows are durable.

        It is shared with other callers: await it through ``wait``. An urgent one does not linger.
        """
        self.check_open()
        rows, limits = self._batch.rows, self._limits
        if len(rows) >= limits.batch_rows or rows.size_bytes >= limits.batch_bytes:
            self._room.clear()
            urgent = True
        if urgent:
            self._full.set()
        self._wanted.set()
        return self._batch.done

    def add(self, rows: Rows, *, urgent: bool = False) -> asyncio.Future[None]:
        """Add rows to the next commit, and ask for it."""
        self.rows.extend(rows)
        return self.commit(urgent=urgent)

    @staticmethod
    async def wait(done: asyncio.Future[None]) -> None:
        """Wait for a batch; a caller that is cancelled does not take the batch with it."""
        await asyncio.shield(done)

    def check_open(self) -> None:
        """Raise what stopped the committer, if something did."""
        if self._failure is not None:
            # Without its traceback, which would grow with every caller that gets it.
            raise self._failure.with_traceback(None)
        if self._closing:
            raise ClosedError(f"{self._database.name} is closed")

    async def close(self) -> None:
        """Commit what has gathered, then stop. Callers get their results."""
        self._closing = True
        self._room.set()
        self._full.set()
        self._wanted.set()
        # A caller that gives up on closing must not cancel a commit; one that failed is known.
        if not self._runner.done():
            await asyncio.wait([self._runner])

    async def _run(self) -> None:
        try:
            while not (self._closing and not self._wanted.is_set()):
                await self._wanted.wait()
                if self._limits.linger_ms:
                    await self._linger()
                await self._commit_next()
        except OdqError as error:
            self._stop(error)
        except BaseException as error:
            # Cancelled with its event loop, or a defect: whoever waits must not wait for ever.
            stopped = ClosedError(f"{self._database.name} was stopped by {error!r}")
            stopped.__cause__ = error
            self._stop(stopped)
            if isinstance(error, asyncio.CancelledError):
                raise
            logger.exception("%s", stopped)

    async def _commit_next(self) -> None:
        batch = self._under_way = self._take()
        if self._prepare is not None:
            self._prepare(batch.rows)
        if batch.rows:
            await self._database.commit(batch.rows)
        self.durable_batch = batch.number
        self._under_way = None
        batch.done.set_result(None)

    def _take(self) -> _Batch:
        batch, self._batch = self._batch, _Batch(self._batch.number + 1)
        if not self._closing:
            self._full.clear()
        self._wanted.clear()
        self._room.set()
        return batch

    async def _linger(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_ms / 1000):
                await self._full.wait()

    def _stop(self, error: OdqError) -> None:
        self._failure = error
        if isinstance(error, StoreUnavailableError):
            # In doubt is only the batch that was under way: nothing else was written.
            self._failure = StoreUnavailableError(f"an earlier write failed: {error}")
        for batch, failure in ((self._under_way, error), (self._batch, self._failure)):
            if batch is not None and not batch.done.done():
                batch.done.set_exception(failure)
                batch.done.exception()  # seen, even if its callers were all cancelled
        self._room.set()
        if self._on_stop is not None:
            self._on_stop()
