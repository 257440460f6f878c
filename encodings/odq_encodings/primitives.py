"""The primitives as codecs of their own: whole inputs, nothing before or behind them."""

from __future__ import annotations

from odq_encodings.reader import Reader


def decode_utf8(data: bytes) -> str:
    """The text of a ``Utf8``; the inverse of ``encode_utf8``."""
    reader = Reader("Utf8", data)
    text = reader.utf8("text")
    reader.finish()
    return text


def decode_terminated_bytes(data: bytes) -> bytes:
    """The bytes of a ``TerminatedBytes``; the inverse of ``encode_terminated_bytes``."""
    reader = Reader("TerminatedBytes", data)
    raw = reader.terminated_bytes("raw")
    reader.finish()
    return raw
