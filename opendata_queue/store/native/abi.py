"""What Python and the C helper must agree on: structures and numbers, as in ``helper.h``.

Where one of them changes, ``NATIVE_ABI`` is raised here and there. ``layout`` is compared before
the first write; a test compares the numbers by their names.
"""

from __future__ import annotations

import ctypes
import enum
import os
from typing import Final

from opendata_queue.store.files.durable import WalSync

NATIVE_ABI: Final = 11
MOST_COLUMNS: Final = 32


class Result(enum.IntEnum):
    """Results of the helper's functions, and of its jobs."""

    OK = 0
    FAILED = 1
    MALFORMED = 2
    NOT_SYNCED = 3
    NO_WAL = 4
    NO_MEMORY = 5
    NO_THREAD = 6
    GIVEN_UP = 7
    FENCED = 8
    NOT_WRITTEN = 9


class JobFlag(enum.IntFlag):
    """What a job does besides."""

    FLUSH = 1
    SYNC = 2
    OF_READER = 4


class RustBuffer(ctypes.Structure):
    # The binding's own structure, but with the address as an int: cheaper to read for each row.
    _fields_ = (
        ("capacity", ctypes.c_uint64),
        ("len", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
    )


class CallStatus(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int8), ("error_buf", RustBuffer))


class Wal(ctypes.Structure):
    """The files that are synced after a flush."""

    _fields_ = (
        ("folder", ctypes.c_char_p),
        ("descriptor", ctypes.c_int32),
        ("error_number", ctypes.c_int32),
        ("next", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, sync: WalSync) -> Wal:
        return cls(os.fsencode(sync.folder), sync.descriptor, 0, sync.next_number)


class Append(ctypes.Structure):
    """Where a record goes."""

    _fields_ = (
        ("next", ctypes.c_char_p),
        ("descriptor", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("offset", ctypes.c_uint64),
    )


class Outcome(ctypes.Structure):
    """The outcome of a job."""

    _fields_ = (
        ("number", ctypes.c_uint64),
        ("wal_next", ctypes.c_uint64),
        ("result", ctypes.c_int32),
        ("error_number", ctypes.c_int32),
        ("status", CallStatus),
        ("rows", RustBuffer),
        ("iterator", ctypes.c_uint64),
        ("has_more", ctypes.c_int32),
    )


def layout(*, symbols: int, header_bytes: int) -> list[int]:
    """What ``odq_layout`` must answer, given how many symbols and how long headers of rows are."""
    return [
        NATIVE_ABI,
        ctypes.sizeof(RustBuffer),
        RustBuffer.len.offset,
        RustBuffer.data.offset,
        ctypes.sizeof(CallStatus),
        CallStatus.error_buf.offset,
        symbols * ctypes.sizeof(ctypes.c_void_p),
        header_bytes,
        ctypes.sizeof(Wal),
        Wal.descriptor.offset,
        Wal.error_number.offset,
        Wal.next.offset,
        ctypes.sizeof(Outcome),
        Outcome.result.offset,
        Outcome.status.offset,
        Outcome.rows.offset,
        Outcome.iterator.offset,
        Outcome.has_more.offset,
        ctypes.sizeof(Append),
        Append.descriptor.offset,
        Append.flags.offset,
        Append.offset.offset,
    ]
