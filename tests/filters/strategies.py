"""Filters, headers and system fields for property tests, made so that they often meet."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import strategies as st

from opendata_queue.filters import (
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
    SystemFields,
    Text,
)

NAMES = ("a", "b", "x-y.z", "priority", "and", "sys.id", "", 'say "hi"', "größe\n")
TEXTS = (
    "", "a", "b", "ab", "aab", "ba", "a%b", "a_b", "a!b", "'", "''", "a\nb", "a\x00b", "true",
    "false", "True", "é", "e\u0301", "\uffff", "\U0001f600", "5", "5.0", "128", "255", "256",
)  # fmt: skip
NUMBER_TEXTS = (
    "0", "-0", "+0", "0.0", "1", "01", "+1", "-1", "1.0", "1.10", "1.1", "0.1", "0.3",
    "0.30000000000000004", "9007199254740992", "9007199254740993", "9223372036854775807",
    "18446744073709551615", "99999999999999999999", "99999999999999999999.999999999999999999",
    "-99999999999999999999.999999999999999999", "0.000000000000000001", "-0.000000000000000001",
    "00000000000000000001", "1.000000000000000000",
)  # fmt: skip
NOT_NUMBERS = (
    "1e5", "1.", ".5", " 1", "1 ", "1\n", "\t1", "1_0", "1,0", "٣", "²", "inf", "nan", "NaN",
    "--1", "+-1", "0x1", "1.1.1", "100000000000000000000", "000000000000000000001",
    "1.0000000000000000000", "1\x00", "+", "-", "1.5e0", "１",
)  # fmt: skip

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
texts = st.sampled_from(TEXTS) | unicode_text
number_texts = st.sampled_from(NUMBER_TEXTS) | st.decimals(
    allow_nan=False, allow_infinity=False, min_value=-1000, max_value=1000, places=3
).map(lambda value: format(value, "f"))
numbers = number_texts.map(Decimal)
values = texts | number_texts | st.sampled_from(NOT_NUMBERS)
headers_of_messages = st.dictionaries(st.sampled_from(NAMES) | unicode_text, values, max_size=6)
repeated_headers = st.lists(st.tuples(st.sampled_from(NAMES), values), max_size=8)
times = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)
system_fields = st.builds(
    SystemFields, st.integers(0, 2**63 - 1) | st.integers(0, 5), times, times, times
)

headers = (st.sampled_from(NAMES) | unicode_text).map(Header)
some_fields = headers | st.sampled_from(SystemField)
operators = st.sampled_from(Operator)
equalities = st.sampled_from((Operator.EQUAL, Operator.NOT_EQUAL))
text_literals = texts.map(Text)
number_literals = numbers.map(Number)
booleans = st.booleans().map(Boolean)


@st.composite
def likes(draw: st.DrawFn) -> Like:
    escape = draw(st.none() | st.sampled_from("!\\é"))
    pieces = ["%", "_", "a", "b", "\n", "é", "\U0001f600", "%%", "."]
    if escape is not None:
        pieces += [escape + "%", escape + "_", escape + escape]
        pieces = [piece for piece in pieces if piece != escape]
    return Like(draw(headers), "".join(draw(st.lists(st.sampled_from(pieces), max_size=7))), escape)


predicates = st.one_of(
    booleans,
    st.builds(Comparison, headers, operators, text_literals),
    st.builds(Comparison, some_fields, operators, number_literals),
    st.builds(Comparison, headers, equalities, booleans),
    st.builds(In, headers, st.lists(text_literals, min_size=1, max_size=4).map(tuple)),
    st.builds(In, some_fields, st.lists(number_literals, min_size=1, max_size=4).map(tuple)),
    st.builds(Between, headers, text_literals, text_literals),
    st.builds(Between, some_fields, number_literals, number_literals),
    likes(),
    st.builds(Exists, headers),
)


def _joined(connective: type[And] | type[Or], operands: list[Condition]) -> Condition:
    flat: list[Condition] = []
    for operand in operands:
        flat += operand.operands if isinstance(operand, connective) else (operand,)
    return connective(tuple(flat))


def _grown(below: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
    several = st.lists(below, min_size=2, max_size=3)
    return st.one_of(
        below.map(Not),
        several.map(lambda operands: _joined(And, operands)),
        several.map(lambda operands: _joined(Or, operands)),
    )


conditions: st.SearchStrategy[Condition] = st.recursive(predicates, _grown, max_leaves=8)
priorities = st.none() | st.integers(0, 255) | headers
rules = st.builds(Rule, conditions, priorities)


@st.composite
def filters(draw: st.DrawFn) -> Filter:
    try:
        return Filter(tuple(draw(st.lists(rules, min_size=1, max_size=3))))
    except FilterError as error:  # the strategies make valid trees, and must go on doing so
        raise AssertionError(str(error)) from error
