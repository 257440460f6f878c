"""Options and counters of a queue (RFC 0006)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from odq_encodings.arrays import join_array
from odq_encodings.integer_record import IntegerRecord
from odq_encodings.integers import IntegerRun
from odq_encodings.key_prefix import RecordType
from odq_encodings.reader import Reader
from odq_encodings.record import QueueKey, Record

PAUSED: Final = 0x01
RELAXED_CLAIMS: Final = 0x02
BEING_DELETED: Final = 0x04

_COUNTS: Final = IntegerRun(
    "<",
    done_bucket="Q",
    failed_bucket="Q",
    done="Q",
    failed="Q",
    expired="Q",
    scheduled="Q",
    scheduled_from="q",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOptionsKey(QueueKey):
    """``01 09``, queue id ``TerminatedBytes``."""

    record_type = RecordType.QUEUE_OPTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOptionsRecord(IntegerRecord):
    """What the version-1 configuration has no room for; 38 bytes, little-endian.

    Created at ``i64``, default and longest lease ``u32`` ms, first and longest back-off ``u32`` ms,
    back-off factor ``u16`` in hundredths, jitter ``u8`` percent, window ``u16``, most in flight
    ``u16``, bucket ``u16``, retention of failed messages ``u32`` s, flags ``u8``.
    """

    layout = IntegerRun(
        "<",
        created_at="q",
        lease_ms="I",
        max_lease_ms="I",
        backoff_ms="I",
        max_backoff_ms="I",
        backoff_factor="H",
        backoff_jitter="B",
        window="H",
        max_in_flight="H",
        bucket="H",
        failed_retention_seconds="I",
        flags="B",
    )

    created_at: int
    lease_ms: int
    max_lease_ms: int
    backoff_ms: int
    max_backoff_ms: int
    backoff_factor: int
    backoff_jitter: int
    window: int
    max_in_flight: int
    bucket: int
    failed_retention_seconds: int
    flags: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueCountersKey(QueueKey):
    """``01 0a``, queue id ``TerminatedBytes``."""

    record_type = RecordType.QUEUE_COUNTERS


@dataclass(frozen=True, kw_only=True, slots=True)
class BacklogCount(IntegerRecord):
    """Priority ``u8``, rows ``u64``, and the id ``u64`` below which there is no row; 17 bytes."""

    layout = IntegerRun("<", priority="B", rows="Q", from_message_id="Q")

    priority: int
    rows: int
    from_message_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueCounters(Record):
    """How much is where, so that nothing has to be counted.

    Layout, little-endian: open done bucket, open failed bucket, done, failed, expired, scheduled,
    each ``u64``; scheduled from ``i64``; ``Array<BacklogCount>``.
    """

    done_bucket: int
    failed_bucket: int
    done: int
    failed: int
    expired: int
    scheduled: int
    scheduled_from: int
    backlog: tuple[BacklogCount, ...]

    def encode(self) -> bytes:
        name = "QueueCounters"
        backlog = BacklogCount.encode_each(self.backlog, record=name, field="backlog")
        return _COUNTS.pack_fields(self) + join_array(backlog, record=name, field="backlog")

    @staticmethod
    def join(*counts: int, backlog: Iterable[tuple[int, int, int]]) -> bytes:
        """The record made of its counts, and of the fields of its ``backlog``, in their order
        (bulk path: every commit of a queue makes one)."""
        entries = [BacklogCount.layout.pack_trusted("BacklogCount", *one) for one in backlog]
        array = join_array(entries, record="QueueCounters", field="backlog")
        return _COUNTS.pack_trusted("QueueCounters", *counts) + array

    @classmethod
    def read(cls, reader: Reader) -> Self:
        counts = dict(zip(_COUNTS.names, reader.integers(_COUNTS), strict=True))
        return cls(**counts, backlog=BacklogCount.read_array(reader, "backlog"))
