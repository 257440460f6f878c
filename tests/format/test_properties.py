"""What holds for all records and all bytes, not just for the golden ones."""

from __future__ import annotations

import contextlib
import pickle
from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import odq_encodings
from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    AttemptsKey,
    AvailableMessage,
    BacklogCount,
    BacklogEntry,
    DoneMessages,
    EncodingError,
    FailedMessages,
    InFlightMessage,
    MetadataLogKey,
    PayloadKey,
    QueueConfigKey,
    QueueCounters,
    Record,
    ScheduleKey,
    SeqBlockKey,
    decode_any,
    decode_due,
    decode_payload,
    decode_terminated_bytes,
    decode_utf8,
    encode_attempts_key,
    encode_due,
    encode_inline_payload,
    encode_message_metadata,
    encode_metadata_log_key,
    encode_metadata_log_keys,
    encode_payload_key,
    encode_payload_keys,
    encode_terminated_bytes,
    encode_utf8,
    inline_payload_columns,
    inspect_key,
    inspect_record,
    inspect_row,
    message_metadata_columns,
    metadata_log_key_columns,
    row_kind,
    woven,
)
from tests.format import strategies
from tests.format.strategies import RECORDS, i64, u8, u32, u64

each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
# What order is promised for: anything without FF, so all UTF-8 (RFC 0001, Conventions).
ordered_ids = st.binary().map(lambda raw: raw.replace(b"\xff", b"\xfe"))


def test_every_exported_record_has_a_strategy() -> None:
    exported = {getattr(odq_encodings, name) for name in odq_encodings.__all__}
    records = {
        found
        for found in exported
        if isinstance(found, type) and issubclass(found, Record) and found is not Record
    }

    assert records == set(RECORDS)


@each_record
@given(data=st.data())
def test_a_record_survives_the_round_trip(record: type[Record], data: st.DataObject) -> None:
    original = data.draw(RECORDS[record])

    encoded = original.encode()

    assert record.decode(encoded) == original
    assert type(record.decode(encoded)) is record


@each_record
@given(data=st.data())
@settings(max_examples=10)
def test_a_record_decodes_from_any_kind_of_bytes(record: type[Record], data: st.DataObject) -> None:
    original = data.draw(RECORDS[record])
    encoded = original.encode()

    backwards = memoryview(encoded[::-1])[::-1]
    for given_as in (bytearray(encoded), memoryview(encoded), backwards):
        assert record.decode(cast(bytes, given_as)) == original
        assert record.decode(cast(bytes, given_as)).encode() == encoded


@pytest.mark.parametrize("data", [None, 5, "0102", [1, 2], array("B", [1, 2])])
def test_what_is_no_bytes_is_refused(data: Any) -> None:
    decoders: list[Callable[[Any], object]] = [record.decode for record in RECORDS]
    for decode in (*decoders, decode_payload, decode_utf8, decode_terminated_bytes, row_kind):
        with pytest.raises(EncodingError, match="is not bytes"):
            decode(data)


def test_a_released_view_is_refused() -> None:
    view = memoryview(b"\x01\x02")
    view.release()

    with pytest.raises(EncodingError, match="released"):
        SeqBlockKey.decode(cast(bytes, view))


def test_the_kind_of_a_row_is_told_from_any_kind_of_bytes() -> None:
    key = PayloadKey(message_id=1).encode()

    assert row_kind(cast(bytes, memoryview(key))) is row_kind(key)


@each_record
@given(data=st.binary(max_size=200))
def test_no_bytes_make_a_decoder_raise_anything_but_an_encoding_error(
    record: type[Record], data: bytes
) -> None:
    with contextlib.suppress(EncodingError):
        assert record.decode(data).encode() == data


@each_record
@given(data=st.data())
def test_a_flipped_byte_is_refused_or_decodes_to_what_encodes_back(
    record: type[Record], data: st.DataObject
) -> None:
    encoded = bytearray(data.draw(RECORDS[record]).encode())
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))

    with contextlib.suppress(EncodingError):
        assert record.decode(bytes(encoded)).encode() == encoded


@given(prefix=st.sampled_from([b"", b"\x01", *(bytes((1, t)) for t in range(9))]), rest=st.data())
def test_no_row_makes_a_tool_raise_anything_but_an_encoding_error(
    prefix: bytes, rest: st.DataObject
) -> None:
    key = prefix + rest.draw(st.binary(max_size=60))
    value = rest.draw(st.binary(max_size=200))

    with contextlib.suppress(EncodingError):
        decode_any(key, value)
    with contextlib.suppress(EncodingError):
        decode_payload(value)
    inspect_row(key, value)
    inspect_key(key)


