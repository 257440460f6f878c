"""Hypothesis strategies for every record, each within the limits of the format."""

from __future__ import annotations

from hypothesis import strategies as st

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    Attempts,
    AttemptsKey,
    AvailableMessage,
    BacklogCount,
    BacklogEntry,
    BacklogKey,
    BlobReference,
    BlobReferenceKey,
    ClockKey,
    ClockMark,
    Cursor,
    CursorKey,
    DoneMessage,
    DoneMessages,
    DoneMessagesKey,
    FailedMessage,
    FailedMessages,
    FailedMessagesKey,
    Failure,
    FailureKey,
    IdempotencyRecord,
    IdempotencyRecordKey,
    InFlightMessage,
    InlinePayload,
    MessageMetadata,
    MetadataLogKey,
    PayloadKey,
    QueueConfig,
    QueueConfigKey,
    QueueCounters,
    QueueCountersKey,
    QueueOptionsKey,
    QueueOptionsRecord,
    Record,
    Replay,
    ReplayKey,
    ScheduleEntry,
    ScheduleKey,
    SealedDoneKey,
    SealedFailedKey,
    SeqBlock,
    SeqBlockKey,
    UriPayload,
)

U64_MAX = 2**64 - 1

u8 = st.integers(0, 2**8 - 1)
u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, U64_MAX)
i64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(st.characters(codec="utf-8"))

available = st.builds(
    AvailableMessage,
    message_id=u64,
    priority=u8,
    visible_at=i64,
    retention_deadline=i64,
    attempts=u16,
)
in_flight = st.builds(
    InFlightMessage,
    message_id=u64,
    priority=u8,
    claimed_at=i64,
    lease_deadline=i64,
    attempts=u16,
)
done = st.builds(DoneMessage, message_id=u64, done_at=i64, attempts=u16)
failed = st.builds(FailedMessage, message_id=u64, failed_at=i64, attempts=u16)
backlog_count = st.builds(BacklogCount, priority=u8, rows=u64, from_message_id=u64)
seq_block = u64.flatmap(
    lambda base: st.builds(
        SeqBlock, base_sequence=st.just(base), block_size=st.integers(0, U64_MAX - base)
    )
)

RECORDS: dict[type[Record], st.SearchStrategy[Record]] = {
    PayloadKey: st.builds(PayloadKey, message_id=u64),
    InlinePayload: st.builds(InlinePayload, data=st.binary()),
    UriPayload: st.builds(UriPayload, uri=text),
    MetadataLogKey: st.builds(MetadataLogKey, sequence=u64, instance=st.none() | text.filter(bool)),
    MessageMetadata: st.builds(
        MessageMetadata,
        message_id=u64,
        created_at=i64,
        received_at=i64,
        visible_at=i64,
        retention_seconds=u32,
        headers=st.lists(st.tuples(text, text), max_size=10).map(tuple),
    ),
    SeqBlockKey: st.just(SeqBlockKey()),
    SeqBlock: seq_block,
    ActiveMessagesKey: st.builds(ActiveMessagesKey, queue_id=st.binary()),
    AvailableMessage: available,
    InFlightMessage: in_flight,
    ActiveMessages: st.builds(
        ActiveMessages,
        available=st.lists(available).map(tuple),
        in_flight=st.lists(in_flight).map(tuple),
    ),
    DoneMessagesKey: st.builds(DoneMessagesKey, queue_id=st.binary()),
    DoneMessage: done,
    DoneMessages: st.builds(DoneMessages, messages=st.lists(done).map(tuple)),
    FailedMessagesKey: st.builds(FailedMessagesKey, queue_id=st.binary()),
    FailedMessage: failed,
    FailedMessages: st.builds(FailedMessages, messages=st.lists(failed).map(tuple)),
    AttemptsKey: st.builds(AttemptsKey, message_id=u64),
    Attempts: st.builds(Attempts, consumer_ids=st.lists(text).map(tuple)),
    QueueConfigKey: st.builds(QueueConfigKey, queue_id=st.binary()),
    IdempotencyRecordKey: st.builds(IdempotencyRecordKey, namespace=text, idempotency_key=text),
    IdempotencyRecord: st.builds(IdempotencyRecord, message_id=u64, expires_at=i64),
    BlobReferenceKey: st.builds(BlobReferenceKey, blob_id=st.binary(min_size=16, max_size=16)),
    BlobReference: st.builds(BlobReference, message_id=u64),
    QueueOptionsKey: st.builds(QueueOptionsKey, queue_id=st.binary()),
    QueueOptionsRecord: st.builds(
        QueueOptionsRecord,
        created_at=i64,
        lease_ms=u32,
        max_lease_ms=u32,
        backoff_ms=u32,
        max_backoff_ms=u32,
        backoff_factor=u16,
        backoff_jitter=u8,
        window=u16,
        max_in_flight=u16,
        bucket=u16,
        failed_retention_seconds=u32,
        flags=u8,
    ),
    QueueCountersKey: st.builds(QueueCountersKey, queue_id=st.binary()),
    BacklogCount: backlog_count,
    QueueCounters: st.builds(
        QueueCounters,
        done_bucket=u64,
        failed_bucket=u64,
        done=u64,
        failed=u64,
        expired=u64,
        scheduled=u64,
        scheduled_from=i64,
        backlog=st.lists(backlog_count).map(tuple),
    ),
    BacklogKey: st.builds(BacklogKey, queue_id=st.binary(), priority=u8, message_id=u64),
    BacklogEntry: st.builds(BacklogEntry, visible_at=i64, retention_deadline=i64, attempts=u16),
    ScheduleKey: st.builds(ScheduleKey, queue_id=st.binary(), visible_at=i64, message_id=u64),
    ScheduleEntry: st.builds(ScheduleEntry, priority=u8, retention_deadline=i64, attempts=u16),
    SealedDoneKey: st.builds(SealedDoneKey, queue_id=st.binary(), bucket=u64),
    SealedFailedKey: st.builds(SealedFailedKey, queue_id=st.binary(), bucket=u64),
    FailureKey: st.builds(FailureKey, queue_id=st.binary(), message_id=u64),
    Failure: st.builds(
        Failure,
        bucket=u64,
        failed_at=i64,
        attempts=u16,
        priority=u8,
        retention_deadline=i64,
        consumer=text,
        error=text,
    ),
    CursorKey: st.builds(CursorKey, shard=u32),
    Cursor: st.builds(Cursor, next_sequence=u64),
    ReplayKey: st.builds(ReplayKey, queue_id=st.binary(), shard=u32),
    Replay: st.builds(Replay, next_sequence=u64, end_sequence=u64, from_time=i64),
    ClockKey: st.just(ClockKey()),
    ClockMark: st.builds(ClockMark, now=i64),
    QueueConfig: st.builds(QueueConfig, filter=text, max_attempts=u16, done_retention_seconds=u32),
}
