"""Messages in an Arrow batch: which of its columns are what, and what is wrong with which row.

Most batches are fine and hold plain messages. Those are encoded column by column with Arrow's own
kernels. A batch with anything unusual in it (a large payload, a URI, a time that is text, a row
that can't be stored) is gone through row by row, with the very checks that publishing makes. Both
ways write the same rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from odq_encodings import MAX_HEADERS, MAX_INLINE_PAYLOAD_BYTES, EncodingError, encode_utf8
from opendata_queue.log.cache import CheckedMessage
from opendata_queue.log.checks import MAX_RETENTION_SECONDS, check_message
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.messages import MAX_HEADERS_BYTES, NewMessage
from opendata_queue.spark.rows.plain_messages import PlainMessages

PAYLOAD: Final = "payload"
PAYLOAD_URI: Final = "payload_uri"
HEADERS: Final = "headers"
CREATED_AT: Final = "created_at"
VISIBLE_AT: Final = "visible_at"
RETENTION_SECONDS: Final = "retention_seconds"
CORRUPT_RECORD: Final = "_corrupt_record"
"""Spark's own name: the text of a row that it could not parse."""
KNOWN: Final = (
    PAYLOAD,
    PAYLOAD_URI,
    HEADERS,
    CREATED_AT,
    VISIBLE_AT,
    RETENTION_SECONDS,
    CORRUPT_RECORD,
)

MAX_TEXT_BYTES: Final = 65_535

# pyarrow has no types that mypy could read.
Array: TypeAlias = Any
Batch: TypeAlias = Any

_BINARY: Final = pa.large_binary()
_EMPTY: Final = pa.scalar(b"", _BINARY)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_BLANKS: Final = " \t\r\n"
# Arrow would take 0x10 for a number as well, and Python 1_000. More digits may be too many for it.
_WHOLE_NUMBER: Final = "^[0-9]{1,18}$"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that can't be a message: where in its batch, and why."""

    place: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which columns a batch has. ``header_columns`` become headers of their names."""

    columns: tuple[str, ...]
    header_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        missing = [name for name in self.header_columns if name not in self.columns]
        if missing:
            raise InvalidInputError(f"headerColumns names {missing[0]!r}, which is no column")
        unknown = [
            name for name in self.columns if name not in KNOWN and name not in self.header_columns
        ]
        if unknown:
            raise InvalidInputError(
                f"column {unknown[0]!r} is none of {', '.join(KNOWN)}: add it to headerColumns, "
                "or drop it"
            )
        if PAYLOAD not in self.columns and PAYLOAD_URI not in self.columns:
            raise InvalidInputError(f"there is neither a column {PAYLOAD!r} nor {PAYLOAD_URI!r}")

    def has(self, name: str) -> bool:
        """Whether there is such a column that is not meant to be a header."""
        return name in self.columns and name not in self.header_columns


class _Unusual(Exception):
    """A batch that has to be checked row by row."""


def plain_messages(batch: Batch, layout: Layout) -> PlainMessages | None:
    """The messages of a batch in which every row is a plain message; none if one is not."""
    try:
        return _plain_messages(batch, layout)
    except _Unusual:
        return None


def _plain_messages(batch: Batch, layout: Layout) -> PlainMessages:
    if not layout.has(PAYLOAD):
        raise _Unusual
    for name in (PAYLOAD_URI, CORRUPT_RECORD):
        if layout.has(name) and batch.column(name).null_count < batch.num_rows:
            raise _Unusual
    payload = _as_binary(batch.column(PAYLOAD))
    if payload.null_count or _longest(payload) > MAX_INLINE_PAYLOAD_BYTES:
        raise _Unusual
    headers, counts = _headers(batch, layout)
    return PlainMessages(
        payloads=payload,
        headers=headers,
        header_counts=counts,
        created_at_ms=_plain_times(batch, layout, CREATED_AT),
        visible_at_ms=_plain_times(batch, layout, VISIBLE_AT),
        retention_seconds=_plain_retention(batch, layout),
    )


def checked_messages(batch: Batch, layout: Layout) -> tuple[list[CheckedMessage], list[BadRow]]:
    """The messages of any batch, in their order, and the rows that can't be messages."""
    checked, bad = [], []
    for place, row in enumerate(_rows(batch, layout)):
        try:
            checked.append(check_message(_message(row, layout), MAX_INLINE_PAYLOAD_BYTES))
        except (EncodingError, InvalidInputError) as error:
            bad.append(BadRow(place=place, reason=str(error)))
    return checked, bad


