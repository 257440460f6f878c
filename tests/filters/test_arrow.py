"""Whole batches at once, with the same answers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendata_queue.filters import Filter, SystemFields
from tests.filters.strategies import filters, repeated_headers, system_fields

pa = pytest.importorskip("pyarrow")
arrow = pytest.importorskip("opendata_queue.filters.arrow")

Pairs = list[tuple[str, str]]
Messages = list[tuple[Pairs | None, SystemFields]]
MAP = pa.map_(pa.string(), pa.string())
LARGE_MAP = pa.map_(pa.large_string(), pa.large_string())


def columns(messages: Messages, map_type: object = MAP) -> tuple[Any, Any]:
    headers = pa.array([pairs for pairs, _ in messages], map_type)
    sys = [pa.array([fields[i] for _, fields in messages], pa.int64()) for i in range(4)]
    return headers, arrow.SystemColumns(*sys)


def assert_agrees(parsed: Filter, messages: Messages, map_type: object = MAP) -> None:
    headers, sys = columns(messages, map_type)
    expected = [(dict(pairs or ()), fields) for pairs, fields in messages]

    truths = arrow.evaluate_arrow(parsed, headers, sys)
    priorities = arrow.priority_arrow(parsed, headers, sys)

    assert truths.type == pa.bool_()
    assert priorities.type == pa.uint8()
    assert truths.to_pylist() == [parsed.evaluate(*message) for message in expected]
    assert priorities.to_pylist() == [parsed.priority_if_match(*message) for message in expected]


@given(
    filters(),
    st.lists(st.tuples(st.none() | repeated_headers, system_fields), max_size=5),
    st.sampled_from([MAP, LARGE_MAP]),
)
@settings(max_examples=300)
def test_arrow_agrees_with_the_compiled_filter(
    parsed: Filter, messages: Messages, map_type: object
) -> None:
    assert_agrees(parsed, messages, map_type)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "FALSE",
        "a = 0.3",
        "a < 9007199254740993",
        "a > 'é'",
        "a LIKE '_'",
        "a LIKE '%_'",
        "a NOT LIKE 'a%b%c'",
        "a IN (1, 2.5)",
        "a NOT IN ('1', '')",
        "a = TRUE OR a <> TRUE",
        "sys.id IN (5) AND sys.created_at > -9223372036854775808.5",
        "a > 0 PRIORITY a; b IS NULL PRIORITY 3",
    ],
)
def test_arrow_agrees_on_texts_that_are_nearly_numbers(text: str) -> None:
    values = [
        "0.3", "0.30000000000000004", "9007199254740993", "1", "01", "+1", "-1", "1.", ".5", "1e5",
        " 1", "1\n", "٣", "１", "", "inf", "nan", "256", "255", "99999999999999999999",
        "100000000000000000000", "0.000000000000000001", "0.0000000000000000001", "\U0001f600",
        "é", "e\u0301", "a\nb\nc", "true", "false", "TRUE", "1\x00", "2.50",
    ]  # fmt: skip
    sys = SystemFields(5, -(2**63), 0, 2**63 - 1)

    assert_agrees(Filter.parse(text), [([("a", value)], sys) for value in values])


def test_of_a_header_that_comes_twice_the_last_one_counts() -> None:
    messages: Messages = [([("a", "1"), ("b", "x"), ("a", "2")], SystemFields(0, 0, 0, 0))]

    assert_agrees(Filter.parse("a = 2"), messages)
    headers, sys = columns(messages)
    assert arrow.evaluate_arrow(Filter.parse("a = 2"), headers, sys).to_pylist() == [True]


def test_a_slice_of_a_batch_is_a_batch() -> None:
    messages: Messages = [([("a", str(i))], SystemFields(i, 0, 0, 0)) for i in range(10)]
    headers, sys = columns(messages)
    parsed = Filter.parse("a >= 5 AND sys.id < 8")

    truths = arrow.evaluate_arrow(
        parsed, headers.slice(4, 5), arrow.SystemColumns(*(each.slice(4, 5) for each in sys))
    )

    assert truths.to_pylist() == [False, True, True, True, False]


def test_ids_may_be_unsigned() -> None:
    sys = arrow.SystemColumns(pa.array([2**64 - 1], pa.uint64()), *[pa.array([0])] * 3)
    parsed = Filter.parse("sys.id = 18446744073709551615")

    assert arrow.evaluate_arrow(parsed, pa.array([[]], MAP), sys).to_pylist() == [True]


def test_filters_work_without_pyarrow() -> None:
    code = "import sys, opendata_queue.filters; sys.exit('pyarrow' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
