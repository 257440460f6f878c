"""RFC 0005 says what the code does: its examples are run, its limits and words compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opendata_queue.filters import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_PATTERN_CHARACTERS,
    MAX_SEARCHES,
    MAX_TEXT_BYTES,
    Filter,
    FilterError,
    SystemFields,
)
from opendata_queue.filters.parser import RESERVED_WORDS

RFC = (Path(__file__).parents[2] / "rfcs" / "0005-filters.md").read_text()
HEADERS = {"type": "order.created", "price": "99.990", "region": "emea"}
SYS = SystemFields(0, 0, 0, 0)
EXAMPLES = re.findall(
    r"^\| (\(empty\)|`[^`|]*`) \| (TRUE|FALSE|UNKNOWN)[^|]*\| *(\d*) *\|$",
    RFC.partition("### Examples")[2],
    re.MULTILINE,
)


def test_the_examples_were_found() -> None:
    assert len(EXAMPLES) == 9


@pytest.mark.parametrize(("shown", "result", "priority"), EXAMPLES)
def test_an_example_of_the_rfc_holds(shown: str, result: str, priority: str) -> None:
    parsed = Filter.parse("" if shown == "(empty)" else shown.strip("`"))

    expected = {"TRUE": True, "FALSE": False, "UNKNOWN": None}[result]
    assert parsed.evaluate(HEADERS, SYS) is expected
    found = parsed.priority_if_match(HEADERS, SYS)
    assert found == (int(priority) if priority else None)


def test_the_rfc_states_the_limits_of_the_code() -> None:
    limits = RFC.partition("### Limits")[2].partition("### Meaning")[0]
    stated = re.findall(r"\| ([\d,]+)(?: bytes of UTF-8 each)? \|$", limits, re.MULTILINE)

    assert [int(number.replace(",", "")) for number in stated] == [
        MAX_TEXT_BYTES,
        MAX_DEPTH,
        MAX_DEPTH,
        MAX_NODES,
        MAX_PATTERN_CHARACTERS,
        MAX_SEARCHES,
    ]


def test_the_rfc_lists_the_reserved_words_of_the_code() -> None:
    listed = re.search(r"The words `([A-Z ]+)` are reserved", RFC)

    assert listed is not None
    assert set(listed[1].split()) == RESERVED_WORDS


def test_the_error_that_the_rfc_shows_is_the_error_that_is_raised() -> None:
    with pytest.raises(FilterError) as caught:
        Filter.parse("price = AND")

    assert f"```\n{caught.value}\n```" in RFC
