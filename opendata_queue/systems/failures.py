"""Which failed messages a call means, and what is done with them."""

from __future__ import annotations

from collections.abc import Sequence

from opendata_queue.log.all_shards import AllMessages
from opendata_queue.model.checks import check_integer
from opendata_queue.queues.dead_letters import DeadLetters
from opendata_queue.queues.store import QueueStore
from opendata_queue.queues.views import given_filter, satisfying
from opendata_queue.systems.arguments import MAX_FAILED_AT_ONCE, check_choice


class ChosenFailures:
    """Replays or forgets failed messages, chosen by ids or a filter, or all of them."""

    def __init__(self, queues: QueueStore, messages: AllMessages) -> None:
        self._messages = messages
        self._dead_letters = DeadLetters(queues)

    async def finish(
        self,
        name: str,
        message_ids: Sequence[int],
        every: bool,
        filter: str | None,
        limit: int,
        *,
        again: bool,
    ) -> list[int]:
        check_choice(message_ids, every, filter)
        check_integer("limit", limit, 1, MAX_FAILED_AT_ONCE)
        if message_ids:
            return await self._dead_letters.finish(name, message_ids, again=again)
        wanted = None if filter is None else await given_filter(filter)

        async def chosen(ids: Sequence[int]) -> Sequence[int]:
            if wanted is None:
                return ids
            found: list[int] = []
            async for some, metadata in self._messages.metadata_in_steps(ids):
                found += await satisfying(wanted, some, metadata)
            return found

        return await self._dead_letters.finish_chosen(name, chosen, again=again, limit=limit)
