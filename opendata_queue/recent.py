"""Messages that were published a moment ago, so that consuming them soon needs no read."""

from __future__ import annotations

from typing import Final

from opendata_queue.messages import NewMessage, Published, StoredMessage

# What a message weighs besides its payload, its URI and its headers: Python's objects.
MESSAGE_OVERHEAD_BYTES: Final = 500


class RecentMessages:
    """The newest messages, the oldest dropped first, bounded in bytes."""

    __slots__ = ("_by_id", "_limit_bytes", "_size_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._by_id: dict[int, tuple[NewMessage, Published, int]] = {}

    def add(self, message: NewMessage, published: Published, size_bytes: int) -> None:
        """Add a message under an id that was never added before; ``size_bytes`` is its encoding."""
        weight = MESSAGE_OVERHEAD_BYTES + size_bytes
        self._by_id[published.message_id] = message, published, weight
        self._size_bytes += weight
        while self._size_bytes > self._limit_bytes:
            oldest = next(iter(self._by_id))
            self._size_bytes -= self._by_id.pop(oldest)[2]

    def get(self, message_id: int) -> StoredMessage | None:
        found = self._by_id.get(message_id)
        if found is None:
            return None
        message, published, _ = found
        return StoredMessage(
            message_id=message_id,
            payload=message.payload,
            payload_uri=message.payload_uri,
            headers=tuple(published.headers.items()),
            created_at_ms=published.created_at,
            received_at_ms=published.received_at,
            visible_at_ms=published.visible_at,
            retention_seconds=published.retention_seconds,
        )
