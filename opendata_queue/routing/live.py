"""Following one live shard that another process writes (RFC 0008)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from opendata_queue.log.readers import ShardReaders, is_not_there
from opendata_queue.log.remote_log import FollowedLog
from opendata_queue.model.errors import OdqError, StoreUnavailableError
from opendata_queue.model.ids import message_id_of
from opendata_queue.queues.store import QueueStore
from opendata_queue.routing.replay import CLOCK_SLACK_MS, first_since
from opendata_queue.routing.router import Router
from opendata_queue.routing.tailer import Tailer
from opendata_queue.runtime.aio import end_tasks

logger = logging.getLogger(__name__)

CATCH_UP_TIMEOUT_MS: Final = 30_000
_LOOK_MS: Final = 50
_TRY_AGAIN_MS: Final = 1_000


class LiveFollower:
    """Routes what appears in a shard's log, soon after it appears."""

    def __init__(
        self, shard: int, next_sequence: int, store: QueueStore, readers: ShardReaders
    ) -> None:
        self.shard = shard
        self._readers = readers
        self._tailer = Tailer(FollowedLog(readers, shard), Router(store, shard, next_sequence))
        self._watching = asyncio.create_task(self._watch(), name=f"watch shard {shard}")

    @classmethod
    async def start(cls, shard: int, store: QueueStore, readers: ShardReaders) -> LiveFollower:
        """Go on where the queue store says, or at the beginning of a shard that it does not know.

        All queues are older than such a shard: before a queue is made, new shards are listed.
        Without queues only messages that are received from now on can matter to one.
        """
        cursor = await store.cursor(shard)
        if cursor is None:
            cursor = 0 if store.names() else await _recent_end(shard, store, readers)
        store.ledger.starts_at(message_id_of(shard, cursor))
        return cls(shard, cursor, store, readers)

    @property
    def cursor(self) -> int:
        return self._tailer.cursor

    def check_running(self) -> None:
        self._tailer.check_running()

    async def caught_up(self) -> None:
        """Wait until everything is routed that had been acknowledged when this was called."""
        try:
            async with asyncio.timeout(CATCH_UP_TIMEOUT_MS / 1000):
                # What a fresh reader shows is not older than this call.
                await self._renew()
                self._tailer.read_again()
                await self._tailer.caught_up()
        except TimeoutError:
            raise StoreUnavailableError(
                f"shard {self.shard} is routed up to sequence {self.cursor}, and its log goes on: "
                "try again when routing has caught up"
            ) from None

    async def caught_up_with(self, sequence: int) -> None:
        """Wait until the log is routed up to a sequence, or as far as it goes."""
        await self._tailer.caught_up(sequence)

    async def close(self) -> None:
        await end_tasks([self._watching])
        await self._tailer.close()

    async def _renew(self) -> None:
        try:
            async with self._readers.using(self.shard) as reader:
                self._readers.renew(self.shard, reader)
        except OdqError as error:
            if not is_not_there(error):
                raise

    async def _watch(self) -> None:
        while True:
            try:
                await self._watch_reader()
            except OdqError as error:
                if not is_not_there(error):  # its writer has not come that far yet
                    logger.warning("shard %d can't be followed: %s", self.shard, error)
                await asyncio.sleep(_TRY_AGAIN_MS / 1000)

    async def _watch_reader(self) -> None:
        """Wake the tailer when a reader shows more, until the reader is replaced."""
        async with self._readers.using(self.shard) as reader:
            seen = None
            while self._readers.is_current(self.shard, reader):
                with contextlib.suppress(StoreUnavailableError):  # there is no position then
                    await reader.database.check_moving()
                position = reader.position
                if position is None:
                    self._readers.renew(self.shard, reader)
                elif position != seen:
                    seen = position
                    self._tailer.read_again()
                await asyncio.sleep(_LOOK_MS / 1000)


async def _recent_end(shard: int, store: QueueStore, readers: ShardReaders) -> int:
    """A sequence before which everything was received a while ago."""
    try:
        async with readers.using(shard) as reader:
            end = await reader.end()
    except OdqError as error:
        if is_not_there(error):
            return 0
        raise
    since = store.clock.now_ms() - CLOCK_SLACK_MS
    return await first_since(FollowedLog(readers, shard), 0, end, since)
