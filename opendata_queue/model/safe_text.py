"""Text from others, for a terminal or a log: nothing in it moves a cursor, turns or forges a line.

Headers, errors, names and payloads may hold anything. Escape sequences of a terminal can do more
than colour: they write into its title, its clipboard and its input. Marks for the direction of text
show it in another order than it has.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any, Final

_LARGEST_SINGLE: Final = 0xFFFF
# All that is not printable begins beyond these, so this finds candidates quickly.
_MAYBE: Final = re.compile(r"[^ -~]")


def harmless(text: str, *, keep: str = "") -> str:
    """``text`` with everything escaped that is not printable, as Python writes it: ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def harmless_json(document: str) -> str:
    """A JSON document with the same value, in which all characters but line ends are printable.

    Others are only within its strings, where JSON has escapes for them.
    """
    return _MAYBE.sub(_json_escaped, document)


def json_text(value: object, *, indent: int | None = None) -> str:
    """A value as JSON: readable, exact, and harmless."""
    return harmless_json(json.dumps(value, ensure_ascii=False, indent=indent))


class HarmlessLines(logging.Formatter):
    """Text for people, a line for each event, but for tracebacks: what others sent forges none."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return harmless(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return harmless(super().formatException(ei), keep="\n")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _json_escaped(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable() or character == "\n":
        return character
    code = ord(character)
    if code <= _LARGEST_SINGLE:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
