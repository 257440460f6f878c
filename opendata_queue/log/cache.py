"""Messages on their way into the store, and those that got there a moment ago."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final, NamedTuple, Self

from odq_encodings import EncodingError, encode_headers
from opendata_queue.log.payloads import Blob
from opendata_queue.model.messages import MAX_HEADERS_BYTES, MessageFields, NewMessage, Published

_GivenTimes = tuple[int | None, int | None, int] | None
"""Created at, visible at and the delay, where the producer has given one of them."""

_Unusual = tuple[str | None, _GivenTimes, int]
"""Payload URI, given times, retention in seconds; an empty URI for a blob."""

_BLOB: Final = ""
_MAX_TIME_MS: Final = (1 << 63) - 1
_USUAL: Final[_Unusual] = (None, None, 0)

# What a message weighs in addition to its payload, URI and headers: Python's objects.
MESSAGE_OVERHEAD_BYTES: Final = 500


class CheckedMessage:
    """A message that can be stored: everything but its id and its received-at time.

    It is ours: the producer may change the message that it was made of. ``uri_value`` is the
    encoded payload where that is a URI, the producer's or that of a blob.
    """

    __slots__ = (
        "blob",
        "encoded_headers",
        "given_times",
        "headers",
        "key",
        "payload",
        "payload_uri",
        "retention_seconds",
        "size_bytes",
        "uri_value",
    )

    def __init__(self, message: NewMessage, inline_bytes: int) -> None:
        self.payload = payload = message.payload
        self.payload_uri = message.payload_uri
        self.headers = dict(message.headers)
        self.encoded_headers = encoded = encode_headers(self.headers.items())
        self.retention_seconds = message.retention_seconds
        self.given_times: _GivenTimes = None
        if (
            message.created_at_ms is not None
            or message.visible_at_ms is not None
            or message.delay_ms is not None
        ):
            self.given_times = message.created_at_ms, message.visible_at_ms, message.delay_ms or 0
        self.uri_value: bytes | None = None
        self.blob: Blob | None = None
        self.key: tuple[str, str] | None = None
        inline = payload is not None and len(payload) <= inline_bytes
        self.size_bytes = len(encoded) + (len(payload) if inline and payload else 0)
        if self.payload_uri is not None:
            self.size_bytes += len(self.payload_uri)
        """What it adds to a commit, roughly; a blob adds only its reference."""

    def becomes(self, blob: Blob, uri_value: bytes) -> None:
        """Its payload is an object of its own now."""
        self.blob = blob
        self.uri_value = uri_value
        self.payload = None

    def shift(self, milliseconds: int) -> None:
        """Move the instant at which it becomes visible, if one was given, to another clock."""
        created_at, visible_at, delay_ms = self.given_times or (None, None, 0)
        if visible_at is not None:
            shifted = min(max(visible_at + milliseconds, -_MAX_TIME_MS), _MAX_TIME_MS)
            self.given_times = created_at, shifted, delay_ms

    def times(self, received_at: int) -> tuple[int, int]:
        """Created at and visible at, given when it was received."""
        return _times(self.given_times, received_at)

    def published(self, message_id: int, received_at: int) -> Published:
        created_at, visible_at = self.times(received_at)
        return Published(
            message_id,
            created_at,
            received_at,
            visible_at,
            self.retention_seconds,
            self.headers,
        )


def _times(given: _GivenTimes, received_at: int) -> tuple[int, int]:
    if given is None:
        return received_at, received_at
    created_at, visible_at, delay_ms = given
    return (
        received_at if created_at is None else created_at,
        received_at + delay_ms if visible_at is None else visible_at,
    )


class MessageBatch:
    """Messages that are stored together, column by column.

    Most have nothing but a payload and headers, and need no object of their own here. If one of
    them has more, ``checked`` has them all; otherwise it is empty.
    """

    __slots__ = ("checked", "encoded_headers", "headers", "payloads", "size_bytes")

    def __init__(
        self,
        payloads: list[bytes | None],
        headers: list[dict[str, str]],
        encoded_headers: list[bytes],
        size_bytes: int,
        checked: Sequence[CheckedMessage] = (),
    ) -> None:
        self.payloads = payloads
        self.headers = headers
        self.encoded_headers = encoded_headers
        self.size_bytes = size_bytes
        self.checked = checked

    @classmethod
    def of(cls, checked: Sequence[CheckedMessage]) -> Self:
        return cls(
            [one.payload for one in checked],
            [one.headers for one in checked],
            [one.encoded_headers for one in checked],
            sum(one.size_bytes for one in checked),
            checked,
        )

    @classmethod
    def of_plain(cls, messages: Sequence[NewMessage], inline_bytes: int) -> Self | None:
        """Messages that can be checked together; none if one has to be checked alone, or is wrong.

        A batch is checked like this in a fifth of the time. Headers that several messages share
        are copied and encoded once: no caller can change them in between.
        """
        payloads: list[bytes | None] = []
        headers: list[dict[str, str]] = []
        encoded_headers: list[bytes] = []
        size_bytes = 0
        given: object = object()  # the headers of no message
        copied: dict[str, str] = {}
        encoded = b""
        for message in messages:
            if message.__class__ is not NewMessage:
                return None
            payload = message.payload
            if (
                payload.__class__ is not bytes
                or len(payload) > inline_bytes
                or message.payload_uri is not None
                or message.delay_ms is not None
                or message.visible_at_ms is not None
                or message.created_at_ms is not None
                or message.retention_seconds.__class__ is not int
                or message.retention_seconds
                or message.idempotency_key is not None
            ):
                return None
            if message.headers is not given:
                given = message.headers
                if given.__class__ is not dict:
                    return None
                copied = dict(message.headers)
                try:
                    encoded = encode_headers(copied.items())
                except EncodingError:
                    return None
                if len(encoded) > MAX_HEADERS_BYTES:
                    return None
            size_bytes += len(payload)
            payloads.append(payload)
            headers.append(copied)
            encoded_headers.append(encoded)
        size_bytes += sum(map(len, encoded_headers))
        return cls(payloads, headers, encoded_headers, size_bytes)

    def __len__(self) -> int:
        return len(self.payloads)

    def published(self, first_id: int, received_at: int) -> list[Published]:
        """What routing needs to know of them, given their consecutive ids."""
        if self.checked:
            return [one.published(i, received_at) for i, one in enumerate(self.checked, first_id)]
        ids, time = range(first_id, first_id + len(self)), repeat(received_at)
        fields = zip(ids, time, time, time, repeat(0), self.headers, strict=False)
        return list(map(tuple.__new__, repeat(Published), fields))  # a third of the time of calls


class _Batch(NamedTuple):
    """Messages with consecutive ids that became durable together.

    Column by column, and without an object for each message: a hundred thousand of them would make
    Python's garbage collector stop everything for 50 ms now and then. It has no interest in bytes,
    nor in dictionaries of strings. ``unusual`` has what most messages have not, by their place.
    """

    payloads: list[bytes | None]
    headers: list[dict[str, str]]
    unusual: dict[int, _Unusual]
    received_at: int
    size_bytes: int


def _usual_messages(
    message_ids: Sequence[int], batch: _Batch, first: int
) -> Iterable[MessageFields]:
    """Messages of a batch with nothing unusual, beginning with a place, column by column."""
    behind = first + len(message_ids)
    pairs: list[tuple[tuple[str, str], ...]] = []
    last: dict[str, str] | None = None
    items: tuple[tuple[str, str], ...] = ()
    for headers in batch.headers[first:behind]:
        if headers is not last:  # most often they share them
            last, items = headers, tuple(headers.items())
        pairs.append(items)
    none, time, forever = repeat(None), repeat(batch.received_at), repeat(0)
    payloads = batch.payloads[first:behind]
    fields = zip(message_ids, payloads, none, pairs, time, time, time, forever, strict=False)
    return map(tuple.__new__, repeat(MessageFields), fields)


class RecentMessages:
    """The newest messages, so that consuming them soon needs no read.

    They come and go in batches, the oldest first, so that a message costs next to nothing here;
    bounded in bytes.
    """

    __slots__ = ("_batches", "_first_ids", "_gone", "_limit_bytes", "_size_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._first_ids: list[int] = []
        self._batches: list[_Batch | None] = []
        self._gone = 0
        """How many batches at the front of both lists are gone, and not cut off yet."""

    def add_many(self, first_id: int, messages: MessageBatch, received_at: int) -> None:
        """Add messages with consecutive ids, greater than all that were added before."""
        size_bytes = MESSAGE_OVERHEAD_BYTES * len(messages) + messages.size_bytes
        unusual: dict[int, _Unusual] = {}
        for place, m in enumerate(messages.checked):
            if m.uri_value is not None or m.given_times is not None or m.retention_seconds:
                uri = m.payload_uri if m.blob is None else _BLOB
                unusual[place] = uri, m.given_times, m.retention_seconds
        self._first_ids.append(first_id)
        self._batches.append(
            _Batch(messages.payloads, messages.headers, unusual, received_at, size_bytes)
        )
        self._size_bytes += size_bytes
        while self._size_bytes > self._limit_bytes:
            self._drop_oldest()

    def missing(self, message_ids: Iterable[int]) -> list[int]:
        """Those of the messages that are not at hand."""
        missing = []
        first_id = behind = 0
        unusual: dict[int, _Unusual] = {}
        for one in message_ids:
            if first_id <= one < behind and not unusual:
                continue
            found = self._find(one)
            if found is None:
                missing.append(one)
            else:
                batch, place = found
                first_id, behind = one - place, one - place + len(batch.payloads)
                unusual = batch.unusual
        return missing

    def get(self, message_id: int) -> MessageFields | None:
        """A message whose payload is at hand; none for a blob."""
        found = self._find(message_id)
        return None if found is None else self._message(message_id, *found)

    def get_many(self, message_ids: Sequence[int]) -> list[MessageFields | None]:
        """The same for several, in their order. Those of one batch are found with one search."""
        messages: list[MessageFields | None] = []
        place = 0
        while place < len(message_ids):
            one = message_ids[place]
            found = self._find(one)
            behind = place + 1
            if found is None:
                messages.append(None)
            elif found[0].unusual:
                messages.append(self._message(one, *found))
            else:
                batch, first = found
                end = min(len(message_ids), place + len(batch.payloads) - first)
                while behind < end and message_ids[behind] == one + behind - place:
                    behind += 1
                messages += _usual_messages(message_ids[place:behind], batch, first)
            place = behind
        return messages

    @staticmethod
    def _message(message_id: int, batch: _Batch, place: int) -> MessageFields:
        unusual = batch.unusual.get(place) if batch.unusual else None
        if unusual is None:
            payload_uri, retention_seconds = None, 0
            created_at = visible_at = batch.received_at
        else:
            payload_uri, given_times, retention_seconds = unusual
            created_at, visible_at = _times(given_times, batch.received_at)
        fields = (
            message_id,
            batch.payloads[place],
            payload_uri,
            tuple(batch.headers[place].items()),
            created_at,
            batch.received_at,
            visible_at,
            retention_seconds,
        )
        return tuple.__new__(MessageFields, fields)  # half the time of a call

    def forget(self, message_ids: Iterable[int]) -> None:
        """Let go of messages that were deleted."""
        for message_id in message_ids:
            found = self._find(message_id)
            if found is not None:
                batch, place = found
                batch.payloads[place] = None
                batch.unusual[place] = _BLOB, None, 0

    def _find(self, message_id: int) -> tuple[_Batch, int] | None:
        """The batch of a message that is at hand, and its place there."""
        index = bisect_right(self._first_ids, message_id, self._gone) - 1
        if index < self._gone:
            return None
        batch = self._batches[index]
        assert batch is not None
        place = message_id - self._first_ids[index]
        if place >= len(batch.payloads) or batch.unusual.get(place, _USUAL)[0] == _BLOB:
            return None
        return batch, place

    def _drop_oldest(self) -> None:
        batch = self._batches[self._gone]
        assert batch is not None
        self._size_bytes -= batch.size_bytes
        self._batches[self._gone] = None
        self._gone += 1
        if self._gone > 1_000 and 2 * self._gone > len(self._batches):
            # Now and then: cutting off the front costs as much as what is left behind it.
            del self._first_ids[: self._gone], self._batches[: self._gone]
            self._gone = 0
