"""What a caller is shown of a message, made of what the store holds of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

from odq_encodings import Failure, MessageMetadata
from opendata_queue.filters import Filter
from opendata_queue.model.messages import MessageFields, PeekedMessage, StoredMessage
from opendata_queue.model.values import FailedMessage, MessageHistory, QueueEntry
from opendata_queue.queues.matching import system_fields
from opendata_queue.queues.state import Waiting
from opendata_queue.runtime.turns import Turn

_LONG_FILTER_CHARACTERS: Final = 512


async def given_filter(text: str, *, unless: Filter | None = None) -> Filter:
    """The filter that a caller gives, which must not cost too much ``unless`` it is that one.

    A long text takes tens of milliseconds, so another thread parses it.
    """
    if isinstance(text, str) and len(text) > _LONG_FILTER_CHARACTERS:
        filter = await asyncio.to_thread(Filter.parse, text)
    else:
        filter = Filter.parse(text)
    if filter != unless:
        filter.check_cost()
    return filter


async def satisfying(
    filter: Filter | None, ids: Iterable[int], metadata: Mapping[int, MessageMetadata]
) -> list[int]:
    """Those messages that match; nothing can be said of one that is gone. Lets others run."""
    if filter is None:
        return list(ids)
    found = []
    turn = Turn.of_a_caller()
    for one in ids:
        about = metadata.get(one)
        if about is not None and filter.matches(dict(about.headers), system_fields(about)):
            found.append(one)
        await turn.pause()
    return found


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
