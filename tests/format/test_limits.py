"""Values that no record can hold are refused, by name, and never cut to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import pytest

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    Attempts,
    AttemptsKey,
    AvailableMessage,
    BacklogKey,
    BlobReference,
    BlobReferenceKey,
    BulkExpiry,
    BulkExpiryKey,
    BulkFiled,
    BulkWaiting,
    ClockMark,
    Cursor,
    CursorKey,
    DoneMessage,
    DoneMessages,
    EncodingError,
    ExpiredEntriesKey,
    Expiry,
    ExpiryKey,
    FailedMessage,
    FailedMessages,
    Failure,
    FinishedKey,
    IdempotencyRecordKey,
    InFlightMessage,
    InlinePayload,
    MessageBlob,
    MessageMetadata,
    MetadataLogKey,
    PayloadKey,
    QueueConfig,
    QueueConfigKey,
    QueueCounters,
    Record,
    RetentionFloor,
    ScheduleKey,
    SeqBlock,
    SystemOptions,
    UriPayload,
    encode_headers,
    encode_terminated_bytes,
)
from tests.format.strategies import RECORDS

AVAILABLE = AvailableMessage(
    message_id=1, priority=1, visible_at=1, retention_deadline=1, attempts=1
)
IN_FLIGHT = InFlightMessage(message_id=1, priority=1, claimed_at=1, lease_deadline=1, attempts=1)
DONE = DoneMessage(message_id=1, done_at=1, attempts=1)
FAILED = FailedMessage(message_id=1, failed_at=1, attempts=1)
METADATA = MessageMetadata(
    message_id=1, created_at=1, received_at=1, visible_at=1, retention_seconds=1, headers=()
)
CONFIG = QueueConfig(filter="", max_attempts=1, done_retention_seconds=1)
FAILURE = Failure(
    bucket=1, failed_at=1, attempts=1, priority=1, retention_deadline=1, consumer="", error=""
)
COUNTERS = QueueCounters(
    done_bucket=1,
    failed_bucket=1,
    done=1,
    failed=1,
    expired=1,
    scheduled=1,
    scheduled_from=1,
    backlog=(),
)

U8, U16, U32, U64 = ((0, 2**bits - 1) for bits in (8, 16, 32, 64))
I64 = (-(2**63), 2**63 - 1)

INTEGERS: list[tuple[Record, str, tuple[int, int]]] = [
    (PayloadKey(message_id=1), "message_id", U64),
    (AttemptsKey(message_id=1), "message_id", U64),
    (MetadataLogKey(sequence=1), "sequence", U64),
    (SeqBlock(base_sequence=0, block_size=0), "base_sequence", U64),
    (SeqBlock(base_sequence=0, block_size=0), "block_size", U64),
    *((METADATA, name, I64) for name in ("created_at", "received_at", "visible_at")),
    (METADATA, "message_id", U64),
    (METADATA, "retention_seconds", U32),
    (AVAILABLE, "message_id", U64),
    (AVAILABLE, "priority", U8),
    (AVAILABLE, "visible_at", I64),
    (AVAILABLE, "retention_deadline", I64),
    (AVAILABLE, "attempts", U16),
    (IN_FLIGHT, "message_id", U64),
    (IN_FLIGHT, "priority", U8),
    (IN_FLIGHT, "claimed_at", I64),
    (IN_FLIGHT, "lease_deadline", I64),
    (IN_FLIGHT, "attempts", U16),
    (DONE, "message_id", U64),
    (DONE, "done_at", I64),
    (DONE, "attempts", U16),
    (FAILED, "message_id", U64),
    (FAILED, "failed_at", I64),
    (FAILED, "attempts", U16),
    (CONFIG, "max_attempts", U16),
    (CONFIG, "done_retention_seconds", U32),
    (BacklogKey(queue_id=b"q", priority=1, message_id=1), "priority", U8),
    (ScheduleKey(queue_id=b"q", visible_at=1, message_id=1), "visible_at", I64),
    (ScheduleKey(queue_id=b"q", visible_at=1, message_id=1), "message_id", U64),
    (CursorKey(shard=1), "shard", U32),
    (Cursor(next_sequence=1), "next_sequence", U64),
    (ClockMark(now=1), "now", I64),
    (BlobReference(message_id=1), "message_id", U64),
    (ExpiryKey(deadline=1, message_id=1), "deadline", I64),
    (ExpiryKey(deadline=1, message_id=1), "message_id", U64),
    (Expiry(messages=1, size_bytes=1), "messages", U32),
    (RetentionFloor(done_bucket=1, failed_bucket=1), "failed_bucket", U64),
    (SystemOptions(flags=1), "flags", U8),
    (FinishedKey(shard=1), "shard", U32),
    (ExpiredEntriesKey(shard=1), "shard", U32),
    (BulkExpiryKey(deadline=1, number=1), "deadline", I64),
    (BulkExpiryKey(deadline=1, number=1), "number", U64),
    (BulkExpiry(shard=1, last_deadline=1), "shard", U32),
    (BulkFiled(next_number=1), "next_number", U64),
    (BulkWaiting(since=1), "since", I64),
    (FAILURE, "failed_at", I64),
    (COUNTERS, "scheduled_from", I64),
]


class Index:
    """A number of another library, which Python takes for an integer where it indexes."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Wrapping(int):
    """An integer whose sums are of 64 bits."""

    def __add__(self, other: int) -> int:
        return int(self) + other & 0xFFFF_FFFF_FFFF_FFFF


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


