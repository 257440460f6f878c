"""Plain messages as the rows of the store, by column: a million of them, and no object for any.

What is of one length in every row (headers of rows, keys, times) is filled in with numpy; payloads
and headers are joined in between by one kernel of Arrow. Its result is the very buffer that the
compiled batch writer takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from odq_encodings import (
    encode_inline_payload,
    encode_message_metadata,
    encode_metadata_log_key,
    encode_payload_key,
)
from opendata_queue.log.bulk_writer import WRITE_BYTES, ExpiringRun
from opendata_queue.model.ids import SHARD_SEQUENCES
from opendata_queue.store import PackedRows, Rows

# pyarrow has no types that mypy could read.
Array: TypeAlias = Any
_Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_BINARY: Final = pa.large_binary()
_EMPTY: Final = pa.scalar(b"", _BINARY)
_SEQUENCE: Final = SHARD_SEQUENCES - 1
_ROWS_OF_A_MESSAGE: Final = 2
_MAX_TIME_MS: Final = (1 << 63) - 1

# What comes before a payload: the header of its row, its key, and its length.
_PAYLOAD_HEAD: Final = np.dtype(
    [("op", "u1"), ("_0", "u1"), ("key_size", "<u2"), ("value_size", "<u4"), ("ttl_ms", "<u8"),
     ("_prefix", "V2"), ("message_id", ">u8"),
     ("_kind", "u1"), ("count", "<u2")]
)  # fmt: skip
# What comes before the headers of a message: the header of the row, its key, and the fixed part.
_METADATA_HEAD: Final = np.dtype(
    [("op", "u1"), ("_0", "u1"), ("key_size", "<u2"), ("value_size", "<u4"), ("ttl_ms", "<u8"),
     ("_prefix", f"V{len(encode_metadata_log_key(0)) - 8}"), ("sequence", ">u8"),
     ("message_id", "<u8"), ("created_at", "<i8"), ("received_at", "<i8"), ("visible_at", "<i8"),
     ("retention_seconds", "<u4"), ("header_count", "u1")]
)  # fmt: skip


def _model(dtype: np.dtype[Any], key: bytes, value: bytes, ttl_ms: int | None) -> _Numbers:
    """A row without its variable end, made by the code that makes all others."""
    rows = Rows()
    rows.put(key, value, ttl_ms=ttl_ms)
    return np.frombuffer(rows.packed(), dtype)


def _payload_model(ttl_ms: int | None) -> _Numbers:
    return _model(_PAYLOAD_HEAD, encode_payload_key(0), encode_inline_payload(b""), ttl_ms)


def _metadata_model(ttl_ms: int | None) -> _Numbers:
    value = encode_message_metadata(0, 0, 0, 0, 0, 0, b"")
    return _model(_METADATA_HEAD, encode_metadata_log_key(0), value, ttl_ms)


_PAYLOAD_MODEL: Final = _payload_model(None)
_METADATA_MODEL: Final = _metadata_model(None)
_PUT_TTL: Final = int(_payload_model(1)["op"][0])


@dataclass(kw_only=True, slots=True)
class PlainMessages:
    """Messages whose payloads are inline, as Arrow's arrays, all of them storable.

    ``headers`` are encoded already, as ``encode_headers`` does it, and ``header_counts`` says how
    many each has. A time that is null is the moment of writing; a retention of 0 is for ever.
    """

    payloads: Array
    headers: Array
    header_counts: Array
    created_at_ms: Array | None = None
    visible_at_ms: Array | None = None
    retention_seconds: Array | None = None

    def __len__(self) -> int:
        return len(self.payloads)

    def retentions(self) -> list[int]:
        if self.retention_seconds is None:
            return [0] if len(self) else []
        return [int(one) for one in np.unique(_numbers(self.retention_seconds))]

    def expiring_runs(self) -> Iterator[ExpiringRun]:
        if self.retention_seconds is None or not len(self):
            return
        seconds = _numbers(self.retention_seconds)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(seconds)) + 1))
        lengths = np.diff(np.append(starts, len(seconds)))
        sizes = np.add.reduceat(self._sizes(), starts)
        for start, length, size in zip(starts, lengths, sizes, strict=True):
            if seconds[start]:
                yield ExpiringRun(
                    first=int(start),
                    messages=int(length),
                    retention_seconds=int(seconds[start]),
                    size_bytes=int(size),
                )

    def shifted(self, milliseconds: int) -> PlainMessages:
        times = self.visible_at_ms
        if times is None:
            return self
        latest = pa.scalar(_MAX_TIME_MS - max(0, milliseconds), pa.int64())
        earliest = pa.scalar(-_MAX_TIME_MS - min(0, milliseconds), pa.int64())
        times = pc.min_element_wise(times, latest, skip_nulls=False)
        times = pc.max_element_wise(times, earliest, skip_nulls=False)
        return replace(self, visible_at_ms=pc.add(times, milliseconds))

    def packed(self, first_id: int, now_ms: int, ttl_grace_ms: int) -> Iterator[PackedRows]:
        heads = _PAYLOAD_HEAD.itemsize + _METADATA_HEAD.itemsize
        ends = np.cumsum(self._sizes() + heads)
        start = 0
        while start < len(self):
            before = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + WRITE_BYTES, "right")))
            yield self._pack(slice(start, stop), first_id + start, now_ms, ttl_grace_ms)
            start = stop

    def _sizes(self) -> _Numbers:
        """Bytes of payload and headers of each message."""
        return _lengths(self.payloads) + _lengths(self.headers)

    def _pack(self, part: slice, first_id: int, now_ms: int, ttl_grace_ms: int) -> PackedRows:
        payloads, headers = self.payloads[part], self.headers[part]
        count = len(payloads)
        ids = np.arange(first_id, first_id + count, dtype=np.int64)
        payload_rows = np.repeat(_PAYLOAD_MODEL, count)
        metadata_rows = np.repeat(_METADATA_MODEL, count)
        payload_sizes = _lengths(payloads)
        payload_rows["message_id"] = metadata_rows["message_id"] = ids
        payload_rows["count"] = payload_sizes
        payload_rows["value_size"] += payload_sizes.astype(np.uint32)
        metadata_rows["value_size"] += _lengths(headers).astype(np.uint32)
        metadata_rows["sequence"] = ids & _SEQUENCE
        metadata_rows["received_at"] = now_ms
        metadata_rows["created_at"] = _times(self.created_at_ms, part, now_ms)
        metadata_rows["visible_at"] = _times(self.visible_at_ms, part, now_ms)
        metadata_rows["header_count"] = _numbers(self.header_counts[part])
        if self.retention_seconds is not None:
            seconds = _numbers(self.retention_seconds[part]).astype(np.int64)
            metadata_rows["retention_seconds"] = seconds
            expires = seconds > 0
            ttl_ms = np.where(expires, seconds * 1000 + ttl_grace_ms, 0)
            for rows in (payload_rows, metadata_rows):
                rows["op"][expires] = _PUT_TTL
                rows["ttl_ms"] = ttl_ms
        joined = pc.binary_join_element_wise(
            _as_array(payload_rows), payloads, _as_array(metadata_rows), headers, _EMPTY
        )
        _, _, data = joined.buffers()
        size_bytes = (payload_rows.nbytes + metadata_rows.nbytes + int(payload_sizes.sum())) + int(
            _lengths(headers).sum()
        )
        return PackedRows(data.slice(0, size_bytes).to_pybytes(), _ROWS_OF_A_MESSAGE * count)


def _numbers(array: Array) -> _Numbers:
    found: _Numbers = array.to_numpy(zero_copy_only=False)
    return found


def _lengths(binary: Array) -> _Numbers:
    return _numbers(pc.binary_length(binary))


def _times(array: Array | None, part: slice, now_ms: int) -> _Numbers | int:
    return now_ms if array is None else _numbers(pc.fill_null(array[part], now_ms))


def _as_array(rows: _Numbers) -> Array:
    """Rows of numpy as byte strings of Arrow."""
    offsets = np.arange(0, rows.nbytes + 1, rows.itemsize, dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(rows.view(np.uint8))]
    return pa.Array.from_buffers(_BINARY, len(rows), buffers)
