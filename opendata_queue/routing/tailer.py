"""Following the log of a shard from a cursor, for as long as it grows.

Messages that were published in this process are handed over without a read; everything else is
scanned.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from opendata_queue.log.metadata_log import Log
from opendata_queue.model.errors import ClosedError, StoreUnavailableError
from opendata_queue.model.ids import sequence_of
from opendata_queue.model.messages import Published
from opendata_queue.queues.store import QueueStore
from opendata_queue.routing.router import Router
from opendata_queue.runtime.aio import end_tasks

logger = logging.getLogger(__name__)

HANDED_OVER_AT_MOST: Final = 20_000
_ROUTED_AT_ONCE: Final = 2_000
_TRY_AGAIN_MS: Final = 1_000
_TURNS_FOR_PRODUCERS: Final = 5
"""How many turns of the event loop producers get, from a commit until its messages are routed."""


class Tailer:
    """Follows the log of one shard."""

    def __init__(self, log: Log, router: Router) -> None:
        self._log = log
        self.router = router
        self._store: QueueStore = router.store
        self._handed_over: deque[list[Published]] = deque()
        self._handed_over_count = 0
        self._behind = True
        self._handed_over_end = 0
        """Behind the last message that was handed over; 0 if there is none to wait for."""
        self._waited_for = False
        self._work = asyncio.Event()
        self._work.set()
        self._idle = asyncio.Event()
        self._moved = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"tail shard {router.shard}")
        self._task.add_done_callback(lambda _: self._moved.set())

    @property
    def cursor(self) -> int:
        """The sequence up to which the log is routed."""
        return self.router.next_sequence

    def hand_over(self, last_id: int, listed: Callable[[], list[Published]]) -> None:
        """Take messages that are durable in the log, in its order, right after those before."""
        if self._idle.is_set() and not len(self._store.index):
            self.router.pass_by(last_id)
            return
        messages = listed()
        if self._handed_over_count + len(messages) > HANDED_OVER_AT_MOST:
            self._forget_handed_over()
        elif not self._behind:
            self._handed_over.append(messages)
            self._handed_over_count += len(messages)
            self._handed_over_end = sequence_of(last_id) + 1
        self._idle.clear()
        self._work.set()

    async def handed_over_is_routed(self, *, patient: bool = True) -> None:
        """Wait until what was handed over is routed: a producer finds its messages in the queues.

        Most often there is nothing to wait for. What has to be scanned is not waited for, and a
        caller that is not ``patient`` waits for one batch at most.
        """
        end = self._handed_over_end
        while self.cursor < end and self._handed_over_end and not self._task.done():
            self._waited_for = True
            self._moved.clear()
            await self._moved.wait()
            if not patient:
                return

    def read_again(self) -> None:
        """Read the log: there may be more in it than was handed over."""
        self._behind = True
        self._idle.clear()
        self._work.set()

    async def caught_up(self, up_to: int | None = None) -> None:
        """Wait until the log is routed up to a sequence, or as far as it goes.

        Without one, until there is nothing left to route. If it ends before, that is raised.
        """
        while not (self._idle.is_set() or (up_to is not None and self.cursor >= up_to)):
            if self._task.done():
                self.check_running()
                raise ClosedError("it was closed before all that was published was routed")
            self._moved.clear()
            await self._moved.wait()

    def check_running(self) -> None:
        """Raise what stopped the routing, if something did."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """Stop routing; what is not routed yet will be, after the next open."""
        await end_tasks([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            logger.info("routing had stopped: %s", error)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self._let_producers_go_on()
            self._work.clear()
            try:
                await self._route_what_is_there()
            except StoreUnavailableError as error:
                await self._try_later(error)
            if not self._work.is_set():
                self._idle.set()
                self._moved.set()

    async def _let_producers_go_on(self) -> None:
        """Let producers that have just published publish again first.

        Then the next batch is on its way to the store while this one is routed, and not after it.
        If there are none, it costs some microseconds.
        """
        for _ in range(_TURNS_FOR_PRODUCERS):
            if self._waited_for:
                break
            await asyncio.sleep(0)
        self._waited_for = False

    async def _route_what_is_there(self) -> None:
        if self._behind:
            await self._scan()
        while self._handed_over:
            messages = self._next_handed_over()
            for first in range(0, len(messages), _ROUTED_AT_ONCE):
                await self._route(messages[first : first + _ROUTED_AT_ONCE])

    def _next_handed_over(self) -> list[Published]:
        """What was published together, and small batches put together."""
        messages = self._handed_over.popleft()
        while self._handed_over and len(messages) + len(self._handed_over[0]) <= _ROUTED_AT_ONCE:
            messages += self._handed_over.popleft()
        self._handed_over_count -= len(messages)
        return messages

    def _forget_handed_over(self) -> None:
        """It will be scanned, and no caller waits for that."""
        self._handed_over.clear()
        self._handed_over_count = 0
        self._handed_over_end = 0
        self._behind = True
        self._moved.set()

    async def _try_later(self, error: StoreUnavailableError) -> None:
        """The log could not be read; what was not routed will be scanned again."""
        self._store.committer.check_open()  # if it was a commit that failed, it is over
        logger.warning("routing waits for the store: %s", error)
        self._forget_handed_over()
        clock = self._store.clock.machine
        await clock.wait_until(clock.now_ms() + _TRY_AGAIN_MS)
        self._work.set()

    async def _scan(self) -> None:
        """Catch up from the store. Messages that become durable meanwhile are handed over."""
        # Before the scan: what is published from here on is either scanned or handed over.
        self._behind = False
        index = self._store.index
        async for chunk in self._log.chunks(lambda: index.headers, sequence_of(self.cursor)):
            await self.router.route_log(chunk, on_batch=self._moved.set)

    async def _route(self, messages: list[Published]) -> None:
        await self.router.route(messages, on_batch=self._moved.set)
