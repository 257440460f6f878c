"""A root that is only read: its owner is not disturbed, and nothing is written."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NoReturn, Self, TypeVar

from opendata_queue.api.operation import Operation
from opendata_queue.api.system import AsyncSystem
from opendata_queue.log.all_shards import AllMessages
from opendata_queue.log.readers import ShardReaders
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import (
    ClosedError,
    CorruptStoreError,
    StoreAccessError,
    StoreUnavailableError,
    WrongContextError,
)
from opendata_queue.model.ids import is_bulk, shard_of
from opendata_queue.model.messages import PeekedMessage, StoredMessage
from opendata_queue.model.paths import QUEUES_PATH
from opendata_queue.model.values import (
    BrowsedState,
    FailedMessage,
    FoundPage,
    MessageHistory,
    QueueInfo,
    QueuePage,
    QueueStats,
)
from opendata_queue.queues.names import page_of
from opendata_queue.queues.snapshot import QueueSnapshot
from opendata_queue.root.descriptor import SystemDescriptor, read_root
from opendata_queue.root.timekeeping import reading_clock
from opendata_queue.store import DatabaseReader, Location, Objects, StoreKind, StoreSettings
from opendata_queue.systems.arguments import check_count, check_ids, checked_failed
from opendata_queue.systems.finding import Wanted
from opendata_queue.systems.reading import RootReading

T = TypeVar("T")

_QUEUES: Final = QUEUES_PATH
# Readers are open for a short time: they need less memory than a broker.
_SETTINGS: Final = StoreSettings(block_cache_bytes=8 * 1024 * 1024)


class ReadOnlySystem(AsyncSystem):
    """Reads a root, and owns nothing of it.

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
        self._messages = AllMessages(None, None, self._shards, clock, ahead_bytes=0)
        self._no_queues = QueueSnapshot(None, clock)
        self._opening = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(
        cls, url: str, *, settings: StoreSettings | None = None, clock: Clock | None = None
    ) -> Self:
        """Open the root at ``url`` for reading; an error if there is none. Nothing is made."""
        location = Location.parse(url)
        missing = StoreAccessError(f"there is no root at {url}: make one with `odq init {url}`")
        if location.kind is StoreKind.FILE and not location.folder.is_dir():
            raise missing
        objects = Objects.open(url, settings or _SETTINGS)
        descriptor = await read_root(objects)
        if descriptor is None:
            raise missing
        clock = await reading_clock(objects, machine_clock(clock))
        return cls(descriptor, objects, clock)

    # --- reading ----------------------------------------------------------------------------------

    async def read_many(self, message_ids: Iterable[int]) -> list[StoredMessage | None]:
        ids = list(message_ids)
        check_ids(ids)

        async def read() -> list[StoredMessage | None]:
            # Only a bulk shard has to be asked for in the queue store, which may not be open yet.
            snapshot = (
                await self._snapshot()
                if any(is_bulk(shard_of(one)) for one in ids)
                else self._no_queues
            )
            return await self._reading(snapshot).read_many(ids)

        return await self._twice(read)

    # --- queues -----------------------------------------------------------------------------------

    async def list_queues(
        self, *, prefix: str = "", after: str = "", limit: int | None = None
    ) -> list[str]:
        async def names() -> list[str]:
            return [*await (await self._snapshot()).filters()]

        return page_of(await self._twice(names), prefix, after, limit)

    async def get_queue(self, name: str) -> QueueInfo:
        snapshot = await self._twice(lambda: self._snapshot(name))
        return snapshot.queue(name).info()

    async def stats(self, name: str) -> QueueStats:
        async def stats() -> QueueStats:
            return await self._reading(await self._snapshot(name)).stats(name)

        return await self._twice(stats)

    async def peek(self, name: str, count: int = 1) -> list[PeekedMessage]:
        check_count("count", count)

        async def peek() -> list[PeekedMessage]:
            return await self._reading(await self._snapshot(name)).peek(name, count)

        return await self._twice(peek)

    async def browse(
        self, name: str, state: BrowsedState, *, after: str | None = None, limit: int = 100
    ) -> QueuePage:
        check_count("limit", limit)

        async def page() -> QueuePage:
            reading = self._reading(await self._snapshot(name))
            return await reading.browse(name, state, after=after, limit=limit)

        return await self._twice(page)

    async def find(
        self,
        name: str,
        state: BrowsedState,
        *,
        filter: str | None = None,
        error: str | None = None,
        consumer: str | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> FoundPage:
        check_count("limit", limit)
        wanted = await Wanted.checked(state, filter, error, consumer, since_ms, until_ms)

        async def page() -> FoundPage:
            reading = self._reading(await self._snapshot(name))
            return await reading.find(name, wanted, after=after, limit=limit)

        return await self._twice(page)

    async def history(self, message_id: int) -> MessageHistory | None:
        async def history() -> MessageHistory | None:
            return await self._reading(await self._snapshot()).history(message_id)

        return await self._twice(history)

    async def failed(
        self, name: str, *, filter: str | None = None, after_id: int = -1, limit: int = 100
    ) -> list[FailedMessage]:
        wanted = await checked_failed(filter, after_id, limit)

        async def failed() -> list[FailedMessage]:
            reading = self._reading(await self._snapshot(name))
            return await reading.failed(name, wanted=wanted, after_id=after_id, limit=limit)

        return await self._twice(failed)

    def _reading(self, snapshot: QueueSnapshot) -> RootReading:
        self._check_open()
        return RootReading(snapshot, self._messages)

    # --- what is not for readers ------------------------------------------------------------------

    async def _perform(self, operation: Operation, arguments: dict[str, Any]) -> NoReturn:
        raise WrongContextError(
            f"can't {operation.doing}: {self._objects.location} was opened with read_only=True; "
            "open it without that, or connect to its broker"
        )

    # --- databases --------------------------------------------------------------------------------

    async def _twice(self, read: Callable[[], Awaitable[T]]) -> T:
        """Read, and once more from the newest state if that fails.

        Without a checkpoint a file may be collected while it is read.
        """
        try:
            return await read()
        except (StoreUnavailableError, StoreAccessError, CorruptStoreError):
            await self._let_reader_go()
            return await read()

    async def _let_reader_go(self) -> None:
        async with self._opening:
            reader, self._queues = self._queues, None
        if reader is not None:
            await reader.close()

    async def _snapshot(self, *names: str) -> QueueSnapshot:
        """Queues as they are now."""
        async with self._opening:
            self._check_open()
            if self._queues is None:  # which may come to be there
                self._queues = await DatabaseReader.look(self._objects, _QUEUES)
        snapshot = QueueSnapshot(self._queues, self._clock)
        await snapshot.load(*names)
        return snapshot

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the system is closed")

    async def close(self) -> None:
        await self._let_go()
        self._closed = True
        await self._let_reader_go()
        await self._messages.close()
        await self._shards.close()
