"""Who claimed a message (RFC 0001, Attempts)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

from odq_encodings.arrays import checked_elements, join_array
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import MessageIdKey, Record
from odq_encodings.utf8 import encode_utf8

_KEY_PREFIX = RecordType.ATTEMPTS.prefix
_pack_key = struct.Struct(">2sQ").pack


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptsKey(MessageIdKey):
    """``01 05``, message id ``u64`` big-endian."""

    record_type = RecordType.ATTEMPTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts(Record):
    """``Array<ConsumerID>``, oldest claim first; a consumer id is a ``Utf8``."""

    consumer_ids: tuple[str, ...]

    def encode(self) -> bytes:
        consumer_ids = checked_elements(self.consumer_ids, str, "Attempts", "consumer_ids")
        encoded = [
            encode_utf8(consumer_id, record="Attempts", field=f"consumer_ids[{index}]")
            for index, consumer_id in enumerate(consumer_ids)
        ]
        return join_array(encoded, record="Attempts", field="consumer_ids")

    @classmethod
    def read(cls, reader: Reader) -> Self:
        count = reader.count("consumer_ids")
        return cls(
            consumer_ids=tuple(reader.utf8(f"consumer_ids[{index}]") for index in range(count))
        )


def encode_attempts_key(message_id: int) -> bytes:
    """``AttemptsKey(message_id=message_id).encode()`` without the object (bulk path)."""
    try:
        return _pack_key(_KEY_PREFIX, message_id)
    except (struct.error, OverflowError):
        return AttemptsKey(message_id=message_id).encode()  # names what is wrong
