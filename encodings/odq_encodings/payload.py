"""The payload of a message (RFC 0001, Payload)."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Self

from odq_encodings.arrays import encode_count
from odq_encodings.columns import Column, Each
from odq_encodings.errors import EncodingError
from odq_encodings.integers import U16_MAX, IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import MESSAGE_ID_KEY, MessageIdKey, Record
from odq_encodings.utf8 import encode_utf8

MAX_INLINE_PAYLOAD_BYTES = U16_MAX

_KEY_PREFIX = RecordType.PAYLOAD.prefix
_KIND = IntegerRun("<", kind="B")
_COUNT = IntegerRun("<", count="H")


class PayloadKind(enum.IntEnum):
    """The first byte of a payload."""

    INLINE = 0x01
    URI = 0x02


_INLINE = bytes((PayloadKind.INLINE,))
_URI = bytes((PayloadKind.URI,))
_INLINE_HEAD = struct.Struct("<1sH")
_pack_inline_head = _INLINE_HEAD.pack
_pack_key = struct.Struct(">2sQ").pack


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
    if data.__class__ is bytes and len(data) <= MAX_INLINE_PAYLOAD_BYTES:
        return _pack_inline_head(_INLINE, len(data)) + data
    if not isinstance(data, bytes):
        reason = f"{type(data).__name__} is not bytes"
        raise EncodingError(reason, record="InlinePayload", field="data")
    return _INLINE + encode_count(len(data), record="InlinePayload", field="data") + data


def encode_payload_key(message_id: int) -> bytes:
    """``PayloadKey(message_id=message_id).encode()`` without the object (bulk path)."""
    try:
        return _pack_key(_KEY_PREFIX, message_id)
    except (struct.error, OverflowError):
        return _KEY_PREFIX + MESSAGE_ID_KEY.pack("PayloadKey", message_id)  # names what is wrong


def encode_payload_keys(message_ids: range) -> list[bytes]:
    """``encode_payload_key`` of each, at a third of the cost."""
    try:
        return list(map(_pack_key, repeat(_KEY_PREFIX), message_ids))
    except (struct.error, OverflowError):
        return list(map(encode_payload_key, message_ids))  # names what is wrong


def inline_payload_columns(payloads: Sequence[bytes]) -> list[Column]:
    """``InlinePayload``s by column."""
    data = Each.of(payloads)
    if isinstance(data, bytes):
        return [encode_inline_payload(data)]
    if max(data.sizes, default=0) > MAX_INLINE_PAYLOAD_BYTES:
        for one in payloads:
            encode_inline_payload(one)  # says what is wrong
    return [_INLINE, *_COUNT.columns("InlinePayload", data.sizes), data]


def _expect_kind(reader: Reader, expected: PayloadKind) -> None:
    (kind,) = reader.integers(_KIND)
    if kind not in (PayloadKind.INLINE, PayloadKind.URI):
        raise reader.error(f"payload kind {kind:02x} is neither 01 nor 02", "kind", 0)
    reader.expect(kind, expected, "kind", 0)


def read_payload(reader: Reader) -> InlinePayload | UriPayload:
    """A payload of either kind, as its first byte says."""
    if reader.data[:1] == _URI:
        return UriPayload.read(reader)
    return InlinePayload.read(reader)


def inline_payload(data: bytes) -> bytes | None:
    """The bytes of an inline payload, without the object (bulk path); none for all else."""
    size = _INLINE_HEAD.size
    if (
        data.__class__ is bytes
        and len(data) >= size
        and _INLINE_HEAD.unpack_from(data) == (_INLINE, len(data) - size)
    ):
        return data[size:]
    return None


def inline_payloads(values: Sequence[bytes]) -> list[bytes] | None:
    """``inline_payload`` of each, at a third of the cost; none if one of them is something else."""
    head = _INLINE_HEAD.size
    sizes = set(map(len, values))
    if sizes and not head <= min(sizes) <= max(sizes) <= head + MAX_INLINE_PAYLOAD_BYTES:
        return None
    heads = {size: _pack_inline_head(_INLINE, size - head) for size in sizes}
    if any(one[:head] != heads[len(one)] for one in values):
        return None
    return [one[head:] for one in values]


def decode_payload(data: bytes) -> InlinePayload | UriPayload:
    """A payload of either kind; ``EncodingError`` if it is neither."""
    inline = inline_payload(data)
    if inline is not None:
        return InlinePayload(data=inline)
    reader = Reader("Payload", data)
    payload = read_payload(reader)
    reader.finish()
    return payload
