"""Text that is a filter, and text that is not: where it goes wrong, and what was expected."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opendata_queue.filters import (
    MAX_NODES,
    MAX_PATTERN_CHARACTERS,
    MAX_TEXT_BYTES,
    And,
    Between,
    Boolean,
    Comparison,
    Condition,
    Exists,
    Filter,
    FilterError,
    Header,
    In,
    Like,
    Not,
    Number,
    Operator,
    Or,
    Rule,
    SystemField,
    Text,
)
from opendata_queue.filters.parser import MATCH_ALL, grammar_rules, plain_rules
from opendata_queue.model.errors import InvalidInputError
from tests.filters.strategies import filters

A, B = Header("a"), Header("b")


def number(text: str) -> Number:
    return Number(Decimal(text))


A_IS_1 = Comparison(A, Operator.EQUAL, number("1"))
B_IS_2 = Comparison(B, Operator.EQUAL, number("2"))
C_IS_3 = Comparison(Header("c"), Operator.EQUAL, number("3"))


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("a = 'x'", Comparison(A, Operator.EQUAL, Text("x"))),
        ("a='it''s'", Comparison(A, Operator.EQUAL, Text("it's"))),
        ("a <> 'x'", Comparison(A, Operator.NOT_EQUAL, Text("x"))),
        ("a != 'x'", Comparison(A, Operator.NOT_EQUAL, Text("x"))),
        ("a<-5", Comparison(A, Operator.LESS, number("-5"))),
        ("a <= +0.50", Comparison(A, Operator.LESS_OR_EQUAL, number("0.5"))),
        ("a > 1", Comparison(A, Operator.GREATER, number("1"))),
        ("a >= 1", Comparison(A, Operator.GREATER_OR_EQUAL, number("1"))),
        ("5 < a", Comparison(A, Operator.GREATER, number("5"))),
        ("5 >= a", Comparison(A, Operator.LESS_OR_EQUAL, number("5"))),
        ("'x' = a", Comparison(A, Operator.EQUAL, Text("x"))),
        ("a = true", Comparison(A, Operator.EQUAL, Boolean(True))),
        ("FALSE <> a", Comparison(A, Operator.NOT_EQUAL, Boolean(False))),
        ("True", Boolean(True)),
        ("FALSE", Boolean(False)),
        ("a IN ('x','y')", In(A, (Text("x"), Text("y")))),
        ("a not in (1)", Not(In(A, (number("1"),)))),
        ("a BETWEEN 1 AND 2", Between(A, number("1"), number("2"))),
        ("a NOT BETWEEN 'a' AND 'b'", Not(Between(A, Text("a"), Text("b")))),
        ("a LIKE 'x%'", Like(A, "x%")),
        ("a NOT LIKE '!%' ESCAPE '!'", Not(Like(A, "!%", "!"))),
        ("a IS NULL", Not(Exists(A))),
        ("a IS NOT NULL", Exists(A)),
        ("EXISTS(a)", Exists(A)),
        ("NOT EXISTS ( a )", Not(Exists(A))),
        ("a = 1 AND b = 2 AND c = 3", And((A_IS_1, B_IS_2, C_IS_3))),
        ("a = 1 AND (b = 2 AND c = 3)", And((A_IS_1, B_IS_2, C_IS_3))),
        ("a = 1 OR b = 2 AND c = 3", Or((A_IS_1, And((B_IS_2, C_IS_3))))),
        ("(a = 1 OR b = 2) AND c = 3", And((Or((A_IS_1, B_IS_2)), C_IS_3))),
        ("NOT a = 1 AND b = 2", And((Not(A_IS_1), B_IS_2))),
        ("NOT NOT a = 1", Not(Not(A_IS_1))),
        ("a = 1\tand\r\nb = 2", And((A_IS_1, B_IS_2))),
        (
            "a BETWEEN 1 AND 2 AND b = 2",
            And((Between(A, number("1"), number("2")), B_IS_2)),
        ),
        ("sys.id = 1", Comparison(SystemField.ID, Operator.EQUAL, number("1"))),
        ("sys.created_at < 1", Comparison(SystemField.CREATED_AT, Operator.LESS, number("1"))),
        ("sys.received_at < 1", Comparison(SystemField.RECEIVED_AT, Operator.LESS, number("1"))),
        ("1 > sys.visible_at", Comparison(SystemField.VISIBLE_AT, Operator.LESS, number("1"))),
        ('"sys.id" = 1', Comparison(Header("sys.id"), Operator.EQUAL, number("1"))),
        ("sys = 1", Comparison(Header("sys"), Operator.EQUAL, number("1"))),
        ("x-request-id IS NULL", Not(Exists(Header("x-request-id")))),
        ("_a.b-c IS NULL", Not(Exists(Header("_a.b-c")))),
        ("priority IS NULL", Not(Exists(Header("priority")))),
        ('"say ""hi""" IS NULL', Not(Exists(Header('say "hi"')))),
        ('"" IS NULL', Not(Exists(Header("")))),
        ('"AND" IS NULL', Not(Exists(Header("AND")))),
        ("android IS NULL", Not(Exists(Header("android")))),
        ("Type IS NULL", Not(Exists(Header("Type")))),
    ],
)
def test_a_text_means_its_condition(text: str, condition: Condition) -> None:
    assert Filter.parse(text).rules == (Rule(condition),)


