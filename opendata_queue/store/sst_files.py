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


def describe_file(path: Path) -> SstDescription | None:
    """The description of an SST in a file; none if that is empty, as a fence in the WAL is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        return describe_sst(size, _reader(descriptor)) if size else None
    finally:
        os.close(descriptor)


def check_bytes(data: bytes) -> SstDescription | None:
    """Check a whole SST that was read; none if it is empty."""
    return check_sst(len(data), lambda offset, size: data[offset : offset + size]) if data else None


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
