"""Records of the journal of a database on files (RFC 0011)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_MARK: Final = b"odj\x01"
_HEAD: Final = struct.Struct("<4sIIIQQ")
_CHECKED: Final = struct.Struct("<IIQQ")
_CHECKED_FROM: Final = _HEAD.size - _CHECKED.size

JOURNAL_HEAD_BYTES: Final = _HEAD.size


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalRecord:
    """One commit.

    Layout, little-endian: mark ``6f 64 6a 01``, CRC-32 ``u32`` of all that follows, size of the
    rows ``u32``, salt ``u32``, sequence ``u64``, flushed ``u64``, rows.
    """

    salt: int
    """The same in all records of a file, and not to be guessed by whoever writes rows."""
    sequence: int
    flushed: int
    """Up to which sequence the database itself holds everything."""
    rows: bytes

    def encode(self) -> bytes:
        return encode_journal_head(self.salt, self.sequence, self.flushed, self.rows) + self.rows


def encode_journal_head(salt: int, sequence: int, flushed: int, rows: bytes) -> bytes:
    """What comes before the rows of a record."""
    size = len(rows)
    check = zlib.crc32(rows, zlib.crc32(_CHECKED.pack(size, salt, sequence, flushed)))
    return _HEAD.pack(_MARK, check, size, salt, sequence, flushed)


def read_journal_records(
    data: bytes, before: JournalRecord | None = None
) -> Iterator[JournalRecord]:
    """The records that ``data`` begins with: as far as they are whole and in sequence.

    ``before`` is the one before them, if there is one. What comes behind them was never finished,
    or is of an earlier use of the same bytes.
    """
    at = 0
    while (record := _record_at(data, at)) is not None:
        if before is not None and (
            record.sequence != before.sequence + 1 or record.salt != before.salt
        ):
            return
        yield record
        at, before = at + JOURNAL_HEAD_BYTES + len(record.rows), record


def _record_at(data: bytes, at: int) -> JournalRecord | None:
    rows_at = at + JOURNAL_HEAD_BYTES
    if len(data) < rows_at:
        return None
    mark, check, size, salt, sequence, flushed = _HEAD.unpack_from(data, at)
    end = rows_at + size
    if mark != _MARK or len(data) < end:
        return None
    if zlib.crc32(memoryview(data)[at + _CHECKED_FROM : end]) != check:
        return None
    return JournalRecord(salt=salt, sequence=sequence, flushed=flushed, rows=data[rows_at:end])
