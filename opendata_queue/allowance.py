"""How many bytes of messages one answer may hold, counted before they are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Final

from opendata_queue.messages import MessageFields

READ_AT_ONCE: Final = 256
"""Messages that are read before their bytes are counted, but for large payloads."""

_MESSAGE_BYTES: Final = 64
"""What a message takes in an answer beside its payload and headers, roughly."""

_LARGE_PAYLOAD_BYTES: Final = 0xFFFF
"""A longer one is an object of its own, and counted when it is read."""

ReadMany = Callable[[list[int], "Allowance"], Awaitable[list[MessageFields | None]]]


class Allowance:
    """Bytes for one answer, out of those for all answers, which ``take`` and ``give`` count.

    ``take`` is given how many bytes are asked for, and how many this answer has already.
    """

    __slots__ = ("_give", "_limit_bytes", "_take", "first_id", "left", "no_room", "taken_bytes")

    def __init__(
        self, limit_bytes: int, take: Callable[[int, int], bool], give: Callable[[int], None]
    ) -> None:
        self._limit_bytes = limit_bytes
        self._take = take
        self._give = give
        self.taken_bytes = 0
        self.first_id: int | None = None
        """A message that is not refused for its size alone: there would be no way to get it."""
        self.left: set[int] = set()
        """Messages whose payloads were not read, since they did not fit."""
        self.no_room = False
        """Whether something did not fit because of what others hold."""

    def reserve(self, size_bytes: int) -> bool:
        """Count bytes of what has a bound of its own; false if others hold too much."""
        if not self._take(size_bytes, self.taken_bytes):
            self.no_room = True
            return False
        self.taken_bytes += size_bytes
        return True

    def take(self, size_bytes: int, message_id: int | None = None) -> bool:
        """Count the bytes of a message, or of several; false if they do not fit."""
        if self.taken_bytes + size_bytes > self._limit_bytes and (
            message_id is None or message_id != self.first_id
        ):
            return False
        return self.reserve(size_bytes)

    def admit(self, message_id: int, size_bytes: int) -> bool:
        """Whether a large payload may be read; behind one that may not, none may."""
        if not self.left and self.take(size_bytes, message_id):
            return True
        self.left.add(message_id)
        return False

    def settle(self, size_bytes: int) -> None:
        """The answer is made, and so long."""
        self._give(self.taken_bytes - size_bytes)
        self.taken_bytes = size_bytes

    def give_back(self) -> None:
        """Nothing is held any more."""
        self._give(self.taken_bytes)
        self.taken_bytes = 0
        self.first_id = None
        self.left.clear()
        self.no_room = False


async def read_within(
    read_many: ReadMany, message_ids: list[int], allowance: Allowance
) -> list[MessageFields | None]:
    """The first ones of some messages, as many as fit; none of them if there is no room at all."""
    if message_ids and not allowance.taken_bytes:
        allowance.first_id = message_ids[0]
    found: list[MessageFields | None] = []
    for start in range(0, len(message_ids), READ_AT_ONCE):
        some = message_ids[start : start + READ_AT_ONCE]
        messages = await read_many(some, allowance)
        fitting = _fitting(some, messages, allowance)
        found += messages[:fitting]
        if fitting < len(some):
            break
    return found


def _fitting(
    message_ids: list[int], messages: list[MessageFields | None], allowance: Allowance
) -> int:
    """How many of some messages fit that were read; they are counted."""
    if not allowance.left and allowance.take(_size(messages)):  # nearly always
        return len(messages)
    for index, (message_id, message) in enumerate(zip(message_ids, messages, strict=True)):
        if message_id in allowance.left or not allowance.take(_size([message]), message_id):
            return index
    return len(messages)


def _size(messages: Iterable[MessageFields | None]) -> int:
    present = [one for one in messages if one is not None]
    payloads = [one.payload for one in present if one.payload is not None]
    sizes = [*map(len, payloads)]
    if sizes and max(sizes) > _LARGE_PAYLOAD_BYTES:
        sizes = [one for one in sizes if one <= _LARGE_PAYLOAD_BYTES]
    return (
        sum(sizes)
        + headers_bytes(*[one.headers for one in present])
        + (len(present) * _MESSAGE_BYTES)
    )


def headers_bytes(*headers: Iterable[tuple[str, str]]) -> int:
    """How long the headers of some messages are, roughly."""
    return sum(map(len, chain.from_iterable(chain.from_iterable(headers))))
