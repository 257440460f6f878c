"""Reading shards that other processes write, or wrote: a bounded number of them open at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final, TypeVar

from odq_encodings import MessageMetadata
from opendata_queue.log.reader import StoredMessages
from opendata_queue.log.sequences import Sequences
from opendata_queue.model.allowance import Allowance, ReadStep, RowBudget
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import InvalidInputError, OdqError, StoreAccessError
from opendata_queue.model.ids import SEQUENCE_BITS, is_bulk
from opendata_queue.model.messages import MessageFields
from opendata_queue.model.paths import messages_path
from opendata_queue.store import BlockCache, DatabaseReader, Objects, StoreKind, has_no_database

logger = logging.getLogger(__name__)

OPEN_AT_MOST: Final = 32
"""Unused readers are closed when there are more than these; those in use stay open."""

_POLL_MS: Final = 200
_POLL_S3_MS: Final = 1_000

T = TypeVar("T")


class ShardReader:
    """One open shard."""

    def __init__(self, database: DatabaseReader, stored: StoredMessages) -> None:
        self.database = database
        self.stored = stored
        self.log = stored.log

    @property
    def position(self) -> int | None:
        """Grows when there is more in the log; none if it has to be opened again."""
        return self.database.position

    async def end(self) -> int:
        """A sequence that no message in the log has reached."""
        return (await Sequences.load(self.database)).next

    async def close(self) -> None:
        try:
            await self.database.close()
        except OdqError as error:
            logger.info("%s", error)


class _Place:
    """Where a reader is, or will be; and how many use it."""

    __slots__ = ("opening", "shard", "users")

    def __init__(self, shard: int, opening: asyncio.Task[ShardReader]) -> None:
        self.shard = shard
        self.opening = opening
        self.users = 0

    @property
    def reader(self) -> ShardReader | None:
        """None while it is being opened, and if that has failed."""
        opening = self.opening
        if not opening.done() or opening.cancelled() or opening.exception() is not None:
            return None
        return opening.result()


class ShardReaders:
    """Opens readers when they are wanted, shares them, and closes unused ones.

    Live shards are watched, so that what their writers publish can be seen soon. Bulk shards do not
    change any more. A reader whose files were taken away, by a compaction that it did not see in
    time, is opened again: what it read is there, in other files.
    """

    def __init__(
        self,
        objects: Objects,
        clock: Clock,
        *,
        open_at_most: int = OPEN_AT_MOST,
        leave_no_trace: bool = False,
    ) -> None:
        self._objects = objects
        self._leave_no_trace = leave_no_trace
        self._clock = clock
        self._open_at_most = open_at_most
        self._cache = BlockCache(objects.settings)
        on_s3 = objects.location.kind is StoreKind.S3
        self.poll_interval_ms = _POLL_S3_MS if on_s3 else _POLL_MS
        self._places: OrderedDict[int, _Place] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self.opened = 0
        """How often a reader was opened: a figure, to see whether that is too often."""

    def __len__(self) -> int:
        return len(self._places)

    @contextlib.asynccontextmanager
    async def using(self, shard: int) -> AsyncIterator[ShardReader]:
        """A reader that stays open meanwhile; ``StoreAccessError`` if there is no such shard."""
        place = self._places.get(shard)
        if place is None:
            opening = asyncio.create_task(self._open(shard), name=f"open shard {shard}")
            place = self._places[shard] = _Place(shard, opening)
        self._places.move_to_end(shard)
        place.users += 1
        try:
            # A caller that is cancelled must not take the reader from others.
            yield await asyncio.shield(place.opening)
        finally:
            place.users -= 1
            if place.opening.done() and place.reader is None:
                self._forget(place)  # the next one tries again
            self._close_unused(place)

    async def read(self, shard: int, work: Callable[[ShardReader], Awaitable[T]]) -> T:
        """Do some reading, a second time with a fresh reader if the first one fails."""
        async with self.using(shard) as reader:
            try:
                return await work(reader)
            except InvalidInputError:
                raise
            except OdqError as error:
                logger.info("opening shard %d again: %s", shard, error)
        self.renew(shard, reader)
        async with self.using(shard) as reader:
            return await work(reader)

    def renew(self, shard: int, stale: ShardReader) -> None:
        """Let the next user of a shard get another reader, which knows all of it."""
        place = self._places.get(shard)
        if place is not None and place.reader is stale:
            self._forget(place)
            self._close_unused(place)

    def is_current(self, shard: int, reader: ShardReader) -> bool:
        """Whether it is the reader that the next caller gets."""
        place = self._places.get(shard)
        return place is not None and place.reader is reader

    async def read_messages(
        self,
        message_ids: Iterable[int],
        *,
        blobs: bool = True,
        allowance: Allowance | None = None,
        step: ReadStep | None = None,
    ) -> dict[int, MessageFields]:
        """Those of the messages that are there, of whatever shards."""
        return await self._by_shard(
            message_ids,
            lambda reader, ids: reader.stored.read(
                ids, blobs=blobs, allowance=allowance, step=step
            ),
        )

    async def read_metadata(
        self, message_ids: Iterable[int], budget: RowBudget | None = None
    ) -> dict[int, MessageMetadata]:
        """The metadata of those of the messages that are there."""
        return await self._by_shard(
            message_ids, lambda reader, ids: reader.log.read_many(ids, budget)
        )

    async def _by_shard(
        self,
        message_ids: Iterable[int],
        work: Callable[[ShardReader, list[int]], Awaitable[dict[int, T]]],
    ) -> dict[int, T]:
        ids_of: dict[int, list[int]] = {}
        for one in message_ids:
            ids_of.setdefault(one >> SEQUENCE_BITS, []).append(one)
        found: dict[int, T] = {}
        for shard, ids in ids_of.items():
            try:
                found |= await self.read(shard, lambda reader, ids=ids: work(reader, ids))  # type: ignore[misc]
            except StoreAccessError as error:
                if not has_no_database(error):
                    raise
                # A shard without a database has no messages, not yet or not any more.
        return found

    async def close(self) -> None:
        """Close all readers; a caller that still uses one gets errors."""
        for place in list(self._places.values()):
            self._forget(place)
            self._close_soon(place)
        while self._closing:
            await asyncio.wait(self._closing)

    async def _open(self, shard: int) -> ShardReader:
        self.opened += 1
        database = await DatabaseReader.open(
            self._objects,
            messages_path(shard),
            poll_interval_ms=self.poll_interval_ms,
            complete=is_bulk(shard),
            leave_no_trace=self._leave_no_trace,
            cache=self._cache,
            cache_number=shard,
        )
        return ShardReader(database, StoredMessages(database, self._objects, shard, self._clock))

    def _forget(self, place: _Place) -> None:
        if self._places.get(place.shard) is place:
            del self._places[place.shard]

    def _close_unused(self, last: _Place) -> None:
        """Close what was used last, if it is forgotten, and what is too much."""
        if not last.users and self._places.get(last.shard) is not last:
            self._close_soon(last)
        too_many = len(self._places) - self._open_at_most
        if too_many > 0:
            unused = [place for place in self._places.values() if not place.users]
            for place in unused[:too_many]:
                self._forget(place)
                self._close_soon(place)

    def _close_soon(self, place: _Place) -> None:
        closing = asyncio.create_task(self._close(place), name=f"close shard {place.shard}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, place: _Place) -> None:
        try:
            reader = await place.opening
        except OdqError:
            return  # the caller that wanted it got the error
        await reader.close()


def is_not_there(error: OdqError) -> bool:
    """Whether an error says that a shard has no database, not yet or not any more."""
    return has_no_database(error)
