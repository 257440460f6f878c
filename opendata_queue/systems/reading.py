"""The operations that only read, written once: for the owner of a root and for its readers.

They differ in where queues and messages come from, and in nothing that a caller is shown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from odq_encodings import Failure, MessageMetadata
from opendata_queue.filters import Filter
from opendata_queue.log.all_shards import AllMessages
from opendata_queue.model.allowance import Allowance, failed_bytes
from opendata_queue.model.checks import check_integer
from opendata_queue.model.ids import MAX_MESSAGE_ID, is_bulk, shard_of
from opendata_queue.model.messages import MessageFields, PeekedMessage, StoredMessage
from opendata_queue.model.values import (
    BrowsedState,
    FailedMessage,
    FoundPage,
    MessageHistory,
    QueuePage,
    QueueStats,
)
from opendata_queue.queues.browse import QueueBrowser, QueuesToBrowse, Sought
from opendata_queue.queues.dead_letters import FAILED_AT_ONCE
from opendata_queue.queues.state import Waiting
from opendata_queue.queues.views import (
    failed_message,
    history_of,
    peeked,
    satisfying,
    stored,
)
from opendata_queue.routing.router import retention_deadline
from opendata_queue.systems.finding import Wanted, find_page


class QueuesToRead(QueuesToBrowse, Protocol):
    """The queue store of its owner, or what a reader sees of it."""

    def stats(self, name: str) -> QueueStats: ...
    async def matching(self, about: MessageMetadata) -> list[str]: ...
    async def consumers_of(self, message_id: int) -> tuple[str, ...]: ...
    async def cursor(self, shard: int) -> int | None: ...


class RootReading:
    """Answers from the queues and the messages of a root."""

    def __init__(
        self,
        queues: QueuesToRead,
        messages: AllMessages,
        *,
        until_routed: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._queues = queues
        self._messages = messages
        self._browser = QueueBrowser(queues)
        self._until_routed = until_routed
        """Waits for a message to be in its queues; a reader sees what is there."""

    # --- messages ---------------------------------------------------------------------------------

    async def is_visible(self, shard: int) -> bool:
        """Whether the messages of a shard may be shown: those of a bulk shard have a cursor."""
        return not is_bulk(shard) or await self._queues.cursor(shard) is not None

    async def read_many(self, message_ids: list[int]) -> list[StoredMessage | None]:
        return await self._shown(message_ids, await self._messages.read_many(message_ids))

    async def read_within(
        self, message_ids: list[int], within: Allowance
    ) -> list[StoredMessage | None]:
        """The first of them, as many as fit."""
        found = await self._messages.read_fitting(message_ids, within)
        return await self._shown(message_ids[: len(found)], found)

    async def _shown(
        self, ids: list[int], found: list[MessageFields | None]
    ) -> list[StoredMessage | None]:
        for shard in {shard_of(one) for one in ids}:
            if not await self.is_visible(shard):
                found = [
                    None if shard_of(one) == shard else m for one, m in zip(ids, found, strict=True)
                ]
        return [*map(stored, found)]

    async def history(self, message_id: int) -> MessageHistory | None:
        check_integer("message_id", message_id, 0, MAX_MESSAGE_ID)
        if not await self.is_visible(shard_of(message_id)):
            return None
        about = (await self._messages.metadata([message_id])).get(message_id)
        if about is None or about.message_id != message_id:
            return None
        if self._until_routed is not None:
            await self._until_routed(message_id)
        matching = await self._queues.matching(about)
        entries, left_out = await self._browser.find(_sought(about), matching)
        consumers = await self._queues.consumers_of(message_id)
        return history_of(about, consumers, entries, left_out)

    # --- queues -----------------------------------------------------------------------------------

    async def stats(self, name: str) -> QueueStats:
        oldest = await self._browser.oldest(name)
        stats = self._queues.stats(name)
        if oldest is None or not stats.available:
            return stats
        since = await self._visible_since(oldest)
        return replace(stats, oldest_age_ms=max(0, self._queues.clock.now_ms() - since))

    async def _visible_since(self, waiting: Waiting) -> int:
        """Since when a message could be claimed for the first time."""
        message_id = waiting.message_id
        recent = self._messages.recent(message_id)
        if recent is not None:
            return max(recent.received_at_ms, recent.visible_at_ms)
        metadata = (await self._messages.metadata([message_id])).get(message_id)
        if metadata is None:
            return waiting.visible_at
        return max(metadata.received_at, metadata.visible_at)

    async def peek(
        self, name: str, count: int, *, within: Allowance | None = None
    ) -> list[PeekedMessage]:
        waiting = await self._browser.peek(name, count)
        ids = [one.message_id for one in waiting]
        messages = await self._messages.read_fitting(ids, within)
        return [
            peeked(name, one, message)
            for one, message in zip(waiting, messages, strict=within is None)
            if message is not None
        ]

    async def browse(
        self, name: str, state: BrowsedState, *, after: str | None, limit: int
    ) -> QueuePage:
        return await self._browser.browse(name, state, after=after, limit=limit)

    async def find(self, name: str, wanted: Wanted, *, after: str | None, limit: int) -> FoundPage:
        return await find_page(
            self._browser, self._messages, name, wanted, after=after, limit=limit
        )

    async def failed(
        self,
        name: str,
        *,
        wanted: Filter | None,
        after_id: int,
        limit: int,
        within: Allowance | None = None,
    ) -> list[FailedMessage]:
        """The first one that does not fit ``within`` some bytes is left, and noted there."""
        at_once = min(limit, FAILED_AT_ONCE) if wanted is None else FAILED_AT_ONCE
        found: list[FailedMessage] = []
        while True:
            failures = await self._queues.failures(name, after_id=after_id, limit=at_once)
            async for message in self._failed_messages(dict(failures), wanted):
                if within is not None and not found:
                    within.first_id = message.message_id
                if within is not None and not within.take(
                    failed_bytes(message), message.message_id
                ):
                    within.left.add(message.message_id)
                    return found
                found.append(message)
                if len(found) == limit:
                    return found
            if len(failures) < at_once:
                return found
            after_id = failures[-1][0]

    async def _failed_messages(
        self, failures: dict[int, Failure], wanted: Filter | None
    ) -> AsyncIterator[FailedMessage]:
        async for ids, metadata in self._messages.metadata_in_steps([*failures]):
            for one in await satisfying(wanted, ids, metadata):
                yield failed_message(one, failures[one], metadata.get(one))


def _sought(about: MessageMetadata) -> Sought:
    deadline = retention_deadline(about.received_at, about.retention_seconds)
    # Where it is scheduled: later than its end it would never be delivered.
    visible_at = min(about.visible_at, deadline + 1) if deadline else about.visible_at
    return Sought(about.message_id, about.received_at, visible_at)
