"""``Array<T>`` in values (RFC 0001, Conventions).

Layout: element count ``u16`` little-endian, then the elements back to back.
"""

from __future__ import annotations

from collections.abc import Collection

from odq_encodings.errors import EncodingError
from odq_encodings.integers import U16_MAX


def encode_count(count: int, *, record: str, field: str) -> bytes:
    """The count in front of the elements."""
    if count > U16_MAX:
        reason = f"{count} elements are over the limit of {U16_MAX}"
        raise EncodingError(reason, record=record, field=field)
    return count.to_bytes(2, "little")


def join_array(
    elements: Collection[bytes], *, record: str, field: str, element_size: int | None = None
) -> bytes:
    """An array made of elements that are encoded already: one join, no element is looked at.

    With ``element_size`` the sum of the sizes is checked, so that no stray entry can shift all
    those behind it.
    """
    count = len(elements)
    array = encode_count(count, record=record, field=field) + b"".join(elements)
    if element_size is not None and len(array) != 2 + count * element_size:
        reason = f"{len(array) - 2} bytes are not {count} entries of {element_size} bytes"
        raise EncodingError(reason, record=record, field=field)
    return array
