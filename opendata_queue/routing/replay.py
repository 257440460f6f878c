"""Replaying the logs of all shards for queues that begin in the past (RFC 0006, RFC 0009).

Such a queue is served twice: the tailer routes what comes after the queue was made, and this goes
through what was there before, up to the same boundary. What is routed and how far it has come are
in one batch, so a crash repeats nothing and skips nothing.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile
from typing import Final

from odq_encodings import BulkShard, MessageMetadata, Replay, decode_headers
from opendata_queue.filters import Filter, SystemFields
from opendata_queue.log.metadata_log import Log, LogChunk
from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.model.ids import SEQUENCE_MASK, is_bulk
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.state import Waiting
from opendata_queue.queues.store import ALL_BULK_SHARDS, QueueStore
from opendata_queue.routing.router import received_by, retention_deadline
from opendata_queue.runtime.aio import end_tasks
from opendata_queue.runtime.turns import Turn

logger = logging.getLogger(__name__)

FROM_THE_BEGINNING_MS: Final = -(1 << 63)
ENTRIES_AT_ONCE: Final = 1_000
"""How much of the log is read for one queue before it is the turn of the next one."""
_ROUTED_AT_ONCE: Final = 128
"""Messages that are put into a queue together."""

_SHARDS_AT_ONCE: Final = 1_000
_TRY_AGAIN_MS: Final = 1_000

CLOCK_SLACK_MS: Final = 5 * 60 * 1_000
"""By how much the clocks of a root's owners may differ when a time is searched in the log."""


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
        """Delete the rows of bulk shards that are gone: they are not needed any more."""
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
        limit = min(ENTRIES_AT_ONCE, replay.end_sequence - start)
        # Of large entries a chunk has fewer; the next part goes on behind it.
        async with aclosing(log.chunks(lambda: queue.filter.headers, start, limit=limit)) as chunks:
            chunk = await anext(chunks, None)
        await self._replay_chunk(queue, shard, replay, chunk, behind)

    async def _replay_chunk(
        self,
        queue: StoredQueue,
        shard: int,
        replay: Replay,
        chunk: LogChunk | None,
        behind: Replay | None,
    ) -> None:
        """Go through what was read, in as many turns as it takes; nothing means that all is."""
        place, count, committer = 0, 0, self._store.committer
        matches: _Matches | None = None
        sequences: list[int] = []
        if chunk is not None:
            ids = chunk.columns(queue.filter.headers).message_ids
            sequences = [message_id & SEQUENCE_MASK for message_id in ids]
            count = bisect_left(sequences, replay.end_sequence)
        while True:
            async with self._store.turns.turn() as turn:
                await self._store.room_for_turn(turn)
                if queue.deleted:
                    return
                # The filter may have changed since the last turn.
                if chunk is not None and (matches is None or matches.filter is not queue.filter):
                    matches = _Matches(queue.filter, chunk, replay.from_time)
                try:
                    while matches is not None and place < count:
                        place = self._route(queue, matches, turn, place, count)
                        if turn.is_over:
                            break
                finally:  # in the same batch as what is routed, whatever happens
                    if place or not count:
                        reached = sequences[place - 1] + 1 if count else replay.end_sequence
                        progress = replace(replay, next_sequence=reached)
                        self._put_progress(queue, shard, progress, behind)
                done = committer.commit(lazy=place < count)
            if place >= count:
                await committer.wait(done)
                return

    @staticmethod
    def _put_progress(
        queue: StoredQueue, shard: int, progress: Replay, behind: Replay | None
    ) -> None:
        queue.put_replay(shard, progress)
        if behind is not None and shard not in queue.replays:
            queue.put_replay(ALL_BULK_SHARDS, behind)
        queue.changed()
        queue.waiters.wake()

    def _route(
        self, queue: StoredQueue, matches: _Matches, turn: Turn, place: int, count: int
    ) -> int:
        """Route what matches of some entries from a place on; returns the place behind them.

        A filter may take long for one message, so the clock is asked after each of them.
        """
        now, end = self._store.clock.now_ms(), min(place + _ROUTED_AT_ONCE, count)
        waiting: list[Waiting] = []
        while place < end:
            one = matches.waiting(place, now)
            place += 1
            if one is not None:
                waiting.append(one)
            if turn.is_over:
                break
        queue.state.route_many(waiting, now)
        return place


class _Matches:
    """Which messages of a log match a filter."""

    def __init__(self, filter: Filter, chunk: LogChunk, from_time: int) -> None:
        self.filter = filter
        self._from_time = from_time
        self._columns = chunk.columns(filter.headers)
        self._by_fields = filter.asks_for_system_fields
        self._headers: dict[int, dict[str, str]] = {}
        self._priorities: dict[int, int | None] = {}

    def waiting(self, place: int, now: int) -> Waiting | None:
        """A message as it waits in the queue, if it matches and was not received too early."""
        columns = self._columns
        received_at = columns.received_at[place]
        if received_at < self._from_time:
            return None
        message_id, visible_at = columns.message_ids[place], columns.visible_at[place]
        fields = SystemFields(message_id, columns.created_at[place], received_at, visible_at)
        priority = self._priority(columns.kinds[place], fields)
        if priority is None:
            return None
        received_at, visible_at = received_by(now, received_at, visible_at)
        deadline = retention_deadline(received_at, columns.retention_seconds[place])
        return Waiting(priority, message_id, visible_at, deadline, 0)

    def _priority(self, kind: int, fields: SystemFields) -> int | None:
        if not self._by_fields and kind in self._priorities:
            return self._priorities[kind]
        if kind not in self._headers:
            self._headers[kind] = decode_headers(self._columns.headers[kind])
        priority = self.filter.priority_if_match(self._headers[kind], fields)
        self._priorities[kind] = priority
        return priority


def _has_nothing(shard: BulkShard, sweep: Replay) -> bool:
    """Whether all of a shard is before the time at which a queue begins."""
    return not shard.messages or shard.committed_at < sweep.from_time - CLOCK_SLACK_MS


async def first_since(log: Log, low: int, high: int, time_ms: int) -> int:
    """A sequence before which nothing was received at that time or later, by bisection.

    Times in a log fall only where another owner's clock was behind; the caller allows for that.
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
    return entry.message_id & SEQUENCE_MASK
