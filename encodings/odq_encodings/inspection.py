"""Where every field of a row lies, and how far a broken row can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from odq_encodings.errors import EncodingError
from odq_encodings.integers import IntegerRun
from odq_encodings.reader import COUNT_BYTES, Reader
from odq_encodings.record import Record
from odq_encodings.rows import row_kind

_ORDERS: Final[dict[str, tuple[str, Literal["little", "big"]]]] = {
    "<": ("LE", "little"),
    ">": ("BE", "big"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedField:
    """A field: ``data`` is the bytes from ``offset`` on that ``value`` was read from."""

    name: str
    type_name: str
    offset: int
    data: bytes
    value: int | str | bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The fields that could be read, and what stopped the reading, if anything did.

    ``title`` says what kind of row it is from, if that is known from a key.
    """

    record: str
    title: str
    fields: tuple[InspectedField, ...]
    error: EncodingError | None


def inspect_key(key: bytes) -> Inspection:
    """The fields of a key of any kind."""
    try:
        kind = row_kind(key)
    except EncodingError as error:
        return Inspection(record="key", title="", fields=(), error=error)
    return _inspect(kind.key.__name__, key, kind.key.read, kind.title)


def inspect_row(key: bytes, value: bytes) -> tuple[Inspection, ...]:
    """The fields of a row's key and value; of its key alone if its kind is not known."""
    of_key = inspect_key(key)
    try:
        kind = row_kind(key)
    except EncodingError:
        return (of_key,)
    return of_key, _inspect(kind.value_name, value, kind.read_value, kind.title)


def inspect_record(record: type[Record], data: bytes) -> Inspection:
    """The fields of one key or value that is known to be a ``record``."""
    return _inspect(record.__name__, data, record.read)


def _inspect(
    name: str, data: bytes, read: Callable[[Reader], Record], title: str = ""
) -> Inspection:
    reader = TracingReader(name, data)
    failure: EncodingError | None = None
    try:
        read(reader)
        reader.finish()
    except EncodingError as error:
        failure = error
    return Inspection(record=name, title=title, fields=tuple(reader.fields), error=failure)


class TracingReader(Reader):
    """A reader that notes each field it has read, and of a run that is cut those before the cut."""

    __slots__ = ("fields",)

    def __init__(self, record: str, data: bytes) -> None:
        super().__init__(record, data)
        self.fields: list[InspectedField] = []

    def integers(self, run: IntegerRun, path: str = "") -> tuple[Any, ...]:
        start = self.offset
        try:
            return super().integers(run, path)
        finally:
            self._note_run(run, path, start)

    def sortable(self, run: IntegerRun) -> tuple[Any, ...]:
        first = len(self.fields)
        values = super().sortable(run)
        noted = self.fields[first]
        self.fields[first] = replace(noted, type_name="i64 BE flipped", value=values[0])
        return values

    def elements(self, run: IntegerRun, field: str) -> memoryview:
        start = self.offset + COUNT_BYTES
        try:
            elements = super().elements(run, field)
        except EncodingError:
            # The offset is that of the element that is cut.
            self._note_elements(run, field, start, self.offset + run.size)
            raise
        self._note_elements(run, field, start, self.offset)
        return elements

    def count(self, field: str) -> int:
        count = super().count(field)
        self._note(f"{field}.count", "u16 LE", self.offset - COUNT_BYTES, count)
        return count

    def fixed_octets(self, size: int, field: str) -> bytes:
        raw = super().fixed_octets(size, field)
        self._note(field, "bytes", self.offset - len(raw), raw)
        return raw

    def utf8(self, field: str) -> str:
        text = super().utf8(field)
        # Noted as bytes when they were read; it is known to be text only now.
        as_bytes = self.fields.pop()
        self._note(field, "UTF-8", as_bytes.offset, text)
        return text

    def terminated_bytes(self, field: str) -> bytes:
        start = self.offset
        raw = super().terminated_bytes(field)
        self._note(field, "TerminatedBytes", start, raw)
        return raw

    def _note_elements(self, run: IntegerRun, field: str, start: int, end: int) -> None:
        for index, offset in enumerate(range(start, end, run.size)):
            self._note_run(run, f"{field}[{index}].", offset)

    def _note_run(self, run: IntegerRun, path: str, start: int) -> None:
        """Note the fields of a run, up to the end of the data."""
        suffix, order = _ORDERS[run.order]
        for field in run.fields:
            offset = start + field.offset
            data = self.data[offset : offset + field.size]
            if len(data) < field.size:
                return
            type_name = field.type_name if field.size == 1 else f"{field.type_name} {suffix}"
            value = int.from_bytes(data, order, signed=field.signed)
            self.fields.append(
                InspectedField(
                    name=path + field.name,
                    type_name=type_name,
                    offset=offset,
                    data=data,
                    value=value,
                )
            )

    def _note(self, name: str, type_name: str, start: int, value: int | str | bytes) -> None:
        data = self.data[start : self.offset]
        self.fields.append(
            InspectedField(name=name, type_name=type_name, offset=start, data=data, value=value)
        )