@pytest.mark.parametrize("text", ["", "  \r\n\t", "TRUE", "(true)"])
def test_the_empty_filter_is_the_one_rule_that_is_true(text: str) -> None:
    parsed = Filter.parse(text)

    assert parsed.rules == (Rule(Boolean(True)),)
    assert parsed.text == ""


def test_rules_have_a_priority_each_that_is_a_number_or_a_header() -> None:
    text = (
        'a = 1 PRIORITY 0; b = 2 priority 255; c = 3 PRIORITY "my header"; TRUE PRIORITY priority'
    )

    assert Filter.parse(text).rules == (
        Rule(A_IS_1, 0),
        Rule(B_IS_2, 255),
        Rule(C_IS_3, Header("my header")),
        Rule(Boolean(True), Header("priority")),
    )


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("price = AND", 9, "expected a literal, such as 'text' or 5, but found AND"),
        ("a = b", 5, "but found the name b; text goes in single quotes"),
        ('a = "b"', 5, "double quotes are for names of headers"),
        ("a = ", 4, "expected a literal, such as 'text' or 5, but found the end of the filter"),
        ("a", 2, "expected a comparison, such as = 'text'"),
        ("a b = 1", 3, "expected a comparison"),
        ("a = 1 b = 2", 7, "expected AND, OR, PRIORITY, ; or the end of the filter, but found"),
        ("a = 1)", 6, "expected AND, OR, PRIORITY, ; or the end of the filter, but found )"),
        ("(a = 1", 7, "expected ), but found the end of the filter"),
        ("like = 1", 1, "expected a condition, such as type = 'order.created', but found LIKE; a"),
        ("a = 1;", 7, "expected a condition"),
        (";", 1, "expected a condition"),
        ("a == 1", 4, "expected a literal"),
        ("a NOT = 1", 7, "expected IN, BETWEEN or LIKE, but found ="),
        ("a IS 1", 6, "expected NOT or NULL, but found the number 1"),
        ("a IN ()", 7, "expected a literal"),
        ("a IN (1", 8, "expected , or ), but found the end of the filter"),
        ("a IN (TRUE)", 7, "expected a literal"),
        ("a IN (1, 'x')", 10, "the values must all be of one kind, but are number first and text"),
        ("a BETWEEN 1 AND 'x'", 17, "the values must all be of one kind"),
        ("a BETWEEN 1 OR 2", 13, "expected AND, but found OR"),
        ("'x' = 'y'", 7, "expected the name of a header or of a system field"),
        ("5", 2, "expected a comparison operator, such as ="),
        ("a LIKE 5", 8, "expected text in single quotes, but found the number 5"),
        ("a LIKE 'x!y' ESCAPE '!'", 21, "! is the escape character: %, _ or ! must follow it"),
        ("a LIKE 'x!' ESCAPE '!'", 20, "! is the escape character"),
        ("a LIKE 'x' ESCAPE '!!'", 19, "ESCAPE takes one character other than % and _, not '!!'"),
        ("a LIKE 'x' ESCAPE ''", 19, "ESCAPE takes one character"),
        ("a LIKE 'x' ESCAPE '%'", 19, "ESCAPE takes one character"),
        ("a < TRUE", 5, "TRUE and FALSE have no order"),
        ("sys.id = 'x'", 10, "sys.id is a number: compare it with a number"),
        ("sys.id = TRUE", 10, "sys.id is a number: compare it with a number"),
        ("sys.size = 1", 1, "sys.size is no system field; there are sys.id, sys.created_at,"),
        ("SYS.id = 1", 1, "SYS.id is no system field"),
        ("sys.id IS NULL", 8, "IS is for headers; sys.id is a number and always there"),
        ("sys.id LIKE '5'", 8, "LIKE is for headers"),
        ("EXISTS(sys.id)", 8, "expected the name of a header, but found the name sys.id"),
        ("a = 1 PRIORITY", 15, "expected a number from 0 to 255 or the name of a header"),
        ("a = 1 PRIORITY 256", 16, "a priority is a whole number from 0 to 255"),
        ("a = 1 PRIORITY -1", 16, "a priority is a whole number from 0 to 255"),
        ("a = 1 PRIORITY 1.0", 16, "a priority is a whole number from 0 to 255"),
        ("a = 1 PRIORITY sys.id", 16, "expected a number from 0 to 255 or the name of a header"),
        ("PRIORITY 5", 10, "expected a comparison"),
        ("PRIORITY 5", 10, "the number 5; for all messages that is TRUE PRIORITY 5"),
        ("a = 1; priority level", 17, "; for all messages that is TRUE PRIORITY level"),
        ("a = 'x", 5, "the text that starts here has no closing '"),
        ("a = 'x''", 5, "the text that starts here has no closing '"),
        ('"a = 1', 1, 'the name that starts here has no closing "'),
        ("a = ‘x’", 5, "‘ is no quote here"),
        ("größe = 1", 3, "the character 'ö' means nothing here; a name with other characters"),
        ("a = 1 \x00", 7, "the character U+0000 means nothing here"),
        ("a LI\u212aE 'x'", 3, "but found the name LI"),
        ("a = 1e5", 5, "1e5 is no number"),
        ("a = .5", 5, ".5 is no number"),
        ("a = 5.", 5, "5. is no number"),
        ("a = 1_000", 5, "1_000 is no number"),
        ("a = 100000000000000000000", 5, "a number has at most 20 digits, and 18 more behind"),
        ("a = 0.0000000000000000001", 5, "a number has at most 20 digits, and 18 more behind"),
    ],
)
def test_an_error_points_at_its_column_and_says_what_was_expected(
    text: str, column: int, reason: str
) -> None:
    with pytest.raises(FilterError) as caught:
        Filter.parse(text)

    assert reason in caught.value.reason
    assert (caught.value.line, caught.value.column) == (1, column)
    assert str(caught.value).startswith(f"column {column}: ")


