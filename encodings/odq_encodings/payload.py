"""The payload of a message (RFC 0001, Payload)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Self

from odq_encodings.arrays import encode_count
from odq_encodings.errors import EncodingError
from odq_encodings.integers import U16_MAX, IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import MESSAGE_ID_KEY, MessageIdKey, Record
from odq_encodings.utf8 import encode_utf8

MAX_INLINE_PAYLOAD_BYTES = U16_MAX

_KEY_PREFIX = RecordType.PAYLOAD.prefix
_KIND = IntegerRun("<", kind="B")


class PayloadKind(enum.IntEnum):
    """The first byte of a payload."""

    INLINE = 0x01
    URI = 0x02


_INLINE = bytes((PayloadKind.INLINE,))
_URI = bytes((PayloadKind.URI,))


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadKey(MessageIdKey):
    """``01 01``, message id ``u64`` big-endian."""

    record_type = RecordType.PAYLOAD


@dataclass(frozen=True, kw_only=True, slots=True)
class InlinePayload(Record):
    """``01``, count ``u16`` little-endian, bytes."""

    data: bytes

    def encode(self) -> bytes:
        return encode_inline_payload(self.data)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        _expect_kind(reader, PayloadKind.INLINE)
        return cls(data=reader.octets("data"))


@dataclass(frozen=True, kw_only=True, slots=True)
class UriPayload(Record):
    """``02``, URI ``Utf8``."""

    uri: str

    def encode(self) -> bytes:
        return _URI + encode_utf8(self.uri, record="UriPayload", field="uri")

    @classmethod
    def read(cls, reader: Reader) -> Self:
        _expect_kind(reader, PayloadKind.URI)
        return cls(uri=reader.utf8("uri"))


def encode_inline_payload(data: bytes) -> bytes:
    """``InlinePayload(data=data).encode()`` without the object (bulk path)."""
    if not isinstance(data, bytes):
        reason = f"{type(data).__name__} is not bytes"
        raise EncodingError(reason, record="InlinePayload", field="data")
    return _INLINE + encode_count(len(data), record="InlinePayload", field="data") + data


def encode_payload_key(message_id: int) -> bytes:
    """``PayloadKey(message_id=message_id).encode()`` without the object (bulk path)."""
    return _KEY_PREFIX + MESSAGE_ID_KEY.pack_trusted("PayloadKey", message_id)


def _expect_kind(reader: Reader, expected: PayloadKind) -> None:
    (kind,) = reader.integers(_KIND)
    if kind not in (PayloadKind.INLINE, PayloadKind.URI):
        raise reader.error(f"payload kind {kind:02x} is neither 01 nor 02", "kind", 0)
    reader.expect(kind, expected, "kind", 0)


def read_payload(reader: Reader) -> InlinePayload | UriPayload:
    """A payload of either kind, told by its first byte."""
    if reader.data[:1] == _URI:
        return UriPayload.read(reader)
    return InlinePayload.read(reader)


def decode_payload(data: bytes) -> InlinePayload | UriPayload:
    """A payload of either kind; ``EncodingError`` if it is neither."""
    reader = Reader("Payload", data)
    payload = read_payload(reader)
    reader.finish()
    return payload
