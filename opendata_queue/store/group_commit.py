"""Group commit: callers that arrive while a commit is under way share the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from opendata_queue.model.errors import (
    ClosedError,
    InvalidInputError,
    OdqError,
    StoreUnavailableError,
)
from opendata_queue.model.figures import Distribution, Figure
from opendata_queue.store.db.database import Database
from opendata_queue.store.rows.rows import Rows

logger = logging.getLogger(__name__)

_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
)
_BYTES: Final = tuple(float(1 << bits) for bits in range(8, 27, 2))

_TURNS_FOR_CALLERS: Final = 8
"""Of the event loop, from the end of a commit until its callers are back with their next wish."""
_SHARE_FOR_CALLERS: Final = 1 / 20
"""Of the time that a commit takes: so long those are waited for who are farther away."""
_SHORTEST_WAIT_S: Final = 0.001
_LONGEST_WAIT_S: Final = 0.05
"""A limit, for a commit that an outage has held up: callers are not waited for that long."""

_LAZY_MS: Final = 5
_LAZY_S3_MS: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitLimits:
    """What bounds a commit. One is under way while the next one gathers: that is all there is."""

    batch_rows: int = 20_000
    batch_bytes: int = 16 * 1024 * 1024
    """Callers wait while the next commit has gathered this much; a single call may bring more."""

    linger_ms: float = 0
    """How long a commit waits for company. On S3 it bounds the number of requests."""

    lazy_ms: float | None = None
    """How long rows without a waiting caller, such as those of routing, wait for a commit that
    has one: 5 ms unless given, and 100 ms on S3, where a commit is a request."""

    def __post_init__(self) -> None:
        shortest_ms = min(self.linger_ms, self.lazy_ms or 0)
        if self.batch_rows < 1 or self.batch_bytes < 1 or shortest_ms < 0:
            raise InvalidInputError(f"{self} has a limit that is too small")


class Patience:
    """Whether it is worth to wait for callers: not if they did not come back the last times.

    Those of a broker, for example, are farther away than a commit to a local disk takes. Now and
    then it is tried again.
    """

    __slots__ = ("_in_vain",)

    TRIES: Final = 4
    TRY_AGAIN: Final = 64
    """Of so many commits, one waits all the same."""

    def __init__(self) -> None:
        self._in_vain = 0

    def is_worth_it(self) -> bool:
        if self._in_vain < self.TRIES:
            return True
        self._in_vain += 1
        return self._in_vain % self.TRY_AGAIN == 0

    def waited(self, missed: int, left: int) -> None:
        """So many callers were missed, and so many still are."""
        self._in_vain = 0 if 2 * left <= missed else self._in_vain + 1


class _Batch:
    __slots__ = ("callers", "done", "number", "rows", "starting")

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows = Rows()
        self.callers = 0
        # Those who wait for its beginning, each with a future of its own to be cancelled with:
        # to share one and shield it costs ten times as much.
        self.starting: list[asyncio.Future[None]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has_started(self) -> None:
        starting, self.starting = self.starting, []
        for one in starting:
            if not one.done():
                one.set_result(None)


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
        self._lazy_ms = limits.lazy_ms
        if self._lazy_ms is None:
            self._lazy_ms = _LAZY_S3_MS if database.is_on_s3 else _LAZY_MS
        self._prepare = prepare
        self._batch = _Batch(1)
        self._under_way: _Batch | None = None
        self._wanted = asyncio.Event()
        self._lazily: asyncio.TimerHandle | None = None
        self._full = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._gone = 0
        """How many callers of the last commit have not come back yet."""
        self._all_back = asyncio.Event()
        self._patience = Patience()
        self._took_s = 0.0
        """How long the last commit took."""
        self._failure: OdqError | None = None
        self._closing = False
        self.durable_batch = 0
        self._seconds = Distribution(_SECONDS)
        self._bytes = Distribution(_BYTES)
        self._rows_committed = 0
        self._loop = asyncio.get_running_loop()
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

    @property
    def has_failed(self) -> bool:
        """Whether a failure has stopped it, or it was given up."""
        return self._failure is not None

    async def room(self) -> None:
        """Wait until more may be added. Add without awaiting anything in between."""
        self.check_open()
        while not self._room.is_set():
            await self._room.wait()
            self.check_open()

    async def room_beside_callers(self, most_rows: int) -> None:
        """``room``, but in a commit that has fewer rows than that.

        For rows without a waiting caller: callers that share a commit with them must not wait for
        much more than their own rows.
        """
        await self.room()
        while len(self._batch.rows) >= most_rows:
            self.commit(lazy=True)  # what was added may be waiting for company, for any time
            taken: asyncio.Future[None] = self._loop.create_future()
            self._batch.starting.append(taken)
            await taken
            await self.room()

    def commit(self, *, urgent: bool = False, lazy: bool = False) -> asyncio.Future[None]:
        """Ask for the next commit; the future is done when its rows are durable.

        It is shared with other callers: await it through ``wait``. An urgent one does not linger.
        A lazy one, which has no waiting caller, goes along with the next that has one, if that
        comes soon.
        """
        self.check_open()
        rows, limits = self._batch.rows, self._limits
        if len(rows) >= limits.batch_rows or rows.size_bytes >= limits.batch_bytes:
            self._room.clear()
            urgent = True
        if urgent:
            self._hurry()
        if not lazy:
            self._batch.callers += 1
            self._gone -= 1
            if self._gone <= 0:
                self._all_back.set()
        if not lazy or urgent or not self._lazy_ms:
            self._wanted.set()
        elif self._lazily is None:
            loop = asyncio.get_running_loop()
            self._lazily = loop.call_later(self._lazy_ms / 1000, self._wanted.set)
        return self._batch.done

    def add(self, rows: Rows, *, urgent: bool = False) -> asyncio.Future[None]:
        """Add rows to the next commit, and ask for it."""
        self.rows.extend(rows)
        return self.commit(urgent=urgent)

    @staticmethod
    async def wait(done: asyncio.Future[None]) -> None:
        """Wait for a batch; a caller that is cancelled does not take the batch with it."""
        await asyncio.shield(done)

    async def at_work(self) -> None:
        """Wait until a commit is under way, that which was asked for or the one before it.

        A caller that has something to compute before it waits for the end does it then, while the
        store is busy and the processor is free.
        """
        if self._under_way is None and not self._batch.done.done():
            started: asyncio.Future[None] = self._loop.create_future()
            self._batch.starting.append(started)
            await started

    def check_open(self) -> None:
        """Raise what stopped the committer, if something did."""
        if self._failure is not None:
            # Without its traceback, which would grow with every caller that gets it.
            raise self._failure.with_traceback(None)
        if self._closing:
            raise ClosedError(f"{self._database.name} is closed")

    def give_up(self, error: OdqError) -> None:
        """Take nothing more, for a reason that every caller gets from now on.

        What has gathered is not committed. A commit that is under way ends by itself, one way or
        the other, and its callers get its result.
        """
        if self._failure is not None:
            return
        self._failure = error
        self._fail(self._batch, error)
        self._hurry()
        self._wanted.set()
        self._tell_stopped()

    def figures(self) -> Iterator[Figure]:
        """How commits have fared, and what the database counts itself."""
        labels = self._database.labels
        yield self._seconds.figure("odq_commit_seconds", "How long commits took.", labels)
        yield self._bytes.figure("odq_commit_bytes", "How large commits were.", labels)
        yield Figure(
            name="odq_commit_rows",
            help="Rows that were committed.",
            kind="counter",
            labels=labels,
            value=self._rows_committed,
        )
        yield from self._database.figures()

    async def close(self) -> None:
        """Commit what has gathered, then stop. Callers get their results."""
        self._closing = True
        self._room.set()
        self._hurry()
        self._wanted.set()
        # A caller that gives up on closing must not cancel a commit; one that failed is known.
        if not self._runner.done():
            await asyncio.wait([self._runner])

    def _hurry(self) -> None:
        """Let the next commit begin without waiting for callers."""
        self._full.set()
        self._all_back.set()

    async def _run(self) -> None:
        try:
            while self._failure is None and not (self._closing and not self._wanted.is_set()):
                await self._wanted.wait()
                if self._limits.linger_ms:
                    await self._linger()
                await self._let_callers_join()
                if self._failure is None:
                    await self._commit_next()
        except OdqError as error:
            self._stop(error)
        except BaseException as error:
            # Cancelled with its event loop, or a defect: callers must not wait for ever.
            stopped = ClosedError(f"{self._database.name} was stopped by {error!r}")
            stopped.__cause__ = error
            self._stop(stopped)
            if isinstance(error, asyncio.CancelledError):
                raise
            logger.exception("%s", stopped)

    async def _let_callers_join(self) -> None:
        """Let others into the next commit: a turn of the loop costs microseconds, a commit a
        hundred times that.

        Tasks that were woken together with us may want to join. So may the callers of the last
        commit: without them, they and those who came meanwhile would take turns for ever, each time
        half of them, and each would wait for two commits.
        """
        await asyncio.sleep(0)
        missed = self._gone
        # One that is full takes no more callers, and one that is urgent waits for none.
        if missed > 0 and not self._full.is_set() and self._patience.is_worth_it():
            await self._wait_for_callers()
            if not self._full.is_set():
                self._patience.waited(missed, self._gone)

    async def _wait_for_callers(self) -> None:
        """Wait for the callers of the last commit: a few turns, and a little of what it took."""
        for _ in range(_TURNS_FOR_CALLERS):
            await asyncio.sleep(0)
            if self._gone <= 0 or self._full.is_set():
                return
        wait_s = min(self._took_s * _SHARE_FOR_CALLERS, _LONGEST_WAIT_S)
        if wait_s >= _SHORTEST_WAIT_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._all_back.wait()

    async def _commit_next(self) -> None:
        batch = self._under_way = self._take()
        if self._prepare is not None:
            self._prepare(batch.rows)
        if batch.rows:
            on_start = batch.has_started if batch.starting else None
            started = self._loop.time()
            await self._database.commit(batch.rows, on_start=on_start)
            self._took_s = self._loop.time() - started
            self._seconds.add(self._took_s)
            self._bytes.add(batch.rows.size_bytes)
            self._rows_committed += len(batch.rows)
        batch.has_started()
        self.durable_batch = batch.number
        self._under_way = None
        self._gone = batch.callers
        self._all_back.clear()
        batch.done.set_result(None)

    def _take(self) -> _Batch:
        batch, self._batch = self._batch, _Batch(self._batch.number + 1)
        if not self._closing:
            self._full.clear()
        self._wanted.clear()
        if self._lazily is not None:
            self._lazily.cancel()
            self._lazily = None
        self._room.set()
        return batch

    async def _linger(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_ms / 1000):
                await self._full.wait()

    def _stop(self, error: OdqError) -> None:
        if self._failure is None:
            self._failure = error
            if isinstance(error, StoreUnavailableError):
                # In doubt is only the batch that was under way: nothing else was written.
                self._failure = StoreUnavailableError(
                    "an earlier write failed, and nothing is written after it: close it and open "
                    f"it again ({error})"
                )
        if self._under_way is not None:
            self._fail(self._under_way, error)
        self._fail(self._batch, self._failure)
        self._tell_stopped()

    @staticmethod
    def _fail(batch: _Batch, error: OdqError) -> None:
        if not batch.done.done():
            batch.done.set_exception(error)
            batch.done.exception()  # seen, even if its callers were all cancelled
        batch.has_started()

    def _tell_stopped(self) -> None:
        self._room.set()
        if self._on_stop is not None:
            self._on_stop()
