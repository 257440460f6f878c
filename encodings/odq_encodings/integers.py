"""Runs of fixed-width integers, each run packed and unpacked with one call."""

from __future__ import annotations

import struct
from typing import Final

from odq_encodings.errors import EncodingError

_NAMES: Final = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64"}

U16_MAX: Final = 0xFFFF


class IntegerField:
    """One integer of a run: where it starts and what fits in it.

    ``alone_in_run`` unpacks this integer out of a whole run and skips the others.
    """

    __slots__ = ("alone_in_run", "code", "maximum", "minimum", "name", "offset", "size")

    def __init__(self, name: str, code: str, offset: int, *, order: str, run_size: int) -> None:
        self.name = name
        self.code = code
        self.offset = offset
        self.size = struct.calcsize("<" + code)
        self.alone_in_run = struct.Struct(f"{order}{offset}x{code}{run_size - offset - self.size}x")
        bits = 8 * self.size
        self.minimum, self.maximum = (
            (-(1 << bits - 1), (1 << bits - 1) - 1) if code.islower() else (0, (1 << bits) - 1)
        )

    @property
    def type_name(self) -> str:
        return _NAMES[self.code]


class IntegerRun:
    """Named integers that lie back to back, without padding.

    ``order`` is ``"<"`` in values and ``">"`` in keys; ``fields`` maps names to ``struct`` codes
    in the order in which they lie.
    """

    __slots__ = ("fields", "names", "order", "size", "struct")

    def __init__(self, order: str, **fields: str) -> None:
        self.order = order
        self.struct = struct.Struct(order + "".join(fields.values()))
        self.size = self.struct.size
        self.names = tuple(fields)
        self.fields: list[IntegerField] = []
        offset = 0
        for name, code in fields.items():
            field = IntegerField(name, code, offset, order=order, run_size=self.size)
            self.fields.append(field)
            offset += field.size

    def pack(self, record: str, *values: int) -> bytes:
        """Pack the run; a value that doesn't fit is named in the error."""
        try:
            return self.struct.pack(*values)
        except struct.error as error:
            raise self._misfit(record, values) from error

    def _misfit(self, record: str, values: tuple[object, ...]) -> EncodingError:
        for field, value in zip(self.fields, values, strict=True):
            name = field.name
            if not isinstance(value, int):
                return EncodingError(f"{value!r} is no integer", record=record, field=name)
            if not field.minimum <= value <= field.maximum:
                reason = (
                    f"{value} does not fit {field.type_name} ({field.minimum} to {field.maximum})"
                )
                return EncodingError(reason, record=record, field=name)
        raise AssertionError("struct refused values that fit")  # pragma: no cover
