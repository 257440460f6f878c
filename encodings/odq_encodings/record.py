"""What every key and value has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from odq_encodings.columns import Column
from odq_encodings.errors import EncodingError
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import MAX_KEY_BYTES, VERSION, RecordType
from odq_encodings.reader import Reader
from odq_encodings.terminated_bytes import encode_terminated_bytes

MESSAGE_ID_KEY = IntegerRun(">", message_id="Q")


class Record(ABC):
    """A key or a value with exactly one encoding: ``decode`` accepts what ``encode`` makes."""

    __slots__ = ()

    @abstractmethod
    def encode(self) -> bytes:
        """The record's bytes; ``EncodingError`` if a field does not fit."""

    @classmethod
    @abstractmethod
    def read(cls, reader: Reader) -> Self:
        """Read the record's fields, in order, from ``reader``."""

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The record that ``data`` holds, all of it; ``EncodingError`` if it holds none.

        A ``bytearray`` or a ``memoryview`` is copied first.
        """
        reader = Reader(cls.__name__, data)
        record = cls.read(reader)
        reader.finish()
        return record


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageIdKey(Record):
    """A key that ends in a message id. Layout: version, type, message id ``u64`` big-endian."""

    record_type: ClassVar[RecordType]

    message_id: int

    def encode(self) -> bytes:
        name = type(self).__name__
        return self.record_type.prefix + MESSAGE_ID_KEY.pack(name, self.message_id)

    @classmethod
    def columns(cls, message_ids: Sequence[int]) -> list[Column]:
        """Many of them, by column."""
        return [cls.record_type.prefix, *MESSAGE_ID_KEY.columns(cls.__name__, message_ids)]

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(cls.record_type)
        (message_id,) = reader.integers(MESSAGE_ID_KEY)
        return cls(message_id=message_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueKey(Record):
    """A key of one queue. Layout: version, type, queue id ``TerminatedBytes``, then ``suffix``.

    ``suffix`` is a run of big-endian integers, whose names are fields of the subclass.
    """

    record_type: ClassVar[RecordType]
    key_version: ClassVar[int] = VERSION
    suffix: ClassVar[IntegerRun] = IntegerRun(">")

    queue_id: bytes

    def encode(self) -> bytes:
        return self.prefix(self.queue_id) + self.suffix.pack_fields(self)

    @classmethod
    def prefix(cls, queue_id: bytes) -> bytes:
        """What all keys of this type and queue start with: everything but the suffix."""
        escaped = encode_terminated_bytes(queue_id, record=cls.__name__, field="queue_id")
        start = bytes((cls.key_version, cls.record_type)) + escaped
        checked_key_size(start + bytes(cls.suffix.size), record=cls.__name__, field="queue_id")
        return start

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.key_prefix(cls.record_type, cls.key_version)
        queue_id = reader.terminated_bytes("queue_id")
        values = reader.integers(cls.suffix)
        return cls(queue_id=queue_id, **dict(zip(cls.suffix.names, values, strict=True)))


def checked_key_size(key: bytes, *, record: str, field: str) -> bytes:
    if len(key) > MAX_KEY_BYTES:
        reason = f"makes a key of {len(key)} bytes, over the limit of {MAX_KEY_BYTES}"
        raise EncodingError(reason, record=record, field=field)
    return key
