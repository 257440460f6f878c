"""Runs of fixed-width integers, each run packed and unpacked with one call."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

from odq_encodings.columns import Column, Fixed
from odq_encodings.errors import EncodingError, shown

_NAMES: Final = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64"}

U16_MAX: Final = 0xFFFF


class IntegerField:
    """One integer of a run: where it starts and what fits in it.

    ``alone_in_run`` unpacks this integer out of a whole run and skips the others.
    """

    __slots__ = ("alone_in_run", "code", "maximum", "minimum", "name", "offset", "signed", "size")

    def __init__(self, name: str, code: str, offset: int, *, order: str, run_size: int) -> None:
        self.name = name
        self.code = code
        self.offset = offset
        self.size = struct.calcsize("<" + code)
        self.alone_in_run = struct.Struct(f"{order}{offset}x{code}{run_size - offset - self.size}x")
        self.signed = code.islower()
        bits = 8 * self.size
        self.minimum, self.maximum = (
            (-(1 << bits - 1), (1 << bits - 1) - 1) if self.signed else (0, (1 << bits) - 1)
        )

    @property
    def type_name(self) -> str:
        return _NAMES[self.code]


class IntegerRun:
    """Named integers that lie back to back, without padding.

    ``order`` is ``"<"`` in values and ``">"`` in keys; ``fields`` maps names to ``struct`` codes
    in the order in which they lie.

    An integer is an ``int``, so ``True`` is 1. What only has an ``__index__`` is none.
    """

    __slots__ = ("_values_of", "fields", "names", "order", "size", "struct")

    def __init__(self, order: str, **fields: str) -> None:
        self.order = order
        self.struct = struct.Struct(order + "".join(fields.values()))
        self.size = self.struct.size
        self.names = tuple(fields)
        self._values_of = _getter(self.names)
        self.fields: list[IntegerField] = []
        offset = 0
        for name, code in fields.items():
            field = IntegerField(name, code, offset, order=order, run_size=self.size)
            self.fields.append(field)
            offset += field.size

    def pack(self, record: str, *values: int) -> bytes:
        """Pack the run; a value that is no integer or doesn't fit is named in the error."""
        for value in values:
            if type(value) is not int and not isinstance(value, int):
                raise self._misfit(record, values)
        try:
            return self.struct.pack(*values)
        except (struct.error, OverflowError) as error:
            raise self._misfit(record, values) from error

    def pack_trusted(self, record: str, *values: int) -> bytes:
        """``pack`` for bulk paths: takes the callers' word that their values are ``int``."""
        try:
            return self.struct.pack(*values)
        except (struct.error, OverflowError) as error:
            raise self._misfit(record, values) from error

    def pack_fields(self, record: object) -> bytes:
        """Pack the attributes of ``record`` that have the names of this run."""
        return self.pack(type(record).__name__, *self._values_of(record))

    def columns(self, record: str, *values: Sequence[int] | int) -> list[Column]:
        """The run of many records at once, given by column; a number is the same in all of them.

        It takes the callers' word that their values are ``int``.
        """
        try:
            return [
                self._column(field, column)
                for field, column in zip(self.fields, values, strict=True)
            ]
        except (struct.error, OverflowError):
            rows = zip(*(repeat(c) if isinstance(c, int) else c for c in values), strict=False)
            for row in rows:
                self.pack(record, *row)  # names what is wrong
            raise

    def _column(self, field: IntegerField, values: Sequence[int] | int) -> Column:
        if isinstance(values, int):
            return struct.pack(self.order + field.code, values)
        return Fixed(struct.pack(f"{self.order}{len(values)}{field.code}", *values), field.size)

    def _misfit(self, record: str, values: tuple[object, ...]) -> EncodingError:
        for field, value in zip(self.fields, values, strict=True):
            if not isinstance(value, int):
                reason = f"{shown(value)} is no integer"
                return EncodingError(reason, record=record, field=field.name)
            number = int.__index__(value)  # a subclass may compare as it likes
            if not field.minimum <= number <= field.maximum:
                limits = f"{field.minimum} to {field.maximum}"
                reason = f"{shown(number)} does not fit {field.type_name} ({limits})"
                return EncodingError(reason, record=record, field=field.name)
        raise AssertionError("struct refused values that fit")  # pragma: no cover


def _getter(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    """``attrgetter``, but a tuple for one name, or none, too."""
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda record: ()
    only = attrgetter(*names)
    return lambda record: (only(record),)