def test_an_error_shows_the_place_with_a_caret_below() -> None:
    with pytest.raises(FilterError) as caught:
        Filter.parse("type = 'a'\n  AND price > cheap\n  AND x = 1")

    assert (caught.value.line, caught.value.column) == (2, 15)
    assert str(caught.value).splitlines()[1:] == [
        "    AND price > cheap",
        "                ^",
    ]
    assert str(caught.value).startswith("line 2, column 15: expected a literal")


def test_the_caret_still_points_right_in_a_long_line() -> None:
    text = "a = 1 OR " * 100 + "a = b" + " OR a = 1" * 100

    with pytest.raises(FilterError) as caught:
        Filter.parse(text)

    _, shown, caret = str(caught.value).splitlines()
    assert caught.value.column == 905
    assert shown[caret.index("^")] == "b"
    assert shown.strip()[0] == shown[-1] == "…"
    assert len(shown) < 80


def test_a_filter_error_is_an_invalid_input_like_any_other() -> None:
    assert issubclass(FilterError, InvalidInputError)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("(" * 4_000, 33),
        ("(" * 33 + "a = 1" + ")" * 33, 33),
        ("NOT " * 2_000 + "a = 1", 129),
        ("NOT(" * 1_600, 65),
        ("a = 1 AND (" * 700, 363),
        ("(a = 1 OR b = 2 AND " * 16 + "a = 1" + ")" * 16, 311),
    ],
)
def test_text_that_is_nested_too_deep_is_refused_where_it_becomes_so(
    text: str, column: int
) -> None:
    with pytest.raises(FilterError, match="nested more than 32 deep") as caught:
        Filter.parse(text)

    assert caught.value.column == column


