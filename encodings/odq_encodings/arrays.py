"""``Array<T>`` in values (RFC 0001, Conventions).

Layout: element count ``u16`` little-endian, then the elements back to back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from odq_encodings.errors import EncodingError, shown
from odq_encodings.integers import U16_MAX

T = TypeVar("T")


def checked_elements(elements: object, kind: type[T], record: str, field: str) -> Sequence[T]:
    """``elements`` if they are a tuple or a list and every one is a ``kind``."""
    if not isinstance(elements, tuple | list):
        raise EncodingError(f"{shown(elements)} is no tuple", record=record, field=field)
    for index, element in enumerate(elements):
        if not isinstance(element, kind):
            reason = f"{shown(element)} is no {kind.__name__}"
            raise EncodingError(reason, record=record, field=f"{field}[{index}]")
    return elements


def encode_count(count: int, *, record: str, field: str) -> bytes:
    """The count in front of the elements."""
    if count > U16_MAX:
        reason = f"{count} elements are over the limit of {U16_MAX}"
        raise EncodingError(reason, record=record, field=field)
    return count.to_bytes(2, "little")


def join_array(
    elements: Collection[bytes], *, record: str, field: str, element_size: int | None = None
) -> bytes:
    """An array made of elements that are encoded already: one join, no element is checked.

    With ``element_size`` the sum of the sizes is checked. That finds an entry of another size, not
    two that make up for each other.
    """
    try:
        count, joined = len(elements), b"".join(elements)
    except TypeError as error:
        raise EncodingError(f"not entries of bytes: {error}", record=record, field=field) from error
    array = encode_count(count, record=record, field=field) + joined
    if element_size is not None and len(array) != 2 + count * element_size:
        reason = f"{len(array) - 2} bytes are not {count} entries of {element_size} bytes"
        raise EncodingError(reason, record=record, field=field)
    return array