MISFITS = (10**5000, -(10**5000), 1.0, None, "1", Index(1), Index(-1), Index(2**70), Nameless())


@pytest.mark.parametrize(
    ("record", "field", "limits"),
    INTEGERS,
    ids=[f"{type(record).__name__}.{field}" for record, field, _ in INTEGERS],
)
def test_an_integer_that_does_not_fit_is_refused_and_named(
    record: Any, field: str, limits: tuple[int, int]
) -> None:
    low, high = limits
    for fitting in (low, high):
        replace(record, **{field: fitting}).encode()
    replace(record, **{field: True}).encode()
    for misfit in (low - 1, high + 1, *MISFITS):
        with pytest.raises(EncodingError) as caught:
            replace(record, **{field: misfit}).encode()
        assert (caught.value.record, caught.value.field) == (type(record).__name__, field)


class Encodable:
    def encode(self) -> bytes:
        return b"text"


TOO_LONG = "ü" * 32_768
JUST_FITS = "ü" * 32_767 + "x"

TEXTS: dict[str, Callable[[Any], Record]] = {
    "uri": lambda text: UriPayload(uri=text),
    "filter": lambda text: replace(CONFIG, filter=text),
    "headers[0].key": lambda text: replace(METADATA, headers=((text, ""),)),
    "headers[1].value": lambda text: replace(METADATA, headers=(("", ""), ("", text))),
    "consumer_ids[1]": lambda text: Attempts(consumer_ids=("", text)),
}


@pytest.mark.parametrize("field", TEXTS)
def test_a_text_that_does_not_fit_is_refused_and_named(field: str) -> None:
    build = TEXTS[field]
    build(JUST_FITS).encode()
    for misfit in (TOO_LONG, "\ud800", b"bytes", None, Encodable(), Nameless()):
        with pytest.raises(EncodingError) as caught:
            build(misfit).encode()
        assert caught.value.field == field


ARRAYS: dict[str, Callable[[int], Record]] = {
    "ActiveMessages.available": lambda n: ActiveMessages(available=(AVAILABLE,) * n, in_flight=()),
    "ActiveMessages.in_flight": lambda n: ActiveMessages(available=(), in_flight=(IN_FLIGHT,) * n),
    "DoneMessages.messages": lambda n: DoneMessages(messages=(DONE,) * n),
    "FailedMessages.messages": lambda n: FailedMessages(messages=(FAILED,) * n),
    "Attempts.consumer_ids": lambda n: Attempts(consumer_ids=("",) * n),
    "InlinePayload.data": lambda n: InlinePayload(data=bytes(n)),
}


@pytest.mark.parametrize("place", ARRAYS)
def test_an_array_of_65536_elements_is_refused_and_named(place: str) -> None:
    ARRAYS[place](65_535).encode()

    with pytest.raises(EncodingError, match=f"^{place.replace('.', '[.]')}: 65536 elements"):
        ARRAYS[place](65_536).encode()


def test_256_headers_are_refused() -> None:
    replace(METADATA, headers=(("k", "v"),) * 255).encode()

    with pytest.raises(EncodingError, match="256 headers are over the limit of 255"):
        replace(METADATA, headers=(("k", "v"),) * 256).encode()


def test_a_key_over_the_limit_is_refused_on_both_sides() -> None:
    longest = QueueConfigKey(queue_id=b"q" * (65_535 - 3))
    assert QueueConfigKey.decode(longest.encode()) == longest

    with pytest.raises(EncodingError, match="key of 65536 bytes"):
        QueueConfigKey(queue_id=b"q" * (65_535 - 2)).encode()
    with pytest.raises(EncodingError, match="key of 65536 bytes"):
        QueueConfigKey.decode(b"\x01\x06" + b"q" * (65_535 - 2) + b"\x00")