@pytest.mark.parametrize(
    "text",
    [
        "(" * 32 + "a = 1" + ")" * 32,
        "NOT " * 31 + "a = 1",
        "a IN (1) AND " * 100 + "(a = 1)",
        " AND ".join(["(a = 1 OR b = 2)"] * 100),
        "; ".join(["a NOT IN (1)"] * 50),
    ],
)
def test_long_filters_that_are_not_nested_deep_are_fine(text: str) -> None:
    Filter.parse(text)


def test_ten_thousand_parentheses_are_too_long_to_be_looked_at() -> None:
    with pytest.raises(FilterError, match="10,000 bytes, over the limit of 8,192"):
        Filter.parse("(" * 10_000)


def test_length_is_counted_in_bytes_of_utf_8() -> None:
    fits = "a = '" + "é" * ((MAX_TEXT_BYTES - 6) // 2) + "'"

    assert len(fits.encode()) == MAX_TEXT_BYTES
    assert Filter.parse(fits).text == fits
    with pytest.raises(FilterError, match="8,193 bytes"):
        Filter.parse(fits + " ")


def test_a_text_whose_canonical_form_is_too_long_to_be_stored_is_refused() -> None:
    text = "a=1 OR b='" + "x" * (MAX_TEXT_BYTES - 11) + "'"

    assert len(text) == MAX_TEXT_BYTES
    with pytest.raises(FilterError, match="8,196 bytes"):
        Filter.parse(text)


def test_conditions_and_listed_values_are_counted_together() -> None:
    values = ",".join(["1"] * (MAX_NODES - 1))
    Filter.parse(f"a IN ({values})")

    with pytest.raises(FilterError, match="more than 512 conditions and listed values"):
        Filter.parse(f"a IN ({values}, 1)")
    with pytest.raises(FilterError, match="more than 512 conditions and listed values"):
        Filter.parse("; ".join(["a = 1"] * (MAX_NODES + 1)))


def test_a_pattern_has_a_limit_of_its_own() -> None:
    Filter.parse(f"a LIKE '{'_' * MAX_PATTERN_CHARACTERS}'")

    with pytest.raises(FilterError, match="more than 256 characters"):
        Filter.parse(f"a LIKE '{'_' * (MAX_PATTERN_CHARACTERS + 1)}'")


@pytest.mark.parametrize("text", ["a = '\ud800'", None, b"a = 1", 5])
def test_what_is_no_text_is_refused_too(text: str) -> None:
    with pytest.raises(FilterError):
        Filter.parse(text)


@pytest.mark.parametrize(
    "rules",
    [
        (),
        (Rule(And((A_IS_1,))),),
        (Rule(Or((Or((A_IS_1, B_IS_2)), C_IS_3))),),
        (Rule(In(A, ())),),
        (Rule(In(A, (Boolean(True),))),),
        (Rule(Comparison(SystemField.ID, Operator.EQUAL, Text("x"))),),
        (Rule(A_IS_1, 256),),
        (Rule(Comparison(A, Operator.EQUAL, Text("\ud800"))),),
        *((Rule(Comparison(A, Operator.EQUAL, number(text))),)
          for text in ("NaN", "sNaN", "Infinity", "1E+20", "1E-19", "1E-999999", "1E+999999")),
    ],
)  # fmt: skip
def test_trees_made_by_hand_are_held_to_the_same_rules(rules: tuple[Rule, ...]) -> None:
    with pytest.raises(FilterError):
        Filter(rules)


def test_a_tree_made_by_hand_that_is_too_deep_is_refused_without_recursing() -> None:
    condition: Condition = A_IS_1
    for _ in range(100_000):
        condition = Not(condition)

    with pytest.raises(FilterError, match="nested more than 32 deep"):
        Filter((Rule(condition),))


PIECES = st.sampled_from(
    (
        "a", "b", "sys.id", "sys.x", "priority", "=", "<>", "!=", "<", "<=", ">", ">=", "(", ")",
        ",", ";", "AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "IS", "NULL", "EXISTS",
        "PRIORITY", "TRUE", "FALSE", "'x'", "'a%'", "'!'", "''", "'", '"', '"q"', "5", "-1.5",
        "1e5", "256", ".", "-", "\n", "é", "\x00",
    )
)  # fmt: skip


def parsed_or_error(text: str) -> Filter | FilterError:
    try:
        return Filter.parse(text)
    except FilterError as error:
        return error


@given(st.lists(PIECES, max_size=14).map(" ".join) | st.text(max_size=30))
@settings(max_examples=1_000)
@example("''")
@example("a = 'x' ESCAPE")
def test_any_text_is_a_filter_or_a_filter_error(text: str) -> None:
    found = parsed_or_error(text)

    if isinstance(found, Filter):
        assert Filter.parse(found.text) == found
    else:
        assert 1 <= found.line <= text.count("\n") + 1
        assert 1 <= found.column <= len(text) + 1


@given(filters(), st.data())
def test_a_damaged_filter_is_a_filter_or_a_filter_error(
    parsed: Filter, data: st.DataObject
) -> None:
    text = parsed.text
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 5)))
    inserted = data.draw(PIECES | st.just(""))

    found = parsed_or_error(text[:start] + inserted + text[end:])

    assert isinstance(found, Filter | FilterError)


