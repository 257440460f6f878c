"""Arrow batches as messages: the fast way writes what the careful way writes."""

from __future__ import annotations

from itertools import groupby
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_queue.log.cache import CheckedMessage
from opendata_queue.log.rows import put_message
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.spark.rows import plain_messages as plain_messages_module
from opendata_queue.spark.rows.columns import Layout, checked_messages, plain_messages
from opendata_queue.spark.rows.plain_messages import PlainMessages
from opendata_queue.store import Rows

Row = tuple[int, bytes, bytes, int]

NOW_MS = 1_790_000_000_000
GRACE_MS = 86_400_000
STRINGS = pa.map_(pa.string(), pa.string())
ALL = Layout(
    columns=("payload", "headers", "region", "price", "created_at", "visible_at",
             "retention_seconds"),
    header_columns=("region", "price"),
)  # fmt: skip


def batch(**columns: Any) -> Any:
    return pa.RecordBatch.from_pydict(columns)


def texts(**limits: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), **limits)


rows = st.lists(
    st.fixed_dictionaries(
        {
            "payload": st.binary(max_size=20),
            "headers": st.none()
            | st.dictionaries(texts(max_size=3), texts(max_size=5), max_size=3),
            "region": st.none() | texts(max_size=4),
            "price": st.none() | st.integers(-5, 5),
            "created_at": st.none() | st.integers(-(2**40), 2**40),
            "visible_at": st.none() | st.integers(-(2**40), 2**40),
            "retention_seconds": st.none() | st.integers(0, 2**32 - 1),
        }
    ),
    min_size=1,
    max_size=8,
)


def arrow(found: list[dict[str, Any]], string: Any = None, binary: Any = None) -> Any:
    string = string or pa.string()
    return batch(
        payload=pa.array([one["payload"] for one in found], binary or pa.binary()),
        headers=pa.array(
            [None if one["headers"] is None else list(one["headers"].items()) for one in found],
            pa.map_(string, string),
        ),
        region=pa.array([one["region"] for one in found], string),
        price=pa.array([one["price"] for one in found], pa.int32()),
        created_at=pa.array(
            [one["created_at"] and one["created_at"] * 1000 for one in found],
            pa.timestamp("us", "UTC"),
        ),
        visible_at=pa.array([one["visible_at"] for one in found], pa.int64()),
        retention_seconds=pa.array([one["retention_seconds"] for one in found], pa.int64()),
    )


def packed_rows(plain: PlainMessages, first_id: int) -> list[Row]:
    return [row for some in plain.packed(first_id, NOW_MS, GRACE_MS) for row in some]


def put_rows(checked: list[CheckedMessage], first_id: int) -> list[Row]:
    """What publishing writes."""
    rows = Rows()
    for message_id, one in enumerate(checked, first_id):
        put_message(rows, message_id, one, NOW_MS, GRACE_MS)
    return list(rows)


@given(rows, st.booleans(), st.integers(1, 400), st.data())
def test_both_ways_make_the_same_rows(
    found: list[dict[str, Any]], large: bool, write_bytes: int, data: st.DataObject
) -> None:
    whole = arrow(found, pa.large_string(), pa.large_binary()) if large else arrow(found)
    start = data.draw(st.integers(0, len(found) - 1))
    part = whole.slice(start)
    first_id = data.draw(st.integers(0, 2**31 - 1)) << 32 | 2**32 - 9

    checked, bad = checked_messages(part, ALL)
    plain = plain_messages(part, ALL)

    assert bad == []
    conflict = any(
        key in ("region", "price") for one in found[start:] for key in (one["headers"] or ())
    )
    assert (plain is None) == conflict
    if plain is None:
        return
    with patch.object(plain_messages_module, "WRITE_BYTES", write_bytes):
        assert packed_rows(plain, first_id) == put_rows(checked, first_id)
        for some in plain.packed(first_id, NOW_MS, GRACE_MS):
            assert len(list(some)) == len(some)
            assert some.size_bytes == sum(len(key) + len(value) for _, key, value, _ in some)
            assert len(some) == 2 or len(some.packed()) <= write_bytes
    assert list(plain.retentions()) == sorted({one.retention_seconds for one in checked})
    assert [
        (run.retention_seconds, run.messages, run.size_bytes) for run in plain.expiring_runs()
    ] == [
        (seconds, len(run), sum(one.size_bytes for one in run))
        for seconds, run in (
            (seconds, list(run)) for seconds, run in groupby(checked, lambda c: c.retention_seconds)
        )
        if seconds
    ]


def test_payloads_of_all_lengths_are_packed_as_they_are() -> None:
    found = batch(payload=pa.array([b"", bytes(65_535), b"x" * 256], pa.binary()))
    layout = Layout(columns=("payload",))
    plain = plain_messages(found, layout)
    assert plain is not None
    checked, _ = checked_messages(found, layout)

    assert packed_rows(plain, 7) == put_rows(checked, 7)
    assert plain.retentions() == [0]
    assert list(plain.expiring_runs()) == []


def test_of_a_header_that_comes_twice_the_column_counts() -> None:
    found = batch(
        payload=["p"], headers=pa.array([[("region", "map")]], STRINGS), region=["column"]
    )
    layout = Layout(columns=("payload", "headers", "region"), header_columns=("region",))

    (message,), bad = checked_messages(found, layout)

    assert plain_messages(found, layout) is None
    assert (message.headers, bad) == ({"region": "column"}, [])


