"""The back end for batches: filters over Arrow columns (RFC 0005). Needs ``pyarrow``.

Import it by its name: the rest of the package works without pyarrow.

Text, numbers and the common patterns use Arrow's own kernels. UTF-8 sorts like code points, and a
number is matched against its syntax before it is cast, to a decimal that holds every number of
RFC 0005 exactly. A pattern that no kernel has the exact meaning of is evaluated in Python, once
for each distinct text.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from opendata_queue.filters import like
from opendata_queue.filters.filter import Filter
from opendata_queue.filters.nodes import (
    And,
    Between,
    Boolean,
    Comparison,
    Condition,
    Exists,
    Field,
    Header,
    In,
    Like,
    Literal,
    Not,
    Number,
    Operator,
    Or,
    Predicate,
    Rule,
    SystemField,
)
from opendata_queue.filters.values import (
    DEFAULT_PRIORITY,
    FALSE_TEXT,
    MAX_FRACTION_DIGITS,
    MAX_PRIORITY,
    MAX_WHOLE_DIGITS,
    NUMBER_SYNTAX,
    PRIORITY_HEADER,
    PRIORITY_SYNTAX,
    TRUE_TEXT,
)

# pyarrow has no types that mypy could read.
Column: TypeAlias = Any

_DECIMAL: Final = pa.decimal128(MAX_WHOLE_DIGITS + MAX_FRACTION_DIGITS, MAX_FRACTION_DIGITS)
_NUMBER: Final = rf"\A(?:{NUMBER_SYNTAX})\z"
_PRIORITY: Final = rf"\A(?:{PRIORITY_SYNTAX})\z"
_COMPARE: Final[dict[Operator, Callable[[Column, Column], Column]]] = {
    Operator.EQUAL: pc.equal,
    Operator.NOT_EQUAL: pc.not_equal,
    Operator.LESS: pc.less,
    Operator.LESS_OR_EQUAL: pc.less_equal,
    Operator.GREATER: pc.greater,
    Operator.GREATER_OR_EQUAL: pc.greater_equal,
}


class SystemColumns(NamedTuple):
    """``SystemFields`` of many messages: columns of whole numbers, as long as the headers."""

    id: Column
    created_at: Column
    received_at: Column
    visible_at: Column


def evaluate_arrow(filter: Filter, headers: Column, sys: SystemColumns) -> Column:
    """``Filter.evaluate`` of each row: a boolean array, null where the filter is unknown.

    ``headers`` is a map array from string to string. Of a header that a row has twice the last
    one counts; a row that is null has no headers.
    """
    columns = _Columns(headers, sys)
    result = columns.truth(filter.rules[0].condition)
    for rule in filter.rules[1:]:
        result = pc.or_kleene(result, columns.truth(rule.condition))
    return result


def priority_arrow(filter: Filter, headers: Column, sys: SystemColumns) -> Column:
    """``Filter.priority_if_match`` of each row: a ``uint8`` array, null where there is no match."""
    columns = _Columns(headers, sys)
    result = pa.nulls(len(headers), pa.uint8())
    for rule in reversed(filter.rules):
        matches = pc.fill_null(columns.truth(rule.condition), False)
        result = pc.if_else(matches, columns.priority(rule), result)
    return result


class _Columns:
    """The columns of one batch; each header is looked up and read as a number once."""

    def __init__(self, headers: Column, sys: SystemColumns) -> None:
        self._headers = headers
        self._sys = sys
        self._texts: dict[Header, Column] = {}
        self._numbers: dict[Field, Column] = {}

    def truth(self, condition: Condition) -> Column:
        if isinstance(condition, Not):
            return pc.invert(self.truth(condition.operand))
        if isinstance(condition, And | Or):
            join = pc.and_kleene if isinstance(condition, And) else pc.or_kleene
            first, *others = condition.operands
            result = self.truth(first)
            for other in others:
                result = join(result, self.truth(other))
            return result
        return self._predicate(condition)

    def priority(self, rule: Rule) -> Column:
        if isinstance(rule.priority, int):
            return pa.scalar(rule.priority, pa.uint8())
        text = self._text(rule.priority or Header(PRIORITY_HEADER))
        number = pc.cast(_only(text, pc.match_substring_regex(text, _PRIORITY)), pa.int16())
        small = _only(number, pc.less_equal(number, MAX_PRIORITY))
        return pc.fill_null(pc.cast(small, pa.uint8()), DEFAULT_PRIORITY)

    def _predicate(self, predicate: Predicate) -> Column:
        match predicate:
            case Boolean(value):
                return pa.repeat(pa.scalar(value), len(self._headers))
            case Comparison(Header() as header, operator, Boolean(value)):
                return self._boolean(header, value is (operator is Operator.EQUAL))
            case Comparison(field, operator, literal):
                return _COMPARE[operator](self._operand(field, literal), _scalar(literal))
            case In(field, literals):
                operand = self._operand(field, literals[0])
                values = pa.array(
                    [literal.value for literal in literals], _type_of(literals[0], operand)
                )
                # is_in says false of null, where the answer is unknown.
                return _only(pc.is_in(operand, value_set=values), pc.is_valid(operand))
            case Between(field, low, high):
                operand = self._operand(field, low)
                return pc.and_kleene(
                    pc.greater_equal(operand, _scalar(low)), pc.less_equal(operand, _scalar(high))
                )
            case Like(header, pattern, escape):
                return _like(self._text(header), pattern, escape)
            case Exists(header):
                return pc.is_valid(self._text(header))

    def _boolean(self, header: Header, wanted: bool) -> Column:
        text = self._text(header)
        true, false = pc.equal(text, TRUE_TEXT), pc.equal(text, FALSE_TEXT)
        return _only(true if wanted else false, pc.or_(true, false))

    def _operand(self, field: Field, literal: Literal) -> Column:
        if isinstance(literal, Number):
            return self._number(field)
        assert isinstance(field, Header)  # validation: system fields are compared with numbers
        return self._text(field)

    def _text(self, header: Header) -> Column:
        if header not in self._texts:
            key = pa.scalar(header.name, self._headers.type.key_type)
            self._texts[header] = pc.map_lookup(self._headers, key, "last")
        return self._texts[header]

    def _number(self, field: Field) -> Column:
        if field not in self._numbers:
            if isinstance(field, SystemField):
                self._numbers[field] = pc.cast(self._sys[field], _DECIMAL)
            else:
                text = self._text(field)
                is_number = pc.match_substring_regex(text, _NUMBER)
                self._numbers[field] = pc.cast(_only(text, is_number), _DECIMAL)
        return self._numbers[field]


def _only(column: Column, condition: Column) -> Column:
    """The column, with nulls where the condition does not hold."""
    return pc.if_else(condition, column, pa.scalar(None, column.type))


def _scalar(literal: Literal) -> Column:
    if isinstance(literal, Number):
        return pa.scalar(literal.value, _DECIMAL)
    return pa.scalar(literal.value)


def _type_of(literal: Literal, operand: Column) -> Column:
    return operand.type if isinstance(literal.value, str | Decimal) else None


def _like(text: Column, pattern: str, escape: str | None) -> Column:
    match like.cut(pattern, escape).literals:
        case (whole,):
            return pc.equal(text, whole)
        case (start, ""):
            return pc.starts_with(text, start)
        case ("", end):
            return pc.ends_with(text, end)
        case ("", part, ""):
            return pc.match_substring(text, part)
    matches = like.matcher(pattern, escape)
    encoded = pc.dictionary_encode(text)
    answers = pa.array([matches(value) for value in encoded.dictionary.to_pylist()], pa.bool_())
    return answers.take(encoded.indices)
