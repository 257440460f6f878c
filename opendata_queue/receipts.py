"""Receipts: what a consumer shows to finish what it claimed.

A receipt names one claim of one message in one queue, and is signed with the root's secret, so
that nobody can finish a message that was not handed to them. It is opaque to consumers.

Layout, before it is written in URL-safe base64: message id ``u64``, attempts ``u16``, claimed at
``i64``, all big-endian, then the first 16 bytes of HMAC-SHA256 over these and the queue's name.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from typing import Final

from opendata_queue.errors import InvalidInputError
from opendata_queue.queue_state import Claim

_CLAIM: Final = struct.Struct(">QHq")
_SIGNATURE_BYTES: Final = 16


class Receipts:
    """Makes and checks receipts."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def make(self, queue_id: bytes, claim: Claim) -> str:
        body = _CLAIM.pack(*claim)
        return base64.urlsafe_b64encode(body + self._sign(queue_id, body)).decode()

    def read(self, queue_id: bytes, receipt: str) -> Claim:
        """The claim of a receipt; ``InvalidInputError`` if we never gave it out for this queue."""
        try:
            data = base64.b64decode(receipt, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise InvalidInputError(f"{receipt!r} is no receipt") from error
        body, signature = data[: _CLAIM.size], data[_CLAIM.size :]
        if len(body) != _CLAIM.size or not hmac.compare_digest(
            signature, self._sign(queue_id, body)
        ):
            raise InvalidInputError(f"{receipt!r} is no receipt of queue {queue_id.decode()!r}")
        return Claim(*_CLAIM.unpack(body))

    def _sign(self, queue_id: bytes, body: bytes) -> bytes:
        return hmac.digest(self._secret, queue_id + b"\x00" + body, "sha256")[:_SIGNATURE_BYTES]
