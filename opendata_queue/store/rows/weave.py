"""Joining columns to rows: by the C helper where there is one, in a quarter of the time."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from struct import pack
from typing import Any

from odq_encodings import Column, Fixed, woven
from opendata_queue.store.native.abi import MOST_COLUMNS, Result
from opendata_queue.store.native.library import Unusable, load_native


def weave(columns: Sequence[Column], count: int, size_bytes: int) -> bytes | bytearray:
    """The rows that columns hold, back to back, given how many bytes these are in all."""
    native = _native()
    if native is None or not size_bytes or len(columns) > MOST_COLUMNS:
        return woven(columns, count)
    widths: list[int] = []  # below 0, the same in every row; 0, sizes come before the bytes
    pieces: list[bytes] = []
    for column in columns:
        if isinstance(column, bytes):
            if column:
                widths.append(-len(column))
                pieces.append(column)
        elif isinstance(column, Fixed):
            widths.append(column.width)
            pieces.append(column.data)
        else:
            items, sizes = column
            if sizes.count(sizes[0]) != count:
                widths.append(0)
                pieces.append(pack(f"={count}I", *sizes))
            elif sizes[0]:
                widths.append(sizes[0])
            pieces += items
    data, out = b"".join(pieces), bytearray(size_bytes)
    buffer = ctypes.byref(ctypes.c_char.from_buffer(out))
    described = pack(f"={len(widths)}q", *widths)
    if native(described, len(widths), count, data, len(data), buffer, size_bytes) != Result.OK:
        raise ValueError(f"{count} rows of {size_bytes} bytes are not what the columns hold")
    return out


@functools.cache
def _native() -> Any:
    try:
        library = load_native()
    except Unusable:  # the batch writer says so
        return None
    # The GIL is kept: to give it up would cost as much as the call.
    function = ctypes.PyDLL(library._name).odq_weave
    u64, text = ctypes.c_uint64, ctypes.c_char_p
    function.restype = ctypes.c_int32
    function.argtypes = (text, ctypes.c_uint32, u64, text, u64, ctypes.c_void_p, u64)
    return function
