"""Messages as producers give them and as the store returns them.

They are not frozen, and what is returned can be made without naming each field: either would double
the cost of making one, and they are made by the million. Whatever is done to one, the engine does
not see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, NamedTuple

from opendata_queue.model.errors import InvalidInputError

MAX_HEADERS_BYTES: Final = 1024 * 1024
"""Of all headers of a message together, keys and values as UTF-8. It holds for what is published:
earlier releases had no such limit, and what they have stored is read like everything else."""

_SHOWN_CHARACTERS: Final = 100


@dataclass(slots=True)
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


class MessageFields(NamedTuple):
    """A message on its way to a caller: the fields of ``StoredMessage``, in their order.

    The object is made of them once, when it is known what it is to be.
    """

    message_id: int
    payload: bytes | None
    payload_uri: str | None
    headers: tuple[tuple[str, str], ...]
    created_at_ms: int
    received_at_ms: int
    visible_at_ms: int
    retention_seconds: int


@dataclass(slots=True)
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


@dataclass(slots=True)
class ClaimedMessage(StoredMessage):
    """A message that is yours until ``lease_deadline_ms``, by the clock of the root's owner.

    ``ack``, ``nack``, ``extend`` and ``release`` want to see it, or its ``receipt``, which can be
    passed on to another process. ``attempts`` counts the claims of this message in this queue, this
    one included.
    """

    queue: str
    priority: int
    attempts: int
    lease_deadline_ms: int
    receipt: str


@dataclass(slots=True)
class PeekedMessage(StoredMessage):
    """A message that is among the next to be claimed. ``attempts`` counts its claims so far."""

    queue: str
    priority: int
    attempts: int


def receipts_of(shown: Iterable[str | ClaimedMessage]) -> list[str]:
    """What is shown to finish messages: their receipts, or the messages themselves."""
    return [receipt_of(one) for one in shown]


def receipt_of(shown: str | ClaimedMessage) -> str:
    receipt = shown.receipt if isinstance(shown, ClaimedMessage) else shown
    if not isinstance(receipt, str):
        text = repr(receipt)
        raise InvalidInputError(
            f"{text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '…'} is no "
            f"receipt and no claimed message, but a {type(receipt).__name__}"
            + (": give each one as an argument" if isinstance(receipt, list | tuple) else "")
        )
    return receipt
