"""What time alone does to queues: leases that are over, delayed messages that are due.

The sweeper does it in the background, and a claim that comes first does it for its own queue.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from opendata_queue.model.errors import QueueNotFoundError
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.rows.schedule import DUE_AT_ONCE, due_order
from opendata_queue.queues.store.commits import QueueCommits
from opendata_queue.queues.store.registry import QueueRegistry
from opendata_queue.queues.timers import Sweeper
from opendata_queue.root.clock import RootClock
from opendata_queue.runtime.turns import Turns

_LEASES_AT_ONCE: Final = 250
_DUE_BEFORE_A_CLAIM: Final = 2 * DUE_AT_ONCE
"""How many messages that are due a claim admits before it takes what there is."""
_DUE_AT_A_TIME: Final = 50
"""Admitted before the clock is asked whether the step is over; they take half a millisecond."""

Deadlines = Callable[[Iterable[int]], Awaitable[dict[int, int]]]
"""Looks up the retention deadlines of messages."""


class DueWork:
    """Takes back leases and admits delayed messages when their time has come."""

    def __init__(
        self,
        registry: QueueRegistry,
        commits: QueueCommits,
        clock: RootClock,
        deadlines: Deadlines,
        *,
        turns: Turns,
        lease_grace_ms: int,
        chance: random.Random,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._committer = commits.committer
        self._clock = clock
        self._deadlines = deadlines
        self._turns = turns
        self._grace_ms = lease_grace_ms
        self._chance = chance
        self.sweeper = Sweeper(
            clock,
            next_event=self._next_event,
            sweep=self._sweep,
            check_open=self._committer.check_open,
        )

    async def catch_up_with_time(self, queue: StoredQueue) -> None:
        """Take back all leases that are over, and admit what is due.

        If that is a great deal, only the first of it while there is something to claim: the rest is
        left to the sweeper, and no claim waits for it (RFC 0006, *Schedule*).
        """
        while self._lease_is_over(queue):
            await self._take_back_leases(queue, _LEASES_AT_ONCE)
            await asyncio.sleep(0)  # a consumer that has died may have held thousands
        admitted = 0
        while self._is_due(queue) and (
            admitted < _DUE_BEFORE_A_CLAIM or not len(queue.state.ready)
        ):
            admitted += await self.admit_due(queue)

    def _next_event(self, queue: StoredQueue) -> int | None:
        """When time alone will next change this queue; never if it is gone."""
        if not self._registry.has(queue):
            return None
        state = queue.state
        deadline = state.in_flight.next_deadline
        if deadline is not None:
            deadline += self._grace_ms + 1
        if state.schedule.count and (deadline is None or state.schedule.due_from < deadline):
            return state.schedule.due_from
        return deadline

    async def _sweep(self, queue: StoredQueue) -> None:
        """Do a bounded part of what is due in a queue, though no consumer claims from it."""
        if not self._registry.has(queue):
            self.sweeper.forget(queue)
            return
        try:
            if self._lease_is_over(queue):
                await self._take_back_leases(queue, _LEASES_AT_ONCE)
            if self._is_due(queue):
                await self.admit_due(queue)
        except QueueNotFoundError:  # deleted meanwhile
            self.sweeper.forget(queue)

    def _lease_is_over(self, queue: StoredQueue) -> bool:
        deadline = queue.state.in_flight.next_deadline
        return deadline is not None and deadline + self._grace_ms < self._clock.now_ms()

    async def _take_back_leases(self, queue: StoredQueue, at_most: int) -> None:
        await self.ready_to_give_back(queue)
        if queue.state.expire_leases(
            self._clock.now_ms(),
            grace_ms=self._grace_ms,
            chance=self._chance.random,
            at_most=at_most,
        ):
            self._commits.changed_in_background(queue)

    def _is_due(self, queue: StoredQueue) -> bool:
        state = queue.state
        return bool(state.schedule.count) and state.schedule.due_from <= self._clock.now_ms()

    async def admit_due(self, queue: StoredQueue) -> int:
        """Admit messages that are due, for a turn; returns how many, some hundred at most."""
        async with queue.reading() as indexes:
            if not self._is_due(queue):
                return 0
            await self._committer.room()
            due, next_due = await indexes.first_of_schedule(self._clock.now_ms())
            queue.check()
            now, turn, taken = self._clock.now_ms(), self._turns.of_a_caller(), 0
            while True:
                some = due[taken : taken + _DUE_AT_A_TIME]
                taken += len(some)
                behind = due_order(due[taken]) if taken < len(due) else next_due
                indexes.take_due(some, behind, now)
                if taken == len(due) or turn.is_over:
                    break  # what is left is read again: meanwhile it may have changed
            self._commits.changed_in_background(queue)
            return taken

    async def ready_to_give_back(self, queue: StoredQueue) -> None:
        """Look up what the version-1 records of messages in flight could not hold."""
        unknown = queue.state.in_flight.lacks_deadline
        if unknown:
            for message_id, deadline in (await self._deadlines(list(unknown))).items():
                queue.state.in_flight.learn_deadline(message_id, deadline)
        await self._commits.room_for(queue)
