"""The rows of messages, the same for every writer (RFC 0001, RFC 0004, RFC 0010)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, cast

from odq_encodings import (
    BlobReference,
    BlobReferenceKey,
    Expiry,
    MessageBlob,
    MessageBlobKey,
    PayloadKey,
    UriPayload,
    encode_expiry_key,
    encode_inline_payload,
    encode_message_metadata,
    encode_metadata_log_key,
    encode_payload_key,
    inline_payload_columns,
    message_metadata_columns,
    metadata_log_key_columns,
)
from opendata_queue.log.cache import CheckedMessage, MessageBatch
from opendata_queue.log.payloads import BlobFolder
from opendata_queue.model.ids import SEQUENCE_MASK
from opendata_queue.store import Rows

MAX_TIME_MS: Final = (1 << 63) - 1
ROWS_OVERHEAD_BYTES: Final = 120
"""What the rows of a message take in the store in addition to payload and headers, roughly."""

_retention = attrgetter("retention_seconds")


def put_messages(
    rows: Rows, first_id: int, messages: MessageBatch, received_at: int, ttl_grace_ms: int
) -> None:
    """Add the rows of messages with consecutive ids."""
    if messages.checked:
        for message_id, one in enumerate(messages.checked, first_id):
            put_message(rows, message_id, one, received_at, ttl_grace_ms)
        put_expiries(rows, first_id, messages.checked, received_at)
        return
    # None has more than an inline payload and headers: by column, with no call for each.
    count, first_sequence = len(messages), first_id & SEQUENCE_MASK
    ids = range(first_id, first_id + count)
    payloads = cast("list[bytes]", messages.payloads)
    rows.put_columns(count, PayloadKey.columns(ids), inline_payload_columns(payloads))
    counts, headers = list(map(len, messages.headers)), messages.encoded_headers
    sequences = range(first_sequence, first_sequence + count)
    rows.put_columns(
        count,
        metadata_log_key_columns(sequences),
        message_metadata_columns(ids, received_at, received_at, received_at, 0, counts, headers),
    )


def put_message(
    rows: Rows, message_id: int, checked: CheckedMessage, received_at: int, ttl_grace_ms: int
) -> None:
    """Add the rows of a message: payload, metadata and, for a blob, the ways to it and back."""
    retention = checked.retention_seconds
    ttl_ms = retention * 1000 + ttl_grace_ms if retention else None
    created_at, visible_at = checked.times(received_at)
    payload_value = checked.uri_value
    if payload_value is None:
        assert checked.payload is not None
        payload_value = encode_inline_payload(checked.payload)
    rows.put(encode_payload_key(message_id), payload_value, ttl_ms=ttl_ms)
    rows.put(
        encode_metadata_log_key(message_id & SEQUENCE_MASK),
        encode_message_metadata(
            message_id,
            created_at,
            received_at,
            visible_at,
            retention,
            len(checked.headers),
            checked.encoded_headers,
        ),
        ttl_ms=ttl_ms,
    )
    if checked.blob is not None:
        rows.put(
            BlobReferenceKey(blob_id=checked.blob.blob_id).encode(),
            BlobReference(message_id=message_id).encode(),
            ttl_ms=ttl_ms,
        )
        # Without a time-to-live: it leads to an object, which SlateDB does not know.
        rows.put(
            MessageBlobKey(message_id=message_id).encode(),
            MessageBlob(blob_id=checked.blob.blob_id).encode(),
        )


def put_expiries(
    rows: Rows, first_id: int, messages: Sequence[CheckedMessage], received_at: int
) -> None:
    """One row for each run of messages that expire together (RFC 0010)."""
    if not any(map(_retention, messages)):
        return
    for retention, together in groupby(messages, _retention):
        run = list(together)
        if retention:
            size_bytes = sum(one.size_bytes + ROWS_OVERHEAD_BYTES for one in run)
            put_expiry(rows, first_id, len(run), received_at + retention * 1000, size_bytes)
        first_id += len(run)


def put_expiry(rows: Rows, first_id: int, messages: int, expires_at: int, size_bytes: int) -> None:
    """The row of a run of messages that expire together."""
    rows.put(
        encode_expiry_key(min(expires_at, MAX_TIME_MS), first_id),
        Expiry(messages=messages, size_bytes=size_bytes).encode(),
    )


async def store_blobs(
    blobs: BlobFolder, messages: Iterable[CheckedMessage], inline_bytes: int
) -> None:
    """Make objects of payloads that are too large to be inline."""
    large = {
        message: message.payload
        for message in messages
        if message.payload is not None and len(message.payload) > inline_bytes
    }
    if not large:
        return
    stored = await blobs.store_blobs(list(large.values()))
    for message, blob in zip(large, stored, strict=True):
        message.becomes(blob, UriPayload(uri=blob.reference).encode())
