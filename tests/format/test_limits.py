"""Values that no record can hold are refused, by name, and never cut to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    Attempts,
    AttemptsKey,
    AvailableMessage,
    DoneMessage,
    DoneMessages,
    EncodingError,
    FailedMessage,
    FailedMessages,
    InFlightMessage,
    InlinePayload,
    MessageMetadata,
    MetadataLogKey,
    PayloadKey,
    QueueConfig,
    QueueConfigKey,
    Record,
    SeqBlock,
    UriPayload,
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
]


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
    for misfit in (low - 1, high + 1, 1.0, None, "1"):
        with pytest.raises(EncodingError) as caught:
            replace(record, **{field: misfit}).encode()
        assert (caught.value.record, caught.value.field) == (type(record).__name__, field)


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
    for misfit in (TOO_LONG, "\ud800", b"bytes", None):
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
    with pytest.raises(EncodingError, match=r"MetadataLogKey\.instance: makes a key of"):
        MetadataLogKey(sequence=1, instance="i" * 65_535).encode()


def test_an_instance_without_a_name_is_refused() -> None:
    with pytest.raises(EncodingError, match=r"MetadataLogKey\.instance: is empty"):
        MetadataLogKey(sequence=1, instance="").encode()


def test_a_sequence_block_past_the_last_number_is_refused_on_both_sides() -> None:
    with pytest.raises(EncodingError, match="past the last u64"):
        SeqBlock(base_sequence=2**64 - 1, block_size=1).encode()
    with pytest.raises(EncodingError, match="past the last u64"):
        SeqBlock.decode(b"\xff" * 8 + b"\x00" * 7 + b"\x01")


@pytest.mark.parametrize(
    "record",
    [InlinePayload(data="text"), ActiveMessagesKey(queue_id="text")],  # type: ignore[arg-type]
)
def test_text_where_bytes_belong_is_refused(record: Record) -> None:
    with pytest.raises(EncodingError, match="is not bytes"):
        record.encode()


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