def test_the_limit_of_a_key_includes_what_follows_the_name() -> None:
    # 2 of version and type, 33 of the log's name with its slash, 1 terminator, 8 of sequence.
    longest = MetadataLogKey(sequence=1, instance="i" * (65_535 - 44))
    assert len(longest.encode()) == 65_535
    assert MetadataLogKey.decode(longest.encode()) == longest

    with pytest.raises(EncodingError, match=r"MetadataLogKey\.instance: makes a key of 65536"):
        MetadataLogKey(sequence=1, instance="i" * (65_535 - 43)).encode()
    with pytest.raises(EncodingError, match="key of 65536 bytes"):
        MetadataLogKey.decode(longest.encode()[:-9] + b"i" + longest.encode()[-9:])


def test_the_limit_of_a_key_includes_both_parts_of_an_idempotency_key() -> None:
    longest = IdempotencyRecordKey(namespace="n" * 1000, idempotency_key="k" * (65_535 - 1004))
    assert len(longest.encode()) == 65_535
    assert IdempotencyRecordKey.decode(longest.encode()) == longest

    with pytest.raises(EncodingError, match=r"\.idempotency_key: makes a key of 65536"):
        replace(longest, namespace="n" * 1001).encode()
    with pytest.raises(EncodingError, match="key of 65536 bytes"):
        IdempotencyRecordKey.decode(b"\x01\x07n" + longest.encode()[2:])


def test_an_instance_without_a_name_is_refused() -> None:
    with pytest.raises(EncodingError, match=r"MetadataLogKey\.instance: is empty"):
        MetadataLogKey(sequence=1, instance="").encode()


def test_a_sequence_block_past_the_last_number_is_refused_on_both_sides() -> None:
    with pytest.raises(EncodingError, match="past the last u64"):
        SeqBlock(base_sequence=2**64 - 1, block_size=1).encode()
    with pytest.raises(EncodingError, match="past the last u64"):
        SeqBlock.decode(b"\xff" * 8 + b"\x00" * 7 + b"\x01")


def test_a_sequence_block_is_judged_by_its_bytes() -> None:
    block = SeqBlock(base_sequence=Wrapping(2**64 - 1), block_size=Wrapping(1))
    assert block.end == 0

    with pytest.raises(EncodingError, match="past the last u64"):
        block.encode()


def an_active(**lists: Any) -> ActiveMessages:
    return replace(ActiveMessages(available=(), in_flight=()), **lists)


MALFORMED: dict[str, Callable[[], bytes]] = {
    "InlinePayload.data": InlinePayload(data=cast(Any, "text")).encode,
    "ActiveMessagesKey.queue_id": ActiveMessagesKey(queue_id=cast(Any, "text")).encode,
    "BacklogKey.queue_id": BacklogKey(queue_id=cast(Any, None), priority=1, message_id=1).encode,
    "BlobReferenceKey.blob_id": BlobReferenceKey(blob_id=b"short").encode,
    "MessageBlob.blob_id": MessageBlob(blob_id=b"short").encode,
    "TerminatedBytes.raw": lambda: encode_terminated_bytes(cast(Any, "x")),
    "Attempts.consumer_ids": Attempts(consumer_ids=cast(Any, "abc")).encode,
    "Attempts.consumer_ids[1]": Attempts(consumer_ids=("a", cast(Any, b"b"))).encode,
    "ActiveMessages.available": an_active(available=None).encode,
    "ActiveMessages.available[1]": an_active(available=(AVAILABLE, IN_FLIGHT)).encode,
    "ActiveMessages.in_flight[0]": an_active(in_flight=("text",)).encode,
    "DoneMessages.messages[0]": DoneMessages(messages=cast(Any, (FAILED,))).encode,
    "FailedMessages.messages": FailedMessages(messages=cast(Any, {FAILED})).encode,
    "QueueCounters.backlog[0]": replace(COUNTERS, backlog=cast(Any, (DONE,))).encode,
    "DoneMessages.messages": lambda: DoneMessages.join(cast(Any, ["text"])),
    "ActiveMessages.in_flight": lambda: ActiveMessages.join([], cast(Any, None)),
}


