"""What the retention compactor goes by, and how far it has come (RFC 0010)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from odq_encodings.blob_reference import BLOB_ID_BYTES, checked_blob_id
from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import MessageIdKey, QueueKey, Record

DELETE_WHEN_DONE: Final = 0x01

_DEADLINE: Final = IntegerRun(">", deadline="q", message_id="Q")
_DEADLINE_FLIPPED: Final = IntegerRun(">", deadline="Q", message_id="Q")
_SHARD: Final = IntegerRun(">", shard="I")
_FREED: Final = IntegerRun("<", passed_at="q", freed_bytes="Q", aging_bytes="Q", aged_at="q")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiryKey(Record):
    """``01 14``, deadline, first message id ``u64`` big-endian.

    The deadline is an ``i64``, big-endian with its top bit flipped, so that it sorts.
    """

    deadline: int
    message_id: int

    def encode(self) -> bytes:
        return encode_expiry_key(self.deadline, self.message_id)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.EXPIRY)
        deadline, message_id = reader.sortable(_DEADLINE_FLIPPED)
        return cls(deadline=deadline, message_id=message_id)


def encode_expiry_key(deadline: int, message_id: int = 0) -> bytes:
    """The key of an expiry row; alone with a deadline, a bound for scans."""
    packed = _DEADLINE.pack("ExpiryKey", deadline, message_id)
    return RecordType.EXPIRY.prefix + bytes((packed[0] ^ 0x80,)) + packed[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expiry(IntegerRecord):
    """So many messages with consecutive ids expire together.

    Layout, little-endian: messages ``u32``, bytes of their rows ``u64``.
    """

    layout = IntegerRun("<", messages="I", size_bytes="Q")

    messages: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageBlobKey(MessageIdKey):
    """``01 15``, message id ``u64`` big-endian."""

    record_type = RecordType.MESSAGE_BLOB


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageBlob(Record):
    """The blob that a message's payload is in. Layout: blob id, 16 bytes."""

    blob_id: bytes

    def encode(self) -> bytes:
        return checked_blob_id(self.blob_id, record="MessageBlob")

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(blob_id=reader.fixed_octets(BLOB_ID_BYTES, "blob_id"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPositionKey(Record):
    """``01 16`` and nothing else; each database has one."""

    def encode(self) -> bytes:
        return RecordType.RETENTION_POSITION.prefix

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.RETENTION_POSITION)
        return cls()


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPosition(Record):
    """How far the compactor has come in a database.

    Layout, little-endian: passed at ``i64``, freed ``u64``, aging ``u64`` bytes, aged at ``i64``;
    then the last blob that was checked, 16 bytes.
    """

    passed_at: int
    freed_bytes: int
    aging_bytes: int
    aged_at: int
    blob_id: bytes

    def encode(self) -> bytes:
        blob_id = checked_blob_id(self.blob_id, record="RetentionPosition")
        return _FREED.pack_fields(self) + blob_id

    @classmethod
    def read(cls, reader: Reader) -> Self:
        counts = dict(zip(_FREED.names, reader.integers(_FREED), strict=True))
        return cls(**counts, blob_id=reader.fixed_octets(BLOB_ID_BYTES, "blob_id"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionFloorKey(QueueKey):
    """``01 17``, queue id ``TerminatedBytes``."""

    record_type = RecordType.RETENTION_FLOOR


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionFloor(IntegerRecord):
    """No sealed bucket of a queue has a smaller number: done ``u64``, failed ``u64``, LE."""

    layout = IntegerRun("<", done_bucket="Q", failed_bucket="Q")

    done_bucket: int
    failed_bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemOptionsKey(Record):
    """``01 18`` and nothing else."""

    def encode(self) -> bytes:
        return RecordType.SYSTEM_OPTIONS.prefix

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.SYSTEM_OPTIONS)
        return cls()


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemOptions(IntegerRecord):
    """Options of a whole system: flags ``u8``."""

    layout = IntegerRun("<", flags="B")

    flags: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedKey(Record):
    """``01 19``, shard ``u32`` big-endian."""

    shard: int

    def encode(self) -> bytes:
        return RecordType.FINISHED.prefix + _SHARD.pack_fields(self)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.FINISHED)
        (shard,) = reader.integers(_SHARD)
        return cls(shard=shard)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(IntegerRecord):
    """How far finished messages of a shard were deleted.

    Layout, little-endian: first sequence ``u64``, next sequence ``u64``, messages left ``u64``,
    swept at ``i64``.
    """

    layout = IntegerRun("<", first_sequence="Q", next_sequence="Q", messages_left="Q", swept_at="q")

    first_sequence: int
    next_sequence: int
    messages_left: int
    swept_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiredEntriesKey(Record):
    """``01 1a``, shard ``u32`` big-endian."""

    shard: int

    def encode(self) -> bytes:
        return RecordType.EXPIRED_ENTRIES.prefix + _SHARD.pack_fields(self)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.EXPIRED_ENTRIES)
        (shard,) = reader.integers(_SHARD)
        return cls(shard=shard)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiredEntries(IntegerRecord):
    """Up to which deadline queues were rid of messages of a shard that another process writes.

    Layout: deadline ``i64`` little-endian.
    """

    layout = IntegerRun("<", deadline="q")

    deadline: int
