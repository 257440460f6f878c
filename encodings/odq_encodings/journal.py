"""Records of the journal of a database on files (RFC 0011, RFC 0013)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from odq_encodings.errors import EncodingError

_NAME: Final = b"odj"
_FIRST, _SECOND = 1, 2
_HEAD: Final = struct.Struct("<3sBIIIQQ")
_CHECKED: Final = struct.Struct("<IIQQ")
_CHECKED_FROM: Final = _HEAD.size - _CHECKED.size
_MARK: Final = struct.Struct("<QQQIIQ")
_SALT_AT: Final = 12
_CLOSED: Final = 1
_STATE: Final = struct.Struct("<QB")

JOURNAL_HEAD_BYTES: Final = _HEAD.size + _MARK.size
"""Of a record that has a mark, before its rows."""
JOURNAL_STATE_KEY: Final = b"\x00"
"""The row in which a database says which journal it has. No other row has that key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalMark:
    """Which files of the database were there, and whole, when a record was written.

    Layout, little-endian: wal ``u64``, manifest ``u64``, compactions ``u64``, CRC-32 of the
    manifest's file ``u32``, CRC-32 of that list's file ``u32``, flags ``u64`` (1: closed).
    """

    wal: int = 0
    """The newest WAL file with rows; 0 if none is known."""
    manifest: int = 0
    manifest_check: int = 0
    compactions: int = 0
    compactions_check: int = 0
    is_closed: bool = False
    """This is the last record: the database holds everything, and was closed."""

    def encode(self) -> bytes:
        return _MARK.pack(
            self.wal,
            self.manifest,
            self.compactions,
            self.manifest_check,
            self.compactions_check,
            _CLOSED if self.is_closed else 0,
        )

    @classmethod
    def decode(cls, data: bytes) -> JournalMark:
        wal, manifest, compactions, manifest_check, compactions_check, flags = _MARK.unpack(data)
        return cls(
            wal=wal,
            manifest=manifest,
            manifest_check=manifest_check,
            compactions=compactions,
            compactions_check=compactions_check,
            is_closed=bool(flags & _CLOSED),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalRecord:
    """One commit.

    Layout, little-endian: ``6f 64 6a``, version ``u8``, CRC-32 ``u32`` of all that follows, size of
    the rows ``u32``, salt ``u32``, sequence ``u64``, flushed ``u64``, in version 2 a mark of 40
    bytes, rows. In version 1, that of release 0.1, there is no mark.
    """

    salt: int
    """The same in all records of a file, and not to be guessed by those who choose the rows."""
    sequence: int
    flushed: int
    """Up to which sequence the database itself holds everything."""
    rows: bytes
    mark: JournalMark | None = None

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return _HEAD.size + (0 if self.mark is None else _MARK.size) + len(self.rows)

    def encode(self) -> bytes:
        mark = b"" if self.mark is None else self.mark.encode()
        head = encode_journal_head(self.salt, self.sequence, self.flushed, mark, self.rows)
        return head + self.rows


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalState:
    """What the row ``00`` of a database says of its journal.

    Layout, little-endian: number of the journal's file ``u64``, state ``u8``: 1 while it is in use,
    2 when the database holds everything and was closed.
    """

    number: int
    is_closed: bool

    def encode(self) -> bytes:
        return _STATE.pack(self.number, 2 if self.is_closed else 1)

    @classmethod
    def decode(cls, data: bytes) -> JournalState:
        if len(data) != _STATE.size or data[-1] not in (1, 2):
            raise EncodingError(
                "is not a number of 8 bytes, then 01 or 02", record="JournalState", data=data
            )
        number, state = _STATE.unpack(data)
        return cls(number=number, is_closed=state == 2)


def encode_journal_head(salt: int, sequence: int, flushed: int, mark: bytes, rows: bytes) -> bytes:
    """What comes before the rows of a record; without a mark it is one of version 1."""
    size = len(rows)
    checked = _CHECKED.pack(size, salt, sequence, flushed) + mark
    check = zlib.crc32(rows, zlib.crc32(checked))
    version = _SECOND if mark else _FIRST
    return _HEAD.pack(_NAME, version, check, size, salt, sequence, flushed) + mark


def read_journal_records(
    data: bytes, before: JournalRecord | None = None
) -> Iterator[JournalRecord]:
    """The records that ``data`` begins with: as far as they are whole and in sequence.

    ``before`` is the one before them, if there is one. What comes behind them was never finished,
    is damaged, or is of an earlier use of the same bytes.
    """
    at = 0
    while (record := _record_at(data, at)) is not None:
        if before is not None and (
            record.sequence != before.sequence + 1 or record.salt != before.salt
        ):
            return
        yield record
        at, before = at + record.size, record


def find_journal_record(data: bytes, salt: int, above: int) -> JournalRecord | None:
    """A whole record anywhere in ``data`` with a salt and a sequence above one, if there is one.

    Behind the end of a region's records it proves that the one there was damaged: what is left of
    an earlier use has lower sequences.
    """
    found = (one for one in journal_records_in(data, salt) if one.sequence > above)
    return next(found, None)


def journal_records_in(data: bytes, salt: int) -> Iterator[JournalRecord]:
    """All whole records with a salt, wherever in ``data`` they are, in the order of their places.

    By the salt nothing in the rows of another record passes for one.
    """
    wanted = struct.pack("<I", salt)
    place = data.find(wanted, _SALT_AT)
    while place >= 0:
        record = _record_at(data, place - _SALT_AT)
        if record is not None:
            yield record
        place = data.find(wanted, place + 1)


def _record_at(data: bytes, at: int) -> JournalRecord | None:
    rows_at = at + _HEAD.size
    if len(data) < rows_at:
        return None
    name, version, check, size, salt, sequence, flushed = _HEAD.unpack_from(data, at)
    if name != _NAME or version not in (_FIRST, _SECOND):
        return None
    mark_at, rows_at = rows_at, rows_at + (_MARK.size if version == _SECOND else 0)
    end = rows_at + size
    if len(data) < end or zlib.crc32(memoryview(data)[at + _CHECKED_FROM : end]) != check:
        return None
    return JournalRecord(
        salt=salt,
        sequence=sequence,
        flushed=flushed,
        rows=data[rows_at:end],
        mark=JournalMark.decode(data[mark_at:rows_at]) if version == _SECOND else None,
    )
