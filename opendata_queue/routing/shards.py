"""All shards that the owner of the queue store follows: its own, those of others, bulk shards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from opendata_queue.log.readers import ShardReaders
from opendata_queue.model.errors import OdqError
from opendata_queue.model.ids import OWNERS_SHARD, sequence_of, shard_of
from opendata_queue.queues.store import QueueStore
from opendata_queue.root.commit_files import CommitFiles
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.routing.bulk import BulkRouting
from opendata_queue.routing.live import LiveFollower
from opendata_queue.routing.tailer import Tailer
from opendata_queue.runtime.aio import end_tasks
from opendata_queue.runtime.polling import PollingPace
from opendata_queue.store import Objects, StoreKind

logger = logging.getLogger(__name__)

_LOOK_MS: Final = 1_000
# A list on S3 costs as much as a thousand reads of a local file.
_LOOK_S3_MS: Final = 2_000
_LOOK_IDLE_S3_MS: Final = 60_000
"""Where nothing was committed for a while. A call that asks for messages ends the rest."""
_SHARDS_EVERY: Final = 3
_COMMITS_AT_ONCE: Final = 1_000


class Following:
    """Finds the shards of a root, and routes each of them once."""

    def __init__(
        self,
        objects: Objects,
        store: QueueStore,
        readers: ShardReaders,
        own: tuple[int, Tailer] | None,
    ) -> None:
        self._store = store
        self._readers = readers
        self.own: Tailer | None = None
        """What follows the shard that this process writes."""
        self._own_shard: int | None = None
        if own is not None:
            self._own_shard, self.own = own
        self._files = ShardFiles(objects)
        self._live: dict[int, LiveFollower] = {}
        self._lost: set[int] = set()
        """Live shards whose files were removed."""
        self._starting = asyncio.Lock()
        self._asked = asyncio.Event()
        self._pace = PollingPace(_LOOK_MS, _LOOK_MS)
        if objects.location.kind is StoreKind.S3:
            self._pace = PollingPace(_LOOK_S3_MS, _LOOK_IDLE_S3_MS)
        self.bulk = BulkRouting(CommitFiles(objects), store, readers)
        self._discovering: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find what is there, and poll for more from then on."""
        self._lost = set(await self._store.live_shards()) - set(await self._files.live_shards())
        for shard in sorted(self._lost):
            logger.error(
                "%s is missing, and its shard was routed before: it is followed all the same; "
                "`odq repair` makes the file again",
                self._files.path_of(shard),
            )
        await self.look_for_shards()
        self._discovering = asyncio.create_task(self._discover(), name="discover shards")

    def check_running(self) -> None:
        """Raise what stopped the routing of this process's own shard, or of all."""
        if self.own is not None:
            self.own.check_running()
        self.bulk.check_running()
        task = self._discovering
        if task is not None and task.done() and not task.cancelled():
            task.result()

    async def own_is_routed(self, *, patient: bool = True) -> None:
        """Wait until what was published here is in its queues, most often not at all.

        A caller that is not ``patient`` waits for a part of it, if it is much. Messages of other
        processes are not waited for, but the next poll for them comes soon.
        """
        self._asked.set()
        if self.own is not None:
            await self.own.handed_over_is_routed(patient=patient)

    def cursors(self) -> dict[int, int]:
        """Up to where the log of each live shard is routed."""
        cursors = self.cursors_of_others()
        if self.own is not None and self._own_shard is not None:
            cursors[self._own_shard] = self.own.cursor
        return cursors

    def cursors_of_others(self) -> dict[int, int]:
        """The same for the live shards that others write."""
        return {shard: follower.cursor for shard, follower in self._live.items()}

    @property
    def followed(self) -> list[int]:
        """The live shards that others write."""
        return list(self._live)

    async def all_caught_up(self, own_end: int | None) -> None:
        """Wait until everything is routed that was acknowledged before, except bulk shards.

        Bulk shards that are committed are registered, for the queues that are there now.
        """
        self.check_running()
        if self.own is not None:
            await self.own.caught_up(own_end)
        await self.look_for_shards()
        await asyncio.gather(*(follower.caught_up() for follower in self._live.values()))
        await self.bulk.look()

    async def caught_up_with(self, message_id: int) -> None:
        """Wait until a message that is there is routed, if it is in a live shard."""
        shard, sequence = shard_of(message_id), sequence_of(message_id)
        if self.own is not None and shard == self._own_shard:
            await self.own.caught_up(sequence + 1)
        elif shard in self._live:
            await self._live[shard].caught_up_with(sequence + 1)

    async def look_for_shards(self) -> None:
        """Follow all live shards that are there now."""
        async with self._starting:
            numbers = sorted({*await self._files.live_shards(), *self._lost})
            if self._own_shard != OWNERS_SHARD:
                numbers.append(OWNERS_SHARD)
            for shard in numbers:
                if shard not in self._live and shard != self._own_shard:
                    follower = await LiveFollower.start(shard, self._store, self._readers)
                    self._live[shard] = follower
                    logger.info("following shard %d from sequence %d", shard, follower.cursor)

    async def close(self) -> None:
        """Stop; what is not routed yet will be, after the next open."""
        await end_tasks([self._discovering])
        for follower in self._live.values():
            await follower.close()
        await self.bulk.close()
        if self.own is not None:
            await self.own.close()

    async def _discover(self) -> None:
        """Poll for commits, and now and then for live shards: about one list each time."""
        loop = asyncio.get_running_loop()
        shards_ms = _SHARDS_EVERY * self._pace.shortest_ms
        shards_at: float | None = None
        while True:
            lists = 1
            self._asked.clear()
            try:
                lists += await self.bulk.look() // _COMMITS_AT_ONCE
                if shards_at is None or (loop.time() - shards_at) * 1000 >= shards_ms:
                    shards_at = loop.time()
                    await self.look_for_shards()
            except OdqError as error:
                self._store.committer.check_open()
                logger.warning("could not check for new shards: %s", error)
            await self._rest(lists)

    async def _rest(self, lists: int) -> None:
        """Rest after a poll, for as long as its lists are worth, or until a caller asks."""
        # Not by the clock: the store goes on when a clock stands still.
        least_ms = lists * self._pace.shortest_ms
        most_ms = lists * self._pace.rest_ms(self._store.committer.batch)
        await asyncio.sleep(least_ms / 1000)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((most_ms - least_ms) / 1000):
                await self._asked.wait()
