"""``TerminatedBytes``: byte strings inside keys (RFC 0001, Conventions).

Layout: the bytes with ``00`` written as ``01 01``, ``01`` as ``01 02`` and ``FF`` as ``01 03``,
then one ``00``. No encoded string is a prefix of another, and encoded strings sort as the raw
ones do, unless a raw one contains ``FF`` (UTF-8 never does).
"""

from __future__ import annotations

import re
from typing import Final

from odq_encodings.errors import EncodingError, shown

TERMINATOR: Final = b"\x00"

_ESCAPED: Final = re.compile(rb"\x01.?", re.DOTALL)
_UNESCAPED: Final = {b"\x01\x01": b"\x00", b"\x01\x02": b"\x01", b"\x01\x03": b"\xff"}


def encode_terminated_bytes(
    raw: bytes, *, record: str = "TerminatedBytes", field: str = "raw"
) -> bytes:
    """Escape ``raw`` and terminate it; ``record`` and ``field`` are named if it is not bytes."""
    if not isinstance(raw, bytes):
        raise EncodingError(f"{shown(raw)} is not bytes", record=record, field=field)
    escaped = raw.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01")
    return escaped.replace(b"\xff", b"\x01\x03") + TERMINATOR


def split_terminated_bytes(data: bytes, start: int) -> tuple[bytes, int]:
    """Read the string that starts at ``start``; return it and the offset behind its terminator.

    Raises ``BadTerminatedBytes`` with the offset at which it is broken.
    """
    end = data.find(TERMINATOR, start)
    if end < 0:
        raise BadTerminatedBytes("no terminator 00", len(data))
    escaped = data[start:end]
    stray = escaped.find(b"\xff")
    if stray >= 0:
        raise BadTerminatedBytes("ff is not escaped", start + stray)
    return _unescape(escaped, start), end + 1


def _unescape(escaped: bytes, start: int) -> bytes:
    def unescape(match: re.Match[bytes]) -> bytes:
        raw = _UNESCAPED.get(match.group())
        if raw is None:
            raise BadTerminatedBytes("01 is not followed by 01, 02 or 03", start + match.start())
        return raw

    return _ESCAPED.sub(unescape, escaped)


class BadTerminatedBytes(ValueError):
    """Internal to the codecs: turned into an ``EncodingError`` that names the record."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(reason, offset)
        self.reason = reason
        self.offset = offset
