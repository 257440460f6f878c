"""Walking once through the bytes of one key or value.

A record describes its layout a single time, as calls on a reader in the order of its fields.
``Reader`` turns them into values; ``inspection.TracingReader`` also notes where each one lies.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from odq_encodings.errors import EncodingError, shown, size_of
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import MAX_KEY_BYTES, VERSION, RecordType
from odq_encodings.terminated_bytes import (
    BadTerminatedBytes,
    encode_terminated_bytes,
    split_terminated_bytes,
)

COUNT_BYTES: Final = 2
_I64_SIGN: Final = 1 << 63
_PREFIX = IntegerRun(">", version="B", type="B")


class Reader:
    """Reads fields from the front; every failure is an ``EncodingError`` that names the field."""

    __slots__ = ("data", "offset", "record")

    def __init__(self, record: str, data: bytes) -> None:
        self.record = record
        self.data = data if type(data) is bytes else _as_bytes(record, data)
        self.offset = 0

    def integers(self, run: IntegerRun, path: str = "") -> tuple[Any, ...]:
        """The integers of ``run``; ``path`` goes before their names in errors."""
        try:
            values = run.struct.unpack_from(self.data, self.offset)
        except struct.error:
            raise self._truncated_run(run, path) from None
        self.offset += run.size
        return values

    def sortable(self, run: IntegerRun) -> tuple[Any, ...]:
        """The integers of ``run``, the first an ``i64`` that is stored with its top bit flipped."""
        flipped, *others = self.integers(run)
        return flipped - _I64_SIGN, *others

    def elements(self, run: IntegerRun, field: str) -> memoryview:
        """The elements of an ``Array<T>``, each a ``run``, back to back and not yet unpacked."""
        count = self.count(field)
        start, end = self.offset, self.offset + count * run.size
        if end > len(self.data):
            whole = (len(self.data) - start) // run.size
            self.offset = start + whole * run.size
            raise self._truncated_run(run, f"{field}[{whole}].")
        self.offset = end
        return memoryview(self.data)[start:end]

    def count(self, field: str) -> int:
        """The ``u16`` in front of an array or a text."""
        data, start = self.data, self.offset
        if start + COUNT_BYTES > len(data):
            raise self._truncated(field, start, COUNT_BYTES)
        self.offset = start + COUNT_BYTES
        return data[start] | data[start + 1] << 8

    def octets(self, field: str) -> bytes:
        """An ``Array<Byte>``."""
        return self.fixed_octets(self.count(field), field)

    def utf8(self, field: str) -> str:
        raw = self.octets(field)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            offset = self.offset - len(raw) + error.start
            raise self.error(f"invalid UTF-8: {error.reason}", field, offset) from None

    def terminated_bytes(self, field: str) -> bytes:
        try:
            raw, self.offset = split_terminated_bytes(self.data, self.offset)
        except BadTerminatedBytes as error:
            raise self.error(error.reason, field, error.offset) from None
        return raw

    def terminated_text(self, field: str) -> str:
        """A ``TerminatedBytes`` that holds UTF-8."""
        start = self.offset
        raw = self.terminated_bytes(field)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            before = encode_terminated_bytes(raw[: error.start])
            offset = start + len(before) - 1
            raise self.error(f"invalid UTF-8: {error.reason}", field, offset) from None

    def fixed_octets(self, size: int, field: str) -> bytes:
        """Bytes of a fixed number."""
        start, end = self.offset, self.offset + size
        if end > len(self.data):
            raise self._truncated(field, start, size)
        self.offset = end
        return self.data[start:end]

    def key_prefix(self, expected: RecordType, expected_version: int = VERSION) -> None:
        """The version and type bytes of a key, which must be those of ``expected``."""
        if len(self.data) > MAX_KEY_BYTES:
            reason = f"a key of {len(self.data)} bytes is over the limit of {MAX_KEY_BYTES}"
            raise self.error(reason, None, MAX_KEY_BYTES)
        version, record_type = self.integers(_PREFIX)
        self.expect(version, expected_version, "version", 0)
        self.expect(record_type, expected, "type", 1)

    def expect(self, found: int, expected: int, field: str, offset: int) -> None:
        if found != expected:
            raise self.error(f"{field} {found:02x} is not {expected:02x}", field, offset)

    def finish(self) -> None:
        left = len(self.data) - self.offset
        if left:
            reason = f"{size_of(left)} left over after the record"
            raise self.error(reason, None, self.offset)

    def error(self, reason: str, field: str | None, offset: int) -> EncodingError:
        return EncodingError(reason, record=self.record, field=field, offset=offset, data=self.data)

    def _truncated_run(self, run: IntegerRun, path: str) -> EncodingError:
        left = len(self.data) - self.offset
        field = next(f for f in run.fields if f.offset + f.size > left)
        return self._truncated(path + field.name, self.offset + field.offset, field.size)

    def _truncated(self, field: str, offset: int, needed: int) -> EncodingError:
        left = len(self.data) - offset
        return self.error(f"needs {size_of(needed)}, {left} left", field, offset)


def _as_bytes(record: str, data: object) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise EncodingError(f"{shown(data)} is not bytes", record=record)
    try:
        return bytes(data)
    except ValueError as error:  # a memoryview that was released
        raise EncodingError(str(error), record=record) from error
