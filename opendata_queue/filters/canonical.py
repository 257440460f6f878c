"""The one text of a syntax tree (RFC 0005, Canonical text)."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from types import UnionType

from opendata_queue.filters.nodes import (
    And,
    Between,
    Boolean,
    Comparison,
    Condition,
    Exists,
    Field,
    In,
    Like,
    Literal,
    Not,
    Number,
    Or,
    Rule,
    SystemField,
    Text,
)
from opendata_queue.filters.parser import MATCH_ALL, is_bare_name
from opendata_queue.filters.values import exact_number


def canonical_text(rules: Sequence[Rule]) -> str:
    """What is stored. Parsing it gives ``rules`` back; the filter that matches all is empty."""
    if tuple(rules) == (MATCH_ALL,):
        return ""
    return "; ".join(_rule(rule) for rule in rules)


def _rule(rule: Rule) -> str:
    text = _condition(rule.condition)
    if rule.priority is None:
        return text
    source = rule.priority if isinstance(rule.priority, int) else _field(rule.priority)
    return f"{text} PRIORITY {source}"


def _condition(condition: Condition) -> str:
    match condition:
        case Or(operands):
            return " OR ".join(_condition(below) for below in operands)
        case And(operands):
            return " AND ".join(_operand(below, Or) for below in operands)
        case Not(In() | Between() | Like() | Exists() as predicate):
            return _predicate(predicate, negated=True)
        case Not(operand):
            return f"NOT {_operand(operand, Or | And)}"
        case Boolean():
            return _literal(condition)
        case Comparison(field, operator, literal):
            return f"{_field(field)} {operator} {_literal(literal)}"
        case predicate:
            return _predicate(predicate, negated=False)


def _operand(condition: Condition, looser: type | UnionType) -> str:
    text = _condition(condition)
    return f"({text})" if isinstance(condition, looser) else text


def _predicate(predicate: In | Between | Like | Exists, *, negated: bool) -> str:
    not_ = "NOT " if negated else ""
    match predicate:
        case In(field, literals):
            values = ", ".join(_literal(literal) for literal in literals)
            return f"{_field(field)} {not_}IN ({values})"
        case Between(field, low, high):
            return f"{_field(field)} {not_}BETWEEN {_literal(low)} AND {_literal(high)}"
        case Like(header, pattern, escape):
            end = "" if escape is None else f" ESCAPE {_quoted(escape)}"
            return f"{_field(header)} {not_}LIKE {_quoted(pattern)}{end}"
        case Exists(header):
            return f"{_field(header)} IS {'' if negated else 'NOT '}NULL"


def _field(field: Field) -> str:
    if isinstance(field, SystemField):
        return field.text
    return field.name if is_bare_name(field.name) else _quoted(field.name, '"')


def _literal(literal: Literal) -> str:
    match literal:
        case Text(value):
            return _quoted(value)
        case Number(value):
            return _digits(value)
        case Boolean(value):
            return "TRUE" if value else "FALSE"


def _quoted(text: str, quote: str = "'") -> str:
    return quote + text.replace(quote, quote * 2) + quote


def _digits(value: Decimal) -> str:
    """All digits and no more. Not ``normalize()``: that rounds to the context's precision."""
    number = exact_number(value)
    return str(number) if isinstance(number, int) else format(number, "f").rstrip("0")
