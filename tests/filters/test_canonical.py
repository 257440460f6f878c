"""One text for one filter."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odq_encodings import QueueConfig
from opendata_queue.filters import Filter
from tests.filters.strategies import filters


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("a='x'and b=1", "a = 'x' AND b = 1"),
        ("5 < price", "price > 5"),
        ("a != 1", "a <> 1"),
        ("a = 007.500", "a = 7.5"),
        ("a = -0.0", "a = 0"),
        ("a = +100", "a = 100"),
        ("a = 99999999999999999999.999999999999999999",) * 2,
        ("a = -0.000000000000000001",) * 2,
        ("not a in (1,2)", "a NOT IN (1, 2)"),
        ("NOT (a = 1)", "NOT a = 1"),
        ("NOT NOT a IS NULL", "NOT NOT a IS NULL"),
        ("exists(a) and not exists(b)", "a IS NOT NULL AND b IS NULL"),
        ("((a = 1)) OR ((b = 1 AND c = 1))", "a = 1 OR b = 1 AND c = 1"),
        ("a = 1 AND (b = 1 OR c = 1)", "a = 1 AND (b = 1 OR c = 1)"),
        ("NOT (a = 1 AND b = 1)", "NOT (a = 1 AND b = 1)"),
        ('"a" = 1 AND "b c" = 1 AND "not" = 1', 'a = 1 AND "b c" = 1 AND "not" = 1'),
        ('"sys.id" = 1', '"sys.id" = 1'),
        ('"Sys." = 1 AND "sys" = 1', '"Sys." = 1 AND sys = 1'),
        ('"a\n" = 1', '"a\n" = 1'),
        ("a='x';\nb='y' priority 007", "a = 'x'; b = 'y' PRIORITY 7"),
        ('a = TRUE PRIORITY "priority"', "a = TRUE PRIORITY priority"),
        ("a not like 'x' escape ''''", "a NOT LIKE 'x' ESCAPE ''''"),
        ("a not between 1 and 2", "a NOT BETWEEN 1 AND 2"),
        ("TRUE PRIORITY 5", "TRUE PRIORITY 5"),
        ("TRUE", ""),
    ],
)
def test_each_way_to_write_a_filter_has_one_canonical_text(text: str, canonical: str) -> None:
    parsed = Filter.parse(text)

    assert parsed.text == str(parsed) == canonical
    assert Filter.parse(canonical) == parsed


@given(filters())
@settings(max_examples=300)
def test_the_canonical_text_says_the_same_tree_and_is_its_own_canonical_text(
    parsed: Filter,
) -> None:
    again = Filter.parse(parsed.text)

    assert again == parsed
    assert again.text == parsed.text


@given(filters(), st.data())
def test_the_case_of_words_and_the_space_around_them_mean_nothing(
    parsed: Filter, data: st.DataObject
) -> None:
    if "'" in parsed.text or '"' in parsed.text:
        return
    space = data.draw(st.sampled_from([" ", "\n", "\t \r\n"]))
    words = [
        word.lower() if word.isupper() and data.draw(st.booleans()) else word
        for word in parsed.text.split(" ")
    ]

    assert Filter.parse(space + space.join(words) + space) == parsed


@given(filters())
def test_a_filter_survives_pickling(parsed: Filter) -> None:
    again = pickle.loads(pickle.dumps(parsed))

    assert again == parsed
    assert again.text == parsed.text


def test_the_example_of_the_rfc_has_the_bytes_of_the_rfc() -> None:
    text = Filter.parse("type='order.created' and price>=99.990 priority 5").text
    config = QueueConfig(filter=text, max_attempts=5, done_retention_seconds=86_400)

    assert text == "type = 'order.created' AND price >= 99.99 PRIORITY 5"
    assert config.encode().hex(" ") == (
        "01 34 00 74 79 70 65 20 3d 20 27 6f 72 64 65 72 2e 63 72 65 61 74 65 64 27 20 41 4e 44 20"
        " 70 72 69 63 65 20 3e 3d 20 39 39 2e 39 39 20 50 52 49 4f 52 49 54 59 20 35"
        " 05 00 80 51 01 00"
    )
