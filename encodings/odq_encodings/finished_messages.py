"""What a queue is finished with: done and failed (RFC 0001, Done and failed messages)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from odq_encodings.arrays import join_array
from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import QueueKey, Record


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
class DoneMessages(Record):
    """``Array<DoneMessage>``."""

    messages: tuple[DoneMessage, ...]

    def encode(self) -> bytes:
        return self.join([message.encode() for message in self.messages])

    @staticmethod
    def join(messages: Collection[bytes]) -> bytes:
        """The record made of entries that are encoded already (bulk path)."""
        size = DoneMessage.layout.size
        return join_array(messages, record="DoneMessages", field="messages", element_size=size)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(messages=DoneMessage.read_array(reader, "messages"))


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
class FailedMessages(Record):
    """``Array<FailedMessage>``."""

    messages: tuple[FailedMessage, ...]

    def encode(self) -> bytes:
        return self.join([message.encode() for message in self.messages])

    @staticmethod
    def join(messages: Collection[bytes]) -> bytes:
        """The record made of entries that are encoded already (bulk path)."""
        size = FailedMessage.layout.size
        return join_array(messages, record="FailedMessages", field="messages", element_size=size)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(messages=FailedMessage.read_array(reader, "messages"))
