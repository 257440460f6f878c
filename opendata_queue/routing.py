"""Routing: every message goes into every queue whose filter it satisfies, exactly once.

What is routed and how far it has come in a shard are in one batch of the queue store, so a crash
repeats nothing and skips nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from odq_encodings import MessageMetadata
from opendata_queue.filters import SystemFields
from opendata_queue.messages import Published
from opendata_queue.queue_state import Waiting, new_tuple
from opendata_queue.queue_store import QueueStore
from opendata_queue.stored_queue import StoredQueue

_PLACES_AT_ONCE: Final = 5_000
"""Into how many queues, all messages together, is routed before others get a turn."""
_MAX_TIME_MS: Final = (1 << 63) - 1


def retention_deadline(received_at: int, retention_seconds: int) -> int:
    """When a message expires; 0 for never (RFC 0001)."""
    if not retention_seconds:
        return 0
    return min(received_at + retention_seconds * 1_000, _MAX_TIME_MS)


def published(entry: MessageMetadata) -> Published:
    """What is routed, of an entry of the log."""
    return Published(
        entry.message_id,
        entry.created_at,
        entry.received_at,
        entry.visible_at,
        entry.retention_seconds,
        dict(entry.headers),
    )


class Router:
    """Routes the messages of one shard, in the order of its log."""

    def __init__(
        self,
        store: QueueStore,
        shard: int,
        next_sequence: int,
        *,
        always_remember: bool = True,
        made_until_ms: int = _MAX_TIME_MS,
    ) -> None:
        """Go on at a sequence.

        Where a shard is written by this process, it can be told where its log ends: then nothing
        need be remembered while there are no queues. Queues that were made after ``made_until_ms``
        are passed over.
        """
        self.store = store
        self.shard = shard
        self.next_sequence = next_sequence
        self._always_remember = always_remember
        self._made_until_ms = made_until_ms

    def pass_by(self, last_id: int) -> None:
        """Take note that there was nobody to route messages to, up to the last one of them."""
        self.next_sequence = max(self.next_sequence, (last_id & 0xFFFF_FFFF) + 1)

    async def route(
        self, messages: Sequence[Published], *, on_batch: Callable[[], None] | None = None
    ) -> None:
        """Route messages in as many batches as it takes: each may go into many queues."""
        done = 0
        while done < len(messages):
            await self.store.committer.room()
            done += self._route(messages[done:])
            if on_batch is not None:
                on_batch()
            if done < len(messages):
                await asyncio.sleep(0)

    def _route(self, messages: Sequence[Published]) -> int:
        """Route what was not routed yet, and move the cursor, in the batch that gathers.

        Returns how many messages it has looked at: not all, if they went into many queues.
        """
        store = self.store
        if not len(store.index):
            # The first queue starts where we are then.
            self.pass_by(messages[-1].message_id)
            if self._always_remember:
                self._remember()
            return len(messages)
        now = store.clock.now_ms()
        routed: dict[str, tuple[StoredQueue, list[Waiting]]] = {}
        alike = not store.index.asks_for_system_fields
        headers: Mapping[str, str] | None = None
        places: list[tuple[int, list[Waiting]]] = []
        looked_at = count = 0
        for message in messages:
            if count >= _PLACES_AT_ONCE:
                break
            looked_at += 1
            message_id, _, received_at, visible_at, retention_seconds, its_headers = message
            sequence = message_id & 0xFFFF_FFFF
            if sequence < self.next_sequence:
                continue  # scanned and handed over
            self.next_sequence = sequence + 1
            if not alike or (its_headers is not headers and its_headers != headers):
                headers = its_headers
                places = self._places(message, routed)
            count += len(places)
            deadline = retention_deadline(received_at, retention_seconds)
            for priority, waiting in places:
                fields = priority, message_id, visible_at, deadline, 0
                waiting.append(new_tuple(Waiting, fields))
        for queue, waiting in routed.values():
            queue.state.route_many(waiting, now)
            queue.changed()
            queue.wake()
        self._remember()
        return looked_at

    def _places(
        self, message: Published, routed: dict[str, tuple[StoredQueue, list[Waiting]]]
    ) -> list[tuple[int, list[Waiting]]]:
        """Where a message goes: with which priority, and what goes there together with it."""
        store = self.store
        places = []
        for name, priority in store.index.route(message.headers, SystemFields(*message[:4])):
            if name not in routed:
                queue = store.queue(name)
                if queue.created_at_ms > self._made_until_ms:
                    continue
                routed[name] = queue, []
            places.append((priority, routed[name][1]))
        return places

    def _remember(self) -> None:
        self.store.put_cursor(self.shard, self.next_sequence)
        self.store.committer.commit(lazy=True)
