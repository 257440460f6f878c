"""Replaying the logs of all shards for queues that begin in the past (RFC 0006, RFC 0009).

Such a queue is served twice: the tailer routes what comes after the queue was made, and this goes
through what was there before, up to the same boundary. What is routed and how far it has come are
in one batch, so a crash repeats nothing and skips nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Final

from odq_encodings import BulkShard, MessageMetadata, Replay
from opendata_queue.errors import StoreUnavailableError
from opendata_queue.filters import SystemFields
from opendata_queue.metadata_log import Log
from opendata_queue.pauses import Pauses
from opendata_queue.queue_state import Waiting
from opendata_queue.queue_store import ALL_BULK_SHARDS, QueueStore
from opendata_queue.routing import received_by, retention_deadline
from opendata_queue.shard_files import is_bulk
from opendata_queue.stored_queue import StoredQueue
from opendata_queue.tasks import end_tasks

logger = logging.getLogger(__name__)

FROM_THE_BEGINNING_MS: Final = -(1 << 63)
ENTRIES_AT_ONCE: Final = 1_000
"""How much of the log one batch goes through; live traffic shares the commit with it."""

_SHARDS_AT_ONCE: Final = 1_000
_TRY_AGAIN_MS: Final = 1_000

CLOCK_SLACK_MS: Final = 5 * 60 * 1_000
"""By how much the clocks of a root's owners may differ when a time is looked for in the log."""


Logs = Callable[[int], Log]
"""The log of a shard."""


