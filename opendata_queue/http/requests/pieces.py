"""Answers that are too large to be made at once: encoded in pieces, each when it is its turn.

In JSON a control character takes six bytes, and a payload a third more than it has. So what is
held of a large answer is the messages themselves, for which room was taken, and one piece.
"""

from __future__ import annotations

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import msgspec

from opendata_queue.http.wire import JSON, MSGPACK, to_json
from opendata_queue.model.allowance import MESSAGE_BYTES, headers_bytes

PIECE_BYTES: Final = 64 * 1024
"""A piece has at least so many, but for the last; and no more than 160 KiB."""

_GROUP_BYTES: Final = 16 * 1024
"""Of what is encoded in one go, as it is in memory."""

_PAYLOAD_STEP_BYTES: Final = 48 * 1024
"""A multiple of three, so that the base64 of the parts is that of the whole."""

_FIXSTR: Final = 31
_FIXARRAY: Final = 15
_U8: Final = 0xFF
_U16: Final = 0xFFFF


class Pieces:
    """A large answer. It lets go of the entries of its lists as it goes through them."""

    def __init__(self, answer: Any, *, as_msgpack: bool) -> None:
        self._answer = answer
        self._form: _Form = _Msgpack() if as_msgpack else _Json()
        self.media_type = MSGPACK if as_msgpack else JSON

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces(keeps=False)

    async def count(self) -> int:
        """How long the answer will be, for clients that must be given its length first."""
        size_bytes = 0
        for piece in self._pieces(keeps=True):
            size_bytes += len(piece)
            await asyncio.sleep(0)
        return size_bytes

    def _pieces(self, *, keeps: bool) -> Iterator[bytes]:
        parts: list[bytes] = []
        size_bytes = 0
        for part in self._form.parts(self._answer, keeps=keeps):
            parts.append(part)
            size_bytes += len(part)
            if size_bytes >= PIECE_BYTES:
                yield b"".join(parts)
                parts.clear()
                size_bytes = 0
        if parts:
            yield b"".join(parts)


class _Form(ABC):
    """How values become bytes, part by part."""

    def parts(self, value: Any, name: str = "", *, keeps: bool) -> Iterator[bytes]:
        """A value that may be large; ``name`` is that of the field it is in."""
        if isinstance(value, list | tuple) and name != "headers":
            yield from self._list(value, name, keeps=keeps)
        elif isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
            yield from self._record(value, keeps=keeps)
        elif _weight(value) <= _GROUP_BYTES:
            yield self.encode(value, name)
        elif isinstance(value, bytes):
            yield from self.payload(value)
        elif isinstance(value, str):
            yield from self.text(value)
        else:
            yield from self.headers(value)

    def _record(self, record: Any, *, keeps: bool) -> Iterator[bytes]:
        fields = _shown_fields(record)
        yield self.map_head(len(fields))
        for index, name in enumerate(fields):
            yield self.between(index) + self.encode(name, "") + self.after_key
            yield from self.parts(getattr(record, name), name, keeps=keeps)
        yield self.map_end

    def _list(
        self, entries: list[Any] | tuple[Any, ...], name: str, *, keeps: bool
    ) -> Iterator[bytes]:
        yield self.list_head(len(entries))
        done = 0
        for group in _groups(entries, keeps=keeps):
            count = len(group)
            if count == 1 and _weight(group[0]) > _GROUP_BYTES:
                yield self.between(done)
                yield from self.parts(group.pop(), keeps=keeps)
            else:
                yield self.between(done) + self.entries(group, name)
            done += count
        yield self.list_end

    list_end = map_end = after_key = b""

    def between(self, done: int) -> bytes:
        return b""

    @abstractmethod
    def encode(self, value: Any, name: str) -> bytes: ...

    @abstractmethod
    def entries(self, group: list[Any], name: str) -> bytes:
        """Some entries of a list."""

    @abstractmethod
    def list_head(self, count: int) -> bytes: ...

    @abstractmethod
    def map_head(self, count: int) -> bytes: ...

    @abstractmethod
    def payload(self, payload: bytes) -> Iterator[bytes]: ...

    @abstractmethod
    def text(self, text: str) -> Iterator[bytes]: ...

    @abstractmethod
    def headers(self, headers: Iterable[tuple[str, str]]) -> Iterator[bytes]: ...


