"""What a queue has ready, and what its consumers hold (RFC 0001, Active messages)."""

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
class ActiveMessagesKey(QueueKey):
    """``01 02``, queue id ``TerminatedBytes``."""

    record_type = RecordType.ACTIVE_MESSAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class AvailableMessage(IntegerRecord):
    """A message that can be claimed; 27 bytes.

    Layout, little-endian: message id ``u64``, priority ``u8`` (lower first), visible at ``i64``,
    retention deadline ``i64`` (0 = never), attempts ``u16``.
    """

    layout = IntegerRun(
        "<", message_id="Q", priority="B", visible_at="q", retention_deadline="q", attempts="H"
    )

    message_id: int
    priority: int
    visible_at: int
    retention_deadline: int
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlightMessage(IntegerRecord):
    """A message under a consumer's lease; 27 bytes.

    Layout, little-endian: message id ``u64``, priority ``u8``, claimed at ``i64``, lease deadline
    ``i64``, attempts ``u16`` (this claim included).
    """

    layout = IntegerRun(
        "<", message_id="Q", priority="B", claimed_at="q", lease_deadline="q", attempts="H"
    )

    message_id: int
    priority: int
    claimed_at: int
    lease_deadline: int
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveMessages(Record):
    """``Array<AvailableMessage>``, then ``Array<InFlightMessage>``."""

    available: tuple[AvailableMessage, ...]
    in_flight: tuple[InFlightMessage, ...]

    def encode(self) -> bytes:
        name = "ActiveMessages"
        return self.join(
            AvailableMessage.encode_each(self.available, record=name, field="available"),
            InFlightMessage.encode_each(self.in_flight, record=name, field="in_flight"),
        )

    @staticmethod
    def join(available: Collection[bytes], in_flight: Collection[bytes]) -> bytes:
        """The record made of entries that are encoded already (bulk path)."""
        return join_array(
            available,
            record="ActiveMessages",
            field="available",
            element_size=AvailableMessage.layout.size,
        ) + join_array(
            in_flight,
            record="ActiveMessages",
            field="in_flight",
            element_size=InFlightMessage.layout.size,
        )

    @classmethod
    def read(cls, reader: Reader) -> Self:
        available = AvailableMessage.read_array(reader, "available")
        in_flight = InFlightMessage.read_array(reader, "in_flight")
        return cls(available=available, in_flight=in_flight)