# --- column by column -----------------------------------------------------------------------------

# Before every text of a header: its length, u16 little-endian.
_LENGTHS: Final = pa.array(
    [length.to_bytes(2, "little") for length in range(MAX_TEXT_BYTES + 1)], _BINARY
)


def _headers(batch: Batch, layout: Layout) -> tuple[Array, Array]:
    """The headers of each row, encoded, and their number."""
    parts, counts = [], []
    if layout.has(HEADERS):
        column = batch.column(HEADERS)
        parts.append(_mapped_headers(column, layout))
        offsets = column.offsets
        counts.append(pc.subtract(offsets[1:], offsets[:-1]))
    for name in layout.header_columns:
        values = _as_utf8(batch.column(name))
        if _longest(values) > MAX_TEXT_BYTES:
            raise _Unusual
        key = pa.scalar(encode_utf8(name, record="header", field="key"), _BINARY)
        part = pc.binary_join_element_wise(key, _lengths_of(values), values, _EMPTY)
        parts.append(pc.fill_null(part, _EMPTY))
        counts.append(pc.cast(pc.is_valid(values), pa.int32()))
    if not parts:
        return pa.repeat(_EMPTY, batch.num_rows), pa.repeat(0, batch.num_rows)
    count = counts[0]
    for more in counts[1:]:
        count = pc.add(count, more)
    if (pc.max(count).as_py() or 0) > MAX_HEADERS:
        raise _Unusual
    headers = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, _EMPTY)
    if _longest(headers) > MAX_HEADERS_BYTES:
        raise _Unusual
    return headers, count


def _mapped_headers(column: Array, layout: Layout) -> Array:
    offsets = column.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    keys = _as_utf8(column.keys.slice(first, last - first))
    values = _as_utf8(column.items.slice(first, last - first))
    if keys.null_count or values.null_count:
        raise _Unusual
    if max(_longest(keys), _longest(values)) > MAX_TEXT_BYTES:
        raise _Unusual
    if layout.header_columns:
        names = pa.array([name.encode() for name in layout.header_columns], _BINARY)
        if pc.any(pc.is_in(keys, value_set=names)).as_py():
            raise _Unusual
    pairs = pc.binary_join_element_wise(
        _lengths_of(keys), keys, _lengths_of(values), values, _EMPTY
    )
    # The pairs of a row follow one another: all of them together are what is between two offsets.
    starts = pc.cast(pc.subtract(offsets, first), pa.int64())
    ends_of_pairs = pa.Array.from_buffers(pa.int64(), len(pairs) + 1, [None, pairs.buffers()[1]])
    ends = ends_of_pairs.take(starts)
    return pa.Array.from_buffers(
        _BINARY, len(column), [None, ends.buffers()[1], pairs.buffers()[2]]
    )


def _lengths_of(texts: Array) -> Array:
    return _LENGTHS.take(pc.binary_length(texts))


def _plain_times(batch: Batch, layout: Layout, name: str) -> Array | None:
    """Times in milliseconds; none if there is no such column."""
    if not layout.has(name):
        return None
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        return _milliseconds(column)
    if not pa.types.is_integer(column.type):
        raise _Unusual
    return pc.cast(column, pa.int64())


def _milliseconds(times: Array) -> Array:
    return pc.cast(pc.cast(times, pa.timestamp("ms", times.type.tz), safe=False), pa.int64())


def _plain_retention(batch: Batch, layout: Layout) -> Array | None:
    if not layout.has(RETENTION_SECONDS):
        return None
    column = batch.column(RETENTION_SECONDS)
    if _is_text(column):
        column = pc.utf8_trim(pc.cast(_as_utf8(column), pa.large_string()), _BLANKS)
        if pc.all(pc.match_substring_regex(column, _WHOLE_NUMBER)).as_py() is False:
            raise _Unusual
    elif not pa.types.is_integer(column.type):
        raise _Unusual
    seconds = pc.fill_null(pc.cast(column, pa.int64()), 0)
    limits = pc.min_max(seconds).as_py()
    if len(seconds) and not 0 <= limits["min"] <= limits["max"] <= MAX_RETENTION_SECONDS:
        raise _Unusual
    return seconds