@each_record
@given(data=st.data())
def test_inspected_fields_cover_every_byte_once_and_in_order(
    record: type[Record], data: st.DataObject
) -> None:
    encoded = data.draw(RECORDS[record]).encode()

    inspection = inspect_record(record, encoded)

    assert inspection.error is None
    assert b"".join(field.data for field in inspection.fields) == encoded
    offsets = [field.offset for field in inspection.fields]
    assert offsets == sorted(offsets)


@each_record
@given(data=st.data())
def test_a_cut_record_is_inspected_up_to_the_field_that_is_cut(
    record: type[Record], data: st.DataObject
) -> None:
    encoded = data.draw(RECORDS[record]).encode()
    size = data.draw(st.integers(0, len(encoded) - 1))

    inspection = inspect_record(record, encoded[:size])

    covered = b"".join(field.data for field in inspection.fields)
    ends = [field.offset + len(field.data) for field in inspect_record(record, encoded).fields]
    assert inspection.error is not None
    assert encoded.startswith(covered)
    assert len(covered) == max((end for end in ends if end <= size), default=0)


def test_the_time_of_a_schedule_key_is_inspected_as_a_time() -> None:
    key = ScheduleKey(queue_id=b"q", visible_at=-5, message_id=1).encode()

    field = inspect_record(ScheduleKey, key).fields[-2]

    assert (field.name, field.type_name, field.value) == ("visible_at", "i64 BE flipped", -5)


def test_a_value_whose_key_is_not_known_is_not_inspected() -> None:
    (of_key,) = inspect_row(b"\x09\x09", b"\x00")

    assert of_key.error is not None
    assert of_key.error.field == "version"


@given(raw=st.binary())
def test_terminated_bytes_round_trip(raw: bytes) -> None:
    assert decode_terminated_bytes(encode_terminated_bytes(raw)) == raw


@given(text=strategies.text)
def test_utf8_round_trip(text: str) -> None:
    assert decode_utf8(encode_utf8(text)) == text


@given(data=st.binary(max_size=40))
def test_no_bytes_make_a_primitive_raise_anything_but_an_encoding_error(data: bytes) -> None:
    with contextlib.suppress(EncodingError):
        assert encode_utf8(decode_utf8(data)) == data
    with contextlib.suppress(EncodingError):
        assert encode_terminated_bytes(decode_terminated_bytes(data)) == data


@given(left=ordered_ids, right=ordered_ids)
def test_queue_keys_sort_as_their_ids_do(left: bytes, right: bytes) -> None:
    keys = [ActiveMessagesKey(queue_id=queue_id).encode() for queue_id in (left, right)]

    assert (keys[0] < keys[1]) == (left < right)


def test_ids_with_ff_are_the_one_exception_to_the_order() -> None:
    assert b"\x02" < b"\xff"
    assert encode_terminated_bytes(b"\xff") < encode_terminated_bytes(b"\x02")


@given(left=st.binary(), right=st.binary())
def test_no_queue_key_is_a_prefix_of_another(left: bytes, right: bytes) -> None:
    keys = [QueueConfigKey(queue_id=queue_id).encode() for queue_id in (left, right)]

    assert keys[0].startswith(keys[1]) == (left == right)


@given(left=strategies.u64, right=strategies.u64)
def test_numbered_keys_sort_as_their_numbers_do(left: int, right: int) -> None:
    keys: list[Callable[[int], Record]] = [
        lambda number: PayloadKey(message_id=number),
        lambda number: AttemptsKey(message_id=number),
        lambda number: MetadataLogKey(sequence=number),
        lambda number: MetadataLogKey(sequence=number, instance="newsfeeds"),
    ]
    for key in keys:
        assert (key(left).encode() < key(right).encode()) == (left < right)


@given(active=RECORDS[ActiveMessages])
def test_joining_encoded_entries_is_encoding_the_record(active: ActiveMessages) -> None:
    available = [message.encode() for message in active.available]
    in_flight = [message.encode() for message in active.in_flight]

    assert ActiveMessages.join(available, in_flight) == active.encode()


def test_joining_an_entry_of_a_wrong_size_is_refused() -> None:
    entry = b"\x00" * AvailableMessage.layout.size

    joins: list[Callable[[], bytes]] = [
        lambda: ActiveMessages.join([entry, entry[:-1]], []),
        lambda: ActiveMessages.join([], [entry + b"\x00"]),
        lambda: DoneMessages.join([entry]),
        lambda: FailedMessages.join([entry]),
    ]
    for join in joins:
        with pytest.raises(EncodingError, match="entries of"):
            join()


