"""Messages on their way into the store, and those that got there a moment ago."""

from __future__ import annotations

from typing import Final

from odq_encodings import encode_headers
from opendata_queue.messages import NewMessage, Published, StoredMessage
from opendata_queue.payloads import Blob

# What a message weighs besides its payload, its URI and its headers: Python's objects.
MESSAGE_OVERHEAD_BYTES: Final = 500


class CheckedMessage:
    """A message that can be stored: everything but its id and its received-at time."""

    __slots__ = ("blob", "encoded_headers", "headers", "key", "message", "payload_value")

    def __init__(self, message: NewMessage, payload_value: bytes | None) -> None:
        self.message = message
        self.headers = dict(message.headers)  # ours: the caller may change theirs
        self.encoded_headers = encode_headers(self.headers.items())
        self.payload_value = payload_value
        self.blob: Blob | None = None
        self.key: tuple[str, str] | None = None

    @property
    def size_bytes(self) -> int:
        """What it adds to a commit, roughly; a blob adds only its reference."""
        return len(self.encoded_headers) + len(self.payload_value or b"")

    def published(self, message_id: int, received_at: int) -> Published:
        created_at, visible_at = self.message.times(received_at)
        return Published(
            message_id,
            created_at,
            received_at,
            visible_at,
            self.message.retention_seconds,
            self.headers,
        )


class RecentMessages:
    """The newest messages, so that consuming them soon needs no read.

    The oldest are dropped first; bounded in bytes.
    """

    __slots__ = ("_by_id", "_limit_bytes", "_size_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._by_id: dict[int, tuple[CheckedMessage, int]] = {}

    def add_many(self, first_id: int, messages: list[CheckedMessage], received_at: int) -> None:
        """Add messages with consecutive ids that were never added before."""
        for message_id, checked in enumerate(messages, first_id):
            if checked.blob is None:
                self._by_id[message_id] = checked, received_at
                self._size_bytes += MESSAGE_OVERHEAD_BYTES + checked.size_bytes
        while self._size_bytes > self._limit_bytes:
            oldest = next(iter(self._by_id))
            dropped, _ = self._by_id.pop(oldest)
            self._size_bytes -= MESSAGE_OVERHEAD_BYTES + dropped.size_bytes

    def get(self, message_id: int) -> StoredMessage | None:
        found = self._by_id.get(message_id)
        if found is None:
            return None
        checked, received_at = found
        created_at, visible_at = checked.message.times(received_at)
        return StoredMessage(
            message_id=message_id,
            payload=checked.message.payload,
            payload_uri=checked.message.payload_uri,
            headers=tuple(checked.headers.items()),
            created_at_ms=created_at,
            received_at_ms=received_at,
            visible_at_ms=visible_at,
            retention_seconds=checked.message.retention_seconds,
        )
