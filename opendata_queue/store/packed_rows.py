"""Rows that were packed by whoever made them, many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from opendata_queue.store.rows import HEADER, Op, Rows


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Puts in the layout that ``Rows`` states, made by column: no object for any of them.

    The compiled writer refuses a buffer that is not whole rows. What is in them is up to the maker.
    """

    data: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Op, bytes, bytes, int]]:
        """Each row as (op, key, value, ttl ms), for the tiers that write row by row."""
        data, at = self.data, 0
        while at < len(data):
            op, key_size, value_size, ttl_ms = HEADER.unpack_from(data, at)
            key_end = at + HEADER.size + key_size
            start, at = at + HEADER.size, key_end + value_size
            if at > len(data):
                raise ValueError(f"a row ends at byte {at}, and there are {len(data)}")
            yield Op(op), data[start:key_end], data[key_end:at], ttl_ms

    @property
    def size_bytes(self) -> int:
        """Bytes of all keys and values, without the headers."""
        return len(self.data) - self.count * HEADER.size

    def packed(self) -> bytes:
        return self.data


AnyRows: TypeAlias = Rows | PackedRows
