"""Who may read the indexes of a queue: one at a time, and only while they are held.

A message leaves an index when its rows were read. So whatever reads them holds them until it has
done with what it has read: nothing else takes messages out meanwhile. Rows may be added.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from odq_encodings import FailedMessages
from opendata_queue.queues.lanes import Past
from opendata_queue.queues.rows.backlog import BacklogRows
from opendata_queue.queues.rows.finished import FailedBuckets
from opendata_queue.queues.rows.overlay import FIRST, Place
from opendata_queue.queues.rows.schedule import ScheduleRows
from opendata_queue.queues.state import QueueState, Waiting

Part = TypeVar("Part")


class IndexGuard:
    """Hands out the indexes of a queue, to one holder at a time."""

    __slots__ = (
        "_holder",
        "_lock",
        "_parts",
    )

    def __init__(self, backlog: BacklogRows, schedule: ScheduleRows, failed: FailedBuckets) -> None:
        self._parts = backlog, schedule, failed
        self._lock = asyncio.Lock()
        self._holder: Indexes | None = None

    @asynccontextmanager
    async def hold(self, state: QueueState) -> AsyncIterator[Indexes]:
        async with self._lock:
            indexes = self._holder = Indexes(state, *self._parts)
            try:
                yield indexes
            finally:
                self._holder = None
                indexes.end()

    @property
    def front_may_be_taken(self) -> bool:
        """Whether a refill that needs no read may take messages out of the backlog now.

        A holder has read the backlog, and must find it as it was; unless it reads ahead.
        """
        if self._holder is None:
            return not self._lock.locked()
        return self._holder.reading_ahead


class Indexes:
    """Backlog, schedule and sealed failures of a queue. Of use only while they are held."""

    __slots__ = ("_held_backlog", "_held_failed", "_held_schedule", "_state", "reading_ahead")

    def __init__(
        self, state: QueueState, backlog: BacklogRows, schedule: ScheduleRows, failed: FailedBuckets
    ) -> None:
        self._state = state
        self._held_backlog: BacklogRows | None = backlog
        self._held_schedule: ScheduleRows | None = schedule
        self._held_failed: FailedBuckets | None = failed
        self.reading_ahead = False

    def end(self) -> None:
        """They are not held any more."""
        self._held_backlog = self._held_schedule = self._held_failed = None

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Only what is behind the front is read in here: the front itself may be taken."""
        self.reading_ahead = True
        try:
            yield
        finally:
            self.reading_ahead = False

    @property
    def _backlog(self) -> BacklogRows:
        return _still(self._held_backlog)

    @property
    def _schedule(self) -> ScheduleRows:
        return _still(self._held_schedule)

    @property
    def _failed(self) -> FailedBuckets:
        return _still(self._held_failed)

    # --- backlog ----------------------------------------------------------------------------------

    async def first_of_backlog(
        self, count: int, after: Place = FIRST, *, past: Past | None = None
    ) -> list[Waiting]:
        """The first ``count`` messages behind the window, in order.

        Only those that come after a priority and an id, and those that are in the past, if these
        are given.
        """
        return await self._backlog.first(self._state.ready, count, after, past=past)

    async def backlog_in_turns(self, count: int) -> list[Waiting]:
        """The first messages behind the window, lanes of equal priority in turns."""
        return await self._backlog.in_turns(self._state.ready, count)

    async def find_in_backlog(self, message_id: int) -> Waiting | None:
        """A message if it is in the backlog, by one read for each priority."""
        return await self._backlog.find(self._state.ready, message_id)

    async def backlog_between(self, first_id: int, last_id: int) -> list[Waiting]:
        """The messages of the backlog with these ids, of all priorities."""
        return await self._backlog.between(self._state.ready, first_id, last_id)

    # --- schedule ---------------------------------------------------------------------------------

    async def schedule_after(self, after: Place, count: int) -> list[Waiting]:
        """Scheduled messages that come after a time and an id, in order."""
        return await self._schedule.after(self._state.schedule, after, count)

    async def find_in_schedule(self, visible_at: int, message_id: int) -> Waiting | None:
        """A message if it is scheduled for that time, or has just been."""
        return await self._schedule.find(self._state.schedule, visible_at, message_id)

    async def first_of_schedule(self, now: int) -> tuple[list[Waiting], Place]:
        """Scheduled messages that are due, some hundred at most, and the place of the next one."""
        return await self._schedule.due(self._state.schedule, now)

    def take_due(self, due: Sequence[Waiting], next_due: Place, now: int) -> None:
        """Admit what ``first_of_schedule`` has found, right after it."""
        self._schedule.begins_at(next_due)
        self._state.take_due(due, now, next_due=next_due[0])

    # --- sealed buckets of failed messages --------------------------------------------------------

    async def oldest_failed(self, floor: int, count: int) -> list[tuple[int, FailedMessages]]:
        """The oldest sealed buckets, none of which is before ``floor``."""
        return await self._failed.oldest(floor, count)

    async def sealed_failed(self, buckets: set[int]) -> dict[int, dict[int, bytes]]:
        """The entries of sealed buckets, by message, of those that are there."""
        return await self._failed.read(buckets)

    def rewrite_failed(self, bucket: int, entries: dict[int, bytes]) -> None:
        """Replace what a sealed bucket holds; an empty one is deleted."""
        self._failed.rewrite(bucket, entries)


def _still(part: Part | None) -> Part:
    if part is None:
        raise RuntimeError(
            "the indexes of a queue are used by one that does not hold them any more"
        )
    return part
