"""The queues of a root: loaded, made, changed, purged and deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from odq_encodings import (
    BEING_DELETED,
    QueueConfig,
    QueueConfigKey,
    QueueOptionsRecord,
    RecordType,
    Replay,
    ReplayKey,
)
from opendata_queue.filters import Filter
from opendata_queue.model.errors import ClosedError, QueueExistsError
from opendata_queue.model.options import QueueOptions, check_name
from opendata_queue.queues.bulk_registry import BulkRegistry
from opendata_queue.queues.lanes import Past
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.removal import delete_rows, purge
from opendata_queue.queues.store.commits import QueueCommits
from opendata_queue.queues.store.cursors import put_cursor
from opendata_queue.queues.store.registry import ALL_BULK_SHARDS, QueueRegistry
from opendata_queue.queues.timers import Sweeper
from opendata_queue.root.clock import RootClock
from opendata_queue.root.commit_files import Commit
from opendata_queue.runtime.aio import end_tasks
from opendata_queue.store import Database

logger = logging.getLogger(__name__)


class QueueAdmin:
    """Makes, changes and deletes queues, one after the other."""

    def __init__(
        self,
        registry: QueueRegistry,
        commits: QueueCommits,
        bulk: BulkRegistry,
        sweeper: Sweeper,
        database: Database,
        clock: RootClock,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._committer = commits.committer
        self._bulk = bulk
        self._sweeper = sweeper
        self._database = database
        self._clock = clock
        self._administering = asyncio.Lock()
        self._deletions: dict[str, asyncio.Task[None]] = {}
        self.on_replay: Callable[[StoredQueue], None] | None = None
        """Called with new queues that begin in the past."""

    async def close(self) -> None:
        """A deletion that is under way goes on at the next open."""
        await end_tasks(list(self._deletions.values()))

    @property
    def being_deleted(self) -> list[str]:
        """The queues whose rows are being deleted."""
        return list(self._deletions)

    async def load(self) -> None:
        """Read what is hot of every queue: six records each, however long its backlog."""
        # By what their keys have in common, the queue's id; each record is decoded once.
        records: dict[bytes, dict[RecordType, bytes]] = {}
        for first, behind in (
            (RecordType.ACTIVE_MESSAGES, RecordType.ATTEMPTS),
            (RecordType.QUEUE_CONFIG, RecordType.IDEMPOTENCY),
            (RecordType.QUEUE_OPTIONS, RecordType.BACKLOG),
        ):
            async for chunk in self._database.scan(first.prefix, behind.prefix):
                for key, value in chunk:
                    records.setdefault(key[2:], {})[RecordType(key[1])] = value
        for suffix, values in sorted(records.items()):
            self._load_queue(suffix, values)
        await self._load_replays()

    async def _load_replays(self) -> None:
        first, behind = RecordType.REPLAY.prefix, RecordType.CLOCK.prefix
        async for chunk in self._database.scan(first, behind):
            for key, value in chunk:
                where = self._database.decode(ReplayKey.decode, key, key)
                queue = self._registry.get(where.queue_id.decode())
                if queue is not None:  # not if it is being deleted
                    replay = self._database.decode(Replay.decode, key, value)
                    queue.replays[where.shard] = replay

    def _load_queue(self, suffix: bytes, values: dict[RecordType, bytes]) -> None:
        decode = self._database.decode
        key = RecordType.QUEUE_CONFIG.prefix + suffix
        name = decode(QueueConfigKey.decode, key, key).queue_id.decode()
        config = decode(QueueConfig.decode, key, values[RecordType.QUEUE_CONFIG])
        key = RecordType.QUEUE_OPTIONS.prefix + suffix
        options = decode(QueueOptionsRecord.decode, key, values[RecordType.QUEUE_OPTIONS])
        if options.flags & BEING_DELETED:
            self._delete_in_background(name, options.created_at)
            return
        queue = self._make(
            name,
            Filter.parse(config.filter),
            QueueOptions.from_records(config, options),
            options.created_at,
        )
        queue.load(values)
        self._sweeper.note(queue)

    def _make(
        self, name: str, filter: Filter, options: QueueOptions, created_at_ms: int
    ) -> StoredQueue:
        queue = StoredQueue(
            name,
            filter,
            options,
            created_at_ms,
            self._database,
            self._committer,
            self._commits.mark,
        )
        self._registry.add(queue)
        return queue

    # --- administration ---------------------------------------------------------------------------

    def check_free(self, name: str) -> None:
        """Raise if a queue of that name can't be made."""
        if name in self._registry:
            raise QueueExistsError(f"there is a queue {name!r} already")
        if name in self._deletions:
            raise QueueExistsError(
                f"queue {name!r} is being deleted: try again when delete_queue has returned"
            )

    async def create(
        self,
        name: str,
        filter: Filter,
        options: QueueOptions,
        cursors: Callable[[], Mapping[int, int]],
        *,
        replay_from_ms: int | None = None,
        replayed: Callable[[], Mapping[int, int]] | None = None,
    ) -> None:
        """Make a queue; it gets the messages that are routed from now on.

        ``cursors`` says up to where the log of each live shard is routed. With ``replay_from_ms``,
        it also gets those before that were received since then, of all shards unless ``replayed``
        says of which.
        """
        check_name(name)
        async with self._administering:
            self.check_free(name)
            await self._committer.room()
            # Nothing is awaited from here on: what the cursor has passed is replayed, the rest
            # is routed.
            made_at = self._registry.made_at(self._clock.now_ms())
            queue = self._make(name, filter, options, made_at)
            queue.put_settings(self._committer.rows)
            queue.put_state(self._committer.rows, everything=True)
            routed = cursors()
            for shard, next_sequence in routed.items():
                put_cursor(self._committer.rows, shard, next_sequence)
            if replay_from_ms is not None:
                # Bulk shards that were registered before are in the past of the queue, all of them.
                past = {**routed, ALL_BULK_SHARDS: self._bulk.next_number}
                ends = past if replayed is None else replayed()
                self._begin_replay(queue, ends, replay_from_ms)
            done = self._committer.commit()
        # Others may follow meanwhile: queues that are made together share commits.
        await self._committer.wait(done)

    def _begin_replay(self, queue: StoredQueue, ends: Mapping[int, int], from_ms: int) -> None:
        for shard, end in ends.items():
            queue.put_replay(shard, Replay(next_sequence=0, end_sequence=end, from_time=from_ms))
        if queue.replays and self.on_replay is not None:
            self.on_replay(queue)

    async def register(self, commit: Commit) -> None:
        """Register a bulk job, for the queues that are there now, and for no later ones."""
        async with self._administering:
            now = self._registry.made_at(self._clock.now_ms())
            self._registry.make_later_than(now)
            await self._bulk.register(commit, now)

    async def update(self, name: str, *, filter: Filter | None, changes: Mapping[str, Any]) -> None:
        """Change how a queue is configured; a new filter counts for messages routed from now on."""
        async with self._administering:
            queue = self._registry.queue(name)
            # Only now: another update may have come first, and must not be undone.
            options = queue.options.with_changes(changes)
            filter = queue.filter if filter is None else filter
            await self._committer.room()
            queue.options = options
            self._registry.set_filter(queue, filter)
            queue.state.follow(options.rules())
            queue.changed()
            queue.put_settings(self._committer.rows)
            done = self._committer.commit()
            queue.waiters.wake()
            await self._committer.wait(done)

    async def purge(self, name: str, past: Past) -> int:
        """Drop what waits and is in the past; returns how many messages that were."""
        return await purge(self._registry.queue(name), self._committer, past)

    async def delete(self, name: str) -> None:
        """Delete a queue; returns when nothing is left of it.

        If that is under way already, it waits for the end of it.
        """
        async with self._administering:
            deletion = self._deletions.get(name)
            if deletion is None:
                deletion = await self._begin_deletion(name)
            elif deletion.done():  # it could not read the store
                deletion = self._delete_in_background(name, self._registry.made_from_ms - 1)
        await asyncio.wait([deletion])  # a caller that is cancelled does not stop it
        if deletion.cancelled():
            raise ClosedError(f"{self._database.name} was closed; the next owner deletes {name!r}")
        deletion.result()

    async def _begin_deletion(self, name: str) -> asyncio.Task[None]:
        queue = self._registry.queue(name)
        await self._committer.room()
        # From here on it is not found, and a caller that has found it before is refused.
        self._registry.remove(queue)
        queue.deleted = True
        self._sweeper.forget(queue)
        queue.waiters.wake_all()
        queue.put_settings(self._committer.rows)
        return self._delete_in_background(name, queue.created_at_ms, self._committer.commit())

    def _delete_in_background(
        self, name: str, created_at_ms: int, marked: asyncio.Future[None] | None = None
    ) -> asyncio.Task[None]:
        """Delete all rows of a queue that is marked, or will be when ``marked`` is done."""
        self._registry.make_later_than(created_at_ms)
        task = asyncio.create_task(self._delete_rows(name, marked), name=f"delete queue {name}")
        task.add_done_callback(partial(_log_failure, name))
        self._deletions[name] = task
        return task

    async def _delete_rows(self, name: str, marked: asyncio.Future[None] | None) -> None:
        if marked is not None:
            await self._committer.wait(marked)
        await delete_rows(name.encode(), self._database, self._committer)
        del self._deletions[name]


def _log_failure(name: str, deletion: asyncio.Task[None]) -> None:
    if not deletion.cancelled() and (error := deletion.exception()) is not None:
        logger.warning("queue %r is not deleted completely yet: %s", name, error)
