"""Which trees are filters: limits, and what may be compared with what (RFC 0005)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Final

from opendata_queue.filters.errors import FilterError
from opendata_queue.filters.like import PatternError, cut, search_cost
from opendata_queue.filters.nodes import (
    And,
    Between,
    Boolean,
    Comparison,
    Condition,
    Field,
    In,
    Like,
    Literal,
    Number,
    Operator,
    Or,
    Rule,
    SystemField,
    Text,
    walk,
)
from opendata_queue.filters.values import MAX_FRACTION_DIGITS, MAX_PRIORITY, MAX_WHOLE_DIGITS

MAX_TEXT_BYTES: Final = 8_192
MAX_DEPTH: Final = 32
MAX_NODES: Final = 512
MAX_PATTERN_CHARACTERS: Final = 256
MAX_SEARCHES: Final = 16
"""What a new filter may search headers for, in points: a segment of a pattern between two ``%`` is
one, and one with a ``_`` inside several (``like.search_cost``)."""

_SEARCH_US: Final = 300
_PATTERN_US: Final = 40

_KINDS: Final = {Text: "text", Number: "number", Boolean: "TRUE or FALSE"}
_UNIT: Final = Decimal(1).scaleb(-MAX_FRACTION_DIGITS)
# What does not fit becomes a NaN, which equals nothing.
_EXACT: Final = Context(prec=MAX_WHOLE_DIGITS + MAX_FRACTION_DIGITS, traps=[])


@dataclass(frozen=True, slots=True)
class Source:
    """The text that a tree was parsed from, and where in it each node starts, by its ``id()``."""

    text: str = ""
    offsets: Mapping[int, int] = field(default_factory=dict)

    def error(self, reason: str, node: object) -> FilterError:
        return FilterError(reason, text=self.text, offset=self.offsets.get(id(node), 0))


HAND_MADE: Final = Source()


def checked_text(text: object) -> str:
    """``text`` itself if it may be parsed or stored at all; ``FilterError`` if not."""
    if not isinstance(text, str):
        raise FilterError(f"a filter is text, not {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        reason = f"the character U+{ord(text[error.start]):04X} is half of a pair and has no UTF-8"
        raise FilterError(reason) from None
    if size > MAX_TEXT_BYTES:
        raise FilterError(f"the filter has {size:,} bytes, over the limit of {MAX_TEXT_BYTES:,}")
    return text


def validate(rules: Sequence[Rule], source: Source = HAND_MADE) -> None:
    """``FilterError`` at the first node that breaks a rule of RFC 0005."""
    if not rules:
        raise FilterError("a filter has at least one rule")
    nodes = 0
    for rule in rules:
        if isinstance(rule.priority, int) and not 0 <= rule.priority <= MAX_PRIORITY:
            raise source.error(f"a priority is a whole number from 0 to {MAX_PRIORITY}", rule)
        for condition, depth in walk(rule.condition):
            nodes += 1 + (len(condition.literals) if isinstance(condition, In) else 0)
            if nodes > MAX_NODES:
                reason = f"the filter has more than {MAX_NODES} conditions and listed values"
                raise source.error(reason, condition)
            if depth > MAX_DEPTH:
                raise source.error(too_deep(), condition)
            _check(condition, source)


def check_cost(rules: Sequence[Rule]) -> None:
    """``FilterError`` if a filter may cost too much with long headers (RFC 0005, Cost).

    Not for those that are stored: they were made before there was this limit.
    """
    points = sum(_search_points(pattern) for pattern in _patterns(rules))
    if points > MAX_SEARCHES:
        raise FilterError(
            f"what the filter searches headers for counts {points}, over the limit of "
            f"{MAX_SEARCHES}: a text between two % counts 1, and one with a _ inside 5 or more"
        )


def worst_us(rules: Sequence[Rule]) -> int:
    """How many microseconds a filter takes for the worst message, roughly."""
    conditions = sum(1 for rule in rules for _ in walk(rule.condition))
    patterns = _patterns(rules)
    points = sum(map(_search_points, patterns))
    return conditions + _PATTERN_US * len(patterns) + _SEARCH_US * points


def _patterns(rules: Sequence[Rule]) -> list[Like]:
    conditions = [condition for rule in rules for condition, _ in walk(rule.condition)]
    return [one for one in conditions if isinstance(one, Like)]


def _search_points(like: Like) -> int:
    return sum(map(search_cost, cut(like.pattern, like.escape).searched))


def too_deep() -> str:
    return f"the filter is nested more than {MAX_DEPTH} deep"


def _check(condition: Condition, source: Source) -> None:
    match condition:
        case Comparison(field, operator, literal):
            _check_literals(field, (literal,), condition, source)
            ordered = operator not in (Operator.EQUAL, Operator.NOT_EQUAL)
            if isinstance(literal, Boolean) and ordered:
                reason = f"TRUE and FALSE have no order: compare them with = or <>, not {operator}"
                raise source.error(reason, literal)
        case In(field, literals):
            _check_literals(field, literals, condition, source)
        case Between(field, low, high):
            _check_literals(field, (low, high), condition, source)
        case Like():
            _check_pattern(condition, source)
        case And(operands) | Or(operands):
            if len(operands) < 2 or any(type(below) is type(condition) for below in operands):
                name = type(condition).__name__
                reason = f"{name} takes two operands or more, none of them {name} itself"
                raise source.error(reason, condition)


def _check_literals(
    field: Field, literals: Sequence[Literal], condition: Condition, source: Source
) -> None:
    if not literals:
        raise source.error("IN needs at least one value", condition)
    for literal in literals:
        if type(literal) is not type(literals[0]):
            kinds = f"{_KINDS[type(literals[0])]} first and {_KINDS[type(literal)]} here"
            raise source.error(f"the values must all be of one kind, but are {kinds}", literal)
        if isinstance(field, SystemField) and not isinstance(literal, Number):
            reason = f"{field.text} is a number: compare it with a number, such as 5"
            raise source.error(reason, literal)
        if isinstance(literal, Boolean) and not isinstance(condition, Comparison):
            raise source.error("TRUE and FALSE can only be compared with = or <>", literal)
        if isinstance(literal, Number):
            _check_number(literal, source)


def _check_number(literal: Number, source: Source) -> None:
    value = literal.value
    if not value.is_finite() or value != value.quantize(_UNIT, context=_EXACT):
        raise source.error(number_limits(), literal)


def number_limits() -> str:
    return (
        f"a number has at most {MAX_WHOLE_DIGITS} digits,"
        f" and {MAX_FRACTION_DIGITS} more behind a point"
    )


def _check_pattern(like: Like, source: Source) -> None:
    if len(like.pattern) > MAX_PATTERN_CHARACTERS:
        reason = f"the pattern has more than {MAX_PATTERN_CHARACTERS} characters"
        raise source.error(reason, like)
    if like.escape is not None and (len(like.escape) != 1 or like.escape in "%_"):
        reason = f"ESCAPE takes one character other than % and _, not '{like.escape}'"
        raise source.error(reason, like)
    try:
        cut(like.pattern, like.escape)
    except PatternError as error:
        raise source.error(str(error), like) from None
