"""What filters say of messages: a table for people, and properties against the interpreter."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings

from opendata_queue.filters import Filter, SystemFields
from opendata_queue.filters.compiled import compile_priority
from opendata_queue.filters.like import matcher
from opendata_queue.filters.nodes import Boolean, Comparison, Header, Operator, Rule, Text
from tests.filters import interpreter
from tests.filters.strategies import filters, headers_of_messages, system_fields

SYS = SystemFields(id=5, created_at=1_000, received_at=2_000, visible_at=3_000)
HEADERS = {
    "type": "order.created",
    "region": "emea",
    "price": "99.990",
    "count": "007",
    "paid": "true",
    "note": "a_b%c",
    "empty": "",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("FALSE", False),
        ("type = 'order.created' AND region IN ('emea','apj') AND price >= 99.99", True),
        ("type = 'Order.created'", False),
        ("Type = 'order.created'", None),
        ("missing = 'x'", None),
        ("missing <> 'x'", None),
        ("NOT missing = 'x'", None),
        ("missing = 'x' OR region = 'emea'", True),
        ("missing = 'x' AND region = 'apj'", False),
        ("missing = 'x' AND region = 'emea'", None),
        ("missing NOT IN ('x')", None),
        ("missing NOT LIKE 'x'", None),
        ("missing NOT BETWEEN 1 AND 2", None),
        ("missing IS NULL", True),
        ("NOT EXISTS(missing)", True),
        ("EXISTS(empty)", True),
        ("empty = ''", True),
        ("price = 99.99", True),
        ("price = '99.99'", False),
        ("price > 99.989999999999999999", True),
        ("price BETWEEN 99.99 AND 99.99", True),
        ("price BETWEEN 100 AND 1", False),
        ("price NOT BETWEEN 100 AND 1", True),
        ("region > 5", None),
        ("region NOT IN (5)", None),
        ("count = 7", True),
        ("count < '1'", True),
        ("count IN (6, 7.0)", True),
        ("paid = TRUE", True),
        ("paid <> TRUE", False),
        ("paid = FALSE", False),
        ("paid <> FALSE", True),
        ("NOT paid = FALSE", True),
        ("region = TRUE", None),
        ("type LIKE 'order.%'", True),
        ("type LIKE '%created'", True),
        ("type LIKE '%r.c%'", True),
        ("type LIKE 'order_created'", True),
        ("type LIKE 'o%r%d'", True),
        ("type LIKE 'order'", False),
        ("note LIKE 'a!_b!%c' ESCAPE '!'", True),
        ("type LIKE 'order!_created' ESCAPE '!'", False),
        ("empty LIKE '%'", True),
        ("empty LIKE '_'", False),
        ("sys.id = 5 AND sys.created_at < 1000.5 AND sys.received_at IN (2000)", True),
        ("sys.visible_at NOT BETWEEN 1 AND 3000", False),
        ("FALSE; region = 'emea'", True),
        ("FALSE; missing = 1; FALSE", None),
    ],
)
def test_a_filter_is_true_false_or_unknown(text: str, expected: bool | None) -> None:
    parsed = Filter.parse(text)

    assert parsed.evaluate(HEADERS, SYS) is expected
    assert parsed.matches(HEADERS, SYS) is (expected is True)
    assert interpreter.evaluate(parsed, HEADERS, SYS) is expected


@pytest.mark.parametrize(
    "text", ["1e5", "1.", ".5", " 1", "1\n", "1_0", "٣", "²", "inf", "nan", ""]
)
def test_text_that_is_no_number_by_the_letter_is_unknown(text: str) -> None:
    assert Filter.parse("a < 1000000").evaluate({"a": text}, SYS) is None


def test_numbers_are_compared_exactly() -> None:
    assert Filter.parse("a = 0.3").evaluate({"a": "0.30000000000000004"}, SYS) is False
    assert Filter.parse("a = 9007199254740992").evaluate({"a": "9007199254740993"}, SYS) is False
    assert Filter.parse("a < 99999999999999999999.999999999999999999").evaluate(
        {"a": "99999999999999999999.999999999999999998"}, SYS
    )


def test_text_is_ordered_by_code_points_not_by_language() -> None:
    assert Filter.parse("a > 'Z'").matches({"a": "a"}, SYS)
    assert Filter.parse("a > '\uffff'").matches({"a": "\U0001f600"}, SYS)


@pytest.mark.parametrize(
    ("text", "headers", "expected"),
    [
        ("", {}, 128),
        ("", {"priority": "7"}, 7),
        ("", {"priority": "007"}, 7),
        ("", {"priority": "255"}, 255),
        ("", {"priority": "256"}, 128),
        ("", {"priority": "0007"}, 128),
        ("", {"priority": "-1"}, 128),
        ("", {"priority": "5.0"}, 128),
        ("", {"priority": "٣"}, 128),
        ("", {"priority": ""}, 128),
        ("TRUE PRIORITY 5", {"priority": "7"}, 5),
        ("TRUE PRIORITY urgency", {"priority": "7", "urgency": "9"}, 9),
        ("TRUE PRIORITY urgency", {"priority": "7"}, 128),
        ("a = 1 PRIORITY 1; a = 2 PRIORITY 2; TRUE PRIORITY 3", {"a": "2"}, 2),
        ("a > 0 PRIORITY 1; a = 2 PRIORITY 2", {"a": "2"}, 1),
        ("a = 1 PRIORITY 1; b = 2 PRIORITY 2", {"b": "2"}, 2),
        ("a = 1 PRIORITY 1", {"a": "2"}, None),
        ("a = 1 PRIORITY 1", {}, None),
    ],
)
def test_the_first_rule_that_is_true_gives_the_priority(
    text: str, headers: Mapping[str, str], expected: int | None
) -> None:
    assert Filter.parse(text).priority_if_match(headers, SYS) == expected


@given(filters(), headers_of_messages, system_fields)
@settings(max_examples=300)
def test_the_compiled_filter_agrees_with_the_interpreter(
    parsed: Filter, headers: dict[str, str], sys: SystemFields
) -> None:
    assert parsed.evaluate(headers, sys) is interpreter.evaluate(parsed, headers, sys)
    expected = interpreter.priority_if_match(parsed, headers, sys)
    assert parsed.priority_if_match(headers, sys) == expected
    assert parsed.matches(headers, sys) is (expected is not None)


def test_nothing_that_a_user_writes_becomes_source() -> None:
    evil = "x'); __import__('os').abort(); (\"\\"
    rules = (Rule(Comparison(Header(evil), Operator.EQUAL, Text(evil)), Header(evil)),)

    assert Filter(rules).priority_if_match({evil: evil}, SYS) == 128
    assert compile_priority(rules).__code__.co_code == (
        Filter.parse("a = 'a' PRIORITY a").priority_if_match.__code__.co_code
    )


def test_compiled_filters_have_no_builtins() -> None:
    function = compile_priority((Rule(Boolean(True)),))

    assert function.__globals__["__builtins__"] == {}


def test_a_pattern_made_to_backtrack_does_not() -> None:
    """With backtracking, this test would still run when the sun goes out."""
    text = "a" * 65_535

    assert not matcher("%a" * 100 + "%b")(text)
    assert not matcher("%_a" * 60 + "%b_")(text)
