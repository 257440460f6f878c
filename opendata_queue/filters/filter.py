"""Filters as the rest of the system uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from opendata_queue.filters.canonical import canonical_text
from opendata_queue.filters.compiled import PriorityFunction, compile_priority, compile_truth
from opendata_queue.filters.nodes import Header, Rule, SystemField, SystemFields, field_of, walk
from opendata_queue.filters.parser import parse_rules
from opendata_queue.filters.validation import check_cost, checked_text, validate, worst_us
from opendata_queue.filters.values import PRIORITY_HEADER


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages a queue holds, and with what priority (RFC 0005).

    A message is given as its headers and its system fields; of a header that a message has twice
    the last one counts, which is what ``dict(pairs)`` keeps.

    ``text`` is the canonical text, the one to store. ``priority_if_match(headers, sys)`` is the
    compiled filter: the priority of a message that matches, none of any other.
    """

    rules: tuple[Rule, ...]
    text: str = field(init=False, compare=False)
    priority_if_match: PriorityFunction = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        validate(self.rules)
        # It may be longer than the text that it was parsed from.
        object.__setattr__(self, "text", checked_text(canonical_text(self.rules)))
        object.__setattr__(self, "priority_if_match", compile_priority(self.rules))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The filter that ``text`` says; ``FilterError`` if it says none. Empty matches all."""
        return cls(parse_rules(text))

    @classmethod
    def given(cls, text: str) -> Self:
        """The same for a text that a caller gives, which must not cost too much, either."""
        filter = cls.parse(text)
        filter.check_cost()
        return filter

    def check_cost(self) -> None:
        """``FilterError`` if long headers would make this too slow for a new filter."""
        check_cost(self.rules)

    @property
    def worst_us(self) -> int:
        """How many microseconds it takes for the worst message, roughly."""
        return worst_us(self.rules)

    @property
    def asks_for_system_fields(self) -> bool:
        """Whether messages with equal headers may give different results."""
        return any(
            isinstance(field_of(condition), SystemField)
            for rule in self.rules
            for condition, _ in walk(rule.condition)
        )

    @property
    def headers(self) -> frozenset[str]:
        """The names of the headers that it reads; no other makes a difference."""
        fields = [
            field_of(condition) for rule in self.rules for condition, _ in walk(rule.condition)
        ]
        found = [field.name for field in fields if isinstance(field, Header)]
        for rule in self.rules:
            if rule.priority is None:
                found.append(PRIORITY_HEADER)
            elif isinstance(rule.priority, Header):
                found.append(rule.priority.name)
        return frozenset(found)

    def matches(self, headers: Mapping[str, str], sys: SystemFields) -> bool:
        """Whether a rule is TRUE for the message."""
        return self.priority_if_match(headers, sys) is not None

    def evaluate(self, headers: Mapping[str, str], sys: SystemFields) -> bool | None:
        """True, false, or none for unknown: the rules joined with OR. Compiles at every call."""
        return compile_truth(self.rules)(headers, sys)

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[Filter], tuple[tuple[Rule, ...]]]:
        return (Filter, (self.rules,))
