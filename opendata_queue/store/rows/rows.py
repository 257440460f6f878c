"""The rows of one atomic write, held in the form in which the compiled writer takes them."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from odq_encodings import Column, Fixed
from opendata_queue.store.rows.weave import weave

# Our own bound, not SlateDB's: 0.17 stores longer keys. It lets the header hold a u16.
MAX_KEY_BYTES = 65_535
# The binding passes byte strings with an i32 length, in a buffer that has four bytes more.
MAX_VALUE_BYTES = 2**31 - 1 - 4
# SlateDB adds the TTL to the clock, and a sum beyond i64 silently means "never expires".
MAX_TTL_MS = 2**62


class Op(enum.IntEnum):
    """First byte of a packed row. `native/helper.h` has the same numbers."""

    PUT = 1
    PUT_TTL = 2
    DELETE = 3


# IntEnum members are slow to pack: each one is converted through __index__.
_PUT, _PUT_TTL, _DELETE = int(Op.PUT), int(Op.PUT_TTL), int(Op.DELETE)

HEADER = struct.Struct("<BxHIQ")
_pack_header = HEADER.pack

UnpackedRow: TypeAlias = tuple[Op, bytes, bytes, int]
"""Op, key, value, TTL in milliseconds."""


class Rows:
    """Puts and deletes that are written together or not at all, in the order of their calls.

    If a key occurs more than once, the last row with it wins. A row that is refused with
    `ValueError` or `TypeError` changes nothing.

    A packed row is, little-endian and unaligned::

        op u8 | 0 u8 | key length u16 | value length u32 | ttl ms u64 | key | value

    The TTL is 0 unless the op is PUT_TTL; a delete has no value. The rows follow each other with
    nothing between them. Inside they are kept in pieces, whole rows or parts of them, and joined
    once.
    """

    __slots__ = ("_count", "_pieces", "_size_bytes")

    def __init__(self) -> None:
        self._pieces: list[bytes | bytearray] = []
        self._count = 0
        self._size_bytes = 0

    def put(self, key: bytes, value: bytes, *, ttl_ms: int | None = None) -> None:
        """Set `key`; with `ttl_ms`, SlateDB may drop the row that long after the write."""
        if key.__class__ is not bytes or value.__class__ is not bytes:
            raise _not_bytes(key, value)
        key_size = len(key)
        value_size = len(value)
        self._pieces += (_put_header(key_size, value_size, ttl_ms), key, value)
        self._count += 1
        self._size_bytes += key_size + value_size

    def put_many(self, items: Iterable[tuple[bytes, bytes]], *, ttl_ms: int | None = None) -> None:
        """Put every (key, value), or none of them if one is refused."""
        added = Rows()
        put = added.put
        for key, value in items:
            put(key, value, ttl_ms=ttl_ms)
        self.extend(added)

    def delete(self, key: bytes) -> None:
        """Remove `key`; it need not exist."""
        if key.__class__ is not bytes:
            raise _not_bytes(key, b"")
        self._pieces += (_delete_header(len(key)), key)
        self._count += 1
        self._size_bytes += len(key)

    def put_columns(
        self,
        count: int,
        key: Sequence[Column],
        value: Sequence[Column],
        *,
        ttl_ms: int | None = None,
    ) -> None:
        """Put so many rows, given by column, all keys of one length.

        A row costs a quarter of what ``put`` costs, and is not encoded by itself.
        """
        if not count:
            return
        key_size = _fixed_size(key, count)
        sizes = _sizes(value, count)
        headers: Column
        if isinstance(sizes, int):
            headers = _put_header(key_size, sizes, ttl_ms)
            size_bytes = count * (key_size + sizes)
        else:
            by_size = {size: _put_header(key_size, size, ttl_ms) for size in set(sizes)}
            headers = Fixed(b"".join(map(by_size.__getitem__, sizes)), HEADER.size)
            size_bytes = count * key_size + sum(sizes)
        self._weave(count, [headers, *key, *value], size_bytes)

    def delete_columns(self, count: int, key: Sequence[Column]) -> None:
        """Remove so many keys, all of one length, given by column."""
        if not count:
            return
        key_size = _fixed_size(key, count)
        self._weave(count, [_delete_header(key_size), *key], count * key_size)

    def _weave(self, count: int, columns: Sequence[Column], size_bytes: int) -> None:
        self._pieces.append(weave(columns, count, size_bytes + count * HEADER.size))
        self._count += count
        self._size_bytes += size_bytes

    def extend(self, other: Rows) -> None:
        """Append the rows of `other`, which is left as it is."""
        self._pieces += other._pieces
        self._count += other._count
        self._size_bytes += other._size_bytes

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[UnpackedRow]:
        """Each row, for the tiers that write row by row."""
        return unpacked(self.packed())

    @property
    def size_bytes(self) -> int:
        """Bytes of all keys and values, without the headers."""
        return self._size_bytes

    def packed(self) -> bytes:
        """All rows in one buffer. Rows added later are not in it."""
        return b"".join(self._pieces)


def unpacked(data: bytes) -> Iterator[UnpackedRow]:
    """The rows of a buffer; `ValueError` if the last one is not whole."""
    at = 0
    while at < len(data):
        op, key_size, value_size, ttl_ms = HEADER.unpack_from(data, at)
        key_end = at + HEADER.size + key_size
        start, at = at + HEADER.size, key_end + value_size
        if at > len(data):
            raise ValueError(f"a row ends at byte {at}, and there are {len(data)}")
        yield Op(op), data[start:key_end], data[key_end:at], ttl_ms


def _fixed_size(columns: Sequence[Column], count: int) -> int:
    size = _sizes(columns, count)
    if not isinstance(size, int):
        raise ValueError("keys are not all of one length")
    return size


def _sizes(columns: Sequence[Column], count: int) -> int | list[int]:
    """How many bytes columns have for a row, or for each row; for how many they are is checked."""
    fixed, varying = 0, []
    for column in columns:
        if isinstance(column, bytes):
            fixed += len(column)
        elif isinstance(column, Fixed):
            _check_count(count, len(column.data), column.width)
            fixed += column.width
        else:
            _check_count(count, len(column.items))
            if column.sizes.count(column.sizes[0]) == count:
                fixed += column.sizes[0]
            else:
                varying.append(column.sizes)
    if not varying:
        return fixed
    if len(varying) == 1:
        return [fixed + size for size in varying[0]]
    return [fixed + sum(one) for one in zip(*varying, strict=True)]


def _check_count(rows: int, found: int, width: int = 1) -> None:
    if width < 1:
        raise ValueError(f"a column is {width} bytes wide")
    if found != rows * width:
        raise ValueError(f"a column has {found / width:g} items for {rows} rows")


def _put_header(key_size: int, value_size: int, ttl_ms: int | None) -> bytes:
    if not 0 < key_size <= MAX_KEY_BYTES:
        raise _bad_key(key_size)
    if value_size > MAX_VALUE_BYTES:
        raise _bad_value(value_size)
    if ttl_ms is None:
        return _pack_header(_PUT, key_size, value_size, 0)
    if 0 < ttl_ms <= MAX_TTL_MS:
        return _pack_header(_PUT_TTL, key_size, value_size, ttl_ms)
    raise _bad_ttl(ttl_ms)


def _delete_header(key_size: int) -> bytes:
    if not 0 < key_size <= MAX_KEY_BYTES:
        raise _bad_key(key_size)
    return _pack_header(_DELETE, key_size, 0, 0)


def _not_bytes(key: object, value: object) -> TypeError:
    # A bytearray could change after the check, and a str would only fail at the commit.
    return TypeError(
        f"key and value must be bytes, not {type(key).__name__} and {type(value).__name__}"
    )


def _bad_key(size: int) -> ValueError:
    if size == 0:
        return ValueError("key is empty")
    return ValueError(f"key has {size} bytes, more than the {MAX_KEY_BYTES} allowed")


def _bad_value(size: int) -> ValueError:
    return ValueError(f"value has {size} bytes, more than the {MAX_VALUE_BYTES} allowed")


def _bad_ttl(ttl_ms: int) -> ValueError:
    return ValueError(f"ttl_ms is {ttl_ms}, not within 1 to {MAX_TTL_MS}")
