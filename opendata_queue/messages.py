"""Messages as producers give them and as the store returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to be published: a payload, or the URI of one, and headers.

    Times are milliseconds, absolute ones since the Unix epoch. ``delay_ms`` counts from the
    moment of publishing; ``visible_at_ms`` is absolute; give at most one of them.
    ``retention_seconds`` counts from the moment of publishing too; 0 keeps the message for ever.
    A second publish with the same ``idempotency_key``, in the namespace that the header
    ``namespace`` names, returns the id of the first and stores nothing.
    """

    payload: bytes | None = None
    _: KW_ONLY
    payload_uri: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_ms: int | None = None
    visible_at_ms: int | None = None
    created_at_ms: int | None = None
    retention_seconds: int = 0
    idempotency_key: str | None = None

    def times(self, received_at_ms: int) -> tuple[int, int]:
        """Created at and visible at, given when it was received."""
        created_at = received_at_ms if self.created_at_ms is None else self.created_at_ms
        if self.visible_at_ms is not None:
            return created_at, self.visible_at_ms
        return created_at, received_at_ms + (self.delay_ms or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMessage:
    """A message that is in the store.

    ``payload`` is its bytes, wherever they are kept; it is none only for a message that was
    published with a URI of its producer's, and then ``payload_uri`` is that URI.
    """

    message_id: int
    payload: bytes | None
    payload_uri: str | None
    headers: tuple[tuple[str, str], ...]
    created_at_ms: int
    received_at_ms: int
    visible_at_ms: int
    retention_seconds: int


class Published(NamedTuple):
    """What routing needs to know of a message."""

    message_id: int
    created_at: int
    received_at: int
    visible_at: int
    retention_seconds: int
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedMessage(StoredMessage):
    """A message that is yours until ``lease_deadline_ms``, by the clock of the root's owner.

    ``receipt`` is what ``ack``, ``nack``, ``extend`` and ``release`` want to see. ``attempts``
    counts the claims of this message in this queue, this one included.
    """

    queue: str
    priority: int
    attempts: int
    lease_deadline_ms: int
    receipt: str
