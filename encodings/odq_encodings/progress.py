"""How far the tailer and the clock have come (RFC 0006)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import QueueKey, Record

_SHARD: Final = IntegerRun(">", shard="I")


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorKey(Record):
    """``01 0e``, shard ``u32`` big-endian."""

    shard: int

    def encode(self) -> bytes:
        return RecordType.CURSOR.prefix + _SHARD.pack_fields(self)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.CURSOR)
        (shard,) = reader.integers(_SHARD)
        return cls(shard=shard)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor(IntegerRecord):
    """The log of a shard is routed up to, not including, this sequence: ``u64`` little-endian."""

    layout = IntegerRun("<", next_sequence="Q")

    next_sequence: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayKey(QueueKey):
    """``01 0f``, queue id ``TerminatedBytes``, shard ``u32`` big-endian."""

    record_type = RecordType.REPLAY
    suffix = _SHARD

    shard: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay(IntegerRecord):
    """Next sequence ``u64``, end sequence ``u64``, from time ``i64``; little-endian."""

    layout = IntegerRun("<", next_sequence="Q", end_sequence="Q", from_time="q")

    next_sequence: int
    end_sequence: int
    from_time: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockKey(Record):
    """``01 10`` and nothing else."""

    def encode(self) -> bytes:
        return RecordType.CLOCK.prefix

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(RecordType.CLOCK)
        return cls()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockMark(IntegerRecord):
    """The latest time that a commit has seen: ``i64`` little-endian."""

    layout = IntegerRun("<", now="q")

    now: int
