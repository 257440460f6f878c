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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

Matcher = Callable[[str], bool]
Part = tuple["str | Wildcard", ...]

SHORT_TEXT: Final = 256
"""Up to so many characters a text is matched by a regular expression."""


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


def has_gap(part: Part) -> bool:
    """Whether a segment has a ``_`` between two other characters."""
    return Wildcard.ANY_CHARACTER in _core(part)[1]


def _core(part: Part) -> tuple[int, Part, int]:
    """A segment without the ``_`` at its start and its end, and how many these are."""
    places = [place for place, item in enumerate(part) if _is_text(item)]
    if not places:
        return len(part), (), 0
    return places[0], part[places[0] : places[-1] + 1], len(part) - places[-1] - 1


class _LongTexts:
    """Matches texts against a pattern with a ``%``, in the time that their length takes."""

    __slots__ = ("_codes", "_first", "_last", "_middle", "_widths")

    def __init__(self, segments: Segments) -> None:
        first, *middle, last = segments.parts
        self._first = re.compile(_expression(first), re.DOTALL).match
        self._last = re.compile(_expression(last), re.DOTALL).match
        self._widths = len(first), len(last)
        self._middle = [_core(part) for part in middle]
        gapped = [core for _, core, _ in self._middle if Wildcard.ANY_CHARACTER in core]
        letters = dict.fromkeys(item for core in gapped for item in core if isinstance(item, str))
        self._codes = {letter: code for code, letter in enumerate(letters, start=1)}

    def match(self, text: str) -> bool:
        at, end = self._widths[0], len(text) - self._widths[1]
        if at > end or not self._first(text) or not self._last(text, end):
            return False
        places = _Places(text, self._codes) if self._codes else None
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

    Each character of the pattern has a number. One pass over the text for each bit of these numbers
    gives the places where that bit is set, and those of a character follow from them: so the
    passes are eight at most, however many characters a pattern has.
    """

    __slots__ = ("_codes", "_planes", "_size", "_where")

    def __init__(self, text: str, codes: Mapping[str, int]) -> None:
        self._codes, self._size = codes, len(text)
        # Backwards, as the first digit of a number is its highest one.
        coded = text.translate(_Codes({ord(one): code for one, code in codes.items()}))
        backwards = coded.encode("latin-1")[::-1]
        bits = len(codes).bit_length()
        self._planes = [int(backwards.translate(_DIGITS[bit]), 2) for bit in range(bits)]
        self._where: dict[str, int] = {}

    def first(self, part: Part, start: int) -> int:
        """The first place from ``start`` on where the text is like a segment, or -1."""
        found = ((1 << self._size) - 1) >> start
        for offset, item in enumerate(part, start):
            if isinstance(item, str):
                found &= self._of(item) >> offset
                if not found:
                    return -1
        return start + (found & -found).bit_length() - 1

    def _of(self, letter: str) -> int:
        if letter not in self._where:
            places, code = (1 << self._size) - 1, self._codes[letter]
            for bit, plane in enumerate(self._planes):
                places &= plane if code >> bit & 1 else ~plane
            self._where[letter] = places
        return self._where[letter]


class _Codes(dict[int, int]):
    """The numbers of characters; 0 for those that a pattern does not have."""

    def __missing__(self, character: int) -> int:
        self[character] = 0
        return 0


_DIGITS: Final = [bytes(b"01"[code >> bit & 1] for code in range(256)) for bit in range(8)]
