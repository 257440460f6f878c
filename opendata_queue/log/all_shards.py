"""Reading messages of all shards: of the own one through its writer, of others through readers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Sequence

from odq_encodings import MessageMetadata
from opendata_queue.log.metadata_log import Log
from opendata_queue.log.prefetch import ReadAhead
from opendata_queue.log.reader import unless_expired
from opendata_queue.log.readers import ShardReaders
from opendata_queue.log.remote_log import FollowedLog
from opendata_queue.log.writer import MessageShard
from opendata_queue.model.allowance import Allowance, ReadStep, RowBudget, read_within
from opendata_queue.model.checks import check_integer
from opendata_queue.model.clock import Clock
from opendata_queue.model.ids import MAX_MESSAGE_ID, SEQUENCE_BITS
from opendata_queue.model.messages import MessageFields


class AllMessages:
    """The messages of a root, for the owner of its queues."""

    def __init__(
        self,
        own: MessageShard | None,
        own_shard: int | None,
        readers: ShardReaders,
        clock: Clock,
        *,
        ahead_bytes: int,
    ) -> None:
        self._own = own
        self._own_shard = None if own is None else own_shard
        self._readers = readers
        self._clock = clock
        self._ahead = ReadAhead(self._read_without_blobs, ahead_bytes)

    async def read_many(
        self, message_ids: Iterable[int], allowance: Allowance | None = None
    ) -> list[MessageFields | None]:
        """Messages by their ids, in their order; none for an id that has none, or had one.

        One that ``allowance`` does not admit is none, too.
        """
        ids = list(message_ids)
        if self._own is not None and self._all_own(ids):
            return await self._own.read_many(ids, allowance)
        for one in ids:
            check_integer("message_id", one, 0, MAX_MESSAGE_ID)
        found: dict[int, MessageFields | None] = {}
        if self._own is not None:
            own = [one for one in ids if one >> SEQUENCE_BITS == self._own_shard]
            found |= dict(zip(own, await self._own.read_many(own, allowance), strict=True))
        others = [one for one in ids if one not in found]
        taken = await self._ahead.take(others)
        found |= taken
        others = [one for one in others if one not in taken]
        found |= await self._readers.read_messages(others, allowance=allowance)
        now_ms = self._clock.now_ms()
        return [unless_expired(found.get(one), now_ms) for one in ids]

    async def read_fitting(
        self, message_ids: list[int], within: Allowance | None
    ) -> list[MessageFields | None]:
        """Messages, or the first of them, as many as fit ``within`` some bytes."""
        if within is None:
            return await self.read_many(message_ids)
        return await read_within(self.read_many, message_ids, within)

    async def metadata(
        self, message_ids: Iterable[int], budget: RowBudget | None = None
    ) -> dict[int, MessageMetadata]:
        """The metadata of those of the messages that are there, expired or not."""
        ids = list(message_ids)
        own = [one for one in ids if one >> SEQUENCE_BITS == self._own_shard]
        found = {} if self._own is None else await self._own.log.read_many(own, budget)
        if len(own) < len(ids):
            others = (one for one in ids if one >> SEQUENCE_BITS != self._own_shard)
            found |= await self._readers.read_metadata(others, budget)
        return found

    async def metadata_in_steps(
        self, message_ids: Sequence[int]
    ) -> AsyncIterator[tuple[Sequence[int], dict[int, MessageMetadata]]]:
        """``metadata`` of some messages after the other, with their ids: headers can be large."""
        at_once = len(message_ids)
        while message_ids:
            some = message_ids[:at_once]
            step = ReadStep()
            found = await self.metadata(some, step.metadata)
            read = step.read_of(some)
            at_once = step.next_count(some, read)
            if read:
                yield read, found
            message_ids = message_ids[len(read) :]

    def recent(self, message_id: int) -> MessageFields | None:
        """A message if it is at hand, without reading."""
        return None if self._own is None else self._own.recent.get(message_id)

    def expect(self, message_ids: Iterable[int]) -> None:
        """Read messages ahead that will be asked for soon, as far as they are not at hand."""
        ids = list(message_ids)
        if self._own is not None and self._all_own(ids):
            self._own.expect(ids)
            return
        if self._own is not None:
            self._own.expect(one for one in ids if one >> SEQUENCE_BITS == self._own_shard)
        others = [one for one in ids if one >> SEQUENCE_BITS != self._own_shard]
        if others:
            self._ahead.expect(others)

    def log(self, shard: int) -> Log:
        """The log of a shard."""
        if self._own is not None and shard == self._own_shard:
            return self._own.log
        return FollowedLog(self._readers, shard)

    async def close(self) -> None:
        await self._ahead.close()

    def _all_own(self, ids: list[int]) -> bool:
        try:
            return (
                not ids or min(ids) >> SEQUENCE_BITS == max(ids) >> SEQUENCE_BITS == self._own_shard
            )
        except TypeError:
            return True  # it says what is wrong

    async def _read_without_blobs(
        self, message_ids: Collection[int], step: ReadStep
    ) -> dict[int, MessageFields]:
        return await self._readers.read_messages(message_ids, blobs=False, step=step)
