"""What kind of row a key belongs to, for tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from odq_encodings.active_messages import ActiveMessages, ActiveMessagesKey
from odq_encodings.attempts import Attempts, AttemptsKey
from odq_encodings.blob_reference import BlobReference, BlobReferenceKey
from odq_encodings.bulk_shards import (
    BulkExpiry,
    BulkExpiryKey,
    BulkFiled,
    BulkFiledKey,
    BulkJob,
    BulkJobKey,
    BulkNumbers,
    BulkNumbersKey,
    BulkShard,
    BulkShardKey,
    BulkWaiting,
    BulkWaitingKey,
)
from odq_encodings.finished_messages import (
    DoneMessages,
    DoneMessagesKey,
    FailedMessages,
    FailedMessagesKey,
)
from odq_encodings.idempotency import IdempotencyRecord, IdempotencyRecordKey
from odq_encodings.key_prefix import SEALED_VERSION, VERSION, RecordType
from odq_encodings.metadata_log import MessageMetadata, MetadataLogKey
from odq_encodings.payload import PayloadKey, read_payload
from odq_encodings.progress import ClockKey, ClockMark, Cursor, CursorKey, Replay, ReplayKey
from odq_encodings.queue_config import QueueConfig, QueueConfigKey
from odq_encodings.queue_index import (
    BacklogEntry,
    BacklogKey,
    Failure,
    FailureKey,
    ScheduleEntry,
    ScheduleKey,
    SealedDoneKey,
    SealedFailedKey,
)
from odq_encodings.queue_settings import (
    QueueCounters,
    QueueCountersKey,
    QueueOptionsKey,
    QueueOptionsRecord,
)
from odq_encodings.reader import Reader
from odq_encodings.record import Record
from odq_encodings.retention import (
    ExpiredEntries,
    ExpiredEntriesKey,
    Expiry,
    ExpiryKey,
    Finished,
    FinishedKey,
    MessageBlob,
    MessageBlobKey,
    RetentionFloor,
    RetentionFloorKey,
    RetentionPosition,
    RetentionPositionKey,
    SystemOptions,
    SystemOptionsKey,
)
from odq_encodings.seq_block import SeqBlock, SeqBlockKey

_PAYLOAD_KEY_BYTES: Final = 10
_SEQ_BLOCK_KEY_BYTES: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKind:
    """The pair of records that a row is made of."""

    title: str
    key: type[Record]
    value_name: str
    read_value: Callable[[Reader], Record]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A decoded row."""

    kind: RowKind
    key: Record
    value: Record


def _kind(title: str, key: type[Record], value: type[Record]) -> RowKind:
    return RowKind(title=title, key=key, value_name=value.__name__, read_value=value.read)


_PAYLOAD = RowKind(title="payload", key=PayloadKey, value_name="Payload", read_value=read_payload)
_LOG_ENTRY = _kind("metadata log entry", MetadataLogKey, MessageMetadata)
_SEQ_BLOCK = _kind("sequence block", SeqBlockKey, SeqBlock)
_ACTIVE = _kind("active messages", ActiveMessagesKey, ActiveMessages)
_BY_TYPE: Final = {
    RecordType.DONE_MESSAGES: _kind("done messages", DoneMessagesKey, DoneMessages),
    RecordType.FAILED_MESSAGES: _kind("failed messages", FailedMessagesKey, FailedMessages),
    RecordType.ATTEMPTS: _kind("attempts", AttemptsKey, Attempts),
    RecordType.QUEUE_CONFIG: _kind("queue configuration", QueueConfigKey, QueueConfig),
    RecordType.IDEMPOTENCY: _kind("idempotency key", IdempotencyRecordKey, IdempotencyRecord),
    RecordType.BLOB_REFERENCE: _kind("blob reference", BlobReferenceKey, BlobReference),
    RecordType.QUEUE_OPTIONS: _kind("queue options", QueueOptionsKey, QueueOptionsRecord),
    RecordType.QUEUE_COUNTERS: _kind("queue counters", QueueCountersKey, QueueCounters),
    RecordType.BACKLOG: _kind("backlog row", BacklogKey, BacklogEntry),
    RecordType.SCHEDULE: _kind("schedule row", ScheduleKey, ScheduleEntry),
    RecordType.FAILURE: _kind("failure", FailureKey, Failure),
    RecordType.CURSOR: _kind("cursor", CursorKey, Cursor),
    RecordType.REPLAY: _kind("replay", ReplayKey, Replay),
    RecordType.CLOCK: _kind("clock", ClockKey, ClockMark),
    RecordType.BULK_SHARD: _kind("bulk shard", BulkShardKey, BulkShard),
    RecordType.BULK_JOB: _kind("bulk job", BulkJobKey, BulkJob),
    RecordType.BULK_NUMBERS: _kind("bulk numbers", BulkNumbersKey, BulkNumbers),
    RecordType.EXPIRY: _kind("expiry", ExpiryKey, Expiry),
    RecordType.MESSAGE_BLOB: _kind("blob of a message", MessageBlobKey, MessageBlob),
    RecordType.RETENTION_POSITION: _kind(
        "retention position", RetentionPositionKey, RetentionPosition
    ),
    RecordType.RETENTION_FLOOR: _kind("retention floor", RetentionFloorKey, RetentionFloor),
    RecordType.SYSTEM_OPTIONS: _kind("system options", SystemOptionsKey, SystemOptions),
    RecordType.FINISHED: _kind("finished messages", FinishedKey, Finished),
    RecordType.EXPIRED_ENTRIES: _kind("expired entries", ExpiredEntriesKey, ExpiredEntries),
    RecordType.BULK_EXPIRY: _kind("bulk expiry", BulkExpiryKey, BulkExpiry),
    RecordType.BULK_FILED: _kind("filed bulk shards", BulkFiledKey, BulkFiled),
    RecordType.BULK_WAITING: _kind("waiting bulk shard", BulkWaitingKey, BulkWaiting),
}
_SEALED_BY_TYPE: Final = {
    RecordType.DONE_MESSAGES: _kind("sealed done messages", SealedDoneKey, DoneMessages),
    RecordType.FAILED_MESSAGES: _kind("sealed failed messages", SealedFailedKey, FailedMessages),
}


def row_kind(key: bytes) -> RowKind:
    """What kind of row ``key`` belongs to, by its first two bytes and its length.

    Raises ``EncodingError`` for a version or a type that is not known.
    """
    reader = Reader("key", key)
    key = reader.data
    if len(key) < 2:
        raise reader.error(f"needs 2 bytes of version and type, {len(key)} left", None, 0)
    if key[0] == SEALED_VERSION and key[1] in _SEALED_BY_TYPE:
        return _SEALED_BY_TYPE[RecordType(key[1])]
    reader.expect(key[0], VERSION, "version", 0)
    if key[1] == RecordType.PAYLOAD:
        return _PAYLOAD if len(key) == _PAYLOAD_KEY_BYTES else _LOG_ENTRY
    if key[1] == RecordType.ACTIVE_MESSAGES:
        return _SEQ_BLOCK if len(key) == _SEQ_BLOCK_KEY_BYTES else _ACTIVE
    if key[1] not in _BY_TYPE:
        raise reader.error(f"type {key[1]:02x} is not known", "type", 1)
    return _BY_TYPE[RecordType(key[1])]


def decode_any(key: bytes, value: bytes) -> Row:
    """Decode a row of either database; ``EncodingError`` if it is no record of ours."""
    kind = row_kind(key)
    reader = Reader(kind.value_name, value)
    row = Row(kind=kind, key=kind.key.decode(key), value=kind.read_value(reader))
    reader.finish()
    return row