def test_a_decoding_error_survives_pickling() -> None:
    with pytest.raises(EncodingError) as caught:
        InFlightMessage.decode(b"\x00" * 10)

    copy = pickle.loads(pickle.dumps(caught.value))

    assert str(copy) == str(caught.value)
    assert (copy.record, copy.field, copy.offset) == ("InFlightMessage", "claimed_at", 9)


def _sent_at_once(message_id: int, header_count: int, headers: bytes) -> bytes:
    return encode_message_metadata(message_id, 1, 2, 3, 4, header_count, headers)


def _backlog_entry(visible_at: int, deadline: int) -> bytes:
    entry = BacklogEntry(visible_at=visible_at, retention_deadline=deadline, attempts=3)
    return entry.encode()


@given(
    st.integers(0, 2**63),
    st.lists(st.tuples(st.binary(max_size=40), i64, i64, i64, u32, u8, st.binary(max_size=9))),
)
def test_many_rows_that_are_encoded_by_column_are_those_that_are_encoded_one_by_one(
    first_id: int, rows: list[tuple[bytes, int, int, int, int, int, bytes]]
) -> None:
    ids = range(first_id, first_id + len(rows))
    payloads = [payload for payload, *_ in rows]
    columns: list[list[Any]] = [[row[place] for row in rows] for place in range(1, 7)]

    assert encode_payload_keys(ids) == [encode_payload_key(one) for one in ids]
    assert encode_metadata_log_keys(ids) == [encode_metadata_log_key(one) for one in ids]
    for by_column, one_by_one in (
        (PayloadKey.columns(ids), map(encode_payload_key, ids)),
        (AttemptsKey.columns(ids), map(encode_attempts_key, ids)),
        (metadata_log_key_columns(ids), map(encode_metadata_log_key, ids)),
        (inline_payload_columns(payloads), map(encode_inline_payload, payloads)),
        (
            message_metadata_columns(ids, *columns),
            map(encode_message_metadata, ids, *columns),
        ),
        (
            message_metadata_columns(ids, 1, 2, 3, 4, *columns[-2:]),
            map(_sent_at_once, ids, *columns[-2:]),
        ),
        (
            BacklogEntry.layout.columns("BacklogEntry", *columns[:2], 3),
            (_backlog_entry(visible_at, deadline) for _, visible_at, deadline, *_ in rows),
        ),
    ):
        assert woven(by_column, len(rows)) == b"".join(one_by_one)


@given(st.tuples(u64, u64, u64, u64, u64, u64, i64), st.lists(st.tuples(u8, u64, u64)))
def test_counters_that_are_joined_are_those_that_are_encoded(
    counts: tuple[int, ...], backlog: list[tuple[int, int, int]]
) -> None:
    names = [field.name for field in fields(QueueCounters)]
    entries = tuple(
        BacklogCount(priority=priority, rows=rows, from_message_id=first)
        for priority, rows, first in backlog
    )
    values: dict[str, Any] = dict(zip(names, (*counts, entries), strict=True))

    assert QueueCounters.join(*counts, backlog=backlog) == QueueCounters(**values).encode()


def test_what_can_not_be_encoded_by_column_is_named_like_alone() -> None:
    behind = range(2**64 - 1, 2**64 + 1)
    with pytest.raises(EncodingError, match="PayloadKey"):
        encode_payload_keys(behind)
    with pytest.raises(EncodingError, match="PayloadKey"):
        PayloadKey.columns(behind)
    with pytest.raises(EncodingError, match="MetadataLogKey"):
        metadata_log_key_columns(behind)
    with pytest.raises(EncodingError, match="MetadataLogKey"):
        encode_metadata_log_keys(behind)
    with pytest.raises(EncodingError, match="InlinePayload"):
        inline_payload_columns([b"", bytes(65_536)])
    with pytest.raises(EncodingError, match="InlinePayload"):
        inline_payload_columns([bytes(65_536)] * 2)
    with pytest.raises(EncodingError, match="visible_at"):
        message_metadata_columns([1, 2], [1, 1], [1, 1], [0, 2**63], 1, [0, 0], [b"", b""])
    with pytest.raises(EncodingError, match="visible_at"):
        message_metadata_columns([1, 2], 1, 1, 2**63, 1, [0, 0], [b"", b""])


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1))
def test_the_end_of_a_schedule_key_is_read_as_the_key_is(visible_at: int, message_id: int) -> None:
    key = ScheduleKey(queue_id=b"q", visible_at=visible_at, message_id=message_id).encode()

    assert decode_due(key[-16:]) == (visible_at, message_id)
    assert encode_due(visible_at, message_id) == key[-16:]