NAMES = st.sampled_from(
    ["a", "priority", "Tenant", "x-y.z", "_1", "AND", "not", "sys.id", "1a", "é"]
)
VALUES = st.text(st.sampled_from("aé '=%AND\n"), max_size=12).map(
    lambda text: text.replace("'", "''")
)
TERMS = st.builds("{} = '{}'".format, NAMES, VALUES)


@given(st.lists(TERMS, min_size=1, max_size=9).map(" AND ".join))
@example("a = 'b = ''c'''")
@example("a = 'x' AND b = 'y AND c = ''z'''")
@example("a = 'x''")
@example("a = 'x' AND ")
@example("a = 'x'\n")
@example("")
@example(" ")
def test_a_plain_text_says_what_the_grammar_says(text: str) -> None:
    try:
        expected = grammar_rules(text)
    except FilterError:
        assert plain_rules(text) is None
    else:
        assert plain_rules(text) in (None, expected)


def test_a_queue_for_everything_needs_no_grammar() -> None:
    assert plain_rules("") == (MATCH_ALL,)


@pytest.mark.parametrize(
    ("text", "terms"), [("tenant = 't17'", 1), ("type = 'it''s' AND region = 'de'", 2)]
)
def test_equal_texts_need_no_grammar(text: str, terms: int) -> None:
    rules = plain_rules(text)

    assert rules is not None
    condition = rules[0].condition
    assert (len(condition.operands) if isinstance(condition, And) else 1) == terms
    assert Filter(rules).text == text
