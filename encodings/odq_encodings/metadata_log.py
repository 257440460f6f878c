"""The log of message metadata (RFC 0001, Metadata log entry)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Self

from odq_encodings.arrays import checked_elements
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
    return prefix + _SEQUENCE.pack_trusted("MetadataLogKey", sequence)


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
    """All that is known of a message besides its payload.

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
    fixed_part = _FIXED_PART.pack_trusted(
        "MessageMetadata",
        message_id,
        created_at,
        received_at,
        visible_at,
        retention_seconds,
        header_count,
    )
    return fixed_part + headers


def encode_headers(headers: Collection[tuple[str, str]]) -> bytes:
    """The end of a metadata value: the headers back to back, without their count.

    A pair is a ``tuple``, and nothing but text has ``str.encode``.
    """
    parts: list[bytes] = []
    try:
        count = len(headers)
        for pair in headers:
            if type(pair) is not tuple:
                return _encode_headers_by_name(headers)
            key, value = pair
            raw_key, raw_value = str.encode(key), str.encode(value)
            parts += (
                len(raw_key).to_bytes(2, "little"),
                raw_key,
                len(raw_value).to_bytes(2, "little"),
                raw_value,
            )
    except (TypeError, ValueError, OverflowError):
        return _encode_headers_by_name(headers)
    if count > MAX_HEADERS:
        raise _too_many(count)
    return b"".join(parts)


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
