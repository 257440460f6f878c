"""A root that is only looked at: whoever serves it is not disturbed, and nothing is written."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Self, TypeVar

from odq_encodings import MessageMetadata
from opendata_queue.browsing import MAX_HISTORY_QUEUES, QueueBrowser, Sought
from opendata_queue.checks import check_integer
from opendata_queue.clock import Clock, SystemClock
from opendata_queue.dead_letters import FAILED_AT_ONCE
from opendata_queue.errors import (
    ClosedError,
    CorruptStoreError,
    StoreAccessError,
    StoreUnavailableError,
    WrongContextError,
)
from opendata_queue.filters import Filter, FilterIndex
from opendata_queue.interface import (
    AsyncSystem,
    BrowsedState,
    FailedMessage,
    MessageHistory,
    Outcome,
    QueueInfo,
    QueuePage,
    QueueStats,
    Start,
)
from opendata_queue.messages import (
    ClaimedMessage,
    MessageFields,
    NewMessage,
    PeekedMessage,
    StoredMessage,
)
from opendata_queue.queue_looks import QueueLook
from opendata_queue.queue_options import QueueOptions
from opendata_queue.queue_store import MAX_AT_ONCE
from opendata_queue.root_time import reading_clock
from opendata_queue.shard import MAX_MESSAGE_ID
from opendata_queue.shard_readers import ShardReaders
from opendata_queue.store import DatabaseReader, Location, Objects, StoreKind, StoreSettings
from opendata_queue.stored_messages import unless_expired
from opendata_queue.stored_queue import consumers_of
from opendata_queue.system import SystemDescriptor, read_root
from opendata_queue.views import (
    failed_message,
    history_of,
    matching_queues,
    peeked,
    satisfying,
    stored,
)

T = TypeVar("T")

_QUEUES: Final = "queues/00000"
# A look is short: it shall not take the memory of a broker.
_SETTINGS: Final = StoreSettings(block_cache_bytes=8 * 1024 * 1024)


class ReadOnlySystem(AsyncSystem):
    """Looks at a root, and owns nothing of it.

    It sees what is durable, a second later at most. What changes something raises
    ``WrongContextError``.
    """

    def __init__(self, descriptor: SystemDescriptor, objects: Objects, clock: Clock) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.consumer_id = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._objects = objects
        self._clock = clock
        self._queues: DatabaseReader | None = None
        self._shards = ShardReaders(objects, clock, leave_no_trace=True)
        self._opening = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(
        cls, url: str, *, settings: StoreSettings | None = None, clock: Clock | None = None
    ) -> Self:
        """Look at the root at ``url``; an error if there is none. Nothing is made."""
        location = Location.parse(url)
        missing = StoreAccessError(f"there is no root at {url}: make one with `odq init {url}`")
        if location.kind is StoreKind.FILE and not location.folder.is_dir():
            raise missing
        objects = Objects.open(url, settings or _SETTINGS)
        descriptor = await read_root(objects)
        if descriptor is None:
            raise missing
        clock = await reading_clock(objects, clock or SystemClock())
        return cls(descriptor, objects, clock)

    # --- reading ----------------------------------------------------------------------------------

    async def read_many(self, message_ids: Iterable[int]) -> list[StoredMessage | None]:
        ids = list(message_ids)
        return [*map(stored, await self._twice(lambda: self._read_many(ids)))]

    async def _read_many(self, ids: list[int]) -> list[MessageFields | None]:
        for one in ids:
            check_integer("message_id", one, 0, MAX_MESSAGE_ID)
        self._check_open()
        found = await self._shards.read_messages(ids)
        now_ms = self._clock.now_ms()
        return [unless_expired(found.get(one), now_ms) for one in ids]

    async def _metadata(self, message_ids: Iterable[int]) -> dict[int, MessageMetadata]:
        self._check_open()
        return await self._shards.read_metadata(message_ids)

    # --- queues -----------------------------------------------------------------------------------

    async def list_queues(self) -> list[str]:
        async def names() -> list[str]:
            return [*await (await self._look()).filters()]

        return await self._twice(names)

    async def get_queue(self, name: str) -> QueueInfo:
        look = await self._twice(lambda: self._look(name))
        return look.queue(name).info()

    async def stats(self, name: str) -> QueueStats:
        return await self._twice(lambda: self._stats(name))

    async def _stats(self, name: str) -> QueueStats:
        look = await self._look(name)
        stats = look.queue(name).stats()
        oldest = await QueueBrowser(look).oldest(name)
        if oldest is None:
            return stats
        about = (await self._metadata([oldest.message_id])).get(oldest.message_id)
        since = oldest.visible_at if about is None else max(about.received_at, about.visible_at)
        return replace(stats, oldest_age_ms=max(0, self._clock.now_ms() - since))

    async def peek(self, name: str, count: int = 1) -> list[PeekedMessage]:
        check_integer("count", count, 1, MAX_AT_ONCE)
        return await self._twice(lambda: self._peek(name, count))

    async def _peek(self, name: str, count: int) -> list[PeekedMessage]:
        waiting = await QueueBrowser(await self._look(name)).peek(name, count)
        messages = await self._read_many([one.message_id for one in waiting])
        return [
            peeked(name, one, message)
            for one, message in zip(waiting, messages, strict=True)
            if message is not None
        ]

    async def browse(
        self, name: str, state: BrowsedState, *, after: str | None = None, limit: int = 100
    ) -> QueuePage:
        check_integer("limit", limit, 1, MAX_AT_ONCE)

        async def page() -> QueuePage:
            browser = QueueBrowser(await self._look(name))
            return await browser.browse(name, state, after=after, limit=limit)

        return await self._twice(page)

    async def history(self, message_id: int) -> MessageHistory | None:
        check_integer("message_id", message_id, 0, MAX_MESSAGE_ID)
        return await self._twice(lambda: self._history(message_id))

    async def _history(self, message_id: int) -> MessageHistory | None:
        about = (await self._metadata([message_id])).get(message_id)
        if about is None or about.message_id != message_id:
            return None
        look = await self._look()
        index: FilterIndex[str] = FilterIndex()
        filters = await look.filters()
        for name, filter in filters.items():
            index.add(name, filter)
        matching = await matching_queues(index, about)
        others = [name for name in filters if name not in set(matching)]
        looked_at = [*matching, *others][:MAX_HISTORY_QUEUES]
        await look.load(*looked_at)
        sought = Sought(message_id, about.received_at, about.visible_at)
        entries, _ = await QueueBrowser(look).find(sought, matching[:MAX_HISTORY_QUEUES])
        consumers = () if self._queues is None else await consumers_of(self._queues, message_id)
        return history_of(about, consumers, entries, len(filters) - len(looked_at))

    async def failed(
        self, name: str, *, filter: str | None = None, after_id: int = -1, limit: int = 100
    ) -> list[FailedMessage]:
        check_integer("limit", limit, 1, MAX_AT_ONCE)
        check_integer("after_id", after_id, -1, MAX_MESSAGE_ID)
        wanted = None if filter is None else Filter.given(filter)
        return await self._twice(lambda: self._failed(name, wanted, after_id, limit))

    async def _failed(
        self, name: str, wanted: Filter | None, after_id: int, limit: int
    ) -> list[FailedMessage]:
        at_once = limit if wanted is None else FAILED_AT_ONCE
        look = await self._look(name)
        found: list[FailedMessage] = []
        while len(found) < limit:
            failures = await look.failures(name, after_id=after_id, limit=at_once)
            metadata = await self._metadata(one for one, _ in failures)
            chosen = set(await satisfying(wanted, (one for one, _ in failures), metadata))
            found += [
                failed_message(message_id, failure, metadata.get(message_id))
                for message_id, failure in failures
                if message_id in chosen
            ]
            if len(failures) < at_once:
                break
            after_id = failures[-1][0]
        return found[:limit]

    # --- what is not for readers ------------------------------------------------------------------

    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        raise self._refusal("publish")

    async def create_queue(
        self,
        name: str,
        *,
        filter: str = "",
        options: QueueOptions | None = None,
        start: Start = "now",
    ) -> QueueInfo:
        raise self._refusal("create a queue")

    async def update_queue(
        self, name: str, *, filter: str | None = None, **options: Any
    ) -> QueueInfo:
        raise self._refusal("change a queue")

    async def purge_queue(self, name: str) -> int:
        raise self._refusal("purge a queue")

    async def delete_queue(self, name: str) -> None:
        raise self._refusal("delete a queue")

    async def claim(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str | None = None,
        lease_ms: int | None = None,
        wait_ms: int = 0,
    ) -> list[ClaimedMessage]:
        raise self._refusal("claim")

    async def ack(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        raise self._refusal("ack")

    async def nack(
        self,
        name: str,
        *receipts: str | ClaimedMessage,
        error: str = "",
        delay_ms: int | None = None,
    ) -> list[Outcome]:
        raise self._refusal("nack")

    async def release(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        raise self._refusal("release")

    async def extend(
        self, name: str, *receipts: str | ClaimedMessage, lease_ms: int | None = None
    ) -> list[int | None]:
        raise self._refusal("extend a lease")

    async def replay(
        self,
        name: str,
        *message_ids: int,
        all: bool = False,
        filter: str | None = None,
        limit: int = 10_000,
    ) -> list[int]:
        raise self._refusal("replay failed messages")

    async def purge_failed(
        self,
        name: str,
        *message_ids: int,
        all: bool = False,
        filter: str | None = None,
        limit: int = 10_000,
    ) -> list[int]:
        raise self._refusal("purge failed messages")

    def _refusal(self, what: str) -> WrongContextError:
        return WrongContextError(
            f"can't {what}: {self._objects.location} was opened with read_only=True; open it "
            "without that, or connect to its broker"
        )

    # --- databases --------------------------------------------------------------------------------

    async def _twice(self, look: Callable[[], Awaitable[T]]) -> T:
        """Look, and once more from the newest state if that fails.

        Without a checkpoint a file may be collected while it is read.
        """
        try:
            return await look()
        except (StoreUnavailableError, StoreAccessError, CorruptStoreError):
            await self._let_reader_go()
            return await look()

    async def _let_reader_go(self) -> None:
        async with self._opening:
            reader, self._queues = self._queues, None
        if reader is not None:
            await reader.close()

    async def _look(self, *names: str) -> QueueLook:
        """Queues as they are now."""
        async with self._opening:
            self._check_open()
            if self._queues is None:  # which may come to be there
                self._queues = await DatabaseReader.look(self._objects, _QUEUES)
        look = QueueLook(self._queues, self._clock)
        await look.load(*names)
        return look

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the system is closed")

    async def close(self) -> None:
        await self._let_go()
        self._closed = True
        await self._let_reader_go()
        await self._shards.close()
