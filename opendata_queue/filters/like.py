"""Patterns of ``LIKE`` (RFC 0005): ``%`` is any run of characters, ``_`` is one.

A pattern is cut at each ``%`` into segments of fixed length. The leftmost place for one segment
leaves the most room for the next, so no choice is ever taken back: matching costs at most the
length of the text times the length of the pattern, whatever the two are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

Matcher = Callable[[str], bool]


class Wildcard(Enum):
    ANY_RUN = "%"
    ANY_CHARACTER = "_"


class PatternError(ValueError):
    """An escape that escapes nothing."""


@dataclass(frozen=True, slots=True)
class Segments:
    """A pattern cut at its ``%``; ``_`` is ``Wildcard.ANY_CHARACTER`` in a segment."""

    parts: tuple[tuple[str | Wildcard, ...], ...]

    @property
    def literals(self) -> tuple[str, ...] | None:
        """The segments as text, if no ``_`` is among them."""
        texts = []
        for part in self.parts:
            if Wildcard.ANY_CHARACTER in part:
                return None
            texts.append("".join(str(item) for item in part))
        return tuple(texts)


def cut(pattern: str, escape: str | None = None) -> Segments:
    """The segments of a pattern; ``PatternError`` if its escapes are wrong."""
    parts: list[list[str | Wildcard]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            escaped = next(characters, "")
            if escaped not in ("%", "_", escape):
                raise PatternError(
                    f"{escape} is the escape character: %, _ or {escape} must follow it"
                )
            parts[-1].append(escaped)
        elif character == Wildcard.ANY_RUN.value:
            parts.append([])
        elif character == Wildcard.ANY_CHARACTER.value:
            parts[-1].append(Wildcard.ANY_CHARACTER)
        else:
            parts[-1].append(character)
    return Segments(tuple(tuple(part) for part in parts))


@lru_cache(maxsize=1024)
def matcher(pattern: str, escape: str | None = None) -> Matcher:
    """A function that tells whether a text is like the pattern."""
    segments = cut(pattern, escape)
    first, *middle = [_expression(part) for part in segments.parts]
    if not middle:
        expression = first
    else:
        *middle, last = middle
        # An atomic group never gives back what it took: the leftmost place is the one.
        expression = first + "".join(f"(?>.*?{part})" for part in middle) + ".*" + last
    matches = re.compile(expression, re.DOTALL).fullmatch
    return lambda text: matches(text) is not None


def _expression(part: tuple[str | Wildcard, ...]) -> str:
    return "".join("." if isinstance(item, Wildcard) else re.escape(item) for item in part)
