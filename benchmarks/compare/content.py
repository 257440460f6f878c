"""Messages that all differ, and the check of those that were consumed."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

PAYLOAD_BYTES: Final = 256
HEADERS: Final = {"type": "order.created", "region": "emea"}

_HEAD: Final = struct.Struct(">QQ")
_FILLER: Final = bytes(range(256))[_HEAD.size : PAYLOAD_BYTES]
_HEADERS_JSON: Final = json.dumps(HEADERS, separators=(",", ":")).encode()


class WrongMessages(Exception):
    """What was consumed is not what was published: the figure counts for nothing."""


def payload_of(number: int, due_ns: int = 0) -> bytes:
    """The payload of a message: its number, when it was due, and a filler."""
    return _HEAD.pack(number, due_ns) + _FILLER


def payloads(first: int, count: int) -> list[bytes]:
    return [payload_of(number) for number in range(first, first + count)]


def opened(payload: bytes, headers: Mapping[str, str]) -> tuple[int, int]:
    """The number of a message and when it was due; it must be whole."""
    if len(payload) != PAYLOAD_BYTES or payload[_HEAD.size :] != _FILLER:
        raise WrongMessages(f"a payload was changed: {payload[:40]!r}…")
    if dict(headers) != HEADERS:
        raise WrongMessages(f"headers were changed: {headers!r}")
    number, due_ns = _HEAD.unpack_from(payload)
    return number, due_ns


def boxed(payload: bytes) -> bytes:
    """Headers and payload in one, for systems that know no headers."""
    return _HEADERS_JSON + b"\n" + payload


def unboxed(body: bytes) -> tuple[bytes, Mapping[str, str]]:
    headers, _, payload = bytes(body).partition(b"\n")
    return payload, json.loads(headers)


def check_numbers(numbers: Iterable[int], published: range) -> None:
    """Each number once, and none that was not published."""
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            raise WrongMessages(f"message {number} was handed out twice")
        if number not in published:
            raise WrongMessages(f"message {number} was never published")
        seen.add(number)


def check_losses(published: int, consumed: int, waiting: int) -> None:
    """What was published was consumed, or is still there."""
    if consumed + waiting != published:
        raise WrongMessages(
            f"{published} were published, {consumed} consumed, and {waiting} are waiting"
        )


def slices(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of the slices of ``count`` messages."""
    for first in range(0, count, size):
        yield first, min(size, count - first)
