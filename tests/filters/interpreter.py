"""What filters mean, as plainly as it can be said: no speed, no tricks, nothing shared.

An independent reading of RFC 0005 that the real back ends are tested against.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from opendata_queue.filters import (
    And,
    Between,
    Boolean,
    Comparison,
    Condition,
    Exists,
    Field,
    Filter,
    Header,
    In,
    Like,
    Literal,
    Not,
    Number,
    Operator,
    Or,
    Rule,
    SystemField,
    SystemFields,
)

Headers = Mapping[str, str]
Truth = bool | None
DIGITS = "0123456789"


def evaluate(filter: Filter, headers: Headers, sys: SystemFields) -> Truth:
    return either([truth(rule.condition, headers, sys) for rule in filter.rules])


def priority_if_match(filter: Filter, headers: Headers, sys: SystemFields) -> int | None:
    for rule in filter.rules:
        if truth(rule.condition, headers, sys) is True:
            return priority(rule, headers)
    return None


def priority(rule: Rule, headers: Headers) -> int:
    if isinstance(rule.priority, int):
        return rule.priority
    name = "priority" if rule.priority is None else rule.priority.name
    text = headers.get(name, "")
    if 1 <= len(text) <= 3 and all(character in DIGITS for character in text) and int(text) < 256:
        return int(text)
    return 128


def either(truths: list[Truth]) -> Truth:
    if True in truths:
        return True
    return None if None in truths else False


def negation(truth: Truth) -> Truth:
    return None if truth is None else not truth


def truth(condition: Condition, headers: Headers, sys: SystemFields) -> Truth:
    match condition:
        case Boolean(value):
            return value
        case Not(operand):
            return negation(truth(operand, headers, sys))
        case Or(operands):
            return either([truth(operand, headers, sys) for operand in operands])
        case And(operands):
            return negation(either([negation(truth(o, headers, sys)) for o in operands]))
        case Comparison(field, operator, literal):
            return compared(field, operator, literal, headers, sys)
        case In(field, literals):
            return either([compared(field, Operator.EQUAL, x, headers, sys) for x in literals])
        case Between(field, low, high):
            below = compared(field, Operator.LESS, low, headers, sys)
            above = compared(field, Operator.GREATER, high, headers, sys)
            return negation(either([below, above]))
        case Like(header, pattern, escape):
            text = headers.get(header.name)
            return None if text is None else is_like(text, pattern, escape)
        case Exists(header):
            return header.name in headers


def compared(
    field: Field, operator: Operator, literal: Literal, headers: Headers, sys: SystemFields
) -> Truth:
    left = value_of(field, literal, headers, sys)
    if left is None:
        return None
    right = literal.value if not isinstance(literal, Number) else Fraction(str(literal.value))
    order = (left > right) - (left < right)  # type: ignore[operator]
    return {
        Operator.EQUAL: order == 0,
        Operator.NOT_EQUAL: order != 0,
        Operator.LESS: order < 0,
        Operator.LESS_OR_EQUAL: order <= 0,
        Operator.GREATER: order > 0,
        Operator.GREATER_OR_EQUAL: order >= 0,
    }[operator]


def value_of(
    field: Field, literal: Literal, headers: Headers, sys: SystemFields
) -> str | bool | Fraction | None:
    if isinstance(field, SystemField):
        return Fraction(getattr(sys, field.name.lower()))
    assert isinstance(field, Header)
    text = headers.get(field.name)
    if text is None:
        return None
    if isinstance(literal, Boolean):
        return {"true": True, "false": False}.get(text)
    return number(text) if isinstance(literal, Number) else text


def number(text: str) -> Fraction | None:
    sign = -1 if text[:1] == "-" else 1
    if text[:1] in ("+", "-"):
        text = text[1:]
    whole, point, fraction = text.partition(".")
    if not 1 <= len(whole) <= 20 or not (1 if point else 0) <= len(fraction) <= 18:
        return None
    if any(digit not in DIGITS for digit in whole + fraction):
        return None
    return sign * Fraction(int(whole + fraction), 10 ** len(fraction))


def is_like(text: str, pattern: str, escape: str | None) -> bool:
    """Which starts of the text the pattern so far can match, for each of its characters."""
    reached = {0}
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            wanted = next(characters)
            reached = {at + 1 for at in reached if text[at : at + 1] == wanted}
        elif character == "%":
            reached = set(range(min(reached), len(text) + 1)) if reached else set()
        elif character == "_":
            reached = {at + 1 for at in reached if at < len(text)}
        else:
            reached = {at + 1 for at in reached if text[at : at + 1] == character}
    return len(text) in reached
