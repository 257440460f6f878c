"""Bodies: counted before they are decoded, and large ones decoded in steps.

A byte of a body can become a hundred bytes of objects. In msgpack each list says first how long it
is, and is refused before it is read (``wire``). JSON does not say, so what could be a value is
counted first. The messages of a large body are decoded one by one, and others run in between.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from opendata_queue.http.refusals import Refusal, come_back, invalid
from opendata_queue.http.requests.room import Share

LARGE_BODY_BYTES: Final = 64 * 1024
MAX_VALUES: Final = 250_000
"""Fields and headers in one request."""

_STEP_BYTES: Final = 1024 * 1024
_SCAN_BYTES: Final = 64 * 1024
_STEP_VALUES: Final = 5_000
_VALUE_BYTES: Final = 100
"""What a value takes in memory, in addition to its own bytes."""

_FIELDS_OF_A_MESSAGE: Final = 8
_RETRY_AFTER_MS: Final = 1_000
_TEXT: Final = re.compile(rb'"[^"]*"')

T = TypeVar("T")


def no_room() -> Refusal:
    return come_back(503, "the broker has too many bodies at hand", _RETRY_AFTER_MS)


class BodyDecoder(Generic[T]):
    """Decodes the bodies of one kind of request."""

    def __init__(self, kind: Any) -> None:
        self._msgpack: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._json: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    async def decode(self, body: bytes, *, is_msgpack: bool, share: Share) -> T:
        if is_msgpack:
            return self._msgpack.decode(body)
        if len(body) > LARGE_BODY_BYTES:
            await take_values(body, share)
        return self._json.decode(body)


class MessagesDecoder(Generic[T]):
    """Decodes bodies that are, or have, a list of messages.

    ``outline`` is the body with messages that are yet to be decoded, which ``list_of`` finds in it.
    """

    def __init__(
        self,
        kind: Any,
        outline: Any,
        message: Any,
        list_of: Callable[[Any], list[Any]],
        fill: Callable[[Any, list[Any]], T],
    ) -> None:
        self._whole: BodyDecoder[T] = BodyDecoder(kind)
        self._outline: BodyDecoder[Any] = BodyDecoder(outline)
        self._msgpack: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message)
        self._json: msgspec.json.Decoder[Any] = msgspec.json.Decoder(message)
        self._list_of = list_of
        self._fill = fill

    async def decode(self, body: bytes, *, is_msgpack: bool, share: Share) -> T:
        if len(body) <= LARGE_BODY_BYTES:
            return await self._whole.decode(body, is_msgpack=is_msgpack, share=share)
        outline = await self._outline.decode(body, is_msgpack=is_msgpack, share=share)
        decode = self._msgpack.decode if is_msgpack else self._json.decode
        return self._fill(outline, await _in_steps(self._list_of(outline), decode, share))


async def _in_steps(
    parts: list[msgspec.Raw], decode: Callable[[msgspec.Raw], Any], share: Share
) -> list[Any]:
    messages = []
    values = counted = step_bytes = 0
    for index, part in enumerate(parts):
        try:
            message = decode(part)
        except msgspec.MsgspecError as error:
            raise invalid(f"message {index} makes no sense: {error}") from error
        messages.append(message)
        values += _FIELDS_OF_A_MESSAGE + len(getattr(message, "headers", ()))
        step_bytes += len(memoryview(part))
        if values - counted >= _STEP_VALUES or step_bytes >= _STEP_BYTES:
            if values > MAX_VALUES:
                raise _too_many_values()
            if not share.take((values - counted) * _VALUE_BYTES):
                raise no_room()
            counted, step_bytes = values, 0
            await asyncio.sleep(0)
    return messages


async def take_values(body: bytes, share: Share) -> None:
    """Refuse JSON with too many values, and take room for those that it has."""
    values = 0
    for start in range(0, len(body), _STEP_BYTES):
        values += _signs(body, start, start + _STEP_BYTES)
        await asyncio.sleep(0)
    if values > MAX_VALUES:  # or texts are full of commas
        values = await _count_values(body)
    if not share.take(values * _VALUE_BYTES):
        raise no_room()


def _signs(body: bytes, start: int, end: int) -> int:
    """How many values begin here, if nothing of it is text."""
    return sum(body.count(sign, start, end) for sign in (b",", b"{", b"["))


async def _count_values(body: bytes) -> int:
    """How many values there are outside of texts; an error if too many."""
    values = 0
    rest, is_text = b"", False
    for start in range(0, len(body), _SCAN_BYTES):
        part = rest + body[start : start + _SCAN_BYTES]
        rest = b"\\" if (len(part) - len(part.rstrip(b"\\"))) % 2 else b""
        part = part[: len(part) - len(rest)].replace(rb"\\", b"").replace(rb"\"", b"")
        part = b'"' + part if is_text else part
        is_text = part.count(b'"') % 2 == 1
        outside = _TEXT.sub(b"", part + b'"' if is_text else part)
        values += _signs(outside, 0, len(outside))
        if values > MAX_VALUES:
            raise _too_many_values()
        await asyncio.sleep(0)
    return values


def _too_many_values() -> Refusal:
    return invalid(
        f"the body has over {MAX_VALUES:,} fields, headers and list entries: send fewer messages "
        "in one request",
        413,
    )
