"""The bytes of OpenData Queue: version-1 records as frozen dataclasses (RFC 0001).

Every key and value has ``encode() -> bytes`` and ``decode(data)``; both raise ``EncodingError``
and nothing else. Pure functions of bytes, standard library only.
"""

from odq_encodings.active_messages import (
    ActiveMessages,
    ActiveMessagesKey,
    AvailableMessage,
    InFlightMessage,
)
from odq_encodings.arrays import join_array
from odq_encodings.attempts import Attempts, AttemptsKey
from odq_encodings.blob_reference import BLOB_ID_BYTES, BlobReference, BlobReferenceKey
from odq_encodings.errors import EncodingError
from odq_encodings.finished_messages import (
    DoneMessage,
    DoneMessages,
    DoneMessagesKey,
    FailedMessage,
    FailedMessages,
    FailedMessagesKey,
)
from odq_encodings.idempotency import IdempotencyRecord, IdempotencyRecordKey
from odq_encodings.inspection import (
    InspectedField,
    Inspection,
    inspect_key,
    inspect_record,
    inspect_row,
)
from odq_encodings.key_prefix import MAX_KEY_BYTES, VERSION, RecordType
from odq_encodings.metadata_log import (
    MAX_HEADERS,
    METADATA_LOG_NAME,
    MessageMetadata,
    MetadataLogKey,
    encode_headers,
    encode_message_metadata,
    encode_metadata_log_key,
    metadata_log_prefix,
)
from odq_encodings.payload import (
    MAX_INLINE_PAYLOAD_BYTES,
    InlinePayload,
    PayloadKey,
    PayloadKind,
    UriPayload,
    decode_payload,
    encode_inline_payload,
    encode_payload_key,
)
from odq_encodings.primitives import decode_terminated_bytes, decode_utf8
from odq_encodings.progress import ClockKey, ClockMark, Cursor, CursorKey, Replay, ReplayKey
from odq_encodings.queue_config import FILTER_GRAMMAR, QueueConfig, QueueConfigKey
from odq_encodings.queue_index import (
    BacklogEntry,
    BacklogKey,
    Failure,
    FailureKey,
    ScheduleEntry,
    ScheduleKey,
    SealedDoneKey,
    SealedFailedKey,
    encode_due,
)
from odq_encodings.queue_settings import (
    PAUSED,
    RELAXED_CLAIMS,
    BacklogCount,
    QueueCounters,
    QueueCountersKey,
    QueueOptionsKey,
    QueueOptionsRecord,
)
from odq_encodings.record import Record
from odq_encodings.rows import Row, RowKind, decode_any, row_kind
from odq_encodings.seq_block import SeqBlock, SeqBlockKey
from odq_encodings.terminated_bytes import encode_terminated_bytes
from odq_encodings.utf8 import encode_utf8

__all__ = [
    "BLOB_ID_BYTES",
    "FILTER_GRAMMAR",
    "MAX_HEADERS",
    "MAX_INLINE_PAYLOAD_BYTES",
    "MAX_KEY_BYTES",
    "METADATA_LOG_NAME",
    "PAUSED",
    "RELAXED_CLAIMS",
    "VERSION",
    "ActiveMessages",
    "ActiveMessagesKey",
    "Attempts",
    "AttemptsKey",
    "AvailableMessage",
    "BacklogCount",
    "BacklogEntry",
    "BacklogKey",
    "BlobReference",
    "BlobReferenceKey",
    "ClockKey",
    "ClockMark",
    "Cursor",
    "CursorKey",
    "DoneMessage",
    "DoneMessages",
    "DoneMessagesKey",
    "EncodingError",
    "FailedMessage",
    "FailedMessages",
    "FailedMessagesKey",
    "Failure",
    "FailureKey",
    "IdempotencyRecord",
    "IdempotencyRecordKey",
    "InFlightMessage",
    "InlinePayload",
    "InspectedField",
    "Inspection",
    "MessageMetadata",
    "MetadataLogKey",
    "PayloadKey",
    "PayloadKind",
    "QueueConfig",
    "QueueConfigKey",
    "QueueCounters",
    "QueueCountersKey",
    "QueueOptionsKey",
    "QueueOptionsRecord",
    "Record",
    "RecordType",
    "Replay",
    "ReplayKey",
    "Row",
    "RowKind",
    "ScheduleEntry",
    "ScheduleKey",
    "SealedDoneKey",
    "SealedFailedKey",
    "SeqBlock",
    "SeqBlockKey",
    "UriPayload",
    "decode_any",
    "decode_payload",
    "decode_terminated_bytes",
    "decode_utf8",
    "encode_due",
    "encode_headers",
    "encode_inline_payload",
    "encode_message_metadata",
    "encode_metadata_log_key",
    "encode_payload_key",
    "encode_terminated_bytes",
    "encode_utf8",
    "inspect_key",
    "inspect_record",
    "inspect_row",
    "join_array",
    "metadata_log_prefix",
    "row_kind",
]
