"""The queue store as its one owner has it, put together from its parts.

``registry`` knows which queues there are, ``commits`` writes what has changed of them, ``admin``
makes and deletes them, ``consumers`` is what consumers do, ``refill`` fills windows from backlogs,
``due`` is what time alone does, and ``cursors`` say up to where logs are routed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from odq_encodings import ClockMark, Failure, MessageMetadata
from opendata_queue.filters import FilterIndex
from opendata_queue.model.paths import QUEUES_PATH
from opendata_queue.model.values import QueueStats
from opendata_queue.queues.attempts import AttemptsLedger, consumers_of
from opendata_queue.queues.bulk_registry import BulkRegistry
from opendata_queue.queues.matching import matching_queues
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.rows.finished import failures_in
from opendata_queue.queues.store.admin import QueueAdmin
from opendata_queue.queues.store.commits import CLOCK_KEY, QueueCommits
from opendata_queue.queues.store.consumers import Consumers
from opendata_queue.queues.store.cursors import put_cursor, read_cursor, read_live_shards
from opendata_queue.queues.store.due import Deadlines, DueWork
from opendata_queue.queues.store.refill import Refills
from opendata_queue.queues.store.registry import QueueRegistry
from opendata_queue.root.clock import RootClock
from opendata_queue.runtime.turns import Turn, Turns
from opendata_queue.store import Database, Objects
from opendata_queue.store.group_commit import CommitLimits


async def open_queues(objects: Objects, *, acknowledged: int = 0) -> Database:
    """Become the owner of the queue store; the owner before is fenced.

    ``acknowledged`` is as in ``Database.open``.
    """
    return await Database.open(objects, QUEUES_PATH, journaled=True, acknowledged=acknowledged)


class QueueStore:
    """The one owner of the queue store.

    What it returns is durable, unless a queue has relaxed claims.
    """

    def __init__(
        self,
        database: Database,
        clock: RootClock,
        deadlines: Deadlines,
        *,
        limits: CommitLimits,
        lease_grace_ms: int,
        ttl_grace_ms: int,
        chance: random.Random,
    ) -> None:
        self._database = database
        self.clock = clock
        self.registry = QueueRegistry()
        self._commits = QueueCommits(database, clock, self.registry, limits)
        self.committer = self._commits.committer
        self.ledger = AttemptsLedger(database)
        self.bulk = BulkRegistry(database, self.committer)
        self.turns = Turns()
        """Of all that is done in the background."""
        self.due = DueWork(
            self.registry,
            self._commits,
            clock,
            deadlines,
            turns=self.turns,
            lease_grace_ms=lease_grace_ms,
            chance=chance,
        )
        self.sweeper = self.due.sweeper
        self._commits.on_change = self.sweeper.note
        self.refills = Refills(self.committer, clock)
        self.consumers = Consumers(
            self.registry,
            self._commits,
            self.due,
            self.refills,
            self.ledger,
            clock,
            ttl_grace_ms=ttl_grace_ms,
            chance=chance,
        )
        self.admin = QueueAdmin(
            self.registry, self._commits, self.bulk, self.sweeper, database, clock
        )

    @classmethod
    async def load(
        cls,
        database: Database,
        clock: RootClock,
        deadlines: Deadlines,
        *,
        limits: CommitLimits | None = None,
        lease_grace_ms: int = 0,
        ttl_grace_ms: int,
        chance: random.Random | None = None,
    ) -> QueueStore:
        """All queues of a database that ``open_queues`` has opened, and that is theirs from now on.

        It is closed with them, and if this fails. The clock shows no less from now on than the
        last commit had seen.
        """
        store: QueueStore | None = None
        try:
            mark = await database.get(CLOCK_KEY)
            if mark is not None:
                marked = database.decode(ClockMark.decode, CLOCK_KEY, mark)
                clock.start_no_earlier(marked.now)
            store = cls(
                database,
                clock,
                deadlines,
                limits=limits or CommitLimits(),
                lease_grace_ms=lease_grace_ms,
                ttl_grace_ms=ttl_grace_ms,
                chance=chance or random.Random(),
            )
            await store.admin.load()
            await store.bulk.load()
            store.sweeper.start()
        except BaseException:
            await (database if store is None else store).close()
            raise
        return store

    async def close(self) -> None:
        """End all waiting, commit what has gathered, and close.

        A deletion that is under way goes on at the next open.
        """
        await self.sweeper.close()
        await self.admin.close()
        await self.refills.close()
        self.registry.wake_everybody()
        try:
            await self.committer.close()
        finally:
            await self._database.close()

    @property
    def database(self) -> Database:
        """Its rows, for maintenance such as retention; they are written through ``committer``."""
        return self._database

    # --- which queues there are -------------------------------------------------------------------

    @property
    def index(self) -> FilterIndex[str]:
        """The filters of all queues."""
        return self.registry.index

    def queue(self, name: str) -> StoredQueue:
        return self.registry.queue(name)

    def names(self, prefix: str = "", after: str = "", limit: int | None = None) -> list[str]:
        """See ``AsyncSystem.list_queues``."""
        return self.registry.names(prefix, after, limit)

    def count(self, first_part: str | None = None) -> int:
        """How many queues there are, or how many whose names begin with that and a ``/``."""
        return self.registry.count(first_part)

    def queues(self) -> list[StoredQueue]:
        return self.registry.queues()

    def has_queue_made_until(self, time_ms: int) -> bool:
        """Whether there is a queue that was there at that time."""
        return self.registry.has_queue_made_until(time_ms)

    def replaying(self, shard: int | None = None) -> list[StoredQueue]:
        """The queues that the past is still replayed for, of one shard or of any."""
        return self.registry.replaying(shard)

    async def matching(self, about: MessageMetadata) -> list[str]:
        """The queues whose filters a message satisfies."""
        return await matching_queues(self.index, about)

    # --- routing ----------------------------------------------------------------------------------

    async def cursor(self, shard: int) -> int | None:
        """Up to where the log of a shard is routed; none if it is not known here."""
        return await read_cursor(self._database, shard)

    async def live_shards(self) -> list[int]:
        """The live shards that were routed before, but for that of the owner."""
        return await read_live_shards(self._database)

    def put_cursor(self, shard: int, next_sequence: int) -> None:
        put_cursor(self.committer.rows, shard, next_sequence)

    async def room_for(self, queue: StoredQueue) -> None:
        """Wait until more may be added for a queue, which must not be deleted meanwhile."""
        await self._commits.room_for(queue)

    async def room_for_turn(self, turn: Turn) -> None:
        """Begin a turn of background work when there is room for its rows."""
        await self._commits.room_for_turn(turn)

    # --- reading ----------------------------------------------------------------------------------

    async def catch_up_with_time(self, queue: StoredQueue) -> None:
        """Take back all leases that are over, and admit what is due."""
        await self.due.catch_up_with_time(queue)

    async def all_durable(self) -> None:
        """Wait until everything that has happened can be read."""
        await self._commits.all_durable()

    async def failures(self, name: str, *, after_id: int, limit: int) -> list[tuple[int, Failure]]:
        """Failed messages by ascending id: all that had failed when this was called."""
        queue = self.queue(name)
        await self.all_durable()
        since = queue.options.failed_since(self.clock.now_ms())
        return await queue.finished.failures(after_id, limit=limit, since=since)

    async def failures_in(
        self, queues: Sequence[StoredQueue], message_id: int
    ) -> list[Failure | None]:
        """How one message has failed in each of some queues."""
        return await failures_in(self._database, [one.queue_id for one in queues], message_id)

    async def consumers_of(self, message_id: int) -> tuple[str, ...]:
        """Who has claimed a message, in all queues."""
        await self.all_durable()
        return await consumers_of(self._database, message_id)

    def stats(self, name: str) -> QueueStats:
        return self.queue(name).stats()