class LogReplay:
    """Replays logs: one batch for one queue at a time, the queues in turns."""

    def __init__(self, logs: Logs, store: QueueStore) -> None:
        self._logs = logs
        self._store = store
        self._turns: deque[StoredQueue] = deque(store.replaying())
        self._looked_up: set[tuple[StoredQueue, int]] = set()
        self._work = asyncio.Event()
        self._work.set()
        self._idle = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="replay")

    def add(self, queue: StoredQueue) -> None:
        """Replay for a queue that has just been made."""
        self._turns.append(queue)
        self._idle.clear()
        self._work.set()

    async def finished(self) -> None:
        """Wait until nothing is left to replay."""
        idle = asyncio.create_task(self._idle.wait())
        await asyncio.wait({idle, self._task}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        self.check_running()

    def check_running(self) -> None:
        """Raise what stopped the replay, if something did."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """Stop; what is not replayed yet will be, after the next open."""
        await end_tasks([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            logger.info("replaying had stopped: %s", error)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._turns:
                queue = self._turns.popleft()
                try:
                    more = await self._replay_some(queue)
                except StoreUnavailableError as error:
                    more = await self._try_later(error)
                if more:
                    self._turns.append(queue)
                else:
                    self._looked_up = {one for one in self._looked_up if one[0] is not queue}
            self._idle.set()

    async def _try_later(self, error: StoreUnavailableError) -> bool:
        self._store.committer.check_open()  # if it was a commit that failed, it is over
        logger.warning("replaying waits for the store: %s", error)
        clock = self._store.clock.machine
        await clock.wait_until(clock.now_ms() + _TRY_AGAIN_MS)
        return True

    async def _replay_some(self, queue: StoredQueue) -> bool:
        """Go through a part of a log for a queue; false when there is no more to be done."""
        if queue.deleted:
            return False
        live = next((shard for shard in queue.replays if not is_bulk(shard)), None)
        if live is not None:
            await self._replay_part(queue, live, queue.replays[live])
        elif ALL_BULK_SHARDS in queue.replays:
            await self._replay_bulk(queue, queue.replays[ALL_BULK_SHARDS])
        else:
            await self._forget_rest(queue)
        return not queue.deleted and bool(queue.replays)

    async def _replay_bulk(self, queue: StoredQueue, sweep: Replay) -> None:
        """Go on with the bulk shard that is next, or pass on to the one after it."""
        if (queue, ALL_BULK_SHARDS) not in self._looked_up:
            # Shards may have been removed right before the queue was made. None is from now on.
            await self._store.all_durable()
            self._looked_up.add((queue, ALL_BULK_SHARDS))
        found = await self._store.bulk.from_number(sweep.next_sequence)
        if not found or found[0][0] >= sweep.end_sequence:
            await self._pass_on(queue, replace(sweep, next_sequence=sweep.end_sequence))
            return
        number, shard = found[0]
        if _has_nothing(shard, sweep):
            await self._pass_on(queue, await self._behind_nothing(sweep, number))
            return
        behind = replace(sweep, next_sequence=number + 1)
        replay = queue.replays.get(shard.shard) or replace(
            sweep, next_sequence=0, end_sequence=shard.next_sequence
        )
        await self._replay_part(queue, shard.shard, replay, behind)

    async def _behind_nothing(self, sweep: Replay, number: int) -> Replay:
        """Pass over a shard that has nothing for the queue, and over such ones that follow it."""
        found = await self._store.bulk.from_number(number + 1, _SHARDS_AT_ONCE)
        nothing = takewhile(lambda one: _has_nothing(one[1], sweep), found)
        last = [number, *(one for one, _ in nothing)][-1]
        return replace(sweep, next_sequence=min(last + 1, sweep.end_sequence))

    async def _forget_rest(self, queue: StoredQueue) -> None:
        """Delete the rows of bulk shards that are gone: nobody comes back to them."""
        committer = self._store.committer
        await committer.room()
        if not queue.deleted:
            for shard, replay in list(queue.replays.items()):
                queue.put_replay(shard, replace(replay, next_sequence=replay.end_sequence))
            await committer.wait(committer.commit())

    async def _pass_on(self, queue: StoredQueue, sweep: Replay) -> None:
        committer = self._store.committer
        await committer.room()
        if not queue.deleted:
            queue.put_replay(ALL_BULK_SHARDS, sweep)
            await committer.wait(committer.commit())

    async def _replay_part(
        self, queue: StoredQueue, shard: int, replay: Replay, behind: Replay | None = None
    ) -> None:
        """One batch; ``behind`` is where to go on with bulk shards once this one is finished."""
        log = self._logs(shard)
        start = replay.next_sequence
        if (queue, shard) not in self._looked_up and replay.from_time != FROM_THE_BEGINNING_MS:
            low, high = replay.next_sequence, replay.end_sequence
            start = await first_since(log, low, high, replay.from_time - CLOCK_SLACK_MS)
        self._looked_up.add((queue, shard))
        committer = self._store.committer
        await committer.room()
        entries = await _read(log, start, replay.end_sequence)
        if queue.deleted:
            return
        waiting = await self._matching(queue, entries, replay.from_time)
        if queue.deleted:
            return
        queue.state.route_many(waiting, self._store.clock.now_ms())
        queue.put_replay(shard, replace(replay, next_sequence=_behind(entries, replay)))
        if behind is not None and shard not in queue.replays:
            queue.put_replay(ALL_BULK_SHARDS, behind)
        queue.changed()
        queue.wake()
        await committer.wait(committer.commit())

    async def _matching(
        self, queue: StoredQueue, entries: list[MessageMetadata], from_time: int
    ) -> list[Waiting]:
        """What is for a queue. Others may run meanwhile, and give it another filter: then anew."""
        filter, pauses = queue.filter, Pauses()
        waiting: list[Waiting] = []
        now = self._store.clock.now_ms()
        for entry in entries:
            if entry.received_at < from_time:
                continue
            await pauses.pause()
            if queue.filter is not filter:
                return await self._matching(queue, entries, from_time)
            system = SystemFields(
                entry.message_id, entry.created_at, entry.received_at, entry.visible_at
            )
            priority = filter.priority_if_match(dict(entry.headers), system)
            if priority is None:
                continue
            received_at, visible_at = received_by(now, entry.received_at, entry.visible_at)
            deadline = retention_deadline(received_at, entry.retention_seconds)
            waiting.append(Waiting(priority, entry.message_id, visible_at, deadline, 0))
        return waiting


def _has_nothing(shard: BulkShard, sweep: Replay) -> bool:
    """Whether all of a shard is before the time at which a queue begins."""
    return not shard.messages or shard.committed_at < sweep.from_time - CLOCK_SLACK_MS


async def _read(log: Log, start: int, end: int) -> list[MessageMetadata]:
    """The next entries of a log, none from ``end`` on."""
    limit = min(ENTRIES_AT_ONCE, end - start)
    chunks = [chunk async for chunk in log.scan(start, limit=limit)] if limit > 0 else []
    return [entry for chunk in chunks for entry in chunk if _sequence(entry) < end]


async def first_since(log: Log, low: int, high: int, time_ms: int) -> int:
    """A sequence before which nothing was received at that time or later, by bisection.

    Times in a log fall only where another owner's clock was behind; who looks for a time allows
    for that.
    """
    while low < high:
        middle = (low + high) // 2
        entry = await _first_from(log, middle)
        if entry is None or _sequence(entry) >= high:
            high = middle  # there is nothing between them
        elif entry.received_at < time_ms:
            low = _sequence(entry) + 1
        else:
            high = middle
    return low


async def _first_from(log: Log, sequence: int) -> MessageMetadata | None:
    found = [entry async for chunk in log.scan(sequence, limit=1) for entry in chunk]
    return found[0] if found else None


def _sequence(entry: MessageMetadata) -> int:
    return entry.message_id & 0xFFFF_FFFF


def _behind(entries: list[MessageMetadata], replay: Replay) -> int:
    """Where to go on after these entries: at the end, if there were none."""
    return _sequence(entries[-1]) + 1 if entries else replay.end_sequence
