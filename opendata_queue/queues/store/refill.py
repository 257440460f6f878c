"""Refills: messages of the backlog move into the window, most often before they are asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from opendata_queue.model.errors import CorruptStoreError, OdqError
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.state import Waiting
from opendata_queue.root.clock import RootClock
from opendata_queue.runtime.aio import end_tasks
from opendata_queue.store.group_commit import GroupCommitter

logger = logging.getLogger(__name__)


class Refills:
    """Refills the windows of all queues."""

    def __init__(self, committer: GroupCommitter, clock: RootClock) -> None:
        self._committer = committer
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_announce: Callable[[list[int]], None] | None = None
        """Called with the messages that are likely to be claimed soon."""

    async def close(self) -> None:
        await end_tasks(list(self._tasks))

    async def refill(self, queue: StoredQueue) -> None:
        """Move messages of the backlog into the window, after a read if that is needed."""
        async with queue.reading() as indexes:
            state = queue.state
            if not state.ready.backlog.total or not state.ready.room:
                return
            # Before the scan: what comes back to the backlog after it would be overtaken.
            await self._committer.room()
            if not state.ready.knows_front:
                if state.ready.several_lanes:
                    first = await indexes.backlog_in_turns(state.ready.front_size)
                else:
                    first = await indexes.first_of_backlog(state.ready.front_size)
                queue.check()
                state.ready.learn_front(first)
                if not first and state.ready.backlog.total:
                    raise CorruptStoreError(
                        f"queue {queue.name!r} counts {state.ready.backlog.total} messages in its "
                        "backlog, and the store has none"
                    )
            self.from_front(queue)

    def from_front(self, queue: StoredQueue) -> bool:
        """Refill without reading, if that can be done."""
        queue.check()
        expired = queue.state.expired
        moved = queue.state.refill(self._clock.now_ms())
        if not moved:
            return False
        # No commit for it: should we crash, the messages are where they were. It goes along with
        # the next one, so that no commit has to wait for it.
        queue.changed()
        if queue.state.expired != expired:  # but that can be seen, and must not be undone
            self._committer.commit()
        queue.waiters.wake()
        # All that is known to come next is announced at once: reading a thousand messages ahead
        # costs little more than reading a hundred.
        if moved[-1].message_id not in queue.announced:
            self._announce(queue, [*moved, *queue.state.ready.front])
        return True

    def _announce(self, queue: StoredQueue, messages: Sequence[Waiting]) -> None:
        """Say which messages will be claimed soon."""
        if self.on_announce is not None:
            ids = [message.message_id for message in messages]
            queue.announced = frozenset([*ids, *(m.message_id for m in queue.state.ready.front)])
            self.on_announce(ids)

    def in_background(self, queue: StoredQueue) -> None:
        """Refill while the consumer is busy, so that its next claim need not wait for it."""
        refilled = queue.front_may_be_taken and self.from_front(queue)
        if queue.refilling or (refilled and not queue.state.ready.wants_longer_front):
            return
        queue.refilling = True
        work = self._read_behind_front(queue) if refilled else self.refill(queue)
        task = asyncio.create_task(self._try_to_refill(queue, work), name=f"refill {queue.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_behind_front(self, queue: StoredQueue) -> None:
        """Read what the front will need soon, while it is being used."""
        async with queue.reading() as indexes:
            state = queue.state
            if not state.ready.wants_longer_front:
                return
            last = state.ready.front[-1]
            count = state.ready.front_size - len(state.ready.front)
            with indexes.ahead():
                behind = await indexes.first_of_backlog(count, last[:2])
            queue.check()
            if state.ready.lengthen_front(last, behind):
                self._announce(queue, behind)

    async def _try_to_refill(self, queue: StoredQueue, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except OdqError as error:
            # The next claim gets it too.
            logger.info("could not refill queue %s: %s", queue.name, error)
        finally:
            queue.refilling = False
