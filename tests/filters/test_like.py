"""Patterns against long texts, and what a filter may ask of them (RFC 0005, Cost)."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendata_queue.filters import (
    MAX_SEARCHES,
    Filter,
    FilterError,
    SystemFields,
)
from opendata_queue.filters.like import SHORT_TEXT, matcher
from tests.filters import interpreter

SYS = SystemFields(id=5, created_at=1_000, received_at=2_000, visible_at=3_000)

_pieces = st.sampled_from(["%", "_", "a", "b", "a_b", "_a", "aa", "é", "\n", "\U0001f600", "!%"])
_letters = st.sampled_from(["a", "b", "ab", "é", "\n", "\U0001f600", "%"])
_runs = st.tuples(_letters, st.integers(1, 90))


@given(
    st.lists(_pieces, max_size=9).map("".join),
    st.lists(_runs, min_size=1, max_size=6).map(lambda runs: "".join(a * n for a, n in runs)),
)
@settings(max_examples=300)
def test_long_texts_are_matched_like_short_ones(pattern: str, text: str) -> None:
    """The text is made longer than ``SHORT_TEXT`` by what its end is made of."""
    long = text + text[-1] * max(0, SHORT_TEXT + 1 - len(text))

    for one in (text, long):
        assert matcher(pattern, "!")(one) is interpreter.is_like(one, pattern, "!")


@pytest.mark.parametrize(
    ("pattern", "end", "expected"),
    [
        ("%a_c%", "abc", True),
        ("%a_c", "abc", True),
        ("%a_c%d", "abcd", True),
        ("%a_c%cd", "abcd", False),
        ("x%a_c_%", "abc", False),
        ("x%a_c_%", "abcd", True),
        ("x%b_b%b_b%", "bbbbbb", True),
        ("x%b_b%b_b%", "bbbbb", False),
        ("x%_%_", "", True),
        ("%" + "_".join(chr(0x100 + i) for i in range(120)) + "%", "", False),
        (
            "%" + "_".join(chr(0x100 + i) for i in range(120)) + "%",
            "-".join(chr(0x100 + i) for i in range(120)),
            True,
        ),
    ],
)
def test_segments_with_gaps_are_found_at_the_end_of_a_long_text(
    pattern: str, end: str, expected: bool
) -> None:
    assert matcher(pattern)("x" * 65_000 + end) is expected


def test_a_long_text_is_not_tried_at_each_of_its_places() -> None:
    """Counted, not timed: a regular expression that searches would ask for each character."""
    asked: list[str] = []

    def trace(frame: object, event: str, function: object) -> None:
        if event == "c_call":
            asked.append(getattr(function, "__name__", ""))

    like = matcher("%a" + "_" * 200 + "b%c%")
    sys.setprofile(trace)
    try:
        assert not like("a" * 65_535)
    finally:
        sys.setprofile(None)

    assert "fullmatch" not in asked
    assert len(asked) < 1_000


def test_the_searches_of_a_filter_are_limited_when_it_is_made() -> None:
    most = " OR ".join(["a LIKE '%x%'"] * MAX_SEARCHES)
    Filter.given(most)

    with pytest.raises(FilterError, match="counts 17, over the limit of 16"):
        Filter.given(f"{most}; a LIKE '%y%'")
    Filter.given(f"{most} OR a LIKE 'y%' OR a LIKE '%y' OR a LIKE 'y' OR a LIKE '%_%'")


def test_searches_with_a_gap_count_by_their_length() -> None:
    Filter.given("a LIKE '%x_y%x_y%x_y%' OR a LIKE '%_x_%'")
    Filter.given("a LIKE '%x_" + "y" * 190 + "%'")

    with pytest.raises(FilterError, match="counts 20, over the limit of 16"):
        Filter.given("a LIKE '%x_y%x_y%x_y%' AND NOT a LIKE '%x_y%'")
    with pytest.raises(FilterError, match="counts 17, over the limit of 16"):
        Filter.given("a LIKE '%x_" + "y" * 191 + "%'")


def test_a_filter_that_is_stored_is_read_whatever_it_costs() -> None:
    costly = Filter.parse(" OR ".join(["a LIKE '%x_y%'"] * 100))

    assert costly.matches({"a": "-" * 500 + "x-y"}, SYS)
