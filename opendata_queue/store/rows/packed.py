"""Rows that were packed where they were made, many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from opendata_queue.store.rows.rows import HEADER, Rows, UnpackedRow, unpacked


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Puts in the layout that ``Rows`` states, made by column: no object for any of them.

    The compiled writer refuses a buffer that is not whole rows. What is in them is up to the maker.
    """

    data: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[UnpackedRow]:
        """Each row, for the tiers that write row by row."""
        return unpacked(self.data)

    @property
    def size_bytes(self) -> int:
        """Bytes of all keys and values, without the headers."""
        return len(self.data) - self.count * HEADER.size

    def packed(self) -> bytes:
        return self.data


AnyRows: TypeAlias = Rows | PackedRows
