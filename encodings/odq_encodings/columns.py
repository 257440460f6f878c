"""Many records of one kind at once, by column: no object, and no call, for any of them.

The bytes of a record are those of its columns, one after the other. A column is

- ``bytes``, if they are the same in every record,
- ``Fixed``, if every record has as many,
- ``Each``, if every record has its own.

The code that joins columns to records does not check their lengths: the caller makes them equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import NamedTuple, TypeAlias


class Fixed(NamedTuple):
    """As many bytes for every record, back to back."""

    data: bytes
    width: int


class Each(NamedTuple):
    """Bytes for every record, and how many these are."""

    items: Sequence[bytes]
    sizes: Sequence[int]

    @classmethod
    def of(cls, items: Sequence[bytes]) -> bytes | Each:
        """A column of these; what is the same in all of them is there once."""
        if items and items.count(items[0]) == len(items):
            return items[0]
        return cls(items, list(map(len, items)))


Column: TypeAlias = bytes | Fixed | Each


def woven(columns: Sequence[Column], count: int) -> bytes:
    """The records that columns hold, back to back."""
    parts = [_parts(column, count) for column in columns]
    return b"".join(chain.from_iterable(zip(*parts, strict=True)))


def _parts(column: Column, count: int) -> Iterable[bytes]:
    if isinstance(column, bytes):
        return repeat(column, count)
    if isinstance(column, Each):
        return column.items
    data, width = column
    return [data[start : start + width] for start in range(0, len(data), width)]
