"""The literal bytes of RFC 0001, in both directions, and damaged in every place."""

from __future__ import annotations

import pytest

from odq_encodings import (
    AvailableMessage,
    BacklogCount,
    DoneMessage,
    EncodingError,
    FailedMessage,
    InFlightMessage,
    Record,
    decode_any,
    decode_terminated_bytes,
    encode_terminated_bytes,
)
from tests.format import golden
from tests.format.golden import Vector
from tests.format.strategies import RECORDS

VECTORS = golden.vectors()
CUT_EVERYWHERE_BYTES = 4096

each_vector = pytest.mark.parametrize("vector", VECTORS, ids=[vector.name for vector in VECTORS])


def test_the_vectors_cover_every_record() -> None:
    covered = {type(vector.record).__name__ for vector in VECTORS}

    elements = {AvailableMessage, InFlightMessage, DoneMessage, FailedMessage, BacklogCount}
    assert covered == {record.__name__ for record in set(RECORDS) - elements}


@each_vector
def test_a_record_encodes_to_the_golden_bytes(vector: Vector) -> None:
    assert vector.record.encode() == vector.data


@each_vector
def test_the_golden_bytes_decode_to_the_record(vector: Vector) -> None:
    assert type(vector.record).decode(vector.data) == vector.record


@each_vector
def test_golden_bytes_that_are_cut_anywhere_are_refused(vector: Vector) -> None:
    for size in _cuts(len(vector.data)):
        with pytest.raises(EncodingError) as caught:
            type(vector.record).decode(vector.data[:size])
        assert caught.value.record == type(vector.record).__name__
        assert caught.value.data == vector.data[:size]
        assert caught.value.offset is not None
        assert caught.value.offset <= size


@each_vector
@pytest.mark.parametrize("trailing", [b"\x00", b"\x01", b"\xff"], ids=["00", "01", "ff"])
def test_golden_bytes_with_a_byte_trailing_are_refused(vector: Vector, trailing: bytes) -> None:
    with pytest.raises(EncodingError) as caught:
        type(vector.record).decode(vector.data + trailing)
    assert caught.value.offset is not None


@pytest.mark.parametrize(
    ("key", "value", "key_record", "value_record"),
    [row[1:] for row in golden.rows()],
    ids=[row[0] for row in golden.rows()],
)
def test_decode_any_tells_what_a_golden_row_is(
    key: bytes, value: bytes, key_record: Record, value_record: Record
) -> None:
    row = decode_any(key, value)

    assert (row.key, row.value) == (key_record, value_record)


@pytest.mark.parametrize(
    ("record", "data"),
    [entry[1:] for entry in golden.refused()],
    ids=[entry[0] for entry in golden.refused()],
)
def test_bytes_that_are_no_record_are_refused(record: type[Record], data: bytes) -> None:
    with pytest.raises(EncodingError) as caught:
        record.decode(data)
    assert caught.value.record == record.__name__


@pytest.mark.parametrize(
    ("raw", "encoded"),
    [entry[1:] for entry in golden.terminated_bytes()],
    ids=[entry[0] for entry in golden.terminated_bytes()],
)
def test_terminated_bytes_escape_and_come_back(raw: bytes, encoded: bytes) -> None:
    assert encode_terminated_bytes(raw) == encoded
    assert decode_terminated_bytes(encoded) == raw
    for size in range(len(encoded)):
        with pytest.raises(EncodingError):
            decode_terminated_bytes(encoded[:size])


def _cuts(size: int) -> list[int]:
    """Every length below ``size``; of the few huge vectors, both ends and some in between."""
    if size <= CUT_EVERYWHERE_BYTES:
        return list(range(size))
    ends = [*range(32), *range(size - 32, size)]
    return sorted({*ends, *range(0, size, size // 19)})
