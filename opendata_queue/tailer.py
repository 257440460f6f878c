"""Routing: every message goes into every queue whose filter it satisfies, exactly once.

The tailer follows the metadata log of a shard from a cursor. What it routes and how far it has
come are in one batch of the queue store, so a crash repeats nothing and skips nothing. Messages
that were published in this process are handed over without a read; everything else is scanned.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from opendata_queue.filters import SystemFields
from opendata_queue.messages import Published
from opendata_queue.metadata_log import MetadataLog
from opendata_queue.queue_state import Waiting
from opendata_queue.queue_store import QueueStore

logger = logging.getLogger(__name__)

HANDED_OVER_AT_MOST: Final = 20_000
_ROUTED_AT_ONCE: Final = 2_000
_MAX_TIME_MS: Final = (1 << 63) - 1


def retention_deadline(received_at: int, retention_seconds: int) -> int:
    """When a message expires; 0 for never (RFC 0001)."""
    if not retention_seconds:
        return 0
    return min(received_at + retention_seconds * 1_000, _MAX_TIME_MS)


class Tailer:
    """Follows the log of one shard."""

    def __init__(self, log: MetadataLog, store: QueueStore, shard: int, cursor: int) -> None:
        self._log = log
        self._store = store
        self._shard = shard
        self._next = cursor
        self._handed_over: deque[Published] = deque()
        self._behind = True
        self._work = asyncio.Event()
        self._work.set()
        self._idle = asyncio.Event()
        self._moved = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"tail shard {shard}")

    @property
    def cursor(self) -> tuple[int, int]:
        """The shard, and the sequence up to which its log is routed."""
        return self._shard, self._next

    def hand_over(self, last_id: int, listed: Callable[[], list[Published]]) -> None:
        """Take messages that are durable in the log, in its order, right after those before."""
        if self._idle.is_set() and not len(self._store.index):
            self._next = max(self._next, (last_id & 0xFFFF_FFFF) + 1)
            return
        messages = listed()
        if len(self._handed_over) + len(messages) > HANDED_OVER_AT_MOST:
            self._handed_over.clear()
            self._behind = True
        elif not self._behind:
            self._handed_over.extend(messages)
        self._idle.clear()
        self._work.set()

    async def caught_up(self, up_to: int | None = None) -> None:
        """Wait until the log is routed up to a sequence, or as far as it goes.

        Without one, until there is nothing left to route.
        """
        while not (self._idle.is_set() or (up_to is not None and self._next >= up_to)):
            self.check_running()
            moved = asyncio.create_task(self._moved.wait())
            await asyncio.wait({moved, self._task}, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
            self._moved.clear()

    def check_running(self) -> None:
        """Raise what stopped the routing, if something did."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """Stop routing; what is not routed yet will be, after the next open."""
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            logger.info("routing had stopped: %s", error)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            if self._behind:
                await self._scan()
            while self._handed_over:
                await self._store.committer.room()
                count = min(len(self._handed_over), _ROUTED_AT_ONCE)
                self._route([self._handed_over.popleft() for _ in range(count)])
            if not self._work.is_set():
                self._idle.set()
                self._moved.set()

    async def _scan(self) -> None:
        """Catch up from the store. Messages that become durable meanwhile are handed over."""
        # Before the scan: what is published from here on is either scanned or handed over.
        self._behind = False
        async for chunk in self._log.scan(self._next & 0xFFFF_FFFF):
            await self._store.committer.room()
            self._route(
                [
                    Published(
                        entry.message_id,
                        entry.created_at,
                        entry.received_at,
                        entry.visible_at,
                        entry.retention_seconds,
                        dict(entry.headers),
                    )
                    for entry in chunk
                ]
            )

    def _route(self, messages: Sequence[Published]) -> None:
        """Route what was not routed yet, and move the cursor, in the batch that gathers."""
        store = self._store
        if not len(store.index):
            # Without queues there is nothing to remember: the first one starts where we are then.
            self._next = max(self._next, (messages[-1].message_id & 0xFFFF_FFFF) + 1)
            self._moved.set()
            return
        now = store.clock.now_ms()
        changed = {}
        for message in messages:
            sequence = message.message_id & 0xFFFF_FFFF
            if sequence < self._next:
                continue  # scanned and handed over
            self._next = sequence + 1
            system = SystemFields(*message[:4])
            for name, priority in store.index.route(message.headers, system):
                queue = changed[name] = store.queue(name)
                deadline = retention_deadline(message.received_at, message.retention_seconds)
                queue.state.route(
                    Waiting(priority, message.message_id, message.visible_at, deadline, 0), now
                )
        for queue in changed.values():
            queue.changed()
            queue.wake()
        self._moved.set()
        store.put_cursor(self._shard, self._next)
        store.committer.commit()
