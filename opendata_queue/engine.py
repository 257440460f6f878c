"""One process that owns a root and does everything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from odq_encodings import MessageMetadata
from opendata_queue.clock import Clock, SystemClock
from opendata_queue.errors import InvalidInputError
from opendata_queue.messages import NewMessage, StoredMessage
from opendata_queue.shard import MessageShard, PublishOptions
from opendata_queue.store import Objects, StoreSettings
from opendata_queue.system import SystemDescriptor, open_root

_OWNERS_SHARD: Final = 0


class System:
    """An open root: publish messages and read them back.

    It is the one writer of the root. If another process opens the same root, that one takes over,
    and every call here raises ``FencedError`` from then on.

        async with await System.open("file:///var/lib/orders") as system:
            message_id = await system.publish(b"…", headers={"type": "order.created"})
    """

    def __init__(self, descriptor: SystemDescriptor, shard: MessageShard) -> None:
        self.descriptor = descriptor
        self._shard = shard

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        settings: StoreSettings | None = None,
        options: PublishOptions | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Open the root at ``url`` (``memory:///``, ``file:///path`` or ``s3://bucket/prefix``).

        A root that is not there yet is made. S3 is configured through the environment:
        ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, and for other services
        than Amazon's ``AWS_ENDPOINT`` and, without TLS, ``AWS_ALLOW_HTTP``.
        """
        clock = clock or SystemClock()
        objects = Objects.open(url, settings or StoreSettings())
        descriptor = await open_root(objects, clock)
        shard = await MessageShard.open(
            objects, _OWNERS_SHARD, clock=clock, options=options or PublishOptions()
        )
        return cls(descriptor, shard)

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

    async def close(self) -> None:
        """Make durable what is under way, and give up the root."""
        await self._shard.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
