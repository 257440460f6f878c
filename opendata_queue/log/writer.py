"""Publishing into one shard: payload store and metadata log, written together (RFC 0002)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from odq_encodings import (
    MAX_INLINE_PAYLOAD_BYTES,
    EncodingError,
    IdempotencyRecord,
)
from opendata_queue.log.cache import CheckedMessage, MessageBatch, RecentMessages
from opendata_queue.log.checks import MAX_RETENTION_SECONDS, check_message, request_key
from opendata_queue.log.idempotency import (
    HeldKeys,
    IdempotencyKeys,
    Scoped,
    record_key,
)
from opendata_queue.log.prefetch import ReadAhead
from opendata_queue.log.reader import StoredMessages, unless_expired
from opendata_queue.log.rows import MAX_TIME_MS, put_messages, store_blobs
from opendata_queue.log.sequences import KEY as SEQ_BLOCK_KEY
from opendata_queue.log.sequences import Sequences
from opendata_queue.model.allowance import Allowance, ReadStep
from opendata_queue.model.checks import check_integer
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import InvalidInputError, OdqError, StoreUnavailableError
from opendata_queue.model.figures import Figure
from opendata_queue.model.ids import MAX_MESSAGE_ID, first_id_of
from opendata_queue.model.messages import MessageFields, NewMessage, Published
from opendata_queue.model.paths import messages_path
from opendata_queue.root.clock import RootClock
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.store.group_commit import CommitLimits, GroupCommitter

MAX_MESSAGES_AT_ONCE: Final = 10_000
MAX_BYTES_AT_ONCE: Final = 64 * 1024 * 1024

_FEWEST_BY_COLUMN: Final = 6
"""A single message takes 12 µs by column, and 4 alone; with six it is the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishOptions:
    """How the writer of a shard is configured."""

    limits: CommitLimits = field(default_factory=CommitLimits)

    inline_bytes: int = MAX_INLINE_PAYLOAD_BYTES
    """Payloads over this are stored as objects of their own; at most 65,535."""

    recent_bytes: int = 64 * 1024 * 1024
    """Memory for messages that were just published, so that consuming them soon needs no read.
    Payloads that are objects of their own are not kept."""

    ahead_bytes: int = 16 * 1024 * 1024
    """Memory for older messages that are about to be claimed, read before a claim needs them."""

    idempotency_window_seconds: int = 24 * 3600
    """How long an idempotency key is remembered."""

    def __post_init__(self) -> None:
        for name, most in (
            ("inline_bytes", MAX_INLINE_PAYLOAD_BYTES),
            ("recent_bytes", MAX_TIME_MS),
            ("ahead_bytes", MAX_TIME_MS),
            ("idempotency_window_seconds", MAX_RETENTION_SECONDS),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value <= most:
                raise InvalidInputError(f"{name} is {value!r}, not within 0 to {most}")


class MessageShard:
    """The writer of one shard. What it returns is durable."""

    def __init__(
        self,
        database: Database,
        objects: Objects,
        sequences: Sequences,
        *,
        shard: int,
        clock: Clock,
        options: PublishOptions,
        checked_blobs: bool = True,
    ) -> None:
        self._database = database
        self.objects = objects
        self._sequences = sequences
        self._first_id = first_id_of(shard)
        self.clock = clock = RootClock.of(clock)
        self._options = options
        self._committer = GroupCommitter(database, options.limits)
        self._reserving = asyncio.Lock()
        self._outage_timeout_ms = objects.settings.outage_timeout_ms
        # The engine's clock and SlateDB's may disagree; rows must not go before the engine says so.
        self._ttl_grace_ms = objects.settings.ttl_grace_ms
        self._keys = IdempotencyKeys(database, clock)
        self._stored = StoredMessages(database, objects, shard, clock, checked_blobs=checked_blobs)
        self.payloads = self._stored.payloads
        self.recent = RecentMessages(options.recent_bytes)
        self.ahead = ReadAhead(self._read_without_blobs, options.ahead_bytes)
        self.on_durable: Callable[[int, Callable[[], list[Published]]], None] | None = None
        """Called with messages in the order of the log, once they are durable: with the last one's
        id, and a function that makes the list of them, if it is needed."""
        self.log = self._stored.log

    @classmethod
    async def open(
        cls,
        objects: Objects,
        shard: int,
        *,
        clock: Clock,
        options: PublishOptions,
        journaled: bool = False,
        checked_blobs: bool = True,
        acknowledged: int = 0,
    ) -> MessageShard:
        """Become the writer of ``shard``; the writer before is fenced.

        ``checked_blobs`` is for a root whose readers all know that feature (RFC 0004).

        One that other processes follow must not be ``journaled``: they would see less than was
        acknowledged.

        ``acknowledged`` is as in ``Database.open``.
        """
        path = messages_path(shard)
        database = await Database.open(
            objects, path, journaled=journaled, acknowledged=acknowledged
        )
        try:
            sequences = await Sequences.load(database)
        except BaseException:
            await database.close()
            raise
        return cls(
            database,
            objects,
            sequences,
            shard=shard,
            clock=clock,
            options=options,
            checked_blobs=checked_blobs,
        )

    @property
    def next_id(self) -> int:
        """No message that is published from now on has a smaller id."""
        return self._first_id | self._sequences.next

    @property
    def database(self) -> Database:
        """Its rows, for retention, which writes them through ``commit``."""
        return self._database

    async def commit(self, rows: Rows) -> None:
        """Write rows other than those of messages; returns when they are durable."""
        await self._committer.room()
        await self._committer.wait(self._committer.add(rows))

    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        """Store messages, all of them or none; returns their ids when they are durable.

        If the caller is cancelled, they may be stored all the same.
        """
        plain = self._plain(messages)
        if plain is not None:
            return list(await self._store_batch(plain))
        checked = self._check(messages)
        keys = {message.key for message in checked if message.key is not None}
        if not keys:
            return await self._store(checked, {})
        self._committer.check_open()
        held = await self._hold(keys)
        # A cancelled caller must not let go of its keys while its commit is still under way.
        storing = asyncio.ensure_future(self._store_held(checked, held))
        return await asyncio.shield(storing)

    async def publish_once(self, messages: Sequence[NewMessage], key: str) -> list[int]:
        """The same under one key for all of them: called again with it, it gives the same ids.

        It costs the look-up of a single key, where a key for each message costs one for each. The
        messages can't have keys of their own: then their ids would not be consecutive.
        """
        checked = self._check(messages)
        if not checked:
            return []
        if any(message.key is not None for message in checked):
            raise InvalidInputError("messages with keys of their own can't share another one")
        self._committer.check_open()
        scoped = checked[0].key = request_key(messages, key)
        held = await self._hold({scoped})
        first_id = held.known.get(scoped)
        if first_id is not None:
            self._keys.release(held)
            return list(range(first_id, first_id + len(checked)))
        storing = asyncio.ensure_future(self._store_held(checked, held))
        return await asyncio.shield(storing)

    async def knows(self, messages: Sequence[NewMessage], key: str | None) -> bool:
        """Whether messages were published to this shard under their keys, or one for all."""
        if key is not None:
            keys = {request_key(messages, key)} if messages else set()
        else:
            keys = {one.key for one in self._check(messages) if one.key is not None}
        held = await self._hold(keys)
        self._keys.release(held)
        return bool(keys) and held.known.keys() == keys

    async def _hold(self, keys: set[Scoped]) -> HeldKeys:
        """Hold keys; those who wait for the same one must not add up their time-outs."""
        timeout_ms = self._outage_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._keys.hold(keys)
        except TimeoutError:
            raise StoreUnavailableError(
                f"could not look up the idempotency key within {timeout_ms} ms"
            ) from None

    async def read_many(
        self, message_ids: Iterable[int], allowance: Allowance | None = None
    ) -> list[MessageFields | None]:
        """Messages by their ids, in their order; none for an id that has none, or had one.

        A message is gone when its retention is over, whether or not its space is freed. One that
        ``allowance`` does not admit is none, too.
        """
        self._committer.check_open()
        ids = list(message_ids)
        for one in ids:
            if one.__class__ is not int or not 0 <= one <= MAX_MESSAGE_ID:
                check_integer("message_id", one, 0, MAX_MESSAGE_ID)
        found = self.recent.get_many(ids)
        if not all(found):
            together = zip(ids, found, strict=True)
            missing = list(dict.fromkeys(one for one, message in together if message is None))
            read = await self.ahead.take(missing)
            missing = [one for one in missing if one not in read]
            read |= await self._stored.read(missing, allowance=allowance)
            found = [message or read.get(one) for one, message in zip(ids, found, strict=True)]
        now_ms = self.clock.now_ms()
        return [
            message
            if message is None or not message.retention_seconds
            else unless_expired(message, now_ms)
            for message in found
        ]

    def expect(self, message_ids: Iterable[int]) -> None:
        """Read messages ahead that will be asked for soon, as far as they are not at hand."""
        self.ahead.expect(self.recent.missing(message_ids))

    async def _read_without_blobs(
        self, message_ids: Collection[int], step: ReadStep
    ) -> dict[int, MessageFields]:
        return await self._stored.read(list(message_ids), blobs=False, step=step)

    def figures(self) -> Iterator[Figure]:
        """How its commits have fared."""
        return self._committer.figures()

    @property
    def has_failed(self) -> bool:
        """Whether a failure has stopped it."""
        return self._committer.has_failed

    def step_down(self, error: OdqError) -> None:
        """Take no more messages: another process writes this shard now."""
        self._committer.give_up(error)

    async def close(self) -> None:
        """Commit what is pending and close. After a failure there is nothing left to commit."""
        try:
            await self.ahead.close()
            await self._committer.close()
        finally:
            await self._database.close()

    async def _store_held(self, checked: list[CheckedMessage], held: HeldKeys) -> list[int]:
        try:
            # What is known is durable, but after a failure nothing is acknowledged any more.
            self._committer.check_open()
            return await self._store(checked, held.known)
        finally:
            self._keys.release(held)

    async def _store(self, checked: list[CheckedMessage], known: dict[Scoped, int]) -> list[int]:
        new = _without_repeats(checked, known)
        ids = await self._store_new(new) if new else range(0)
        if len(new) == len(checked):
            return list(ids)
        return _with_repeats(checked, ids, known)

    async def _store_new(self, new: list[CheckedMessage]) -> range:
        self._committer.check_open()
        await store_blobs(self.payloads, new, self._options.inline_bytes)
        return await self._store_batch(MessageBatch.of(new))

    async def _store_batch(self, messages: MessageBatch) -> range:
        count = len(messages)
        await self._wait_for_room_and_sequences(count)
        # From here to the committer nothing awaits: the order of ids is the order of the log.
        first_id = self._first_id | self._sequences.take(count)
        await self._committer.wait(self._commit(messages, first_id))
        return range(first_id, first_id + count)

    async def _wait_for_room_and_sequences(self, count: int) -> None:
        await self._committer.room()
        while self._sequences.available < count:
            await self._reserve(count)
            await self._committer.room()

    async def _reserve(self, count: int) -> None:
        async with self._reserving:
            if self._sequences.available >= count:
                return
            block = self._sequences.next_block(count)
            rows = Rows()
            rows.put(SEQ_BLOCK_KEY, block.encode())
            # No publish can join before it is durable, so it does not linger.
            await self._committer.wait(self._committer.add(rows, urgent=True))
            self._sequences.block_is_durable(block)

    def _commit(self, messages: MessageBatch, first_id: int) -> asyncio.Future[None]:
        now_ms = self.clock.now_ms()
        rows = Rows()
        put_messages(rows, first_id, messages, now_ms, self._ttl_grace_ms)
        self._put_keys(rows, first_id, messages.checked, now_ms)
        block = self._sequences.next_block() if self._sequences.running_low else None
        if block is not None:
            rows.put(SEQ_BLOCK_KEY, block.encode())
        done = self._committer.add(rows)

        def durable(done: asyncio.Future[None]) -> None:
            if done.exception() is not None:
                return
            if block is not None:
                self._sequences.block_is_durable(block)
            self._are_durable(messages, first_id, now_ms)

        # A callback and not the caller's next step: callbacks run in the order of the log.
        done.add_done_callback(durable)
        return done

    def _are_durable(self, messages: MessageBatch, first_id: int, now_ms: int) -> None:
        if self.on_durable is not None:
            self.on_durable(
                first_id + len(messages) - 1, partial(messages.published, first_id, now_ms)
            )
        self.recent.add_many(first_id, messages, now_ms)

    def _put_keys(
        self, rows: Rows, first_id: int, checked: Sequence[CheckedMessage], now_ms: int
    ) -> None:
        window_ms = self._options.idempotency_window_seconds * 1000
        for message_id, one in enumerate(checked, first_id):
            if one.key is not None:
                record = IdempotencyRecord(message_id=message_id, expires_at=now_ms + window_ms)
                ttl_ms = window_ms + self._ttl_grace_ms
                rows.put(record_key(one.key), record.encode(), ttl_ms=ttl_ms)

    def _plain(self, messages: Sequence[NewMessage]) -> MessageBatch | None:
        """Messages with payload and headers only, all of them valid; none for all other batches."""
        if messages.__class__ is not list:
            return None
        if not _FEWEST_BY_COLUMN <= len(messages) <= MAX_MESSAGES_AT_ONCE:
            return None
        inline_bytes = min(self._options.inline_bytes, MAX_INLINE_PAYLOAD_BYTES)
        batch = MessageBatch.of_plain(messages, inline_bytes)
        return batch if batch is not None and batch.size_bytes <= MAX_BYTES_AT_ONCE else None

    def _check(self, messages: Sequence[NewMessage]) -> list[CheckedMessage]:
        if not isinstance(messages, Sequence):
            raise InvalidInputError(f"messages are {type(messages).__name__}, not a list")
        if len(messages) > MAX_MESSAGES_AT_ONCE:
            raise InvalidInputError(
                f"{len(messages)} messages are over the limit of {MAX_MESSAGES_AT_ONCE} "
                "in one call; publish them in several"
            )
        checked = []
        size_bytes = 0
        inline_bytes = self._options.inline_bytes
        for index, message in enumerate(messages):
            try:
                one = check_message(message, inline_bytes)
            except (EncodingError, InvalidInputError) as error:
                raise InvalidInputError(f"message {index}: {error}") from error
            if message.visible_at_ms is not None:
                one.shift(self.clock.ahead_for_callers_ms())
            checked.append(one)
            size_bytes += one.size_bytes
        if size_bytes > MAX_BYTES_AT_ONCE:
            raise InvalidInputError(
                f"{size_bytes} bytes are over the limit of {MAX_BYTES_AT_ONCE} in one call; "
                "publish them in several"
            )
        return checked


def _without_repeats(
    checked: list[CheckedMessage], known: dict[Scoped, int]
) -> list[CheckedMessage]:
    """The messages to store: none whose key is known, and of equal keys the first."""
    seen = set(known)
    new = []
    for message in checked:
        if message.key is None:
            new.append(message)
        elif message.key not in seen:
            seen.add(message.key)
            new.append(message)
    return new


def _with_repeats(
    checked: list[CheckedMessage], ids: Iterable[int], known: dict[Scoped, int]
) -> list[int]:
    """An id for every message: those of repeats are the ids of the first with that key."""
    fresh = iter(ids)
    by_key = dict(known)
    result = []
    for message in checked:
        if message.key is None:
            result.append(next(fresh))
            continue
        if message.key not in by_key:
            by_key[message.key] = next(fresh)
        result.append(by_key[message.key])
    return result
