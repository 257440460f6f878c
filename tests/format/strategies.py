"""Hypothesis strategies for every record, each within the limits of the format."""

from __future__ import annotations

from hypothesis import strategies as st

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    Attempts,
    AttemptsKey,
    AvailableMessage,
    BlobReference,
    BlobReferenceKey,
    DoneMessage,
    DoneMessages,
    DoneMessagesKey,
    FailedMessage,
    FailedMessages,
    FailedMessagesKey,
    IdempotencyRecord,
    IdempotencyRecordKey,
    InFlightMessage,
    InlinePayload,
    MessageMetadata,
    MetadataLogKey,
    PayloadKey,
    QueueConfig,
    QueueConfigKey,
    Record,
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
    QueueConfig: st.builds(QueueConfig, filter=text, max_attempts=u16, done_retention_seconds=u32),
}
