"""What goes into a commit of the queue store: the records of the queues that have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from odq_encodings import ClockKey, ClockMark
from opendata_queue.model.values import Outcome
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.store.registry import QueueRegistry
from opendata_queue.root.clock import RootClock
from opendata_queue.runtime.turns import Turn
from opendata_queue.store import Database, Rows
from opendata_queue.store.group_commit import CommitLimits, GroupCommitter

CLOCK_KEY: Final = ClockKey().encode()
ROWS_BESIDE_CALLERS: Final = 1_000
"""A commit with so many rows gets no more from the background while callers may join it."""


class QueueCommits:
    """The committer of the queue store, and the queues whose records go into its next batch."""

    def __init__(
        self, database: Database, clock: RootClock, registry: QueueRegistry, limits: CommitLimits
    ) -> None:
        self._clock = clock
        self._registry = registry
        self._changed: dict[StoredQueue, None] = {}
        self.committer = GroupCommitter(database, limits, self._prepare, registry.wake_everybody)
        self.on_change: Callable[[StoredQueue], None] | None = None
        """Called with every queue that changes."""

    def mark(self, queue: StoredQueue) -> None:
        """The records of a queue have changed."""
        self._changed[queue] = None
        if self.on_change is not None:
            self.on_change(queue)

    def _prepare(self, rows: Rows) -> None:
        changed, self._changed = self._changed, {}
        for queue in changed:
            queue.put_state(rows)
        if not rows:
            return
        claims_after = max((queue.state.in_flight.claims_after for queue in changed), default=0)
        mark = max(self._clock.now_ms(), self._registry.made_from_ms, claims_after)
        rows.put(CLOCK_KEY, ClockMark.layout.pack_trusted("ClockMark", mark))
        for queue in changed:
            queue.batch_is_durable()

    async def settle(
        self, queue: StoredQueue, outcomes: list[bool], *, wake: bool
    ) -> list[Outcome]:
        """Wait until what was done to a queue is durable, if anything was."""
        if any(outcomes):
            queue.changed()
            done = self.committer.commit()
            if wake:
                queue.waiters.wake()
            await self.committer.wait(done)
        return ["ok" if outcome else "lease_lost" for outcome in outcomes]

    def changed_in_background(self, queue: StoredQueue) -> None:
        """Commit a change soon, though no caller waits for it."""
        queue.changed()
        self.committer.commit(lazy=True)
        queue.waiters.wake()

    async def room_for(self, queue: StoredQueue) -> None:
        """Wait until more may be added for a queue, which must not be deleted meanwhile."""
        await self.committer.room()
        queue.check()

    async def room_for_turn(self, turn: Turn) -> None:
        """Begin a turn of background work when there is room for its rows."""
        if turn.leaves_room:
            await self.committer.room_beside_callers(ROWS_BESIDE_CALLERS)
        else:
            await self.committer.room()
        turn.begin()

    async def all_durable(self) -> None:
        """Wait until everything that has happened can be read."""
        await self.committer.wait(self.committer.commit(urgent=True))
