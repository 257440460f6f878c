"""The back end for jobs: a filter as a column of Spark's (RFC 0005).

Spark has the same three values of truth, and compares texts by their UTF-8, which sorts like code
points. A number is matched against its syntax before it is cast to a decimal that holds every
number of RFC 0005 exactly.
"""

from __future__ import annotations

import functools
import operator
import string
from collections.abc import Callable
from typing import Any, Final

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, DecimalType

from opendata_queue.filters import (
    And,
    Between,
    Boolean,
    Comparison,
    Condition,
    Exists,
    Filter,
    Header,
    In,
    Like,
    Not,
    Number,
    Operator,
    Or,
    SystemField,
    like,
)
from opendata_queue.filters.nodes import Field, Literal, Predicate
from opendata_queue.filters.values import (
    FALSE_TEXT,
    MAX_FRACTION_DIGITS,
    MAX_WHOLE_DIGITS,
    NUMBER_SYNTAX,
    TRUE_TEXT,
)

_DECIMAL: Final = DecimalType(MAX_WHOLE_DIGITS + MAX_FRACTION_DIGITS, MAX_FRACTION_DIGITS)
_NUMBER: Final = rf"\A(?:{NUMBER_SYNTAX})\z"
_COMPARE: Final[dict[Operator, Callable[[Any, Any], Any]]] = {
    Operator.EQUAL: operator.eq,
    Operator.NOT_EQUAL: operator.ne,
    Operator.LESS: operator.lt,
    Operator.LESS_OR_EQUAL: operator.le,
    Operator.GREATER: operator.gt,
    Operator.GREATER_OR_EQUAL: operator.ge,
}


def filter_column(
    text: str | Filter,
    *,
    headers: Column | str = "headers",
    message_id: Column | str = "message_id",
    created_at_ms: Column | None = None,
    received_at_ms: Column | None = None,
    visible_at_ms: Column | None = None,
) -> Column:
    """A boolean column: true where a filter matches, null where it is unknown.

    ``df.where(filter_column("region = 'emea'"))`` are the messages that a queue with that filter
    would get. The columns that it reads are those of the table ``messages``, unless others are
    named; times are in milliseconds.
    """
    parsed = Filter.parse(text) if isinstance(text, str) else text
    fields = {
        SystemField.ID: F.col(message_id) if isinstance(message_id, str) else message_id,
        SystemField.CREATED_AT: _time(created_at_ms, "created_at"),
        SystemField.RECEIVED_AT: _time(received_at_ms, "received_at"),
        SystemField.VISIBLE_AT: _time(visible_at_ms, "visible_at"),
    }
    compiler = _Compiler(F.col(headers) if isinstance(headers, str) else headers, fields)
    conditions = [compiler.truth(rule.condition) for rule in parsed.rules]
    return functools.reduce(operator.or_, conditions)


def _time(given: Column | None, name: str) -> Column:
    return F.unix_millis(F.col(name)) if given is None else given


class _Compiler:
    def __init__(self, headers: Column, fields: dict[SystemField, Column]) -> None:
        self._headers = headers
        self._fields = fields

    def truth(self, condition: Condition) -> Column:
        if isinstance(condition, Not):
            return ~self.truth(condition.operand)
        if isinstance(condition, And | Or):
            join = operator.and_ if isinstance(condition, And) else operator.or_
            return functools.reduce(join, map(self.truth, condition.operands))
        return self._predicate(condition)

    def _predicate(self, predicate: Predicate) -> Column:
        match predicate:
            case Boolean(value):
                return F.lit(value)
            case Comparison(Header() as header, comparison, Boolean(value)):
                wanted = TRUE_TEXT if value is (comparison is Operator.EQUAL) else FALSE_TEXT
                text = self._text(header)
                return F.when(text.isin(TRUE_TEXT, FALSE_TEXT), text == F.lit(wanted))
            case Comparison(field, comparison, literal):
                compared = _COMPARE[comparison](self._operand(field, literal), _literal(literal))
                assert isinstance(compared, Column)
                return compared
            case In(field, literals):
                operand = self._operand(field, literals[0])
                return operand.isin(*map(_literal, literals))
            case Between(field, low, high):
                return self._operand(field, low).between(_literal(low), _literal(high))
            case Like(header, pattern, escape):
                return _like(self._text(header), pattern, escape)
            case Exists(header):
                return self._text(header).isNotNull()

    def _operand(self, field: Field, literal: Literal) -> Column:
        if isinstance(field, SystemField):
            return self._fields[field].cast(_DECIMAL)
        text = self._text(field)
        if not isinstance(literal, Number):
            return text
        return F.when(text.rlike(_NUMBER), text.try_cast(_DECIMAL))

    def _text(self, header: Header) -> Column:
        return F.try_element_at(self._headers, F.lit(header.name))


def _literal(literal: Literal) -> Column:
    if isinstance(literal, Number):
        return F.lit(literal.value).cast(_DECIMAL)
    return F.lit(literal.value)


def _like(text: Column, pattern: str, escape: str | None) -> Column:
    segments = like.cut(pattern, escape)
    match segments.literals:
        case (whole,):
            return text == F.lit(whole)
        case (start, ""):
            return text.startswith(F.lit(start))
        case ("", end):
            return text.endswith(F.lit(end))
        case ("", part, ""):
            return text.contains(F.lit(part))
    first, *middle = ["".join(map(_expression, part)) for part in segments.parts]
    if not middle:
        expression = first
    else:
        *middle, last = middle
        # As in the Python matcher: the leftmost place is the one, so nothing is ever taken back.
        expression = first + "".join(f"(?>.*?{part})" for part in middle) + ".*" + last
    return text.rlike(rf"(?s)\A(?:{expression})\z").cast(BooleanType())


def _expression(item: str | like.Wildcard) -> str:
    if isinstance(item, like.Wildcard):
        return "."
    return f"\\{item}" if item in string.punctuation else item