def _longest(binary: Array) -> int:
    return pc.max(pc.binary_length(binary)).as_py() or 0


def _as_binary(column: Array) -> Array:
    return pc.cast(column, _BINARY)


def _is_text(column: Array) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _as_utf8(column: Array) -> Array:
    """The bytes of a column as text."""
    if _is_text(column):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            raise _Unusual from None  # some of them are no UTF-8
        return pc.cast(column, _BINARY)
    return pc.cast(pc.cast(column, pa.large_string()), _BINARY)


# --- row by row -----------------------------------------------------------------------------------

_Row = dict[str, Any]


def _rows(batch: Batch, layout: Layout) -> Iterator[_Row]:
    """Each row as Python's values; texts as bytes, since they may be no UTF-8."""
    columns: dict[str, Sequence[Any]] = {}
    for name in layout.columns:
        column = batch.column(name)
        if name in layout.header_columns:
            columns[name] = _texts(column)
        elif name == HEADERS:
            columns[name] = _maps(column)
        elif name in (PAYLOAD, PAYLOAD_URI):
            columns[name] = _as_binary(column).to_pylist()
        elif pa.types.is_timestamp(column.type):
            columns[name] = _milliseconds(column).to_pylist()
        elif _is_text(column):
            columns[name] = _as_binary(column).to_pylist()
        else:
            columns[name] = column.to_pylist()
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _texts(column: Array) -> list[bytes | None]:
    if not _is_text(column):
        column = pc.cast(column, pa.large_string())
    texts: list[bytes | None] = _as_binary(column).to_pylist()
    return texts


def _maps(column: Array) -> list[list[tuple[bytes, bytes | None]]]:
    offsets = column.offsets.to_pylist()
    first = offsets[0]
    keys = _texts(column.keys.slice(first, offsets[-1] - first))
    items = _texts(column.items.slice(first, offsets[-1] - first))
    pairs = list(zip(keys, items, strict=True))
    return [
        pairs[start - first : end - first]  # type: ignore[misc]
        for start, end in itertools.pairwise(offsets)
    ]


def _message(row: _Row, layout: Layout) -> NewMessage:
    if layout.has(CORRUPT_RECORD) and row[CORRUPT_RECORD] is not None:
        raise InvalidInputError("Spark could not parse it: it is broken, or has other columns")
    headers: dict[str, str] = {}
    if layout.has(HEADERS):
        for key, value in row[HEADERS]:
            if value is not None:
                name = _text("a header's name", key)
                headers[name] = _text(f"header {name!r}", value)
    for name in layout.header_columns:
        if row[name] is not None:
            headers[name] = _text(f"header {name!r}", row[name])
    uri = row.get(PAYLOAD_URI) if layout.has(PAYLOAD_URI) else None
    payload = row.get(PAYLOAD) if layout.has(PAYLOAD) else None
    if payload is None and uri is None:
        raise InvalidInputError("payload is null")
    return NewMessage(
        payload,
        payload_uri=None if uri is None else _text(PAYLOAD_URI, uri),
        headers=headers,
        created_at_ms=_time(row, layout, CREATED_AT),
        visible_at_ms=_time(row, layout, VISIBLE_AT),
        retention_seconds=_retention(row, layout),
    )


def _text(what: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidInputError(f"{what} is no UTF-8: {raw[:40].hex()}") from None


def _time(row: _Row, layout: Layout, name: str) -> int | None:
    value = row[name] if layout.has(name) else None
    if not isinstance(value, bytes):
        return value
    text = _text(name, value)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(
            f"{name} is {text!r}, not a time like 2026-01-31T12:00:00Z"
        ) from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    since = time - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1000 + since.microseconds // 1000


def _retention(row: _Row, layout: Layout) -> int:
    value = row[RETENTION_SECONDS] if layout.has(RETENTION_SECONDS) else None
    if not isinstance(value, bytes):
        return 0 if value is None else value
    text = _text(RETENTION_SECONDS, value)
    if re.match(_WHOLE_NUMBER, text.strip(_BLANKS)) is None:
        raise InvalidInputError(f"{RETENTION_SECONDS} is {text!r}, not a whole number of seconds")
    return int(text)
