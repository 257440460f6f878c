"""The back end of the tailer: a filter as one Python function (RFC 0005).

Only TRUE matches, so no three-valued value is ever computed: each condition is turned into an
expression that is true when the condition is TRUE, and where a NOT is above it, one that is true
when it is FALSE. UNKNOWN makes both of them false.

The source consists of our own text and of numbered names. Whatever the user wrote is handed over
as the value of such a name, so there is nothing to inject into, and filters that differ in their
values alone share one compiled source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

from opendata_queue.filters import like
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
    SystemFields,
    Text,
)
from opendata_queue.filters.values import (
    FALSE_TEXT,
    PRIORITY_HEADER,
    TRUE_TEXT,
    exact_number,
    parse_number,
    priority_of,
)

PriorityFunction: TypeAlias = Callable[[Mapping[str, str], SystemFields], int | None]
TruthFunction: TypeAlias = Callable[[Mapping[str, str], SystemFields], bool | None]

_CACHED_SHAPES: Final = 1024
_NAMES: Final = {"__builtins__": {}, "number": parse_number, "priority": priority_of}
_PYTHON: Final = {Operator.EQUAL: "==", Operator.NOT_EQUAL: "!="}


def compile_priority(rules: Sequence[Rule]) -> PriorityFunction:
    """A function that gives the priority of a message that matches, and none of any other."""
    source = _Source()
    for rule in rules:
        source.returns(source.is_(rule.condition, True), source.priority(rule))
    function: PriorityFunction = source.function()
    return function


def compile_truth(rules: Sequence[Rule]) -> TruthFunction:
    """A function that gives true, false, or none for unknown: the rules joined with OR."""
    condition = rules[0].condition if len(rules) == 1 else Or(tuple(r.condition for r in rules))
    source = _Source()
    source.returns(source.is_(condition, True), "True")
    source.returns(source.is_(condition, False), "False")
    function: TruthFunction = source.function()
    return function


class _Source:
    """The source of a function of ``headers`` and ``sys``, and the values of its names."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._values: list[object] = []
        self._headers: dict[str, str] = {}

    def returns(self, condition: str, value: str) -> None:
        self._lines.append(f"  if {condition}: return {value}")

    def priority(self, rule: Rule) -> str:
        if isinstance(rule.priority, int):
            return self._name(rule.priority)
        return f"priority({self._get(rule.priority or Header(PRIORITY_HEADER))})"

    def function(self) -> Any:
        parameters = ", ".join(f"k{number}" for number in range(len(self._values)))
        body = "\n".join(self._lines)
        return _factory(
            f"def make({parameters}):\n"
            f" def match(headers, sys):\n"
            f"  get = headers.get\n"
            f"{body}\n"
            f"  return None\n"
            f" return match\n"
        )(*self._values)

    def is_(self, condition: Condition, wanted: bool) -> str:
        """An expression that is true when ``condition`` is TRUE, or FALSE, as wanted."""
        if isinstance(condition, Not):
            return self.is_(condition.operand, not wanted)
        if isinstance(condition, And | Or):
            word = " and " if isinstance(condition, And) is wanted else " or "
            return f"({word.join(self.is_(below, wanted) for below in condition.operands)})"
        return self._predicate(condition, wanted)

    def _predicate(self, predicate: Predicate, wanted: bool) -> str:
        match predicate:
            case Boolean(value):
                return str(value is wanted)
            case Comparison(Header() as header, operator, Boolean(value)):
                asked = value is ((operator is Operator.EQUAL) is wanted)
                return f"{self._get(header)} == {self._name(TRUE_TEXT if asked else FALSE_TEXT)}"
            case Comparison(field, operator, literal):
                operator = operator if wanted else operator.negated
                test = f"{_PYTHON.get(operator, operator.value)} {self._constant(literal)}"
                if operator is Operator.EQUAL:
                    return f"{self._operand(field, literal)} {test}"  # none equals no constant
                return self._known(field, literal, f"t {test}")
            case In(field, literals):
                values = self._name(frozenset(_value(literal) for literal in literals))
                if wanted:
                    return f"{self._operand(field, literals[0])} in {values}"
                return self._known(field, literals[0], f"t not in {values}")
            case Between(field, low, high):
                test = f"{self._constant(low)} <= t <= {self._constant(high)}"
                return self._known(field, low, test if wanted else f"not ({test})")
            case Like(header, pattern, escape):
                test = self._like(like.cut(pattern, escape), like.matcher(pattern, escape))
                return self._known(header, Text(""), test if wanted else f"not ({test})")
            case Exists(header):
                return f"{self._get(header)} {'is not' if wanted else 'is'} None"

    def _known(self, field: Field, literal: Literal, test: str) -> str:
        """``test`` of ``t``, the field's value; false where that is missing or of another kind."""
        return f"((t := {self._operand(field, literal)}) is not None and {test})"

    def _operand(self, field: Field, literal: Literal) -> str:
        """The value of the field as what the literal is, or none."""
        if isinstance(field, SystemField):
            return f"sys[{int(field)}]"
        text = self._get(field)
        return f"number({text})" if isinstance(literal, Number) else text

    def _like(self, segments: like.Segments, matches: like.Matcher) -> str:
        """The cheapest test of ``t``: most patterns are a start, an end or a part of a text."""
        match segments.literals:
            case (whole,):
                return f"t == {self._name(whole)}"
            case (start, ""):
                return f"t.startswith({self._name(start)})"
            case ("", end):
                return f"t.endswith({self._name(end)})"
            case ("", part, ""):
                return f"{self._name(part)} in t"
        return f"{self._name(matches)}(t)"

    def _get(self, header: Header) -> str:
        if header.name not in self._headers:
            self._headers[header.name] = self._name(header.name)
        return f"get({self._headers[header.name]})"

    def _constant(self, literal: Literal) -> str:
        return self._name(_value(literal))

    def _name(self, value: object) -> str:
        self._values.append(value)
        return f"k{len(self._values) - 1}"


def _value(literal: Literal) -> object:
    return exact_number(literal.value) if isinstance(literal, Number) else literal.value


@lru_cache(maxsize=_CACHED_SHAPES)
def _factory(source: str) -> Callable[..., Any]:
    made: dict[str, Callable[..., Any]] = {}
    exec(compile(source, "<filter>", "exec"), dict(_NAMES), made)
    return made["make"]
