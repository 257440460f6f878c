"""The configuration of a queue (RFC 0001, Queue configuration)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import QueueKey, Record
from odq_encodings.utf8 import encode_utf8

FILTER_GRAMMAR: Final = 0x01

_GRAMMAR = IntegerRun("<", filter_grammar="B")
_LIMITS = IntegerRun("<", max_attempts="H", done_retention_seconds="I")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueConfigKey(QueueKey):
    """``01 06``, queue id ``TerminatedBytes``."""

    record_type = RecordType.QUEUE_CONFIG


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueConfig(Record):
    """Which messages a queue holds, and for how long.

    Layout, little-endian: filter grammar ``u8`` (01), filter text ``Utf8``, max attempts ``u16``,
    retention of done messages in seconds ``u32`` (0 = for ever). ``filter`` is the canonical text;
    this module does not parse it.
    """

    filter: str
    max_attempts: int
    done_retention_seconds: int

    def encode(self) -> bytes:
        return (
            bytes((FILTER_GRAMMAR,))
            + encode_utf8(self.filter, record="QueueConfig", field="filter")
            + _LIMITS.pack("QueueConfig", self.max_attempts, self.done_retention_seconds)
        )

    @classmethod
    def read(cls, reader: Reader) -> Self:
        (grammar,) = reader.integers(_GRAMMAR)
        reader.expect(grammar, FILTER_GRAMMAR, "filter_grammar", 0)
        text = reader.utf8("filter")
        max_attempts, done_retention_seconds = reader.integers(_LIMITS)
        return cls(
            filter=text,
            max_attempts=max_attempts,
            done_retention_seconds=done_retention_seconds,
        )
