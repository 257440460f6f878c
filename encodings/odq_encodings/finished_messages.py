"""What a queue is finished with: done and failed (RFC 0001, Done and failed messages)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from odq_encodings.arrays import join_array
from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import QueueKey, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedMessages(Record):
    """``Array<element>``: what the records of done and of failed messages share."""

    element: ClassVar[type[IntegerRecord]]

    messages: tuple[Any, ...]

    def encode(self) -> bytes:
        name = type(self).__name__
        return self.join(self.element.encode_each(self.messages, record=name, field="messages"))

    @classmethod
    def join(cls, messages: Collection[bytes]) -> bytes:
        """The record made of entries that are encoded already (bulk path)."""
        size = cls.element.layout.size
        return join_array(messages, record=cls.__name__, field="messages", element_size=size)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(messages=cls.element.read_array(reader, "messages"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DoneMessagesKey(QueueKey):
    """``01 03``, queue id ``TerminatedBytes``."""

    record_type = RecordType.DONE_MESSAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class DoneMessage(IntegerRecord):
    """Acknowledged; 18 bytes.

    Layout, little-endian: message id ``u64``, done at ``i64``, attempts ``u16``.
    """

    layout = IntegerRun("<", message_id="Q", done_at="q", attempts="H")

    message_id: int
    done_at: int
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DoneMessages(FinishedMessages):
    """``Array<DoneMessage>``."""

    element = DoneMessage

    messages: tuple[DoneMessage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedMessagesKey(QueueKey):
    """``01 04``, queue id ``TerminatedBytes``."""

    record_type = RecordType.FAILED_MESSAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedMessage(IntegerRecord):
    """Given up; 18 bytes.

    Layout, little-endian: message id ``u64``, failed at ``i64``, attempts ``u16``.
    """

    layout = IntegerRun("<", message_id="Q", failed_at="q", attempts="H")

    message_id: int
    failed_at: int
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedMessages(FinishedMessages):
    """``Array<FailedMessage>``."""

    element = FailedMessage

    messages: tuple[FailedMessage, ...]
