"""What can be checked of SlateDB's SST files without SlateDB: each part of one has a checksum.

An SST is its blocks, one behind the other, then a filter, an index, statistics and a description of
these parts, each with a CRC-32 behind it, then the place of the description (``u64``, big-endian)
and the version of the format (``u16``). WAL files are SSTs, too, without filter and statistics. The
index and the description are tables of FlatBuffers.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_END: Final = struct.Struct(">QH")
_CHECK: Final = struct.Struct(">I")
_VERSIONS: Final = (1, 2)
_TAIL_BYTES: Final = 4096
_LARGEST_DESCRIPTION: Final = 1024 * 1024

# Fields of the description, by their order in SlateDB's schema.
_FIRST_ENTRY, _INDEX_OFFSET, _INDEX_LEN, _FILTER_OFFSET, _FILTER_LEN, _COMPRESSION = range(6)
_LAST_ENTRY, _STATS_OFFSET, _STATS_LEN = 7, 8, 9
# Of the index, and of each block in it.
_BLOCKS, _BLOCK_OFFSET = 0, 0
_HAS_EXPIRY, _HAS_CREATION = 2, 4

NOT_KNOWN: Final = 1 << 63
"""A sequence number that is above all others."""

ReadPart = Callable[[int, int], bytes]
"""The bytes from an offset on, so many of them."""


class DamagedSst(Exception):
    """Says what is wrong with a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SstDescription:
    """Where the parts of an SST are, as the file itself says."""

    first_entry: bytes
    """The first key; of a WAL file the first sequence number, eight bytes."""
    last_entry: bytes
    index: tuple[int, int]
    """Offset and size, with the checksum."""
    filter: tuple[int, int]
    stats: tuple[int, int]
    is_compressed: bool
    version: int

    @property
    def first_sequence(self) -> int:
        """Of a WAL file: the sequence number of its first row."""
        return int.from_bytes(self.first_entry, "big")


def describe_sst(size: int, read: ReadPart) -> SstDescription:
    """The description of an SST of ``size`` bytes; ``DamagedSst`` if its end is not as it must be.

    A file that was cut, to which bytes were added, or whose end is zeros or damaged has none.
    """
    if size < _END.size + _CHECK.size:
        raise DamagedSst(f"has {size} bytes, which is less than any file of its kind has")
    start = max(0, size - _TAIL_BYTES)
    tail = read(start, size - start)
    if len(tail) != size - start:
        raise DamagedSst("is shorter than it was a moment ago")
    place, version = _END.unpack_from(tail, len(tail) - _END.size)
    if version not in _VERSIONS or not place < size - _END.size - _CHECK.size:
        raise DamagedSst("does not end as a file of its kind does: it was cut, or added to")
    if place >= start:
        described = tail[place - start : -_END.size]
    elif size - place > _LARGEST_DESCRIPTION:
        raise DamagedSst("has a wrong end")
    else:
        described = read(place, size - _END.size - place)
    try:
        table = _Table.root(_checked(described, "description"))
        return SstDescription(
            first_entry=table.bytes_of(_FIRST_ENTRY),
            last_entry=table.bytes_of(_LAST_ENTRY),
            index=(table.u64(_INDEX_OFFSET), table.u64(_INDEX_LEN)),
            filter=(table.u64(_FILTER_OFFSET), table.u64(_FILTER_LEN)),
            stats=(table.u64(_STATS_OFFSET), table.u64(_STATS_LEN)),
            is_compressed=bool(table.u8(_COMPRESSION)),
            version=version,
        )
    except (struct.error, IndexError) as error:
        raise DamagedSst(f"has a description that can't be read ({error})") from error


def check_sst(size: int, read: ReadPart) -> SstDescription:
    """Read an SST from its beginning to its end; ``DamagedSst`` if any part of it is damaged."""
    found = describe_sst(size, read)
    for name, (offset, length) in (("filter", found.filter), ("statistics", found.stats)):
        if length:
            _checked(read(offset, length), name)
    index = _checked(read(*found.index), "index")
    try:
        offsets = list(_block_offsets(index)) if not found.is_compressed else []
    except (struct.error, IndexError) as error:
        raise DamagedSst(f"has an index that can't be read ({error})") from error
    # The filter comes right behind the blocks, even if there is none.
    for offset, end in zip(offsets, [*offsets[1:], found.filter[0]], strict=False):
        _checked(read(offset, end - offset), f"block at byte {offset:,}")
    return found