@pytest.mark.parametrize("place", MALFORMED)
def test_what_has_the_wrong_type_is_refused_and_named(place: str) -> None:
    with pytest.raises(EncodingError) as caught:
        MALFORMED[place]()
    assert f"{caught.value.record}.{caught.value.field}" == place


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        (None, "headers"),
        (5, "headers"),
        (iter([("a", "b")]), "headers"),
        ("ab", "headers"),
        ((("a", "b", "c"),), "headers[0]"),
        ((("a", "b"), ("a",)), "headers[1]"),
        ((1,), "headers[0]"),
        ((None,), "headers[0]"),
        (("ab",), "headers[0]"),
        (({"a", "b"},), "headers[0]"),
        (((1, "b"),), "headers[0].key"),
    ],
)
def test_headers_that_are_no_pairs_are_refused_and_named(headers: Any, field: str) -> None:
    with pytest.raises(EncodingError) as caught:
        replace(METADATA, headers=headers).encode()
    assert (caught.value.record, caught.value.field) == ("MessageMetadata", field)

    with pytest.raises(EncodingError):
        encode_headers(headers)


@pytest.mark.parametrize(
    "record",
    [
        ActiveMessagesKey(queue_id=cast(Any, "x" * 10_000_000)),
        InlinePayload(data=cast(Any, "x" * 10_000_000)),
        PayloadKey(message_id=cast(Any, "x" * 10_000_000)),
        PayloadKey(message_id=1 << 10_000_000),
        UriPayload(uri=cast(Any, bytes(1_000_000))),
        BlobReferenceKey(blob_id=bytes(1_000_000)),
        Attempts(consumer_ids=cast(Any, ["x" * 10_000_000, 5])),
        replace(METADATA, headers=cast(Any, ("x" * 10_000_000,))),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_message_of_an_error_is_short_whatever_was_given(record: Record) -> None:
    with pytest.raises(EncodingError) as caught:
        record.encode()
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_are_frozen_slotted_dataclasses_with_keyword_only_fields(
    record: type[Record],
) -> None:
    assert is_dataclass(record)
    assert record.__dataclass_params__.frozen
    assert all(field.kw_only for field in fields(record))
    assert "__dict__" not in dir(record)


def test_an_error_names_the_record_the_field_the_offset_and_the_bytes() -> None:
    data = METADATA.encode()[:-1] + b"\x01\x03\x00ab"

    with pytest.raises(EncodingError) as caught:
        MessageMetadata.decode(data)

    error = caught.value
    assert (error.record, error.field, error.offset) == ("MessageMetadata", "headers[0].key", 39)
    assert error.data == data
    assert str(error) == (
        "MessageMetadata.headers[0].key at offset 39: needs 3 bytes, 2 left (bytes … 03 00 61 62)"
    )


NAME = "01016f70656e646174612d71756575652f6d657373616765732f6d657461646174612f"

BROKEN: list[tuple[type[Record], str, str | None, int]] = [
    (ActiveMessagesKey, "010261010400", "queue_id", 3),
    (ActiveMessagesKey, "01020101610100", "queue_id", 5),
    (ActiveMessagesKey, "0102010162ff00", "queue_id", 5),
    (ActiveMessagesKey, "010261", "queue_id", 3),
    (MetadataLogKey, NAME + "61c3000000000000000001", "log_name", 36),
    (MetadataLogKey, NAME + "01010102c0000000000000000001", "log_name", 39),
    (MetadataLogKey, NAME + "610103000000000000000001", "log_name", 36),
    (IdempotencyRecordKey, "0107010180006b00", "namespace", 4),
    (IdempotencyRecordKey, "01076e0001026beda08000", "idempotency_key", 7),
    (UriPayload, "0204006162c0af", "uri", 5),
    (Attempts, "0200010061020062ff", "consumer_ids[1]", 8),
    (Failure, "00" * 27 + "0000030061e282", "error", 32),
    (QueueConfig, "0100000300000000", "done_retention_seconds", 5),
    (PayloadKey, "010100000000000001", "message_id", 2),
    (DoneMessages, "0200" + "00" * 18 + "01" * 15, "messages[1].done_at", 28),
    (ScheduleKey, "010c7100" + "80" * 8 + "00", "message_id", 12),
    (QueueConfigKey, "0106710000", None, 4),
]


@pytest.mark.parametrize(
    ("record", "data", "field", "offset"),
    BROKEN,
    ids=[f"{record.__name__}-{field}-{offset}" for record, _, field, offset in BROKEN],
)
def test_a_decoding_error_says_exactly_where(
    record: type[Record], data: str, field: str | None, offset: int
) -> None:
    with pytest.raises(EncodingError) as caught:
        record.decode(bytes.fromhex(data))
    assert (caught.value.field, caught.value.offset) == (field, offset)
