"""Publishing into one shard: payload store and metadata log, written together (RFC 0002)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from odq_encodings import (
    MAX_INLINE_PAYLOAD_BYTES,
    BlobReference,
    BlobReferenceKey,
    EncodingError,
    IdempotencyRecord,
    MessageMetadata,
    UriPayload,
    encode_inline_payload,
    encode_message_metadata,
    encode_metadata_log_key,
    encode_payload_key,
)
from opendata_queue.clock import Clock
from opendata_queue.committer import CommitLimits, GroupCommitter
from opendata_queue.errors import InvalidInputError, StoreUnavailableError
from opendata_queue.idempotency import HeldKeys, IdempotencyKeys, Scoped, record_key
from opendata_queue.messages import NewMessage, Published, StoredMessage
from opendata_queue.metadata_log import MetadataLog
from opendata_queue.payloads import PayloadStore, is_user_uri
from opendata_queue.recent import CheckedMessage, RecentMessages
from opendata_queue.sequences import KEY as SEQ_BLOCK_KEY
from opendata_queue.sequences import Sequences
from opendata_queue.store import Database, Objects, Rows

NAMESPACE_HEADER: Final = "namespace"
MAX_IDEMPOTENCY_KEY_BYTES: Final = 512
MAX_MESSAGES_AT_ONCE: Final = 10_000
MAX_BYTES_AT_ONCE: Final = 64 * 1024 * 1024
MAX_PAYLOAD_BYTES: Final = 512 * 1024 * 1024
MAX_MESSAGE_ID: Final = (1 << 63) - 1
MAX_TIME_MS: Final = (1 << 63) - 1
MAX_RETENTION_SECONDS: Final = (1 << 32) - 1

# The engine's clock and SlateDB's may disagree; rows must not go before the engine says so.
_TTL_GRACE_MS: Final = 3_600_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishOptions:
    """What a shard's writer may be told."""

    limits: CommitLimits = field(default_factory=CommitLimits)

    inline_bytes: int = MAX_INLINE_PAYLOAD_BYTES
    """Payloads over this are stored as objects of their own; at most 65,535."""

    recent_bytes: int = 64 * 1024 * 1024
    """Memory for messages that were just published, so that consuming them soon needs no read."""

    idempotency_window_seconds: int = 24 * 3600
    """How long an idempotency key is remembered."""

    def __post_init__(self) -> None:
        for name, most in (
            ("inline_bytes", MAX_INLINE_PAYLOAD_BYTES),
            ("recent_bytes", MAX_TIME_MS),
            ("idempotency_window_seconds", MAX_RETENTION_SECONDS),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value <= most:
                raise InvalidInputError(f"{name} is {value!r}, not within 0 to {most}")


class MessageShard:
    """The writer of one shard. Nothing that it returns is not durable."""

    def __init__(
        self,
        database: Database,
        objects: Objects,
        sequences: Sequences,
        *,
        shard: int,
        clock: Clock,
        options: PublishOptions,
    ) -> None:
        self._database = database
        self._sequences = sequences
        self._first_id = shard << 32
        self._clock = clock
        self._options = options
        self._committer = GroupCommitter(database, options.limits)
        self._reserving = asyncio.Lock()
        self._outage_timeout_ms = objects.settings.outage_timeout_ms
        self._keys = IdempotencyKeys(database, clock)
        self.payloads = PayloadStore(database, objects, shard, clock)
        self.recent = RecentMessages(options.recent_bytes)
        self.on_durable: Callable[[int, Callable[[], list[Published]]], None] | None = None
        """Told of messages in the order of the log, once they are durable: the last one's id, and
        what makes the list of them, for whoever wants it."""
        self.log = MetadataLog(database)

    @classmethod
    async def open(
        cls, objects: Objects, shard: int, *, clock: Clock, options: PublishOptions
    ) -> MessageShard:
        """Become the writer of ``shard``; whoever was it before is fenced."""
        database = await Database.open(objects, f"messages/{shard:05}")
        try:
            sequences = await Sequences.load(database)
        except BaseException:
            await database.close()
            raise
        return cls(database, objects, sequences, shard=shard, clock=clock, options=options)

    @property
    def next_id(self) -> int:
        """No message that is published from now on has a smaller id."""
        return self._first_id | self._sequences.next

    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        """Store messages, all of them or none; returns their ids when they are durable.

        If the caller is cancelled, they may be stored all the same.
        """
        checked = self._check(messages)
        keys = {message.key for message in checked if message.key is not None}
        if not keys:
            return await self._store(checked, {})
        self._committer.check_open()
        held = await self._hold(keys)
        # A cancelled caller must not let go of its keys while its commit is still under way.
        storing = asyncio.ensure_future(self._store_held(checked, held))
        return await asyncio.shield(storing)

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

    async def read_many(self, message_ids: Iterable[int]) -> list[StoredMessage | None]:
        """Messages by their ids, in their order; none for an id that has none, or had one.

        A message is gone when its retention is over, whether or not its space is freed.
        """
        self._committer.check_open()
        ids = list(message_ids)
        for one in ids:
            _check_integer("message_id", one, 0, MAX_MESSAGE_ID)
        found = {one: self.recent.get(one) for one in ids}
        missing = [one for one, message in found.items() if message is None]
        metadata, payloads = await asyncio.gather(
            self.log.read_many(missing), self.payloads.read_many(missing)
        )
        found |= {one: _stored(metadata.get(one), payloads.get(one)) for one in missing}
        now_ms = self._clock.now_ms()
        return [_unless_expired(found[one], now_ms) for one in ids]

    async def close(self) -> None:
        """Commit what is pending and close. After a failure there is nothing left to commit."""
        try:
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
        await self._store_blobs(new)
        await self._wait_for_room_and_sequences(len(new))
        # From here to the committer nothing awaits: the order of ids is the order of the log.
        first_id = self._first_id | self._sequences.take(len(new))
        await self._committer.wait(self._commit(new, first_id))
        return range(first_id, first_id + len(new))

    async def _store_blobs(self, messages: list[CheckedMessage]) -> None:
        large = [message for message in messages if message.payload_value is None]
        payloads = [message.message.payload or b"" for message in large]
        for message, blob in zip(large, await self.payloads.store_blobs(payloads), strict=True):
            message.blob = blob
            message.payload_value = UriPayload(uri=blob.path).encode()

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
            # Nobody can join before it is durable, so it does not linger.
            await self._committer.wait(self._committer.add(rows, urgent=True))
            self._sequences.block_is_durable(block)

    def _commit(self, messages: list[CheckedMessage], first_id: int) -> asyncio.Future[None]:
        now_ms = self._clock.now_ms()
        rows = Rows()
        for message_id, message in enumerate(messages, first_id):
            self._put_rows(rows, message_id, message, now_ms)
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

    def _are_durable(self, messages: list[CheckedMessage], first_id: int, now_ms: int) -> None:
        if self.on_durable is not None:
            self.on_durable(
                first_id + len(messages) - 1,
                lambda: [
                    checked.published(message_id, now_ms)
                    for message_id, checked in enumerate(messages, first_id)
                ],
            )
        self.recent.add_many(first_id, messages, now_ms)

    def _put_rows(self, rows: Rows, message_id: int, checked: CheckedMessage, now_ms: int) -> None:
        message = checked.message
        retention = message.retention_seconds
        ttl_ms = retention * 1000 + _TTL_GRACE_MS if retention else None
        created_at, visible_at = message.times(now_ms)
        assert checked.payload_value is not None
        rows.put(encode_payload_key(message_id), checked.payload_value, ttl_ms=ttl_ms)
        rows.put(
            encode_metadata_log_key(message_id & 0xFFFF_FFFF),
            encode_message_metadata(
                message_id,
                created_at,
                now_ms,
                visible_at,
                retention,
                len(checked.headers),
                checked.encoded_headers,
            ),
            ttl_ms=ttl_ms,
        )
        if checked.blob is not None:
            rows.put(
                BlobReferenceKey(blob_id=checked.blob.blob_id).encode(),
                BlobReference(message_id=message_id).encode(),
                ttl_ms=ttl_ms,
            )
        if checked.key is not None:
            window_ms = self._options.idempotency_window_seconds * 1000
            rows.put(
                record_key(checked.key),
                IdempotencyRecord(message_id=message_id, expires_at=now_ms + window_ms).encode(),
                ttl_ms=window_ms + _TTL_GRACE_MS,
            )

    def _check(self, messages: Sequence[NewMessage]) -> list[CheckedMessage]:
        if not isinstance(messages, Sequence):
            raise InvalidInputError(f"messages are a {type(messages).__name__}, not a list")
        if len(messages) > MAX_MESSAGES_AT_ONCE:
            raise InvalidInputError(
                f"{len(messages)} messages are over the limit of {MAX_MESSAGES_AT_ONCE} "
                "in one call; publish them in several"
            )
        checked = []
        size_bytes = 0
        for index, message in enumerate(messages):
            try:
                checked.append(_check(message, self._options.inline_bytes))
            except (EncodingError, InvalidInputError) as error:
                raise InvalidInputError(f"message {index}: {error}") from error
            size_bytes += checked[-1].size_bytes
        if size_bytes > MAX_BYTES_AT_ONCE:
            raise InvalidInputError(
                f"{size_bytes} bytes are over the limit of {MAX_BYTES_AT_ONCE} in one call; "
                "publish them in several"
            )
        return checked


def _check(message: NewMessage, inline_bytes: int) -> CheckedMessage:
    """Encode what can be encoded without an id; refuse what can't be stored."""
    if not isinstance(message, NewMessage):
        raise InvalidInputError(f"is a {type(message).__name__}, not a NewMessage")
    if not isinstance(message.headers, Mapping):
        raise InvalidInputError(f"headers are a {type(message.headers).__name__}, not a mapping")
    checked = CheckedMessage(message, _payload_value(message, inline_bytes))
    delay_ms, visible_at_ms = message.delay_ms, message.visible_at_ms
    if delay_ms is not None:
        if visible_at_ms is not None:
            raise InvalidInputError("delay_ms and visible_at_ms exclude each other")
        _check_integer("delay_ms", delay_ms, 0, MAX_TIME_MS // 2)
    elif visible_at_ms is not None:
        _check_integer("visible_at_ms", visible_at_ms, -MAX_TIME_MS, MAX_TIME_MS)
    if message.created_at_ms is not None:
        _check_integer("created_at_ms", message.created_at_ms, -MAX_TIME_MS, MAX_TIME_MS)
    if message.retention_seconds != 0 or not isinstance(message.retention_seconds, int):
        _check_integer("retention_seconds", message.retention_seconds, 0, MAX_RETENTION_SECONDS)
    if message.idempotency_key is not None:
        checked.key = _scoped_key(message, message.idempotency_key)
    return checked


def _payload_value(message: NewMessage, inline_bytes: int) -> bytes | None:
    """The encoded payload; none if it is to become a blob."""
    payload = message.payload
    if message.payload_uri is None:
        if not isinstance(payload, bytes):
            kind = type(payload).__name__
            raise InvalidInputError(f"payload is {kind}, not bytes, and there is no payload_uri")
        if len(payload) <= inline_bytes:
            return encode_inline_payload(payload)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidInputError(
                f"payload has {len(payload)} bytes, over the limit of {MAX_PAYLOAD_BYTES}; "
                "store it yourself and publish its payload_uri"
            )
        return None
    if payload is not None:
        raise InvalidInputError("payload and payload_uri exclude each other")
    value = UriPayload(uri=message.payload_uri).encode()
    if not is_user_uri(message.payload_uri):
        raise InvalidInputError(f"payload_uri {message.payload_uri!r} has no scheme, like s3://…")
    return value


def _check_integer(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise InvalidInputError(f"{name} is {value!r}, not an integer within {least} to {most}")


def _scoped_key(message: NewMessage, key: str) -> Scoped:
    scoped = message.headers.get(NAMESPACE_HEADER, ""), key
    record_key(scoped)  # refuses what has no UTF-8
    size = len(key.encode())
    if not 0 < size <= MAX_IDEMPOTENCY_KEY_BYTES:
        raise InvalidInputError(
            f"idempotency_key has {size} bytes, not 1 to {MAX_IDEMPOTENCY_KEY_BYTES}"
        )
    return scoped


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


def _unless_expired(message: StoredMessage | None, now_ms: int) -> StoredMessage | None:
    if message is None or not message.retention_seconds:
        return message
    deadline = message.received_at_ms + message.retention_seconds * 1000
    return None if now_ms > deadline else message


def _stored(
    metadata: MessageMetadata | None, payload: bytes | UriPayload | None
) -> StoredMessage | None:
    if metadata is None or payload is None:
        return None
    uri = payload.uri if isinstance(payload, UriPayload) else None
    return StoredMessage(
        message_id=metadata.message_id,
        payload=None if isinstance(payload, UriPayload) else payload,
        payload_uri=uri,
        headers=metadata.headers,
        created_at_ms=metadata.created_at,
        received_at_ms=metadata.received_at,
        visible_at_ms=metadata.visible_at,
        retention_seconds=metadata.retention_seconds,
    )
