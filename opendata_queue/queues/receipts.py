"""Receipts: what a consumer shows to finish what it claimed.

A receipt names one claim of one message in one queue, and is signed with the root's secret, so
that a consumer can finish only messages that were handed to it. It is opaque to consumers.

Layout, before it is written in hexadecimal: message id ``u64``, attempts ``u16``, claimed at
``i64``, the queue's created at ``i64``, all big-endian, then 16 bytes of BLAKE2b, keyed with the
secret, over the queue's name, a zero byte and these. A queue that is made anew under the name of a
deleted one is created later (RFC 0006), so it knows the receipts of its predecessor.
"""

from __future__ import annotations

import hmac
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.messages import ClaimedMessage, receipt_of
from opendata_queue.queues.state import Claim, Held, new_tuple

_BODY: Final = struct.Struct(">QHqq")
_SIGNATURE_BYTES: Final = 16
_NO_CLAIM: Final = Claim(0, 0, 0)
"""Is never valid: attempts count from 1."""
_QUEUES_KEPT: Final = 1024
_MADE_KEPT: Final = 10_000
_SHOWN_CHARACTERS: Final = 100


_Made = OrderedDict[str, tuple[bytes, int, int, int, int]]


class Receipts:
    """The receipts of all queues of a root."""

    __slots__ = ("_key", "_made", "_queues")

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(secret).digest()
        # What was made here lately need not be checked: most receipts come back soon. The values
        # are plain tuples, which the garbage collector does not track.
        self._made: _Made = OrderedDict()
        self._queues = lru_cache(maxsize=_QUEUES_KEPT)(self._new)

    def of(self, queue_id: bytes, created_at: int) -> QueueReceipts:
        """Those of a queue that was made at that time."""
        return self._queues(queue_id, created_at)

    def _new(self, queue_id: bytes, created_at: int) -> QueueReceipts:
        return QueueReceipts(self._key, queue_id, created_at, self._made)


class QueueReceipts:
    """Makes and checks the receipts of one queue."""

    __slots__ = ("_created_at", "_made", "_queue_id", "_signer")

    def __init__(self, key: bytes, queue_id: bytes, created_at: int, made: _Made) -> None:
        self._queue_id = queue_id
        self._created_at = created_at
        self._made = made
        # The part of the signature that all receipts of a queue share.
        self._signer = blake2b(queue_id + b"\x00", key=key, digest_size=_SIGNATURE_BYTES)

    def make(self, claim: Claim | Held) -> str:
        message_id, attempts, claimed_at = claim.message_id, claim.attempts, claim.claimed_at
        body = _BODY.pack(message_id, attempts, claimed_at, self._created_at)
        receipt = (body + self._sign(body)).hex()
        self._made[receipt] = self._queue_id, self._created_at, message_id, attempts, claimed_at
        if len(self._made) > _MADE_KEPT:
            self._made.popitem(last=False)
        return receipt

    def read(self, receipts: Sequence[str | ClaimedMessage]) -> list[Claim | Held]:
        """The claims of receipts, or of messages; ``InvalidInputError`` for what is none of ours.

        For what was given out for a deleted queue of that name, a claim that is never valid.
        """
        return [
            one.claim
            if isinstance(one, HeldMessage) and one.made_by is self and one.claim is not None
            else self._claim(one)
            for one in receipts
        ]

    def _claim(self, shown: str | ClaimedMessage) -> Claim:
        receipt = receipt_of(shown)
        known = self._made.get(receipt)
        if known is not None and known[:2] == (self._queue_id, self._created_at):
            return new_tuple(Claim, known[2:])
        return self._checked(receipt)

    def _checked(self, receipt: str) -> Claim:
        try:
            data = bytes.fromhex(receipt)
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"{receipt[:_SHOWN_CHARACTERS]!r} is no receipt") from error
        body, signature = data[: _BODY.size], data[_BODY.size :]
        if len(body) != _BODY.size or not hmac.compare_digest(signature, self._sign(body)):
            name = self._queue_id.decode()
            raise InvalidInputError(
                f"{receipt[:_SHOWN_CHARACTERS]!r} is no receipt of queue {name!r}"
            )
        *claim, claimed_from = _BODY.unpack(body)
        return Claim(*claim) if claimed_from == self._created_at else _NO_CLAIM

    def _sign(self, body: bytes) -> bytes:
        signature = self._signer.copy()
        signature.update(body)
        return signature.digest()


class HeldMessage(ClaimedMessage):
    """A message that was claimed in this process, and knows its claim.

    Its receipt is made when it is asked for. In this process the message itself serves as one.
    """

    __slots__ = ("claim", "made_by")

    def __init__(
        self,
        message_id: int,
        payload: bytes | None,
        payload_uri: str | None,
        headers: tuple[tuple[str, str], ...],
        created_at_ms: int,
        received_at_ms: int,
        visible_at_ms: int,
        retention_seconds: int,
        queue: str,
        priority: int,
        attempts: int,
        lease_deadline_ms: int,
        claim: Held | None = None,
        made_by: QueueReceipts | None = None,
        *,
        receipt: str | None = None,
    ) -> None:
        self.message_id = message_id
        self.payload = payload
        self.payload_uri = payload_uri
        self.headers = headers
        self.created_at_ms = created_at_ms
        self.received_at_ms = received_at_ms
        self.visible_at_ms = visible_at_ms
        self.retention_seconds = retention_seconds
        self.queue = queue
        self.priority = priority
        self.attempts = attempts
        self.lease_deadline_ms = lease_deadline_ms
        self.claim = claim
        self.made_by = made_by
        if receipt is not None:  # of a copy with changes
            self.receipt = receipt

    def __getattr__(self, name: str) -> str:
        if name != "receipt" or self.made_by is None or self.claim is None:
            raise AttributeError(f"a claimed message has no {name!r}")
        self.receipt = receipt = self.made_by.make(self.claim)
        return receipt

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClaimedMessage):
            return NotImplemented
        return astuple(self) == astuple(other)

    __hash__ = None  # type: ignore[assignment]  # like every message

    def __reduce__(self) -> tuple[type[ClaimedMessage], tuple[object, ...]]:
        """A copy is a message with a receipt, as one that came from another process."""
        return ClaimedMessage, astuple(self)
