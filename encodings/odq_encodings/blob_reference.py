"""Which message a payload that is stored as an object of its own belongs to (RFC 0004)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from odq_encodings.errors import EncodingError, shown
from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import Record

BLOB_ID_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobReferenceKey(Record):
    """``01 08``, blob id: 16 bytes."""

    blob_id: bytes

    def encode(self) -> bytes:
        blob_id = checked_blob_id(self.blob_id, record="BlobReferenceKey")
        return RecordType.BLOB_REFERENCE.prefix + blob_id

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.BLOB_REFERENCE)
        return cls(blob_id=reader.fixed_octets(BLOB_ID_BYTES, "blob_id"))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobReference(IntegerRecord):
    """Layout: message id ``u64`` little-endian."""

    layout = IntegerRun("<", message_id="Q")

    message_id: int


def checked_blob_id(blob_id: bytes, *, record: str) -> bytes:
    if not isinstance(blob_id, bytes) or len(blob_id) != BLOB_ID_BYTES:
        reason = f"{shown(blob_id)} is not {BLOB_ID_BYTES} bytes"
        raise EncodingError(reason, record=record, field="blob_id")
    return blob_id
