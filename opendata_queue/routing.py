"""Routing: every message goes into every queue whose filter it satisfies, exactly once.

What is routed and how far it has come in a shard are in one batch of the queue store, so a crash
repeats nothing and skips nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import repeat
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


def received_by(now: int, received_at: int, visible_at: int) -> tuple[int, int]:
    """When a message was received and is visible, by the root's clock (RFC 0012).

    One that another process has received later than now was received now, at the latest: its
    delay and its retention count from here.
    """
    if received_at <= now:
        return received_at, visible_at
    return now, visible_at - (received_at - now)


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


def _alike_until(messages: Sequence[Published], first: int) -> int:
    """Behind the last message that has the headers of the first, and so has all in between."""
    headers = messages[first].headers
    for place in range(first + 1, len(messages)):
        its_headers = messages[place][5]
        if its_headers is not headers and its_headers != headers:
            return place
    return len(messages)


def _put_together(
    messages: Sequence[Published], places: Sequence[tuple[int, list[Waiting]]], now: int
) -> None:
    """Add messages to what waits in each of the places, with its priority, by column."""
    if len(messages) == 1:
        ((message_id, _, received_at, visible_at, retention, _),) = messages
        received_at, visible_at = received_by(now, received_at, visible_at)
        deadline = retention_deadline(received_at, retention)
        for priority, waiting in places:
            waiting.append(new_tuple(Waiting, (priority, message_id, visible_at, deadline, 0)))
        return
    ids, _, received, visible, retentions, _ = zip(*messages, strict=True)
    if max(received) > now:
        both = map(received_by, repeat(now), received, visible)
        received, visible = zip(*both, strict=True)
    deadlines = [*map(retention_deadline, received, retentions)] if any(retentions) else repeat(0)
    for priority, waiting in places:
        fields = zip(repeat(priority), ids, visible, deadlines, repeat(0), strict=False)
        waiting.extend(map(new_tuple, repeat(Waiting), fields))


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
            done += self._route(messages[done:] if done else messages)
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
        looked_at = self._routed_before(messages)
        count = 0
        while looked_at < len(messages) and count < _PLACES_AT_ONCE:
            behind = looked_at + 1
            if not store.index.asks_for_system_fields:
                behind = _alike_until(messages, looked_at)
            places = self._places(messages[looked_at], routed)
            if places:
                behind = min(behind, looked_at + -(-(_PLACES_AT_ONCE - count) // len(places)))
                count += len(places) * (behind - looked_at)
                _put_together(messages[looked_at:behind], places, now)
            looked_at = behind
            self.next_sequence = (messages[behind - 1].message_id & 0xFFFF_FFFF) + 1
        for queue, waiting in routed.values():
            queue.state.route_many(waiting, now)
            queue.changed()
            queue.wake()
        self._remember()
        return looked_at

    def _routed_before(self, messages: Sequence[Published]) -> int:
        """How many of them, at the front, were scanned before they were handed over."""
        for count, message in enumerate(messages):
            if message.message_id & 0xFFFF_FFFF >= self.next_sequence:
                return count
        return len(messages)

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
