"""One process that owns a root and does everything."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

from odq_encodings import Failure, MessageMetadata
from opendata_queue.clock import Clock, SystemClock
from opendata_queue.errors import InvalidInputError
from opendata_queue.filters import Filter
from opendata_queue.messages import ClaimedMessage, NewMessage, StoredMessage
from opendata_queue.queue_options import QueueOptions
from opendata_queue.queue_state import Claim, Held
from opendata_queue.queue_store import Outcome, QueueStats, QueueStore
from opendata_queue.receipts import Receipts
from opendata_queue.shard import MessageShard, PublishOptions
from opendata_queue.store import Objects, StoreSettings
from opendata_queue.system import SystemDescriptor, open_root
from opendata_queue.tailer import Tailer, retention_deadline

_OWNERS_SHARD: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueInfo:
    """What a queue was told."""

    name: str
    filter: str
    options: QueueOptions
    created_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedMessage:
    """A message that was given up, and why."""

    message_id: int
    failed_at_ms: int
    attempts: int
    priority: int
    consumer: str
    error: str


class System:
    """An open root: publish messages, and consume them from queues.

    It is the one owner of the root. If another process opens the same root, that one takes over,
    and every call here raises ``FencedError`` from then on.

        async with await System.open("file:///var/lib/orders") as system:
            await system.create_queue("emails", filter="type = 'order.created'")
            await system.publish(b"…", headers={"type": "order.created"})
            for message in await system.claim("emails", 10, wait_ms=1_000):
                await system.ack("emails", message.receipt)
    """

    def __init__(
        self,
        descriptor: SystemDescriptor,
        shard: MessageShard,
        queues: QueueStore,
        tailer: Tailer,
    ) -> None:
        self.descriptor = descriptor
        self._shard = shard
        self._queues = queues
        self._tailer = tailer
        self._receipts = Receipts(descriptor.secret_bytes)
        self.consumer_id = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        """How this process is called in attempts, unless a claim says otherwise."""
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        settings: StoreSettings | None = None,
        options: PublishOptions | None = None,
        clock: Clock | None = None,
        lease_grace_ms: int = 0,
    ) -> Self:
        """Open the root at ``url`` (``memory:///``, ``file:///path`` or ``s3://bucket/prefix``).

        A root that is not there yet is made. S3 is configured through the environment:
        ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, and for other services
        than Amazon's ``AWS_ENDPOINT`` and, without TLS, ``AWS_ALLOW_HTTP``.

        ``lease_grace_ms`` is how long after its end a lease is taken back, for consumers that
        reckon with another clock.
        """
        clock = clock or SystemClock()
        objects = Objects.open(url, settings or StoreSettings())
        descriptor = await open_root(objects, clock)
        shard = await MessageShard.open(
            objects, _OWNERS_SHARD, clock=clock, options=options or PublishOptions()
        )
        queues: QueueStore | None = None
        try:
            queues = await QueueStore.open(
                objects, clock, _Deadlines(shard), lease_grace_ms=lease_grace_ms
            )
            cursor = shard.next_id & 0xFFFF_FFFF
            if queues.names():
                cursor = await queues.cursor(_OWNERS_SHARD)
        except BaseException:
            await shard.close()
            if queues is not None:
                await queues.close()
            raise
        queues.ledger.starts_at(shard.next_id)
        tailer = Tailer(shard.log, queues, _OWNERS_SHARD, cursor)
        shard.on_durable = tailer.hand_over
        return cls(descriptor, shard, queues, tailer)

    # --- publishing and reading -------------------------------------------------------------------

    async def publish(
        self,
        payload: bytes | None = None,
        *,
        payload_uri: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None,
        visible_at_ms: int | None = None,
        created_at_ms: int | None = None,
        retention_seconds: int = 0,
        idempotency_key: str | None = None,
    ) -> int:
        """Publish one message; returns its id when it is durable. See ``NewMessage``."""
        message = NewMessage(
            payload,
            payload_uri=payload_uri,
            headers={} if headers is None else headers,
            delay_ms=delay_ms,
            visible_at_ms=visible_at_ms,
            created_at_ms=created_at_ms,
            retention_seconds=retention_seconds,
            idempotency_key=idempotency_key,
        )
        (message_id,) = await self._shard.publish_many([message])
        return message_id

    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        """Publish messages, all of them or none; returns their ids when they are durable."""
        return await self._shard.publish_many(messages)

    async def read(self, message_id: int) -> StoredMessage | None:
        """A message by its id; none if there is no such message."""
        (message,) = await self._shard.read_many([message_id])
        return message

    async def read_many(self, message_ids: Iterable[int]) -> list[StoredMessage | None]:
        """Messages by their ids, in their order; none for an id that has none."""
        return await self._shard.read_many(message_ids)

    def scan_log(
        self, from_sequence: int = 0, *, limit: int | None = None
    ) -> AsyncIterator[list[MessageMetadata]]:
        """The metadata of all messages in the order of publishing, in chunks of up to 1,000.

        Those whose retention is over are there until their space is freed.
        """
        if not isinstance(from_sequence, int) or from_sequence < 0:
            raise InvalidInputError(f"from_sequence is {from_sequence!r}, not 0 or more")
        return self._shard.log.scan(from_sequence, limit=limit)

    # --- queues -----------------------------------------------------------------------------------

    async def create_queue(
        self, name: str, *, filter: str = "", options: QueueOptions | None = None
    ) -> QueueInfo:
        """Make a queue of the messages that satisfy ``filter`` and are published from now on."""
        # Whatever was published before this call is not for this queue.
        await self._tailer.caught_up(self._shard.next_id & 0xFFFF_FFFF)
        await self._queues.create(
            name, Filter.parse(filter), options or QueueOptions(), lambda: self._tailer.cursor
        )
        return self.get_queue(name)

    async def update_queue(
        self, name: str, *, filter: str | None = None, **options: Any
    ) -> QueueInfo:
        """Change a queue's filter, or any of its options by its name."""
        queue = self._queues.queue(name)
        await self._queues.update(
            name,
            filter=queue.filter if filter is None else Filter.parse(filter),
            options=replace(queue.options, **options),
        )
        return self.get_queue(name)

    def get_queue(self, name: str) -> QueueInfo:
        """What a queue was told; ``QueueNotFoundError`` if there is none of that name."""
        queue = self._queues.queue(name)
        return QueueInfo(
            name=name,
            filter=queue.filter.text,
            options=queue.options,
            created_at_ms=queue.created_at_ms,
        )

    def list_queues(self) -> list[str]:
        """The names of all queues, sorted."""
        return self._queues.names()

    def stats(self, name: str) -> QueueStats:
        """How many messages of a queue are where, without counting."""
        return self._queues.stats(name)

    # --- consuming --------------------------------------------------------------------------------

    async def claim(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str | None = None,
        lease_ms: int | None = None,
        wait_ms: int = 0,
    ) -> list[ClaimedMessage]:
        """Up to ``count`` messages, best priority first, then the oldest.

        They are yours for ``lease_ms``; after that somebody else gets them. With ``wait_ms`` it
        waits so long for the first one.
        """
        self._tailer.check_running()
        held = await self._queues.claim(
            name, count, consumer=consumer or self.consumer_id, lease_ms=lease_ms, wait_ms=wait_ms
        )
        messages = await self._shard.read_many(one.message_id for one in held)
        gone = [_claim_of(one) for one, message in zip(held, messages, strict=True) if not message]
        if gone:  # past their retention, and dropped by the store before us
            await self._queues.ack(name, gone)
        return [
            self._claimed(name, one, message)
            for one, message in zip(held, messages, strict=True)
            if message is not None
        ]

    def _claimed(self, name: str, held: Held, message: StoredMessage) -> ClaimedMessage:
        return ClaimedMessage(
            message_id=message.message_id,
            payload=message.payload,
            payload_uri=message.payload_uri,
            headers=message.headers,
            created_at_ms=message.created_at_ms,
            received_at_ms=message.received_at_ms,
            visible_at_ms=message.visible_at_ms,
            retention_seconds=message.retention_seconds,
            queue=name,
            priority=held.priority,
            attempts=held.attempts,
            lease_deadline_ms=held.lease_deadline,
            receipt=self._receipts.make(name.encode(), _claim_of(held)),
        )

    async def ack(self, name: str, *receipts: str) -> list[Outcome]:
        """Finish messages; ``lease_lost`` for those that are not yours any more."""
        return await self._queues.ack(name, self._claims(name, receipts))

    async def nack(
        self, name: str, *receipts: str, error: str = "", delay_ms: int | None = None
    ) -> list[Outcome]:
        """Report failure: the messages come back after a back-off, or ``delay_ms``.

        Those without attempts left are moved to the failed ones.
        """
        claims = self._claims(name, receipts)
        return await self._queues.nack(name, claims, error=error, delay_ms=delay_ms)

    async def release(self, name: str, *receipts: str) -> list[Outcome]:
        """Give messages back at once, as if they had not been claimed."""
        return await self._queues.release(name, self._claims(name, receipts))

    async def extend(
        self, name: str, *receipts: str, lease_ms: int | None = None
    ) -> list[int | None]:
        """Hold messages for longer, from now on; their new deadlines, none for lost ones."""
        claims = self._claims(name, receipts)
        return await self._queues.extend(name, claims, lease_ms=lease_ms)

    def _claims(self, name: str, receipts: Sequence[str]) -> list[Claim]:
        return [self._receipts.read(name.encode(), receipt) for receipt in receipts]

    # --- failed messages --------------------------------------------------------------------------

    async def failed(
        self, name: str, *, after_id: int = -1, limit: int = 100
    ) -> list[FailedMessage]:
        """Messages that were given up, by ascending id, from behind ``after_id`` on."""
        found = await self._queues.failures(name, after_id=after_id, limit=limit)
        return [_failed(message_id, failure) for message_id, failure in found]

    async def replay(self, name: str, *message_ids: int) -> list[int]:
        """Make failed messages available again; returns the ids of those that were failed."""
        return await self._queues.replay(name, message_ids)

    async def purge_failed(self, name: str, *message_ids: int) -> list[int]:
        """Forget failed messages; returns the ids of those that were failed."""
        return await self._queues.forget_failed(name, message_ids)

    # --- closing ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Make durable what is under way, and give up the root. Closing twice does nothing.

        A caller that is cancelled does not stop it half-way.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._shard.close()
        finally:
            await self._tailer.close()
            await self._queues.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class _Deadlines:
    """Looks up when messages expire."""

    def __init__(self, shard: MessageShard) -> None:
        self._shard = shard

    async def __call__(self, message_ids: Iterable[int]) -> dict[int, int]:
        ids = list(message_ids)
        found = await self._shard.log.read_many(ids)
        # Without metadata there is no message any more: it expired before all others.
        return {
            one: retention_deadline(found[one].received_at, found[one].retention_seconds)
            if one in found
            else 1
            for one in ids
        }


def _claim_of(held: Held) -> Claim:
    return Claim(held.message_id, held.attempts, held.claimed_at)


def _failed(message_id: int, failure: Failure) -> FailedMessage:
    return FailedMessage(
        message_id=message_id,
        failed_at_ms=failure.failed_at,
        attempts=failure.attempts,
        priority=failure.priority,
        consumer=failure.consumer,
        error=failure.error,
    )
