"""The log has the same columns with the C helper as without it, and damage is found by both."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import odq_encodings
from odq_encodings import (
    EncodingError,
    MessageMetadata,
    MetadataColumns,
    decode_headers,
    encode_metadata_log_key,
    metadata_columns,
)
from opendata_queue.log.metadata_log import MetadataLog
from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.store import Database, Objects, Rows, ScannedRows, StoreSettings
from opendata_queue.store.rows import log_columns
from opendata_queue.store.rows.log_columns import read_log
from tests.format.golden import _data

GOLDEN = Path(odq_encodings.__file__).parents[1] / "golden" / "metadata_log.json"
NAMES = ["type", "région", "😀", "", "k"]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
entries = st.builds(
    MessageMetadata,
    message_id=st.integers(0, 2**64 - 1),
    created_at=st.integers(-(2**63), 2**63 - 1),
    received_at=st.integers(-(2**63), 2**63 - 1),
    visible_at=st.integers(-(2**63), 2**63 - 1),
    retention_seconds=st.integers(0, 2**32 - 1),
    headers=st.lists(st.tuples(st.sampled_from(NAMES) | text, text), max_size=5).map(tuple),
)
wanted_names = st.none() | st.sets(st.sampled_from(NAMES) | text, max_size=4)


def packed(values: Sequence[bytes]) -> bytes:
    """Rows as the binding returns them, some of which expire."""
    rows = [struct.pack(">i", len(values))]
    for number, value in enumerate(values):
        key = encode_metadata_log_key(number)
        rows += (struct.pack(">i", len(key)), key, struct.pack(">i", len(value)), value)
        rows.append(struct.pack(">qqB", number, 7, number % 2) + bytes(8 * (number % 2)))
    return b"".join(rows)


def natively(values: Sequence[bytes], names: Collection[str] | None) -> MetadataColumns | None:
    native = log_columns._native()
    if native is None:
        pytest.skip("there is no C helper")
    return log_columns._read(native, packed(values), len(values), log_columns._encoded(names))


@given(st.lists(entries, max_size=12), wanted_names)
def test_the_columns_are_the_same_with_the_helper_as_without(
    messages: list[MessageMetadata], names: set[str] | None
) -> None:
    values = [message.encode() for message in messages]

    assert natively(values, names) == metadata_columns(values, names)


@given(st.lists(entries, min_size=1, max_size=8), wanted_names)
def test_columns_hold_what_the_records_do(
    messages: list[MessageMetadata], names: set[str] | None
) -> None:
    columns = read_log(ScannedRows(packed([one.encode() for one in messages])), names)

    found = [dict(message.headers) for message in messages]
    if names is not None:
        found = [{k: v for k, v in one.items() if k in names} for one in found]
    assert [decode_headers(columns.headers[kind]) for kind in columns.kinds] == found
    assert len(set(columns.headers)) == len(columns.headers)
    fixed = zip(*columns[:5], strict=True)
    assert list(fixed) == [
        (m.message_id, m.created_at, m.received_at, m.visible_at, m.retention_seconds)
        for m in messages
    ]


def test_golden_vectors_are_read_by_column() -> None:
    values = [
        _data(vector["value_hex"])
        for vector in json.loads(GOLDEN.read_text())
        if vector.get("value_record") == "MessageMetadata"
    ]
    assert len(values) > 3

    assert natively(values, None) == metadata_columns(values)
    assert natively(values, {"topic"}) == metadata_columns(values, {"topic"})


@given(entries, st.integers(0, 200), st.binary(max_size=3), st.integers(0, 3), wanted_names)
@example(MessageMetadata(
    message_id=0, created_at=0, received_at=0, visible_at=0, retention_seconds=0,
    headers=(("k", "\u0800"),)), 42, b"\xe0\x80\x80", 3, set(),
)  # fmt: skip
@example(MessageMetadata(
    message_id=0, created_at=0, received_at=0, visible_at=0, retention_seconds=0,
    headers=(("k", "\ue000"),)), 42, b"\xed\xa0\x80", 3, set(),
)  # fmt: skip
def test_the_helper_refuses_exactly_what_decoding_refuses(
    message: MessageMetadata, place: int, new: bytes, removed: int, names: set[str] | None
) -> None:
    """Also in a header that is not wanted: damage is never passed over."""
    value = message.encode()
    place = min(place, len(value))
    broken = value[:place] + new + value[place + removed :]
    try:
        MessageMetadata.decode(broken)
    except EncodingError:
        assert natively([value, broken], names) is None
        with pytest.raises(EncodingError):
            read_log(ScannedRows(packed([value, broken])), names)
    else:
        assert natively([value, broken], names) == metadata_columns([value, broken], names)


@given(st.binary(min_size=1, max_size=6))
def test_the_helper_takes_for_text_what_python_does(raw: bytes) -> None:
    fixed = bytes(36) + b"\x01" + b"\x00\x00" + struct.pack("<H", len(raw))
    try:
        raw.decode()
    except UnicodeDecodeError:
        assert natively([fixed + raw], None) is None
    else:
        assert natively([fixed + raw], None) is not None


@given(st.lists(entries, max_size=3), st.integers(1, 30))
def test_rows_that_are_cut_off_are_refused(messages: list[MessageMetadata], removed: int) -> None:
    native = log_columns._native()
    if native is None:
        pytest.skip("there is no C helper")
    data = packed([message.encode() for message in messages])
    cut = data[: max(0, len(data) - removed)]

    assert log_columns._read(native, cut, len(messages), None) is None
    longer = data + bytes(removed)
    assert log_columns._read(native, longer, len(messages), None) is None
    assert log_columns._read(native, data, len(messages) + 1, None) is None


async def test_a_log_entry_that_is_damaged_is_named(root: str) -> None:
    database = await Database.open(Objects.open(root, StoreSettings()), "messages/00000")
    rows = Rows()
    key = encode_metadata_log_key(3)
    rows.put(encode_metadata_log_key(2), bytes(37))
    rows.put(key, bytes(36) + b"\x01")
    await database.commit(rows)
    try:
        with pytest.raises(CorruptStoreError, match="MessageMetadata") as raised:
            async for _ in MetadataLog(database).chunks(frozenset):
                pass
        assert raised.value.key == key
    finally:
        await database.close()
