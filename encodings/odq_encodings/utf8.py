"""``Utf8``: text inside values (RFC 0001, Conventions).

Layout: length in bytes ``u16`` little-endian, then that many bytes of UTF-8.
"""

from __future__ import annotations

from odq_encodings.errors import EncodingError, shown
from odq_encodings.integers import U16_MAX


def encode_utf8(text: str, *, record: str = "Utf8", field: str = "text") -> bytes:
    """Encode ``text``; ``record`` and ``field`` are named if it can't be."""
    raw = encode_text(text, record=record, field=field)
    size = len(raw)
    if size > U16_MAX:
        reason = f"{size} bytes of UTF-8 are over the limit of {U16_MAX}"
        raise EncodingError(reason, record=record, field=field)
    return size.to_bytes(2, "little") + raw


def encode_text(text: str, *, record: str, field: str) -> bytes:
    """The bare UTF-8 bytes of ``text``, without a length."""
    if not isinstance(text, str):
        raise EncodingError(f"{shown(text)} is no text", record=record, field=field)
    try:
        return str.encode(text)
    except UnicodeEncodeError as error:
        reason = f"character {error.start} ({text[error.start]!r}) has no UTF-8"
        raise EncodingError(reason, record=record, field=field) from error
