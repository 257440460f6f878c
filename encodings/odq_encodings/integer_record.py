"""Records made of integers only: the elements of a queue's arrays, and some values."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any, ClassVar, Self

from odq_encodings.arrays import checked_elements
from odq_encodings.integers import IntegerRun
from odq_encodings.reader import Reader
from odq_encodings.record import Record


class IntegerRecord(Record):
    """A record whose fields are those of ``layout``, back to back."""

    __slots__ = ()

    layout: ClassVar[IntegerRun]

    def encode(self) -> bytes:
        return self.layout.pack_fields(self)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        values = reader.integers(cls.layout)
        return cls(**dict(zip(cls.layout.names, values, strict=True)))

    @classmethod
    def encode_each(cls, elements: Iterable[Self], *, record: str, field: str) -> list[bytes]:
        """The elements of an ``Array`` of these, each by itself."""
        return [element.encode() for element in checked_elements(elements, cls, record, field)]

    @classmethod
    def read_array(cls, reader: Reader, field: str) -> tuple[Self, ...]:
        """An ``Array`` of these, built column by column.

        A frozen dataclass pays a Python call for each instance and a lookup for each field; for
        65,535 entries that is 100 ms. Filling the slots of bare instances, one field of all of
        them at a time, stays in C and takes half of it (``benchmarks/encodings.py``).
        """
        data = reader.elements(cls.layout, field)
        count = len(data) // cls.layout.size
        instances = list(map(object.__new__, repeat(cls, count)))
        for column in cls.layout.fields:
            values = chain.from_iterable(column.alone_in_run.iter_unpack(data))
            _exhaust(map(getattr(cls, column.name).__set__, instances, values))
        return tuple(instances)


def _exhaust(steps: Iterable[Any]) -> None:
    deque(steps, maxlen=0)
