"""Patterns of ``LIKE`` (RFC 0005): ``%`` is any run of characters, ``_`` is one.

A pattern is cut at each ``%`` into segments of fixed length. The leftmost place for one segment
leaves the most room for the next, so no choice is ever taken back. The first and the last segment
have one place each; one between two ``%`` is searched for.

A regular expression tries a segment at each place of a text, which is the fastest for a short one
and costs the length of the text times that of the pattern. A header may have 65,535 bytes, so a
longer text is searched in the time that its length takes: for a segment without ``_`` inside as any
substring, for another one with a bit for each place of the text, at thousands of places at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

Matcher = Callable[[str], bool]
Part = tuple["str | Wildcard", ...]

SHORT_TEXT: Final = 256
"""Up to so many characters a text is matched by a regular expression."""
_COST_OF_GAPS: Final = 4
_CHARACTERS_OF_A_POINT: Final = 16


class Wildcard(Enum):
    ANY_RUN = "%"
    ANY_CHARACTER = "_"


class PatternError(ValueError):
    """An escape that escapes nothing."""


@dataclass(frozen=True, slots=True)
class Segments:
    """A pattern cut at its ``%``; ``_`` is ``Wildcard.ANY_CHARACTER`` in a segment."""

    parts: tuple[Part, ...]

    @property
    def searched(self) -> tuple[Part, ...]:
        """The segments that have to be searched for: those between two ``%`` with a character."""
        return tuple(part for part in self.parts[1:-1] if any(map(_is_text, part)))

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
    """A function that says whether a text is like the pattern."""
    segments = cut(pattern, escape)
    first, *middle = [_expression(part) for part in segments.parts]
    if not middle:
        expression = first
    else:
        *middle, last = middle
        # An atomic group never gives back what it took: the leftmost place is the one.
        expression = first + "".join(f"(?>.*?{part})" for part in middle) + ".*" + last
    matches = re.compile(expression, re.DOTALL).fullmatch
    if len(segments.parts) == 1:
        return lambda text: matches(text) is not None
    in_long = _LongTexts(segments)
    return lambda text: (
        matches(text) is not None if len(text) <= SHORT_TEXT else in_long.match(text)
    )


def _expression(part: Part) -> str:
    return "".join("." if isinstance(item, Wildcard) else re.escape(item) for item in part)


def _is_text(item: str | Wildcard) -> bool:
    return isinstance(item, str)


def search_cost(part: Part) -> int:
    """What it costs to search for a segment: 1 as a substring, else by the number of characters.

    A point is some 0.3 ms at most, in a text of 65,535 bytes.
    """
    core = _core(part)[1]
    if Wildcard.ANY_CHARACTER not in core:
        return 1
    return _COST_OF_GAPS + -(-len(core) // _CHARACTERS_OF_A_POINT)


def _core(part: Part) -> tuple[int, Part, int]:
    """A segment without the ``_`` at its start and its end, and how many these are."""
    places = [place for place, item in enumerate(part) if _is_text(item)]
    if not places:
        return len(part), (), 0
    return places[0], part[places[0] : places[-1] + 1], len(part) - places[-1] - 1


class _LongTexts:
    """Matches texts against a pattern with a ``%``, in the time that their length takes."""

    __slots__ = ("_first", "_last", "_letters", "_middle", "_widths")

    def __init__(self, segments: Segments) -> None:
        first, *middle, last = segments.parts
        self._first = re.compile(_expression(first), re.DOTALL).match
        self._last = re.compile(_expression(last), re.DOTALL).match
        self._widths = len(first), len(last)
        self._middle = [_core(part) for part in middle]
        gapped = [core for _, core, _ in self._middle if Wildcard.ANY_CHARACTER in core]
        letters = dict.fromkeys(item for core in gapped for item in core if isinstance(item, str))
        self._letters = [*letters]

    def match(self, text: str) -> bool:
        at, end = self._widths[0], len(text) - self._widths[1]
        if at > end or not self._first(text) or not self._last(text, end):
            return False
        places = _Places(text, self._letters) if self._letters else None
        for before, core, behind in self._middle:
            at, last = at + before, end - behind
            if places is not None and Wildcard.ANY_CHARACTER in core:
                found = places.first(core, at)
            else:
                found = text.find("".join(str(item) for item in core), at)
            if found < 0 or found + len(core) > last:
                return False
            at = found + len(core) + behind
        return True


class _Places:
    """Where the characters of a pattern are in one text: whole numbers with a bit for each place.

    The text is taken apart by the bytes of its characters: one column if it is ASCII, and else the
    three of UTF-32 that are ever set. In a column, each byte that the pattern has gets a number.
    One pass for each bit of these numbers gives the places where that bit is set, and those of a
    character follow from them: so the passes are few, however many characters a pattern has, and
    whatever other ones the text has.
    """

    __slots__ = ("_columns", "_size", "_where")

    def __init__(self, text: str, letters: Sequence[str]) -> None:
        self._size = len(text)
        # Backwards, as the first digit of a number is its highest one.
        if text.isascii():
            columns = [text.encode("ascii")[::-1]]
            letters = [one for one in letters if one.isascii()]
        else:
            wide = text.encode("utf-32-be")[::-1]
            columns = [wide[byte::4] for byte in range(_BYTES)]
        codes = [ord(one) for one in letters]
        self._columns = [_Column(one, byte, codes) for byte, one in enumerate(columns)]
        self._where = dict.fromkeys(codes, -1)

    def first(self, part: Part, start: int) -> int:
        """The first place from ``start`` on where the text is like a segment, or -1."""
        found = ((1 << self._size) - 1) >> start
        for offset, item in enumerate(part, start):
            if isinstance(item, str):
                found &= self._of(ord(item)) >> offset
                if not found:
                    return -1
        return start + (found & -found).bit_length() - 1

    def _of(self, code: int) -> int:
        places = self._where.get(code, 0)  # one that is not ASCII is nowhere in a text that is
        if places < 0:
            places = (1 << self._size) - 1
            for column in self._columns:
                places = column.restrict(places, code)
            self._where[code] = places
        return places


class _Column:
    """Where each of some bytes is in a column of bytes."""

    __slots__ = ("_byte", "_numbers", "_planes")

    def __init__(self, column: bytes, byte: int, codes: Sequence[int]) -> None:
        self._byte = byte
        values = dict.fromkeys(self._value(code) for code in codes)
        self._numbers = {value: number for number, value in enumerate(values, start=1)}
        self._planes = []
        for bit in range(len(values).bit_length()):
            digits = bytearray(b"0" * 256)
            for value, number in self._numbers.items():
                digits[value] = _DIGITS[number >> bit & 1]
            plane = int(column.translate(digits), 2)
            self._planes.append((~plane, plane))

    def restrict(self, places: int, code: int) -> int:
        """Those places of some where a character has its byte."""
        number = self._numbers[self._value(code)]
        for bit, plane in enumerate(self._planes):
            places &= plane[number >> bit & 1]
        return places

    def _value(self, code: int) -> int:
        return code >> 8 * self._byte & 0xFF


_BYTES: Final = 3
_DIGITS: Final = b"01"
