"""Finding bulk jobs that were committed, and routing their shards to the end (RFC 0009)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

from odq_encodings import BulkShard
from opendata_queue.log.readers import ShardReaders
from opendata_queue.log.remote_log import FollowedLog
from opendata_queue.model.errors import CorruptStoreError, OdqError
from opendata_queue.model.ids import message_id_of
from opendata_queue.queues.store import QueueStore
from opendata_queue.root.commit_files import Commit, CommitFiles
from opendata_queue.routing.router import Router
from opendata_queue.runtime.aio import end_tasks

logger = logging.getLogger(__name__)

SHARDS_AT_ONCE: Final = 4
_FAILING_AT_MOST: Final = 1_000
"""How many shards that can't be routed are kept in memory. If there are more, they take turns."""
_ASIDE_AT_ONCE: Final = 100
_JOBS_AT_ONCE: Final = 1_000
_READS_AT_ONCE: Final = 16
_TRY_AGAIN_MS: Final = 1_000
_LONGEST_PAUSE_MS: Final = 60_000


class BulkRouting:
    """Registers committed jobs, and routes their shards, a few at a time, in their order."""

    def __init__(self, commits: CommitFiles, store: QueueStore, readers: ShardReaders) -> None:
        self._commits = commits
        self._store = store
        self._readers = readers
        self._clock = store.clock.machine
        self._known: set[str] = set()
        self._registering = asyncio.Lock()
        self._work = asyncio.Event()
        self._work.set()
        self._may_route = asyncio.Event()
        self._may_route.set()
        self._pauses = 0
        self._routing: dict[int, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(SHARDS_AT_ONCE)
        self._failing: set[int] = set()
        """Shards that could not be routed so far. They wait for their next try without a slot, and
        each has a row that leads to it."""
        self._resting: set[int] = set()
        """Those of them that wait just now."""
        self._has_aside = True
        """Whether there may be such rows of shards that are not in memory."""
        self._aside_after = -1
        self._aside_found = False
        self._taken = -1
        self._moved = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="route bulk shards")

    def check_running(self) -> None:
        """Raise what stopped the routing, if something did."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """Stop; what is not routed yet will be, after the next open."""
        await end_tasks([self._task, *self._routing.values()])

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Route no more bulk messages meanwhile, but for those that are being routed."""
        self._pauses += 1
        self._may_route.clear()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._may_route.set()

    # --- finding ----------------------------------------------------------------------------------

    async def look(self) -> int:
        """Register all jobs that are committed now; returns how many commits there are."""
        async with self._registering:
            jobs = await self._commits.jobs()
            new = [job for job in jobs if job not in self._known]
            self._known &= set(jobs)
            for start in range(0, len(new), _JOBS_AT_ONCE):
                await self._register(new[start : start + _JOBS_AT_ONCE])
            return len(jobs)

    async def _register(self, jobs: list[str]) -> None:
        found: list[Commit] = []
        for start in range(0, len(jobs), _READS_AT_ONCE):
            some = jobs[start : start + _READS_AT_ONCE]
            read = await asyncio.gather(*(self._unregistered(job) for job in some))
            found += [commit for commit in read if commit is not None]
        for commit in sorted(found, key=lambda one: (one.committed_at, one.job)):
            await self._store.admin.register(commit)
            self._known.add(commit.job)
            self._work.set()

    async def _unregistered(self, job: str) -> Commit | None:
        """A commit that is to be registered."""
        if await self._store.bulk.knows(job):
            self._known.add(job)
            return None
        try:
            return await self._commits.read(job)
        except CorruptStoreError as error:
            logger.error("a bulk job can't be registered: %s", error)
            self._known.add(job)
            return None

    # --- routing ----------------------------------------------------------------------------------

    async def finished(self) -> None:
        """Wait until all that is registered is routed."""
        await self._moved_until(lambda: not self._routing and not self._has_aside)

    async def tried(self) -> None:
        """Wait until all that is registered is routed, but for shards that can't be now.

        Each of those has had its try, unless there are so many that they take turns.
        """
        await self._moved_until(self._all_tried)

    def _all_tried(self) -> bool:
        if len(self._failing) >= _FAILING_AT_MOST:
            return self._routing.keys() <= self._failing
        return self._routing.keys() <= self._resting and not self._has_aside

    async def _moved_until(self, reached: Callable[[], bool]) -> None:
        """Wait until all that is registered was taken up, and something more is true."""
        bulk = self._store.bulk
        while self._taken + 1 < bulk.next_number or not reached():
            self.check_running()
            self._moved.clear()
            moved = asyncio.create_task(self._moved.wait())
            await asyncio.wait({moved, self._task}, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            for task in [task for task in self._routing.values() if task.done()]:
                task.result()
            self._routing = {n: task for n, task in self._routing.items() if not task.done()}
            self._failing &= self._routing.keys()
            await self._take_new()
            if self._has_aside and len(self._failing) < _FAILING_AT_MOST:
                await self._take_aside(_FAILING_AT_MOST - len(self._failing))
            self._moved.set()

    async def _take_new(self) -> None:
        """Begin with the next shards that were not tried yet."""
        room = SHARDS_AT_ONCE - (len(self._routing) - len(self._failing))
        behind = self._store.bulk.next_number
        if room <= 0 or self._taken + 1 >= behind:
            return
        found = await self._store.bulk.unfinished(self._taken, room)
        for number, shard in found:
            if number not in self._routing:  # it may be one that was set aside
                self._begin(number, shard)
        self._taken = found[-1][0] if len(found) == room else behind - 1

    async def _take_aside(self, room: int) -> None:
        """Try again with some of those that were set aside, all of them in turn."""
        rows = await self._store.bulk.waiting(self._aside_after, _ASIDE_AT_ONCE)
        others = [row for row in rows if row[0] not in self._routing][:room]
        for number, shard in others:
            self._failing.add(number)
            self._begin(number, shard)
        self._aside_found = self._aside_found or bool(others)
        if len(rows) < _ASIDE_AT_ONCE and len(others) < room:
            # Once around: if there was none, all of them are in memory.
            self._has_aside = self._aside_found
            self._aside_after, self._aside_found = -1, False
        else:
            self._aside_after = others[-1][0] if len(others) == room else rows[-1][0]
        if self._has_aside:
            self._work.set()

    def _begin(self, number: int, shard: BulkShard) -> None:
        name = f"route bulk shard {shard.shard}"
        task = asyncio.create_task(self._route(number, shard), name=name)
        self._routing[number] = task
        task.add_done_callback(lambda _: self._work.set())

    async def _route(self, number: int, shard: BulkShard) -> None:
        pause_ms = _TRY_AGAIN_MS
        router: Router | None = None
        while True:
            try:
                # First come, first served: shards that fail again and again delay the others,
                # and never keep them from their turn.
                async with self._slots:
                    # The same one each time: its last batch need not be durable yet, and then the
                    # store does not know how far it has come.
                    router = router or await self._router_of(shard)
                    await self._route_to_the_end(number, shard, router)
                return
            except OdqError as error:
                self._store.committer.check_open()  # if it was a commit that failed, it is over
                again_at = self._clock.now_ms() + pause_ms
                logger.warning("bulk shard %d of %s waits: %s", shard.shard, shard.job, error)
                if await self._gives_way(number, pause_ms):
                    return
                logger.info("%d bulk shards wait for another try", len(self._failing))
                self._resting.add(number)
                self._work.set()  # another one may be begun meanwhile
                await self._clock.wait_until(again_at)
                self._resting.discard(number)
                pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

    async def _gives_way(self, number: int, pause_ms: int) -> bool:
        """Set a shard aside that could not be routed; true if it shall leave the memory to others.

        Then all of its rows are durable, and its next try goes on at its cursor.
        """
        store = self._store
        known = number in self._failing
        self._failing.add(number)
        patient = pause_ms < _LONGEST_PAUSE_MS
        crowded = len(self._failing) > _FAILING_AT_MOST or (self._has_aside and not patient)
        if known and not crowded:
            return False
        await store.committer.room()
        store.bulk.set_aside(number, self._clock.now_ms())
        await store.committer.wait(store.committer.commit())
        if crowded:
            self._has_aside = True
        return crowded

    async def _router_of(self, shard: BulkShard) -> Router:
        store = self._store
        cursor = await store.cursor(shard.shard) or 0
        store.ledger.starts_at(message_id_of(shard.shard, cursor))
        return Router(store, shard.shard, cursor, made_until_ms=shard.registered_at)

    async def _route_to_the_end(self, number: int, shard: BulkShard, router: Router) -> None:
        store = self._store
        cursor = router.next_sequence
        if cursor < shard.next_sequence and store.has_queue_made_until(shard.registered_at):
            log = FollowedLog(self._readers, shard.shard)
            async for chunk in log.chunks(lambda: store.index.headers, cursor):
                await self._may_route.wait()
                await router.route_log(chunk)
            if router.next_sequence < shard.next_sequence:
                raise CorruptStoreError(
                    f"it ends at sequence {router.next_sequence}, and its commit says "
                    f"{shard.next_sequence}"
                )
        await store.committer.room()
        store.put_cursor(shard.shard, shard.next_sequence)
        store.bulk.finish(number, shard, waits=number in self._failing)
        await store.committer.wait(store.committer.commit())