def last_sequence(size: int, read: ReadPart) -> int:
    """The sequence number of the last row of a WAL file.

    A block is rows, then the places of some of them (``u16`` each) and how many these are. A row is
    three sizes, each a varint, of what its key shares with the one before, of the rest of the key,
    and of the value; then that rest, the value, the sequence number (``u64``, big-endian), flags
    (``u8``) and a time of 8 bytes for each of the flags 2 and 4.
    """
    found = describe_sst(size, read)
    if found.is_compressed or found.version != _VERSIONS[-1]:
        return NOT_KNOWN
    try:
        last = list(_block_offsets(_checked(read(*found.index), "index")))[-1]
        block = _checked(read(last, found.filter[0] - last), f"block at byte {last:,}")
        (places,) = struct.unpack_from(">H", block, len(block) - 2)
        end, at, sequence = len(block) - 2 - 2 * places, 0, 0
        while at < end:
            _, at = _varint(block, at)
            key_size, at = _varint(block, at)
            value_size, at = _varint(block, at)
            at += key_size + value_size
            sequence, flags = struct.unpack_from(">QB", block, at)
            at += 9 + 8 * bool(flags & _HAS_EXPIRY) + 8 * bool(flags & _HAS_CREATION)
    except (struct.error, IndexError) as error:
        raise DamagedSst(f"has a block that can't be read ({error})") from error
    return sequence


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def last_sequence_in(path: Path) -> int:
    """The sequence number of the last row of a WAL file that is not empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return last_sequence(os.fstat(descriptor).st_size, _reader(descriptor))
    finally:
        os.close(descriptor)


def describe_file(path: Path) -> SstDescription | None:
    """The description of an SST in a file; none if that is empty, as a fence in the WAL is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        return describe_sst(size, _reader(descriptor)) if size else None
    finally:
        os.close(descriptor)


def begins_with_sst(path: Path) -> bool:
    """Whether a file is a whole SST, and more: then that SST was there once, and was added to."""
    data = path.read_bytes()
    for version in _VERSIONS:
        end_mark = version.to_bytes(2, "big")
        at = data.find(end_mark)
        while at >= 0:
            end = at + len(end_mark)
            if _is_end(data, end):
                return True
            at = data.find(end_mark, at + 1)
    return False


def _is_end(data: bytes, end: int) -> bool:
    if end < _END.size or not _END.unpack_from(data, end - _END.size)[0] < end < len(data):
        return False
    try:
        describe_sst(end, lambda offset, size: data[offset : offset + size])
    except DamagedSst:
        return False
    return True


def check_bytes(data: bytes) -> SstDescription | None:
    """Check a whole SST that was read; none if it is empty."""
    return check_sst(len(data), lambda offset, size: data[offset : offset + size]) if data else None


def renumbered(wal: bytes, old: int, new: int) -> bytes:
    """A WAL file of one row with another sequence number: that is in its block, index and
    description."""
    found = describe_sst(len(wal), lambda offset, size: wal[offset : offset + size])
    end = found.index[0] + found.index[1]
    parts = [wal[: found.index[0]], wal[found.index[0] : end], wal[end : -_END.size]]
    before, after = struct.pack(">Q", old), struct.pack(">Q", new)
    data = b""
    for part in parts:
        assert part.count(before) == 1
        changed = part[: -_CHECK.size].replace(before, after)
        data += changed + _CHECK.pack(zlib.crc32(changed))
    return data + wal[-_END.size :]


def _reader(descriptor: int) -> ReadPart:
    return lambda offset, size: os.pread(descriptor, size, offset)


def _checked(part: bytes, name: str) -> bytes:
    """A part without its checksum."""
    if len(part) < _CHECK.size:
        raise DamagedSst(f"lacks its {name}")
    data = part[: -_CHECK.size]
    if zlib.crc32(data) != _CHECK.unpack_from(part, len(data))[0]:
        raise DamagedSst(f"has a wrong checksum ({name})")
    return data


def _block_offsets(index: bytes) -> Iterator[int]:
    for block in _Table.root(index).tables(_BLOCKS):
        yield block.u64(_BLOCK_OFFSET)


class _Table:
    """A table of FlatBuffers; a field that is not there has its default, 0."""

    __slots__ = ("_at", "_data", "_fields")

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        fields_at = at - struct.unpack_from("<i", data, at)[0]
        (size,) = struct.unpack_from("<H", data, fields_at)
        self._fields = struct.unpack_from(f"<{max(0, size // 2 - 2)}H", data, fields_at + 4)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, struct.unpack_from("<I", data)[0])

    def u64(self, field: int) -> int:
        at = self._place(field)
        return int(struct.unpack_from("<Q", self._data, at)[0]) if at else 0

    def u8(self, field: int) -> int:
        at = self._place(field)
        return self._data[at] if at else 0

    def bytes_of(self, field: int) -> bytes:
        at, count = self._vector(field)
        return self._data[at : at + count]

    def tables(self, field: int) -> Iterator[_Table]:
        at, count = self._vector(field)
        for place in range(at, at + 4 * count, 4):
            yield _Table(self._data, place + struct.unpack_from("<I", self._data, place)[0])

    def _vector(self, field: int) -> tuple[int, int]:
        """Where its first element is, and how many there are."""
        at = self._place(field)
        if not at:
            return 0, 0
        at += struct.unpack_from("<I", self._data, at)[0]
        return at + 4, struct.unpack_from("<I", self._data, at)[0]

    def _place(self, field: int) -> int:
        offset = self._fields[field] if field < len(self._fields) else 0
        return self._at + offset if offset else 0