PAYLOAD_AND_HEADERS = Layout(columns=("payload", "headers"))
UNDECODABLE = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"payload": pa.array([None], pa.binary())}, "payload is null"),
        ({"payload": [b"p"], "payload_uri": ["s3://x/y"]}, "exclude each other"),
        ({"payload_uri": ["no scheme"]}, "no scheme"),
        (
            {"payload": [b"p"], "headers": [[(f"h{n}", "v") for n in range(256)]]},
            "256 headers",
        ),
        ({"payload": [b"p"], "headers": [[("h", "v" * 65_536)]]}, "65536 bytes"),
        ({"payload": [b"p"], "headers": [[("h" * 65_536, "v")]]}, "65536 bytes"),
        (
            {"payload": [b"p"], "headers": [[(f"h{n}", "v" * 60_000) for n in range(18)]]},
            "headers have 1080044 bytes in all, over the limit of 1048576",
        ),
        ({"payload": [b"p"], "region": UNDECODABLE}, "'region' is no UTF-8: fffe"),
        ({"payload": [b"p"], "created_at": ["yesterday"]}, "created_at is 'yesterday'"),
        ({"payload": [b"p"], "visible_at": ["2026-02-30T00:00:00Z"]}, "2026-02-30"),
        ({"payload": [b"p"], "retention_seconds": [-1]}, "retention_seconds is -1"),
        ({"payload": [b"p"], "retention_seconds": [1 << 32]}, "retention_seconds"),
        ({"payload": [b"p"], "retention_seconds": ["abc"]}, "retention_seconds is 'abc'"),
        ({"payload": [b"p"], "retention_seconds": [""]}, "retention_seconds is ''"),
        ({"payload": [b"p"], "retention_seconds": ["0x10"]}, "not a whole number of seconds"),
        ({"payload": [b"p"], "retention_seconds": ["1_000"]}, "not a whole number of seconds"),
        ({"payload": [b"p"], "retention_seconds": ["-1"]}, "not a whole number of seconds"),
        ({"payload": [b"p"], "retention_seconds": ["9" * 19]}, "not a whole number of seconds"),
        ({"payload": [b"p"], "retention_seconds": [str(1 << 32)]}, "retention_seconds"),
        ({"payload": [b"p"], "retention_seconds": UNDECODABLE}, "no UTF-8: fffe"),
        ({"payload": [b"p"], "_corrupt_record": ["{broken"]}, "Spark could not parse it"),
    ],
)
def test_a_bad_row_is_found_with_its_reason(columns: dict[str, Any], reason: str) -> None:
    if "headers" in columns:
        columns = columns | {"headers": pa.array(columns["headers"], STRINGS)}
    header_columns = ("region",) if "region" in columns else ()
    layout = Layout(columns=tuple(columns), header_columns=header_columns)
    found = batch(**columns)

    checked, bad = checked_messages(found, layout)

    assert plain_messages(found, layout) is None
    assert checked == []
    assert [one.place for one in bad] == [0]
    assert reason in bad[0].reason


def test_good_rows_around_a_bad_one_keep_their_order() -> None:
    found = batch(payload=[b"a", None, b"c"])

    checked, bad = checked_messages(found, Layout(columns=("payload",)))

    assert [one.payload for one in checked] == [b"a", b"c"]
    assert [one.place for one in bad] == [1]


def test_times_may_be_text() -> None:
    found = batch(
        payload=[b"p", b"p"],
        created_at=["2026-01-01T00:00:00Z", "1969-12-31T23:59:59.5"],
        visible_at=["2026-01-01T02:00:00+02:00", None],
    )
    layout = Layout(columns=("payload", "created_at", "visible_at"))

    checked, bad = checked_messages(found, layout)

    assert bad == []
    assert [one.given_times for one in checked] == [
        (1_767_225_600_000, 1_767_225_600_000, 0),
        (-500, None, 0),
    ]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_retentions_may_be_text(kind: Any) -> None:
    found = batch(
        payload=[b"p"] * 4, retention_seconds=pa.array(["60", " 07 ", None, "4294967295"], kind)
    )
    layout = Layout(columns=("payload", "retention_seconds"))

    checked, bad = checked_messages(found, layout)
    plain = plain_messages(found, layout)

    assert bad == []
    assert [one.retention_seconds for one in checked] == [60, 7, 0, 4294967295]
    assert plain is not None
    assert packed_rows(plain, 7) == put_rows(checked, 7)


def test_rows_that_spark_could_parse_stay_plain() -> None:
    found = batch(payload=[b"p", b"p"], _corrupt_record=pa.nulls(2, pa.string()))

    plain = plain_messages(found, Layout(columns=("payload", "_corrupt_record")))

    assert plain is not None
    assert len(plain) == 2


def test_a_header_that_is_null_is_no_header() -> None:
    found = batch(payload=["p"], headers=pa.array([[("a", None), ("b", "1")]], STRINGS))

    (message,), bad = checked_messages(found, PAYLOAD_AND_HEADERS)

    assert (message.headers, bad) == ({"b": "1"}, [])


@pytest.mark.parametrize(
    ("columns", "header_columns", "reason"),
    [
        (("payload", "other"), (), "'other' is none of payload"),
        (("payload",), ("region",), "'region', which is no column"),
        (("headers",), (), "neither a column 'payload'"),
    ],
)
def test_columns_that_make_no_messages_are_refused(
    columns: tuple[str, ...], header_columns: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        Layout(columns=columns, header_columns=header_columns)
