"""The one error that the codecs raise."""

from __future__ import annotations

import reprlib
from typing import Final

_SHOWN_BYTES: Final = 16
_SHOWN_BITS: Final = 128
_CUT: Final = reprlib.Repr()
_CUT.maxstring = _CUT.maxother = 60


class EncodingError(ValueError):
    """Bytes that are no version-1 record, or a value that no record can hold.

    Raised by ``decode`` it means that the data is damaged or was written by something newer:
    give up on this row and keep its bytes. Raised by ``encode`` it means that the caller's
    value does not fit the format: fix the input.

    ``record`` and ``field`` say what was being read or written. When decoding, ``offset`` is
    where in ``data`` it went wrong, and ``data`` is the whole input.
    """

    def __init__(
        self,
        reason: str,
        *,
        record: str,
        field: str | None = None,
        offset: int | None = None,
        data: bytes | None = None,
    ) -> None:
        self.reason = reason
        self.record = record
        self.field = field
        self.offset = offset
        self.data = data
        super().__init__(reason, record, field, offset, data)

    def __str__(self) -> str:
        place = self.record if self.field is None else f"{self.record}.{self.field}"
        if self.offset is None or self.data is None:
            return f"{place}: {self.reason}"
        return f"{place} at offset {self.offset}: {self.reason} (bytes {self._shown()})"

    def _shown(self) -> str:
        """The bytes from the offset on, or the last few when the offset is at the end."""
        assert self.data is not None
        assert self.offset is not None
        if not self.data:
            return "none"
        start = min(self.offset, max(0, len(self.data) - 4))
        shown = self.data[start : start + _SHOWN_BYTES]
        before = "… " if start else ""
        after = " …" if start + len(shown) < len(self.data) else ""
        return f"{before}{shown.hex(' ')}{after}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive pickling by themselves; Spark workers pickle.
        return _rebuild, (self.reason, self.record, self.field, self.offset, self.data)


def shown(value: object) -> str:
    """A value that a caller gave, for a message of bounded length."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        return _CUT.repr(value)
    except Exception:  # of a __repr__ that is not ours
        return f"a {type(value).__name__}"


def size_of(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"


def _rebuild(
    reason: str, record: str, field: str | None, offset: int | None, data: bytes | None
) -> EncodingError:
    return EncodingError(reason, record=record, field=field, offset=offset, data=data)
