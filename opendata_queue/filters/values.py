"""What the text of a header means where a number or a priority is wanted (RFC 0005).

Every back end uses these rules. A number has at most 20 digits before the point and 18 behind it,
so that Arrow and Spark hold each one exactly as ``decimal(38, 18)``.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

MAX_WHOLE_DIGITS: Final = 20
MAX_FRACTION_DIGITS: Final = 18
NUMBER_SYNTAX: Final = rf"[+-]?[0-9]{{1,{MAX_WHOLE_DIGITS}}}(?:\.[0-9]{{1,{MAX_FRACTION_DIGITS}}})?"
TRUE_TEXT: Final = "true"
FALSE_TEXT: Final = "false"

PRIORITY_HEADER: Final = "priority"
PRIORITY_SYNTAX: Final = "[0-9]{1,3}"
DEFAULT_PRIORITY: Final = 128
MAX_PRIORITY: Final = 255

_is_number = re.compile(NUMBER_SYNTAX).fullmatch
_is_priority = re.compile(PRIORITY_SYNTAX).fullmatch


def parse_number(text: str | None) -> Decimal | int | None:
    """The number that ``text`` is, or none. Whole and unsigned ones come as ``int``: faster."""
    if text is None:
        return None
    if len(text) <= MAX_WHOLE_DIGITS and text.isascii() and text.isdigit():
        return int(text)
    return Decimal(text) if _is_number(text) else None


def exact_number(value: Decimal) -> Decimal | int:
    """An ``int`` where that is the same number; the two compare and hash alike."""
    return int(value) if value == value.to_integral_value() else value


def parse_priority(text: str | None) -> int | None:
    """The priority that ``text`` is, or none."""
    if text is None or not _is_priority(text):
        return None
    priority = int(text)
    return priority if priority <= MAX_PRIORITY else None


def priority_of(text: str | None) -> int:
    """The priority that a header gives; the default if it is missing or no priority."""
    if text is None:
        return DEFAULT_PRIORITY
    priority = parse_priority(text)
    return DEFAULT_PRIORITY if priority is None else priority
