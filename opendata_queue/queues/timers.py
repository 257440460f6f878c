"""What time alone does to queues: leases that run out, delayed messages that come due.

One heap holds the time of the next event of each queue that has one. Queues without one are not
in it, and a queue that changes is moved only if its next event has come closer.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import ClosedError, FencedError, OdqError
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.runtime.aio import end_tasks

logger = logging.getLogger(__name__)

_PUT_ASIDE_MS: Final = 5_000
_STALE_AT_MOST: Final = 64


class Sweeper:
    """Sweeps the queue whose event is the longest due, in bounded steps, one after the other.

    ``next_event`` says when time alone will next change a queue; ``sweep`` does some of what is
    due in a queue, and ``check_open`` raises when there is nothing to be swept any more.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        next_event: Callable[[StoredQueue], int | None],
        sweep: Callable[[StoredQueue], Awaitable[None]],
        check_open: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._next_event = next_event
        self._sweep = sweep
        self._check_open = check_open
        self._heap: list[tuple[int, int, StoredQueue]] = []
        self._due_at: dict[StoredQueue, int] = {}
        self._put_aside: dict[StoredQueue, int] = {}
        self._numbers = itertools.count()
        self._sweeping = False
        self._sooner = asyncio.Event()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="sweep queues")

    def note(self, queue: StoredQueue) -> None:
        """Take note that a queue has changed. It is called with every change: keep it cheap."""
        event = self._next_event(queue)
        if event is None:
            return
        known = self._due_at.get(queue)
        if known is not None and known <= event:
            return  # the event that is there already is no later
        # What is overdue comes after all others that are: one queue must not keep them waiting.
        event = max(event, self._clock.now_ms(), self._put_aside.get(queue, event))
        if known is None or event < known:
            self._push(queue, event)

    def forget(self, queue: StoredQueue) -> None:
        """A queue is gone."""
        self._due_at.pop(queue, None)
        self._put_aside.pop(queue, None)

    async def caught_up(self) -> None:
        """Wait until nothing is due."""
        while self._task is not None and not self._task.done() and self._is_due():
            self._moved.clear()
            moved = asyncio.create_task(self._moved.wait())
            await asyncio.wait({moved, self._task}, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()

    async def close(self) -> None:
        """Stop; what is due then is done by the next owner."""
        await end_tasks([self._task])

    # --- the heap ---------------------------------------------------------------------------------

    def _push(self, queue: StoredQueue, event: int) -> None:
        self._due_at[queue] = event
        if len(self._heap) > 2 * len(self._due_at) + _STALE_AT_MOST:
            self._heap = [(at, next(self._numbers), one) for one, at in self._due_at.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (event, next(self._numbers), queue))
        if self._heap[0][2] is queue:
            self._sooner.set()

    def _first(self) -> tuple[int, StoredQueue] | None:
        """The next event, after dropping what has been replaced by an earlier one."""
        while self._heap:
            at, _, queue = self._heap[0]
            if self._due_at.get(queue) == at:
                return at, queue
            heapq.heappop(self._heap)
        return None

    def _is_due(self) -> bool:
        first = self._first()
        return self._sweeping or (first is not None and first[0] <= self._clock.now_ms())

    # --- sweeping ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            queue = await self._next_due()
            self._sweeping = True
            try:
                self._check_open()
                await self._sweep(queue)
                self._put_aside.pop(queue, None)
            except (FencedError, ClosedError) as error:
                # Callers get it, too.
                logger.info("sweeping has stopped: %s", error)
                return
            except OdqError as error:
                self._later(queue)
                logger.warning("could not sweep queue %s: %s", queue.name, error)
            except Exception:
                # A defect in one queue; the others must not suffer from it.
                self._later(queue)
                logger.exception("could not sweep queue %s", queue.name)
            finally:
                self._sweeping = False
                self._moved.set()
            self.note(queue)
            await asyncio.sleep(0)

    async def _next_due(self) -> StoredQueue:
        while True:
            self._sooner.clear()
            first = self._first()
            if first is None:
                self._moved.set()
                await self._sooner.wait()
                continue
            at, queue = first
            if at <= self._clock.now_ms():
                heapq.heappop(self._heap)
                del self._due_at[queue]
                return queue
            self._moved.set()
            await self._wait_until(at)

    async def _wait_until(self, time_ms: int) -> None:
        waits = {
            asyncio.ensure_future(self._clock.wait_until(time_ms)),
            asyncio.ensure_future(self._sooner.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _later(self, queue: StoredQueue) -> None:
        self._put_aside[queue] = self._clock.now_ms() + _PUT_ASIDE_MS
