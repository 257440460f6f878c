"""Filling a shard of its own in one go: what Spark tasks and other bulk writers do (RFC 0009).

The rows are those of any other shard (RFC 0001, 0002 and 0004), so readers need to know nothing
of it. What differs is when they count: a bulk shard was reserved for one writer, is durable as a
whole or not at all, and does not exist for readers before a commit names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from odq_encodings import (
    MAX_INLINE_PAYLOAD_BYTES,
    EncodingError,
    SeqBlock,
)
from opendata_queue.log.cache import CheckedMessage
from opendata_queue.log.checks import check_message
from opendata_queue.log.payloads import BlobFolder
from opendata_queue.log.rows import (
    ROWS_OVERHEAD_BYTES,
    put_expiries,
    put_expiry,
    put_message,
    store_blobs,
)
from opendata_queue.log.sequences import KEY as SEQ_BLOCK_KEY
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import InvalidInputError, ShardFullError
from opendata_queue.model.ids import SHARD_SEQUENCES, first_id_of
from opendata_queue.model.messages import NewMessage
from opendata_queue.model.paths import messages_path
from opendata_queue.root.clock import RootClock
from opendata_queue.store import AnyRows, BulkDatabase, Objects, PackedRows, Rows

WRITE_BYTES: Final = 1024 * 1024
"""How much is handed to the store at once: large enough that a call costs nothing by the row, small
enough to stay in the processor's cache on its way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkResult:
    """What a finished shard holds, as its commit will say."""

    shard: int
    messages: int
    next_sequence: int
    bytes: int
    expires_from: int
    """When the first of its messages expires; 0 if none does."""
    expires_at: int
    """When the last of its messages expires; 0 if one never does."""


