"""Who has claimed messages that are gone: these rows are not needed any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from odq_compactor.finished import read_finished
from odq_compactor.messages import delete_attempts
from odq_compactor.options import CompactorOptions
from odq_compactor.pace import Pace
from odq_encodings import encode_attempts_key
from opendata_queue.log.readers import is_not_there
from opendata_queue.model.errors import OdqError
from opendata_queue.model.ids import first_id_of
from opendata_queue.queues.store import QueueStore
from opendata_queue.systems.owned import OwnedStores

_ROWS_AT_ONCE: Final = 1_000

Choose = Callable[[Sequence[int]], Awaitable[Collection[int]]]


async def forget_attempts(
    queues: QueueStore,
    first_id: int,
    count: int,
    options: CompactorOptions,
    *,
    chosen: Choose | None = None,
) -> None:
    """Delete the attempts of so many messages from an id on, or of those that are ``chosen``."""
    pace = Pace(options.work_share)
    start, end = encode_attempts_key(first_id), encode_attempts_key(first_id + count)
    while True:
        rows = [
            key
            async for chunk in queues.database.scan(start, end, limit=_ROWS_AT_ONCE)
            for key, _ in chunk
        ]
        if rows:
            async with pace.work():
                ids: Collection[int] = [int.from_bytes(key[-8:], "big") for key in rows]
                if chosen is not None:
                    ids = await chosen(list(ids))
                await delete_attempts(queues, list(ids))
        if len(rows) < _ROWS_AT_ONCE:
            return
        start = rows[-1] + b"\x00"


class AttemptsOfGone:
    """Forgets the attempts of messages that the writer of another shard has deleted as done.

    It can't write to the queue store. Its *finished* record says how far it was.
    """

    def __init__(self, stores: OwnedStores, options: CompactorOptions) -> None:
        self._stores = stores
        self._options = options

    async def run(self) -> None:
        for shard in self._stores.followed():
            try:
                await self._forget(shard)
            except OdqError as error:
                if not is_not_there(error):  # its writer has not come that far yet
                    raise

    async def _forget(self, shard: int) -> None:
        readers = self._stores.readers
        finished = await readers.read(shard, lambda one: read_finished(one.database, shard))
        if finished is None:
            return

        async def gone(ids: Sequence[int]) -> Collection[int]:
            there = await readers.read_metadata(ids)
            return [one for one in ids if one not in there]

        await forget_attempts(
            self._stores.queues,
            first_id_of(shard),
            finished.next_sequence,
            self._options,
            chosen=gone,
        )
