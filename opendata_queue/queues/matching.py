"""Which queues a message matches, by the filters that they have now."""

from __future__ import annotations

from odq_encodings import MessageMetadata
from opendata_queue.filters import Evaluation, FilterIndex, SystemFields
from opendata_queue.runtime.turns import Turn


async def matching_queues(index: FilterIndex[str], about: MessageMetadata) -> list[str]:
    """The queues whose filters a message matches. Lets others run: there may be many of them."""
    evaluation = Evaluation(index, dict(about.headers), system_fields(about))
    turn = Turn.of_a_caller()
    while (found := evaluation.go_on(turn.spent)) is None:
        await turn.pause()
    return [name for name, _ in found]


def system_fields(metadata: MessageMetadata) -> SystemFields:
    return SystemFields(
        metadata.message_id, metadata.created_at, metadata.received_at, metadata.visible_at
    )
