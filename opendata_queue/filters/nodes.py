"""What a filter is made of (RFC 0005): the syntax tree that all back ends share.

Nodes are plain data. ``validation`` says which trees are filters, ``canonical`` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import NamedTuple, TypeAlias


class SystemFields(NamedTuple):
    """What the system knows of a message; times are milliseconds since the Unix epoch."""

    id: int
    created_at: int
    received_at: int
    visible_at: int


class SystemField(IntEnum):
    """A name under ``sys.``; its number is its place in ``SystemFields``."""

    ID = 0
    CREATED_AT = 1
    RECEIVED_AT = 2
    VISIBLE_AT = 3

    @property
    def text(self) -> str:
        return f"sys.{self.name.lower()}"


class Operator(StrEnum):
    EQUAL = "="
    NOT_EQUAL = "<>"
    LESS = "<"
    LESS_OR_EQUAL = "<="
    GREATER = ">"
    GREATER_OR_EQUAL = ">="

    @property
    def negated(self) -> Operator:
        """``NOT (a op b)`` is ``a op.negated b``: all that can be compared is totally ordered."""
        return _NEGATED[self]

    @property
    def mirrored(self) -> Operator:
        """``a op b`` is ``b op.mirrored a``."""
        return _MIRRORED.get(self, self)


_NEGATED = {
    Operator.EQUAL: Operator.NOT_EQUAL,
    Operator.NOT_EQUAL: Operator.EQUAL,
    Operator.LESS: Operator.GREATER_OR_EQUAL,
    Operator.LESS_OR_EQUAL: Operator.GREATER,
    Operator.GREATER: Operator.LESS_OR_EQUAL,
    Operator.GREATER_OR_EQUAL: Operator.LESS,
}
_MIRRORED = {
    Operator.LESS: Operator.GREATER,
    Operator.LESS_OR_EQUAL: Operator.GREATER_OR_EQUAL,
    Operator.GREATER: Operator.LESS,
    Operator.GREATER_OR_EQUAL: Operator.LESS_OR_EQUAL,
}


@dataclass(frozen=True, slots=True)
class Header:
    name: str


@dataclass(frozen=True, slots=True)
class Text:
    value: str


@dataclass(frozen=True, slots=True)
class Number:
    value: Decimal


@dataclass(frozen=True, slots=True)
class Boolean:
    """``TRUE`` or ``FALSE``: a literal, and a condition of its own."""

    value: bool


Field: TypeAlias = Header | SystemField
Literal: TypeAlias = Text | Number | Boolean


@dataclass(frozen=True, slots=True)
class Comparison:
    field: Field
    operator: Operator
    literal: Literal


@dataclass(frozen=True, slots=True)
class In:
    """``field IN (literals)``; ``NOT IN`` is a ``Not`` around it."""

    field: Field
    literals: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Between:
    """``field BETWEEN low AND high``, both ends included."""

    field: Field
    low: Literal
    high: Literal


@dataclass(frozen=True, slots=True)
class Like:
    header: Header
    pattern: str
    escape: str | None = None


@dataclass(frozen=True, slots=True)
class Exists:
    """``header IS NOT NULL``; ``IS NULL`` is a ``Not`` around it."""

    header: Header


@dataclass(frozen=True, slots=True)
class Not:
    operand: Condition


@dataclass(frozen=True, slots=True)
class And:
    """Two conditions or more, none of which is an ``And`` itself."""

    operands: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Two conditions or more, none of which is an ``Or`` itself."""

    operands: tuple[Condition, ...]


Predicate: TypeAlias = Boolean | Comparison | In | Between | Like | Exists
Condition: TypeAlias = Predicate | Not | And | Or


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition, and the priority of what it matches.

    ``priority`` is a number, or the header to take it from; with none it is the header
    ``priority``.
    """

    condition: Condition
    priority: int | Header | None = None


def conditions_below(condition: Condition) -> tuple[Condition, ...]:
    """The operands of a connective; nothing for a predicate."""
    if isinstance(condition, And | Or):
        return condition.operands
    if isinstance(condition, Not):
        return (condition.operand,)
    return ()


def walk(condition: Condition) -> Iterator[tuple[Condition, int]]:
    """Every condition in the tree with its depth, the root's being 1. Never recurses."""
    waiting = [(condition, 1)]
    while waiting:
        found, depth = waiting.pop()
        yield found, depth
        waiting += [(below, depth + 1) for below in reversed(conditions_below(found))]


def field_of(condition: Condition) -> Field | None:
    """The header or system field that a predicate reads."""
    if isinstance(condition, Comparison | In | Between):
        return condition.field
    if isinstance(condition, Like | Exists):
        return condition.header
    return None
