"""Which message an idempotency key stands for (RFC 0003)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import Record, checked_key_size
from odq_encodings.terminated_bytes import encode_terminated_bytes
from odq_encodings.utf8 import encode_text


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotencyRecordKey(Record):
    """``01 07``, namespace ``TerminatedBytes``, idempotency key ``TerminatedBytes``, both UTF-8."""

    namespace: str
    idempotency_key: str

    def encode(self) -> bytes:
        name = "IdempotencyRecordKey"
        namespace = encode_text(self.namespace, record=name, field="namespace")
        key = encode_text(self.idempotency_key, record=name, field="idempotency_key")
        encoded = (
            RecordType.IDEMPOTENCY.prefix
            + encode_terminated_bytes(namespace)
            + encode_terminated_bytes(key)
        )
        return checked_key_size(encoded, record=name, field="idempotency_key")

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.IDEMPOTENCY)
        namespace = reader.terminated_text("namespace")
        return cls(namespace=namespace, idempotency_key=reader.terminated_text("idempotency_key"))


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotencyRecord(IntegerRecord):
    """Layout, little-endian: message id ``u64``, expires at ``i64``."""

    layout = IntegerRun("<", message_id="Q", expires_at="q")

    message_id: int
    expires_at: int