class _Json(_Form):
    list_end, map_end, after_key = b"]", b"}", b":"

    def between(self, done: int) -> bytes:
        return b"," if done else b""

    def encode(self, value: Any, name: str) -> bytes:
        return to_json(value, name)

    def entries(self, group: list[Any], name: str) -> bytes:
        return to_json(group, name)[1:-1]

    def list_head(self, count: int) -> bytes:
        return b"["

    def map_head(self, count: int) -> bytes:
        return b"{"

    def payload(self, payload: bytes) -> Iterator[bytes]:
        yield b'"'
        for start in range(0, len(payload), _PAYLOAD_STEP_BYTES):
            yield b64encode(memoryview(payload)[start : start + _PAYLOAD_STEP_BYTES])
        yield b'"'

    def text(self, text: str) -> Iterator[bytes]:
        yield b'"'
        for start in range(0, len(text), _GROUP_BYTES):
            yield msgspec.json.encode(text[start : start + _GROUP_BYTES])[1:-1]
        yield b'"'

    def headers(self, headers: Iterable[tuple[str, str]]) -> Iterator[bytes]:
        yield b"{"
        for index, pair in enumerate(dict(headers).items()):
            yield self.between(index)
            yield from self.text(pair[0])
            yield b":"
            yield from self.text(pair[1])
        yield b"}"


class _Msgpack(_Form):
    def encode(self, value: Any, name: str) -> bytes:
        return msgspec.msgpack.encode(value)

    def entries(self, group: list[Any], name: str) -> bytes:
        return msgspec.msgpack.encode(group)[len(self.list_head(len(group))) :]

    def list_head(self, count: int) -> bytes:
        if count <= _FIXARRAY:
            return bytes([0x90 | count])
        return b"\xdc" + count.to_bytes(2) if count <= _U16 else b"\xdd" + count.to_bytes(4)

    def map_head(self, count: int) -> bytes:
        return bytes([0x80 | count])  # records have a few fields

    def payload(self, payload: bytes) -> Iterator[bytes]:
        yield _sized(0xC4, len(payload))
        for start in range(0, len(payload), _PAYLOAD_STEP_BYTES):
            yield payload[start : start + _PAYLOAD_STEP_BYTES]

    def text(self, text: str) -> Iterator[bytes]:
        data = text.encode()
        yield bytes([0xA0 | len(data)]) if len(data) <= _FIXSTR else _sized(0xD9, len(data))
        yield data

    def headers(self, headers: Iterable[tuple[str, str]]) -> Iterator[bytes]:
        pairs = list(headers)
        yield self.list_head(len(pairs))
        for pair in pairs:
            yield msgspec.msgpack.encode(pair)


def _sized(least: int, size: int) -> bytes:
    """The head of what has a size of one, two or four bytes."""
    if size <= _U8:
        return bytes([least, size])
    if size <= _U16:
        return bytes([least + 1]) + size.to_bytes(2)
    return bytes([least + 2]) + size.to_bytes(4)


def _groups(entries: list[Any] | tuple[Any, ...], *, keeps: bool) -> Iterator[list[Any]]:
    """Entries of a list, as many at a time as are encoded in one go; a large one is alone."""
    left = list(reversed(entries))
    if not keeps and isinstance(entries, list):
        entries.clear()
    del entries
    group: list[Any] = []
    size_bytes = 0
    while left:
        weight = _weight(left[-1])
        if group and size_bytes + weight > _GROUP_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(left.pop())
        size_bytes += weight
    if group:
        yield group


# --- how large things are -------------------------------------------------------------------------


def _weight(value: Any) -> int:
    """How many bytes a value has in memory, roughly."""
    if value is None or isinstance(value, int | float):
        return 10
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, list | tuple):
        return sum(map(_weight, value))
    texts, headers, others = _parts_of(value.__class__)
    return (
        MESSAGE_BYTES
        + sum([len(one) for one in texts(value) if one is not None])
        + sum([headers_bytes(one) for one in headers(value)])
        + sum([_weight(one) for one in others(value)])
    )


@lru_cache(maxsize=100)
def _parts_of(kind: Any) -> tuple[Any, Any, Any]:
    """What reads the texts, the headers and the lists and records of a record."""
    names = _names(kind)
    texts = [one for one in names if one in _TEXTS]
    headers = [one for one in names if one == "headers"]
    others = [one for one in names if one in _OTHERS]
    return _getter(texts), _getter(headers), _getter(others)


_TEXTS: Final = frozenset(("payload", "payload_uri", "error"))
_OTHERS: Final = frozenset(
    ("messages", "entries", "queues", "history", "consumers", "message_ids", "outcomes")
)


def _getter(names: list[str]) -> Any:
    if not names:
        return lambda record: ()
    if len(names) == 1:
        get = attrgetter(names[0])
        return lambda record: (get(record),)
    return attrgetter(*names)


def _names(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    return tuple(one.name for one in dataclasses.fields(kind))


def _shown_fields(record: Any) -> list[str]:
    """The names of those fields of a record that are in an answer."""
    names = _names(type(record))
    if not isinstance(record, msgspec.Struct) or not record.__struct_config__.omit_defaults:
        return list(names)
    defaults = {one.name: one.default for one in msgspec.structs.fields(record)}
    return [one for one in names if getattr(record, one) is not defaults[one]]
