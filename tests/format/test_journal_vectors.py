"""The literal bytes of RFC 0011 and RFC 0013, in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from odq_encodings import (
    JOURNAL_STATE_KEY,
    EncodingError,
    JournalMark,
    JournalRecord,
    JournalState,
    find_journal_record,
    read_journal_records,
)
from opendata_queue.store import PackedRows, Rows
from opendata_queue.store.rows.rows import Op
from tests.format.golden import GOLDEN

VECTORS: list[dict[str, Any]] = json.loads((GOLDEN / "journal.json").read_text())
STATES: list[dict[str, Any]] = json.loads((GOLDEN / "journal_state.json").read_text())
OPS = {"put": Op.PUT, "put with ttl": Op.PUT_TTL, "delete": Op.DELETE}

each_vector = pytest.mark.parametrize("vector", VECTORS, ids=[one["name"] for one in VECTORS])


def record_of(vector: dict[str, Any]) -> JournalRecord:
    return JournalRecord(
        salt=int(vector["salt"]),
        sequence=int(vector["sequence"]),
        flushed=int(vector["flushed"]),
        rows=bytes.fromhex(vector["rows_hex"]),
        mark=mark_of(vector["mark"]) if "mark" in vector else None,
    )


def mark_of(fields: dict[str, Any]) -> JournalMark:
    return JournalMark(
        wal=int(fields["wal"]),
        manifest=int(fields["manifest"]),
        manifest_check=int(fields["manifest_check"]),
        compactions=int(fields["compactions"]),
        compactions_check=int(fields["compactions_check"]),
        is_closed=fields["is_closed"],
    )


@each_vector
def test_rows_are_packed_to_the_golden_bytes_and_back(vector: dict[str, Any]) -> None:
    rows = Rows()
    expected = []
    for one in vector["rows"]:
        op, ttl_ms = OPS[one["op"]], int(one["ttl_ms"])
        key, value = bytes.fromhex(one["key_hex"]), bytes.fromhex(one["value_hex"])
        expected.append((op, key, value, ttl_ms))
        if op is Op.DELETE:
            rows.delete(key)
        else:
            rows.put(key, value, ttl_ms=ttl_ms or None)

    assert rows.packed().hex() == vector["rows_hex"]
    assert list(PackedRows(rows.packed(), len(rows))) == expected


@each_vector
def test_a_record_encodes_to_the_golden_bytes_and_back(vector: dict[str, Any]) -> None:
    record, data = record_of(vector), bytes.fromhex(vector["record_hex"])

    assert record.encode() == data
    assert list(read_journal_records(data)) == [record]


@each_vector
def test_a_record_that_is_cut_anywhere_is_none(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["record_hex"])

    assert all(list(read_journal_records(data[:size])) == [] for size in range(len(data)))


@each_vector
def test_what_comes_behind_a_record_out_of_sequence_is_of_an_earlier_use(
    vector: dict[str, Any],
) -> None:
    record, data = record_of(vector), bytes.fromhex(vector["record_hex"])
    next_one = replace(record, sequence=record.sequence + 1)
    forged = replace(next_one, salt=(record.salt + 1) % (1 << 32))

    assert list(read_journal_records(data + data)) == [record]
    assert list(read_journal_records(data + next_one.encode() + data)) == [record, next_one]
    assert list(read_journal_records(data + forged.encode())) == [record]
    assert list(read_journal_records(next_one.encode(), record)) == [next_one]
    assert list(read_journal_records(data, next_one)) == []


@each_vector
def test_a_newer_record_is_found_behind_a_damaged_one_and_an_older_or_forged_one_is_not(
    vector: dict[str, Any],
) -> None:
    record, data = record_of(vector), bytes.fromhex(vector["record_hex"])
    newer = replace(record, sequence=record.sequence + 2)
    forged = replace(newer, salt=(record.salt + 1) % (1 << 32))
    garbage = b"odj\x02 is no record" * 3

    assert find_journal_record(garbage + newer.encode(), record.salt, record.sequence) == newer
    assert find_journal_record(garbage + data, record.salt, record.sequence) is None
    assert find_journal_record(forged.encode(), record.salt, record.sequence) is None
    assert find_journal_record(newer.encode()[:-1], record.salt, record.sequence) is None


@pytest.mark.parametrize("vector", STATES, ids=[one["name"] for one in STATES])
def test_the_state_of_a_journal_encodes_to_the_golden_bytes_and_back(
    vector: dict[str, Any],
) -> None:
    state = JournalState(number=int(vector["number"]), is_closed=vector["is_closed"])

    assert JOURNAL_STATE_KEY.hex() == vector["key_hex"]
    assert state.encode().hex() == vector["value_hex"]
    assert JournalState.decode(state.encode()) == state
    for wrong in (b"", state.encode()[:-1], state.encode() + b"x", state.encode()[:-1] + b"\x03"):
        with pytest.raises(EncodingError, match="JournalState"):
            JournalState.decode(wrong)
