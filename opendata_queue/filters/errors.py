"""The one error of this package."""

from __future__ import annotations

from typing import Final

from opendata_queue.model.errors import InvalidInputError

_SHOWN_BEFORE: Final = 40
_SHOWN_AFTER: Final = 32


class FilterError(InvalidInputError):
    """The text is no filter: fix it at ``line`` and ``column``, both counted from 1.

    ``reason`` says what is wrong; the message adds the place and points at it with a caret.
    """

    def __init__(self, reason: str, *, text: str = "", offset: int = 0) -> None:
        start = text.rfind("\n", 0, offset) + 1
        self.reason = reason
        self.line = text.count("\n", 0, offset) + 1
        self.column = offset - start + 1
        place = f"column {self.column}"
        if "\n" in text:
            place = f"line {self.line}, {place}"
        super().__init__(f"{place}: {reason}{_pointer(text, start, offset)}")


def _pointer(text: str, start: int, offset: int) -> str:
    """Two more lines: the part of the text around ``offset``, and a caret below it."""
    if not text:
        return ""
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    first, last = max(start, offset - _SHOWN_BEFORE), min(end, offset + _SHOWN_AFTER)
    before = "…" if first > start else ""
    after = "…" if last < end else ""
    shown = "".join(character if character.isprintable() else " " for character in text[first:last])
    indent = " " * (len(before) + offset - first)
    return f"\n  {before}{shown}{after}\n  {indent}^"