class MessageColumns(Protocol):
    """Messages of the kind that comes by the million, held by column: their payloads are inline."""

    def __len__(self) -> int: ...

    def retentions(self) -> Iterable[int]:
        """The retentions that occur, in seconds, each once; 0 is for ever."""
        ...

    def expiring_runs(self) -> Iterable[ExpiringRun]:
        """Those that expire, in their order."""
        ...

    def shifted(self, milliseconds: int) -> MessageColumns:
        """The same, with the instants at which they become visible moved to another clock."""
        ...

    def packed(self, first_id: int, now_ms: int, ttl_grace_ms: int) -> Iterator[PackedRows]:
        """The rows of payloads and metadata, some ``WRITE_BYTES`` at a time."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiringRun:
    """Messages that follow one another and have the same retention."""

    first: int
    messages: int
    retention_seconds: int
    size_bytes: int
    """Of payloads and headers."""


class BulkShard:
    """The one writer of a shard that was reserved for it."""

    def __init__(
        self,
        database: BulkDatabase,
        objects: Objects,
        shard: int,
        clock: Clock,
        *,
        checked_blobs: bool = True,
    ) -> None:
        self._database = database
        self._blobs = BlobFolder(objects, shard, clock, checked=checked_blobs)
        self._first_id = first_id_of(shard)
        self._shard = shard
        self._clock = RootClock.of(clock)
        self._ttl_grace_ms = objects.settings.ttl_grace_ms
        self._next_sequence = 0
        self._bytes = 0
        self._deadlines: tuple[int, int] | None = None
        """The first and the last of those messages that expire."""
        self._some_stay = False
        self._rows = Rows()
        self._writing: asyncio.Task[None] | None = None

    @classmethod
    async def create(
        cls, objects: Objects, shard: int, clock: Clock, *, checked_blobs: bool = True
    ) -> BulkShard:
        """Begin to fill ``shard``, whose number no other writer has or will get.

        ``checked_blobs`` is for a root whose readers all know that feature (RFC 0004).
        """
        database = await BulkDatabase.create(objects, messages_path(shard))
        return cls(database, objects, shard, clock, checked_blobs=checked_blobs)

    @property
    def messages(self) -> int:
        return self._next_sequence

    async def add(self, messages: Iterable[NewMessage]) -> None:
        """Add messages of any kind; ``InvalidInputError`` for one that can't be stored."""
        checked = [_checked(message) for message in messages]
        await self.add_checked(checked)

    async def add_checked(self, checked: Sequence[CheckedMessage]) -> None:
        await store_blobs(self._blobs, checked, MAX_INLINE_PAYLOAD_BYTES)
        now_ms = self._clock.now_ms()
        ahead_ms = self._clock.ahead_for_callers_ms()
        if ahead_ms:
            for message in checked:
                message.shift(ahead_ms)
        first_id = self._take(len(checked))
        put_expiries(self._rows, first_id, checked, now_ms)
        for seconds in {message.retention_seconds for message in checked}:
            self._note_retention(now_ms, seconds)
        for message_id, message in enumerate(checked, first_id):
            put_message(self._rows, message_id, message, now_ms, self._ttl_grace_ms)
            await self._write_if_full()

    async def add_columns(self, messages: MessageColumns) -> None:
        """Add many messages at the least cost for each; they must be storable."""
        now_ms = self._clock.now_ms()
        first_id = self._take(len(messages))
        for seconds in messages.retentions():
            self._note_retention(now_ms, seconds)
        for run in messages.expiring_runs():
            size_bytes = run.size_bytes + run.messages * ROWS_OVERHEAD_BYTES
            expires_at = now_ms + run.retention_seconds * 1000
            put_expiry(self._rows, first_id + run.first, run.messages, expires_at, size_bytes)
            await self._write_if_full()
        if self._rows:
            await self._write()  # what came before comes first
        ahead_ms = self._clock.ahead_for_callers_ms()
        if ahead_ms:
            messages = messages.shifted(ahead_ms)
        for rows in messages.packed(first_id, now_ms, self._ttl_grace_ms):
            await self._hand_over(rows)

    async def finish(self) -> BulkResult:
        """Make everything durable. What is not named by a commit still does not count."""
        block = SeqBlock(base_sequence=0, block_size=self._next_sequence)
        self._rows.put(SEQ_BLOCK_KEY, block.encode())
        await self._write()
        await self._written()
        await self._database.finish()
        first, last = self._deadlines or (0, 0)
        return BulkResult(
            shard=self._shard,
            messages=self._next_sequence,
            next_sequence=self._next_sequence,
            bytes=self._bytes,
            expires_from=first,
            expires_at=0 if self._some_stay else last,
        )

    async def abandon(self) -> None:
        """Let go of a shard that will not be committed."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        await self._database.abandon()

    def _note_retention(self, received_at: int, seconds: int) -> None:
        """There are messages with this retention: the commit says when the shard is past."""
        if not seconds:
            self._some_stay = True
            return
        deadline = received_at + seconds * 1000
        first, last = self._deadlines or (deadline, deadline)
        self._deadlines = min(first, deadline), max(last, deadline)

    def _take(self, count: int) -> int:
        """The id of the first of so many new messages."""
        first = self._next_sequence
        if first + count > SHARD_SEQUENCES:
            raise ShardFullError(f"shard {self._shard} can't hold {first + count} messages")
        self._next_sequence += count
        return self._first_id | first

    async def _write_if_full(self) -> None:
        if self._rows.size_bytes >= WRITE_BYTES:
            await self._write()

    async def _write(self) -> None:
        rows, self._rows = self._rows, Rows()
        await self._hand_over(rows)

    async def _hand_over(self, rows: AnyRows) -> None:
        """Have rows written while the next ones are being made."""
        self._bytes += rows.size_bytes
        await self._written()
        self._writing = asyncio.create_task(self._database.write(rows))
        await asyncio.sleep(0)  # it must have begun before we block the loop with other work

    async def _written(self) -> None:
        if self._writing is not None:
            await self._writing
            self._writing = None


def _checked(message: NewMessage) -> CheckedMessage:
    try:
        checked = check_message(message, MAX_INLINE_PAYLOAD_BYTES)
    except EncodingError as error:
        raise InvalidInputError(str(error)) from error
    if checked.key is not None:
        raise InvalidInputError("idempotency keys are for publishing; a bulk job has its own name")
    return checked
