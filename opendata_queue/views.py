"""What a caller is shown of a message, made of what the store holds of it."""

from __future__ import annotations

from odq_encodings import Failure, MessageMetadata
from opendata_queue.filters import Filter, SystemFields
from opendata_queue.interface import FailedMessage, MessageHistory, QueueEntry
from opendata_queue.messages import MessageFields, PeekedMessage, StoredMessage
from opendata_queue.queue_state import Waiting


def satisfies(filter: Filter, metadata: MessageMetadata | None) -> bool:
    """Whether a message matches; nothing can be said of one that is gone."""
    return metadata is not None and filter.matches(dict(metadata.headers), system_fields(metadata))


def system_fields(metadata: MessageMetadata) -> SystemFields:
    return SystemFields(
        metadata.message_id, metadata.created_at, metadata.received_at, metadata.visible_at
    )


def stored(message: MessageFields | None) -> StoredMessage | None:
    return None if message is None else StoredMessage(*message)


def peeked(name: str, waiting: Waiting, message: MessageFields) -> PeekedMessage:
    return PeekedMessage(*message, name, waiting.priority, waiting.attempts)


def failed_message(
    message_id: int, failure: Failure, metadata: MessageMetadata | None
) -> FailedMessage:
    return FailedMessage(
        message_id=message_id,
        failed_at_ms=failure.failed_at,
        attempts=failure.attempts,
        priority=failure.priority,
        consumer=failure.consumer,
        error=failure.error,
        headers=() if metadata is None else metadata.headers,
    )


def history_of(
    about: MessageMetadata,
    consumers: tuple[str, ...],
    entries: tuple[QueueEntry, ...],
    queues_left_out: int,
) -> MessageHistory:
    return MessageHistory(
        message_id=about.message_id,
        headers=about.headers,
        created_at_ms=about.created_at,
        received_at_ms=about.received_at,
        visible_at_ms=about.visible_at,
        retention_seconds=about.retention_seconds,
        consumers=consumers,
        entries=entries,
        queues_left_out=queues_left_out,
    )
