"""Bulk shards that the queue store knows (RFC 0009)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import Record, checked_key_size
from odq_encodings.terminated_bytes import encode_terminated_bytes
from odq_encodings.utf8 import encode_text, encode_utf8

ROUTING: Final = 0
FINISHED: Final = 1

_NUMBER: Final = IntegerRun(">", number="Q")
_DEADLINE: Final = IntegerRun(">", deadline="q", number="Q")
_DEADLINE_FLIPPED: Final = IntegerRun(">", deadline="Q", number="Q")
_SHARD_FIGURES: Final = IntegerRun(
    "<",
    shard="I",
    state="B",
    registered_at="q",
    committed_at="q",
    messages="Q",
    next_sequence="Q",
    size_bytes="Q",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkShardKey(Record):
    """``01 11``, number ``u64`` big-endian."""

    number: int

    def encode(self) -> bytes:
        return RecordType.BULK_SHARD.prefix + _NUMBER.pack_fields(self)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.BULK_SHARD)
        (number,) = reader.integers(_NUMBER)
        return cls(number=number)


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkShard(Record):
    """A bulk shard that was registered, and whether all of it has been routed.

    Layout, little-endian: shard ``u32``, state ``u8`` (0 routing, 1 finished), registered at
    ``i64``, committed at ``i64``, messages ``u64``, next sequence ``u64``, size in bytes ``u64``,
    job ``Utf8``.
    """

    shard: int
    state: int
    registered_at: int
    committed_at: int
    messages: int
    next_sequence: int
    size_bytes: int
    job: str

    def encode(self) -> bytes:
        job = encode_utf8(self.job, record="BulkShard", field="job")
        return _SHARD_FIGURES.pack_fields(self) + job

    @classmethod
    def read(cls, reader: Reader) -> Self:
        figures = dict(zip(_SHARD_FIGURES.names, reader.integers(_SHARD_FIGURES), strict=True))
        return cls(**figures, job=reader.utf8("job"))


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkJobKey(Record):
    """``01 12``, job ``TerminatedBytes``, UTF-8."""

    job: str

    def encode(self) -> bytes:
        name = "BulkJobKey"
        job = encode_text(self.job, record=name, field="job")
        encoded = RecordType.BULK_JOB.prefix + encode_terminated_bytes(job)
        return checked_key_size(encoded, record=name, field="job")

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.BULK_JOB)
        return cls(job=reader.terminated_text("job"))


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkJob(IntegerRecord):
    """A job that was registered, with the numbers of its shards, which follow one another.

    Layout, little-endian: committed at ``i64``, registered at ``i64``, first number ``u64``,
    shards ``u32``.
    """

    layout = IntegerRun("<", committed_at="q", registered_at="q", first_number="Q", shards="I")

    committed_at: int
    registered_at: int
    first_number: int
    shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkNumbersKey(Record):
    """``01 13`` and nothing else."""

    def encode(self) -> bytes:
        return RecordType.BULK_NUMBERS.prefix

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.BULK_NUMBERS)
        return cls()


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkNumbers(IntegerRecord):
    """Next number ``u64``, first number that is not finished ``u64``; little-endian."""

    layout = IntegerRun("<", next_number="Q", first_unfinished="Q")

    next_number: int
    first_unfinished: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkExpiryKey(Record):
    """``01 1b``, deadline, number of the bulk shard ``u64`` big-endian.

    The deadline is an ``i64``, big-endian with its top bit flipped, so that it sorts.
    """

    deadline: int
    number: int

    def encode(self) -> bytes:
        return encode_bulk_expiry_key(self.deadline, self.number)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.BULK_EXPIRY)
        deadline, number = reader.sortable(_DEADLINE_FLIPPED)
        return cls(deadline=deadline, number=number)


def encode_bulk_expiry_key(deadline: int, number: int = 0) -> bytes:
    """The key of a bulk expiry row; alone with a deadline, a bound for scans."""
    packed = _DEADLINE.pack("BulkExpiryKey", deadline, number)
    return RecordType.BULK_EXPIRY.prefix + bytes((packed[0] ^ 0x80,)) + packed[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkExpiry(IntegerRecord):
    """A bulk shard of which messages expire at the deadline of the key.

    Layout, little-endian: shard ``u32``, last deadline ``i64``: when the last of its messages
    expires, 0 if one never does.
    """

    layout = IntegerRun("<", shard="I", last_deadline="q")

    shard: int
    last_deadline: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkFiledKey(Record):
    """``01 1c`` and nothing else."""

    def encode(self) -> bytes:
        return RecordType.BULK_FILED.prefix

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.BULK_FILED)
        return cls()


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkFiled(IntegerRecord):
    """Next number ``u64``, little-endian: all shards with a smaller one have their expiry row."""

    layout = IntegerRun("<", next_number="Q")

    next_number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkWaitingKey(Record):
    """``01 1d``, number ``u64`` big-endian."""

    number: int

    def encode(self) -> bytes:
        return RecordType.BULK_WAITING.prefix + _NUMBER.pack_fields(self)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.BULK_WAITING)
        (number,) = reader.integers(_NUMBER)
        return cls(number=number)


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkWaiting(IntegerRecord):
    """Since ``i64``, little-endian: when the shard could not be routed for the first time."""

    layout = IntegerRun("<", since="q")

    since: int
