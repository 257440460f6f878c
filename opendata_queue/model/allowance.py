"""How many bytes of messages one answer may hold, counted before they are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain, takewhile
from typing import Final

from opendata_queue.model.messages import MessageFields
from opendata_queue.model.values import FailedMessage

READ_AT_ONCE: Final = 256
"""Messages that are read before they are counted, if they are small."""

STEP_BYTES: Final = 1024 * 1024
"""Of rows that are read before they are counted: a message can have megabytes of headers."""

MESSAGE_BYTES: Final = 400
"""What a message takes in addition to payload and headers, roughly: names, numbers, receipt."""

COUNTED_BYTES: Final = 64
"""How many of these count in the limit of an answer, which is meant for what messages hold."""

LARGE_BYTES: Final = 64 * 1024
"""An answer with more bytes of messages is made in pieces."""

PIECES_BYTES: Final = 256 * 1024
"""What a large answer takes in addition to its messages: a piece, and what waits to be sent."""

_LARGE_PAYLOAD_BYTES: Final = 0xFFFF
"""A longer one is an object of its own, and counted when it is read."""

ReadMany = Callable[[list[int], "Allowance"], Awaitable[list[MessageFields | None]]]


class RowBudget:
    """How many bytes of rows may be read; what is beyond them is noted, and not read.

    A reader stops within the next few rows. A single row is always read: there must be progress.
    """

    __slots__ = ("_max_bytes", "read_bytes", "unread")

    def __init__(self, max_bytes: int, unread: set[int]) -> None:
        self._max_bytes = max_bytes
        self.read_bytes = 0
        self.unread = unread
        """Ids whose rows may be there, and were not read."""

    @property
    def left_bytes(self) -> int:
        return max(0, self._max_bytes - self.read_bytes)

    def count(self, rows: Iterable[bytes]) -> None:
        self.read_bytes += sum(map(len, rows))


class ReadStep:
    """What may be read of some messages before it is counted, and which of them it leaves unread.

    They are read in parallel, so the rows of their metadata and of their payloads have a budget
    each.
    """

    __slots__ = ("metadata", "payloads", "unread")

    def __init__(self, max_bytes: int = STEP_BYTES) -> None:
        self.unread: set[int] = set()
        self.metadata = RowBudget(max_bytes, self.unread)
        self.payloads = RowBudget(max_bytes, self.unread)

    def read_of(self, message_ids: Sequence[int]) -> Sequence[int]:
        """The first of some messages, up to one that was left unread."""
        if not self.unread:
            return message_ids
        return [*takewhile(lambda one: one not in self.unread, message_ids)]

    @staticmethod
    def next_count(asked: Sequence[int], read: Sequence[int]) -> int:
        """How many to ask for next: where much was left unread, not many more than were read.

        One is always read.
        """
        if len(read) == len(asked):
            return READ_AT_ONCE
        return min(2 * len(read), READ_AT_ONCE) or max(1, len(asked) // 2)


class Allowance:
    """Bytes for one answer, out of those for all answers, which ``take`` and ``give`` count.

    ``take`` is given how many bytes are asked for, and how many this answer has already.
    """

    __slots__ = (
        *("_admitted", "_counted_bytes", "_give", "_limit_bytes", "_take"),
        *("first_id", "is_large", "left", "no_room", "step", "taken_bytes"),
    )

    def __init__(
        self, limit_bytes: int, take: Callable[[int, int], bool], give: Callable[[int], None]
    ) -> None:
        self._limit_bytes = limit_bytes
        self._take = take
        self._give = give
        self._counted_bytes = 0
        self._admitted: dict[int, int] = {}
        """The sizes of large payloads that were read in this step."""
        self.taken_bytes = 0
        self.is_large = False
        """Whether it is made in pieces; then there is room for these, too."""
        self.first_id: int | None = None
        """A message that is not refused for its size alone: there would be no way to get it."""
        self.left: set[int] = set()
        """Messages whose payloads were not read, since they did not fit."""
        self.step = ReadStep()
        """What is being read, and not counted yet."""
        self.no_room = False
        """Whether something did not fit because of what others hold."""

    def reserve(self, size_bytes: int) -> bool:
        """Count bytes of what has a bound of its own; false if others hold too much."""
        becomes_large = not self.is_large and self.taken_bytes + size_bytes > LARGE_BYTES
        asked_bytes = size_bytes + PIECES_BYTES if becomes_large else size_bytes
        if not self._take(asked_bytes, self.taken_bytes):
            self.no_room = True
            return False
        self.taken_bytes += asked_bytes
        self.is_large = self.is_large or becomes_large
        return True

    def take(self, size_bytes: int, message_id: int | None = None, messages: int = 1) -> bool:
        """Count the bytes of a message, or of several; false if they do not fit."""
        if self._counted_bytes + size_bytes > self._limit_bytes and (
            message_id is None or message_id != self.first_id
        ):
            return False
        if not self.reserve(size_bytes + messages * (MESSAGE_BYTES - COUNTED_BYTES)):
            return False
        self._counted_bytes += size_bytes
        return True

    def admit(self, message_id: int, size_bytes: int) -> bool:
        """Whether a large payload may be read; behind one that may not, none may."""
        if not self.left and self.take(size_bytes, message_id, messages=0):
            self._admitted[message_id] = size_bytes
            return True
        self.left.add(message_id)
        return False

    def begin_step(self) -> ReadStep:
        """Messages are about to be read, and counted afterwards."""
        self._admitted.clear()
        self.step = ReadStep()
        return self.step

    def read_again(self, message_ids: Iterable[int]) -> None:
        """Some messages were read behind one that was left unread: the next step reads them."""
        for one in message_ids:
            size_bytes = self._admitted.pop(one, 0)
            self._counted_bytes -= size_bytes
            self.taken_bytes -= size_bytes
            self._give(size_bytes)
            self.left.discard(one)

    def settle(self, size_bytes: int) -> None:
        """The answer is made, and so long."""
        self._give(self.taken_bytes - size_bytes)
        self.taken_bytes = size_bytes

    def give_back(self) -> None:
        """Nothing is held any more."""
        self._give(self.taken_bytes)
        self.taken_bytes = self._counted_bytes = 0
        self.is_large = False
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
    at_once = READ_AT_ONCE
    while len(found) < len(message_ids):
        some = message_ids[len(found) : len(found) + at_once]
        step = allowance.begin_step()
        messages = await read_many(some, allowance)
        read = step.read_of(some)
        allowance.read_again(some[len(read) :])
        at_once = step.next_count(some, read)
        fitting = _fitting(read, messages[: len(read)], allowance)
        found += messages[:fitting]
        if fitting < len(read):
            break
    return found


def _fitting(
    message_ids: Sequence[int], messages: list[MessageFields | None], allowance: Allowance
) -> int:
    """How many of some messages fit that were read; they are counted."""
    if not allowance.left and allowance.take(
        _size(messages), messages=len(messages)
    ):  # nearly always
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
        + sum([len(one.payload_uri) for one in present if one.payload_uri is not None])
        + headers_bytes(*[one.headers for one in present])
        + (len(present) * COUNTED_BYTES)
    )


def headers_bytes(*headers: Iterable[tuple[str, str]]) -> int:
    """How long the headers of some messages are, roughly."""
    return sum(map(len, chain.from_iterable(chain.from_iterable(headers))))


def failed_bytes(message: FailedMessage) -> int:
    """What a failed message takes in an answer, roughly."""
    texts = len(message.consumer) + len(message.error)
    return MESSAGE_BYTES + texts + headers_bytes(message.headers)
