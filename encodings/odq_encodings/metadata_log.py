"""The log of message metadata (RFC 0001, Metadata log entry)."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Self

from odq_encodings.arrays import checked_elements
from odq_encodings.columns import Column, Each
from odq_encodings.errors import EncodingError, shown
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import Record, checked_key_size
from odq_encodings.terminated_bytes import encode_terminated_bytes
from odq_encodings.utf8 import encode_text, encode_utf8

METADATA_LOG_NAME: Final = "opendata-queue/messages/metadata"
MAX_HEADERS: Final = 255

# Named once: formatting the names of fields would cost more than decoding them.
_HEADER_FIELDS: Final = tuple(
    (f"headers[{index}].key", f"headers[{index}].value") for index in range(MAX_HEADERS)
)
_SEQUENCE = IntegerRun(">", sequence="Q")
_FIXED_PART = IntegerRun(
    "<",
    message_id="Q",
    created_at="q",
    received_at="q",
    visible_at="q",
    retention_seconds="I",
    header_count="B",
)
_CACHED_HEADERS_BYTES: Final = 512
_LENGTH = struct.Struct("<H")
_pack_length = _LENGTH.pack
_unpack_length = _LENGTH.unpack_from
_encode_text = str.encode
_pack_sequence = _SEQUENCE.struct.pack
_pack_fixed_part = _FIXED_PART.struct.pack
_unpack_fixed_part = _FIXED_PART.struct.unpack_from


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataLogKey(Record):
    """``01 01``, log name ``TerminatedBytes``, sequence ``u64`` big-endian.

    The name is ``opendata-queue/messages/metadata``; ``/`` and the instance follow where several
    systems share a database.
    """

    sequence: int
    instance: str | None = None

    def encode(self) -> bytes:
        return metadata_log_prefix(self.instance) + _SEQUENCE.pack_fields(self)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.METADATA_LOG_ENTRY)
        instance = _instance_of(reader)
        (sequence,) = reader.integers(_SEQUENCE)
        return cls(sequence=sequence, instance=instance)


def metadata_log_prefix(instance: str | None = None) -> bytes:
    """What all keys of one log start with: everything but the sequence."""
    name = METADATA_LOG_NAME.encode()
    if instance is not None:
        suffix = encode_text(instance, record="MetadataLogKey", field="instance")
        if not suffix:
            raise EncodingError("is empty", record="MetadataLogKey", field="instance")
        name += b"/" + suffix
    prefix = RecordType.METADATA_LOG_ENTRY.prefix + encode_terminated_bytes(name)
    checked_key_size(prefix + bytes(_SEQUENCE.size), record="MetadataLogKey", field="instance")
    return prefix


_DEFAULT_PREFIX: Final = metadata_log_prefix()


def encode_metadata_log_key(sequence: int, prefix: bytes = _DEFAULT_PREFIX) -> bytes:
    """A ``MetadataLogKey`` without the object (bulk path)."""
    try:
        return prefix + _pack_sequence(sequence)
    except (struct.error, OverflowError):
        return prefix + _SEQUENCE.pack("MetadataLogKey", sequence)  # names what is wrong


def encode_metadata_log_keys(sequences: range) -> list[bytes]:
    """``encode_metadata_log_key`` of each, at a third of the cost."""
    try:
        return list(map(_DEFAULT_PREFIX.__add__, map(_pack_sequence, sequences)))
    except (struct.error, OverflowError):
        return list(map(encode_metadata_log_key, sequences))  # names what is wrong


def metadata_log_key_columns(sequences: Sequence[int]) -> list[Column]:
    """``MetadataLogKey``s of the log without an instance, by column."""
    return [_DEFAULT_PREFIX, *_SEQUENCE.columns("MetadataLogKey", sequences)]


def _instance_of(reader: Reader) -> str | None:
    start = reader.offset
    name = reader.terminated_text("log_name")
    if name == METADATA_LOG_NAME:
        return None
    instance = name.removeprefix(METADATA_LOG_NAME + "/")
    if instance == name or not instance:
        wanted = f"{METADATA_LOG_NAME}[/instance]"
        raise reader.error(f"log name {shown(name)} is not {wanted}", "log_name", start)
    return instance


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageMetadata(Record):
    """All that is known of a message, except its payload.

    Layout, little-endian: message id ``u64``, created at ``i64``, received at ``i64``, visible at
    ``i64``, retention in seconds ``u32`` (0 = for ever), header count ``u8``, then for each
    header its key ``Utf8`` and its value ``Utf8``. Times are milliseconds since the Unix epoch.
    """

    message_id: int
    created_at: int
    received_at: int
    visible_at: int
    retention_seconds: int
    headers: tuple[tuple[str, str], ...]

    def encode(self) -> bytes:
        headers = encode_headers(
            checked_elements(self.headers, tuple, "MessageMetadata", "headers")
        )
        fixed_part = _FIXED_PART.pack(
            "MessageMetadata",
            self.message_id,
            self.created_at,
            self.received_at,
            self.visible_at,
            self.retention_seconds,
            len(self.headers),
        )
        return fixed_part + headers

    @classmethod
    def decode(cls, data: bytes) -> Self:
        fields = _read_plainly(data) if data.__class__ is bytes else None
        if fields is None:
            return super(MessageMetadata, cls).decode(data)  # slowly, and says what is wrong
        message_id, created_at, received_at, visible_at, retention_seconds, headers = fields
        return cls(
            message_id=message_id,
            created_at=created_at,
            received_at=received_at,
            visible_at=visible_at,
            retention_seconds=retention_seconds,
            headers=headers,
        )

    @classmethod
    def read(cls, reader: Reader) -> Self:
        message_id, created_at, received_at, visible_at, retention_seconds, count = reader.integers(
            _FIXED_PART
        )
        headers = tuple(
            [(reader.utf8(key), reader.utf8(value)) for key, value in _HEADER_FIELDS[:count]]
        )
        return cls(
            message_id=message_id,
            created_at=created_at,
            received_at=received_at,
            visible_at=visible_at,
            retention_seconds=retention_seconds,
            headers=headers,
        )


MetadataFields = tuple[int, int, int, int, int, tuple[tuple[str, str], ...]]


def message_metadata_fields(data: bytes) -> MetadataFields:
    """The fields of ``MessageMetadata.decode(data)``, in their order, without the object (bulk
    path)."""
    fields = _read_plainly(data) if data.__class__ is bytes else None
    if fields is not None:
        return fields
    decoded = MessageMetadata.decode(data)
    return (
        decoded.message_id,
        decoded.created_at,
        decoded.received_at,
        decoded.visible_at,
        decoded.retention_seconds,
        decoded.headers,
    )


def metadata_fields_alike(values: Sequence[bytes]) -> list[MetadataFields] | None:
    """``message_metadata_fields`` of each, in half of the time, if they are all equally long; none
    if they are not, or one of them is not right in every respect."""
    if not values:
        return []
    size = len(values[0])
    if size < _FIXED_PART.size or any(len(one) != size for one in values):
        return None
    headers_size = size - _FIXED_PART.size
    read = _cached_headers if headers_size <= _CACHED_HEADERS_BYTES else _read_headers
    fields: list[MetadataFields] = []
    for *fixed, count, encoded in _alike(headers_size).iter_unpack(b"".join(values)):
        headers = read(encoded, count)
        if headers is None:
            return None
        fields.append((*fixed, headers))
    return fields


class MetadataColumns(NamedTuple):
    """``MessageMetadata`` of many messages by column.

    Most of them have the headers of many others, so these are there once: those of a message are
    ``headers[kinds[place]]``, and ``decode_headers`` takes them apart.
    """

    message_ids: Sequence[int]
    created_at: Sequence[int]
    received_at: Sequence[int]
    visible_at: Sequence[int]
    retention_seconds: Sequence[int]
    kinds: Sequence[int]
    headers: Sequence[bytes]


def metadata_columns(
    values: Iterable[bytes], names: Collection[str] | None = None
) -> MetadataColumns:
    """The columns of metadata values. With ``names``, other headers are left out: messages that
    differ in nothing else are of one kind then."""
    kinds: dict[bytes, int] = {}
    numbers: list[int] = []
    fixed: list[tuple[int, ...]] = []
    for value in values:
        *integers, headers = message_metadata_fields(value)
        if names is not None:
            headers = tuple([pair for pair in headers if pair[0] in names])
        numbers.append(kinds.setdefault(encode_headers(headers), len(kinds)))
        fixed.append(tuple(integers))
    ids, created, received, visible, retentions = zip(*fixed, strict=True) if fixed else ((),) * 5
    return MetadataColumns(
        message_ids=list(ids),
        created_at=list(created),
        received_at=list(received),
        visible_at=list(visible),
        retention_seconds=list(retentions),
        kinds=numbers,
        headers=list(kinds),
    )


def decode_headers(encoded: bytes) -> dict[str, str]:
    """Headers as they are in ``MetadataColumns``; of one that is there twice the last counts."""
    headers = {}
    offset = 0
    while offset < len(encoded):
        end = offset + 2 + _unpack_length(encoded, offset)[0]
        behind = end + 2 + _unpack_length(encoded, end)[0]
        headers[encoded[offset + 2 : end].decode()] = encoded[end + 2 : behind].decode()
        offset = behind
    return headers


@lru_cache(maxsize=64)
def _alike(headers_size: int) -> struct.Struct:
    return struct.Struct(f"{_FIXED_PART.struct.format}{headers_size}s")


def _read_plainly(data: bytes) -> MetadataFields | None:
    """The fields of a whole record, in a third of the time that a reader takes; none if it is not
    right in every respect."""
    try:
        message_id, created_at, received_at, visible_at, retention_seconds, count = (
            _unpack_fixed_part(data)
        )
    except struct.error:
        return None
    encoded = data[_FIXED_PART.size :]
    read = _cached_headers if len(encoded) <= _CACHED_HEADERS_BYTES else _read_headers
    headers = read(encoded, count)
    if headers is None:
        return None
    return message_id, created_at, received_at, visible_at, retention_seconds, headers


def _read_headers(encoded: bytes, count: int) -> tuple[tuple[str, str], ...] | None:
    """The headers that a record ends with; none if they are not right in every respect."""
    headers = []
    offset = 0
    try:
        for _ in range(count):
            start = offset + 2
            end = start + _unpack_length(encoded, offset)[0]
            offset = end + 2 + _unpack_length(encoded, end)[0]
            headers.append((encoded[start:end].decode(), encoded[end + 2 : offset].decode()))
    except (struct.error, UnicodeDecodeError):
        return None
    return tuple(headers) if offset == len(encoded) else None


# Most messages have the headers of many others.
_cached_headers = lru_cache(maxsize=4096)(_read_headers)


def encode_message_metadata(
    message_id: int,
    created_at: int,
    received_at: int,
    visible_at: int,
    retention_seconds: int,
    header_count: int,
    headers: bytes,
) -> bytes:
    """A ``MessageMetadata`` without the object, its headers encoded already (bulk path)."""
    fixed_part = (
        message_id, created_at, received_at, visible_at, retention_seconds, header_count
    )  # fmt: skip
    try:
        return _pack_fixed_part(*fixed_part) + headers
    except (struct.error, OverflowError):
        return _FIXED_PART.pack("MessageMetadata", *fixed_part) + headers  # names what is wrong


def message_metadata_columns(
    message_ids: Sequence[int],
    created_at: Sequence[int] | int,
    received_at: Sequence[int] | int,
    visible_at: Sequence[int] | int,
    retention_seconds: Sequence[int] | int,
    header_counts: Sequence[int],
    headers: Sequence[bytes],
) -> list[Column]:
    """``MessageMetadata`` by column, the headers encoded already; a number is the same in all."""
    fixed = (message_ids, created_at, received_at, visible_at, retention_seconds, header_counts)
    return [*_FIXED_PART.columns("MessageMetadata", *fixed), Each.of(headers)]


def encode_headers(headers: Collection[tuple[str, str]]) -> bytes:
    """The end of a metadata value: the headers back to back, without their count.

    A pair is a ``tuple``, and nothing but text has ``str.encode``.
    """
    parts: list[bytes] = []
    add = parts.append
    try:
        count = len(headers)
        for pair in headers:
            if type(pair) is not tuple:
                return _encode_headers_by_name(headers)
            key, value = pair
            raw_value = _encode_text(value)
            # Of the cache only what is surely equal to what it holds, and not large.
            if key.__class__ is str and len(key) <= _CACHED_KEY_CHARACTERS:
                add(_cached_key(key))
            else:
                add(_header_key(key))
            add(_pack_length(len(raw_value)))
            add(raw_value)
    except (TypeError, ValueError, OverflowError, struct.error):
        return _encode_headers_by_name(headers)
    if count > MAX_HEADERS:
        raise _too_many(count)
    return b"".join(parts)


def _header_key(key: str) -> bytes:
    """A key of a header as ``Utf8``."""
    raw = str.encode(key)
    return len(raw).to_bytes(2, "little") + raw


# The same few come with every message.
_cached_key = lru_cache(maxsize=1024)(_header_key)
_CACHED_KEY_CHARACTERS: Final = 64


def _encode_headers_by_name(headers: Collection[tuple[str, str]]) -> bytes:
    """The same with the name of every field at hand, for the error that is about to be raised."""
    if not isinstance(headers, Collection):
        reason = f"{shown(headers)} is no collection of headers"
        raise EncodingError(reason, record="MessageMetadata", field="headers")
    if len(headers) > MAX_HEADERS:
        raise _too_many(len(headers))
    parts = []
    for index, pair in enumerate(headers):
        if not isinstance(pair, tuple) or len(pair) != 2:
            reason = f"{shown(pair)} is no pair of key and value"
            raise EncodingError(reason, record="MessageMetadata", field=f"headers[{index}]")
        for text, field in zip(pair, _HEADER_FIELDS[index], strict=True):
            parts.append(encode_utf8(text, record="MessageMetadata", field=field))
    return b"".join(parts)


def _too_many(count: int) -> EncodingError:
    reason = f"{count} headers are over the limit of {MAX_HEADERS}"
    return EncodingError(reason, record="MessageMetadata", field="headers")
