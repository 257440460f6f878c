"""Messages of a queue that are not in its active record (RFC 0006)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import SEALED_VERSION, RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import QueueKey, Record
from odq_encodings.utf8 import encode_utf8

_FLIPPED: Final = IntegerRun(">", visible_at="Q", message_id="Q")
_FAILURE_COUNTS: Final = IntegerRun(
    "<", bucket="Q", failed_at="q", attempts="H", priority="B", retention_deadline="q"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BacklogKey(QueueKey):
    """``01 0b``, queue id ``TerminatedBytes``, priority ``u8``, message id ``u64`` big-endian."""

    record_type = RecordType.BACKLOG
    suffix = IntegerRun(">", priority="B", message_id="Q")

    priority: int
    message_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BacklogEntry(IntegerRecord):
    """Visible at ``i64``, retention deadline ``i64``, attempts ``u16``; little-endian."""

    layout = IntegerRun("<", visible_at="q", retention_deadline="q", attempts="H")

    visible_at: int
    retention_deadline: int
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleKey(QueueKey):
    """``01 0c``, queue id ``TerminatedBytes``, visible at, message id ``u64`` big-endian.

    Visible at is an ``i64``, big-endian with its top bit flipped, so that it sorts.
    """

    record_type = RecordType.SCHEDULE
    suffix = IntegerRun(">", visible_at="q", message_id="Q")

    visible_at: int
    message_id: int

    def encode(self) -> bytes:
        return self.prefix(self.queue_id) + encode_due(self.visible_at, self.message_id)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(cls.record_type)
        queue_id = reader.terminated_bytes("queue_id")
        visible_at, message_id = reader.sortable(_FLIPPED)
        return cls(queue_id=queue_id, visible_at=visible_at, message_id=message_id)


def encode_due(visible_at: int, message_id: int = 0) -> bytes:
    """The end of a schedule key; alone with a time, a bound for scans."""
    due = ScheduleKey.suffix.pack("ScheduleKey", visible_at, message_id)
    return bytes((due[0] ^ 0x80,)) + due[1:]


def decode_due(encoded: bytes) -> tuple[int, int]:
    """What ``encode_due`` was given, of as many bytes as that returns (bulk path)."""
    flipped, message_id = _FLIPPED.struct.unpack(encoded)
    return flipped - (1 << 63), message_id


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleEntry(IntegerRecord):
    """Priority ``u8``, retention deadline ``i64``, attempts ``u16``; little-endian."""

    layout = IntegerRun("<", priority="B", retention_deadline="q", attempts="H")

    priority: int
    retention_deadline: int
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedDoneKey(QueueKey):
    """``02 03``, queue id ``TerminatedBytes``, bucket ``u64`` big-endian."""

    record_type = RecordType.DONE_MESSAGES
    key_version = SEALED_VERSION
    suffix = IntegerRun(">", bucket="Q")

    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedFailedKey(QueueKey):
    """``02 04``, queue id ``TerminatedBytes``, bucket ``u64`` big-endian."""

    record_type = RecordType.FAILED_MESSAGES
    key_version = SEALED_VERSION
    suffix = IntegerRun(">", bucket="Q")

    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureKey(QueueKey):
    """``01 0d``, queue id ``TerminatedBytes``, message id ``u64`` big-endian."""

    record_type = RecordType.FAILURE
    suffix = IntegerRun(">", message_id="Q")

    message_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(Record):
    """Why a message failed, where its entry is, and what is needed to replay it.

    Layout, little-endian: bucket ``u64``, failed at ``i64``, attempts ``u16``, priority ``u8``,
    retention deadline ``i64``, consumer ``Utf8``, error ``Utf8``.
    """

    bucket: int
    failed_at: int
    attempts: int
    priority: int
    retention_deadline: int
    consumer: str
    error: str

    def encode(self) -> bytes:
        return (
            _FAILURE_COUNTS.pack_fields(self)
            + encode_utf8(self.consumer, record="Failure", field="consumer")
            + encode_utf8(self.error, record="Failure", field="error")
        )

    @classmethod
    def read(cls, reader: Reader) -> Self:
        counts = dict(zip(_FAILURE_COUNTS.names, reader.integers(_FAILURE_COUNTS), strict=True))
        return cls(**counts, consumer=reader.utf8("consumer"), error=reader.utf8("error"))
