"""All queues of a root: making them, filling them, and what consumers do with them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from odq_encodings import (
    BEING_DELETED,
    ClockKey,
    ClockMark,
    Cursor,
    CursorKey,
    Failure,
    QueueConfig,
    QueueConfigKey,
    QueueOptionsRecord,
    RecordType,
    Replay,
    ReplayKey,
)
from opendata_queue.attempts import AttemptsLedger
from opendata_queue.bulk_registry import BulkRegistry
from opendata_queue.checks import check_integer
from opendata_queue.commit_files import Commit
from opendata_queue.committer import CommitLimits, GroupCommitter
from opendata_queue.errors import (
    ClosedError,
    CorruptStoreError,
    InvalidInputError,
    OdqError,
    QueueExistsError,
    QueueNotFoundError,
)
from opendata_queue.filters import Filter, FilterIndex
from opendata_queue.interface import Outcome, QueueStats
from opendata_queue.lanes import Past
from opendata_queue.queue_options import QueueOptions, check_name
from opendata_queue.queue_removal import delete_rows, purge
from opendata_queue.queue_state import Claim, Held, Waiting
from opendata_queue.root_clock import RootClock
from opendata_queue.shard_files import FIRST_BULK_SHARD, OWNERS_SHARD, is_bulk
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.stored_queue import StoredQueue, consumers_of, failures_in
from opendata_queue.sweeper import Sweeper
from opendata_queue.tasks import end_tasks
from opendata_queue.turns import Turns

logger = logging.getLogger(__name__)

MAX_AT_ONCE: Final = 1_000
MAX_CONSUMER_BYTES: Final = 255
MAX_ERROR_BYTES: Final = 4_096
MAX_DELAY_MS: Final = 100 * 365 * 24 * 3_600_000
MAX_WAIT_MS: Final = MAX_DELAY_MS

ALL_BULK_SHARDS: Final = (1 << 32) - 1
"""Stands for all bulk shards in the key of a replay row (RFC 0009)."""

_CLOCK_KEY: Final = ClockKey().encode()
_LEASES_AT_ONCE: Final = 500
_ROUNDS_OF_DUE: Final = 2
"""How often a claim admits some hundred messages that are due before it takes what there is."""

Durable = Callable[[], Awaitable[None]]
"""Waits until what was done is durable."""

Deadlines = Callable[[Iterable[int]], Awaitable[dict[int, int]]]
"""Looks up the retention deadlines of messages."""


async def open_queues(objects: Objects) -> Database:
    """Become the owner of the queue store; whoever was it before is fenced."""
    return await Database.open(objects, "queues/00000", journaled=True)


class QueueStore:
    """The one owner of the queue store.

    Whatever it returns is durable, unless a queue has relaxed claims.
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
        self._ttl_grace_ms = ttl_grace_ms
        self.clock = clock
        self._deadlines = deadlines
        self._grace_ms = lease_grace_ms
        self._chance = chance
        self._queues: dict[str, StoredQueue] = {}
        self._counts: Counter[str] = Counter()
        """How many queues there are by the first part of their names."""
        self._changed: dict[StoredQueue, None] = {}
        self.index: FilterIndex[str] = FilterIndex()
        self.committer = GroupCommitter(database, limits, self._prepare, self._wake_everybody)
        self.ledger = AttemptsLedger(database)
        self.bulk = BulkRegistry(database, self.committer)
        self.turns = Turns()
        """Of all that is done in the background."""
        self._administering = asyncio.Lock()
        self._refills: set[asyncio.Task[None]] = set()
        self.on_refill: Callable[[list[int]], None] | None = None
        """Told which messages are likely to be claimed soon."""
        self.sweeper = Sweeper(
            clock,
            next_event=self._next_event,
            sweep=self._sweep,
            check_open=self.committer.check_open,
        )
        self._deletions: dict[str, asyncio.Task[None]] = {}
        self._made_from_ms = 0
        """No queue that is made now was made earlier: later than all that were deleted."""
        self.on_replay: Callable[[StoredQueue], None] | None = None
        """Told of new queues that begin in the past."""

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
            mark = await database.get(_CLOCK_KEY)
            if mark is not None:
                marked = database.decode(ClockMark.decode, _CLOCK_KEY, mark)
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
            await store._load()
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
        await end_tasks([*self._deletions.values(), *self._refills])
        self._wake_everybody()
        try:
            await self.committer.close()
        finally:
            await self._database.close()

    def _wake_everybody(self) -> None:
        """Let those who wait find out that it is over."""
        for queue in self._queues.values():
            queue.wake_all()

    async def _load(self) -> None:
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
                queue = self._queues.get(where.queue_id.decode())
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
        self.sweeper.note(queue)

    def _make(
        self, name: str, filter: Filter, options: QueueOptions, created_at_ms: int
    ) -> StoredQueue:
        queue = StoredQueue(
            name, filter, options, created_at_ms, self._database, self.committer, self._mark
        )
        self._queues[name] = queue
        self._counts[_first_part(name)] += 1
        self.index.add(name, filter)
        return queue

    # --- administration ---------------------------------------------------------------------------

    def queue(self, name: str) -> StoredQueue:
        try:
            return self._queues[name]
        except KeyError:
            raise QueueNotFoundError(f"there is no queue {name!r}") from None
        except TypeError:  # it can't be looked up
            raise InvalidInputError(
                f"the name of a queue is text, and not a {type(name).__name__}"
            ) from None

    def names(self) -> list[str]:
        return sorted(self._queues)

    def count(self, first_part: str | None = None) -> int:
        """How many queues there are, or how many whose names begin with that and a ``/``."""
        return len(self._queues) if first_part is None else self._counts[first_part]

    def queues(self) -> list[StoredQueue]:
        return list(self._queues.values())

    @property
    def database(self) -> Database:
        """Its rows, for whoever looks after them; they are written through ``committer``."""
        return self._database

    def has_queue_made_until(self, time_ms: int) -> bool:
        """Whether there is a queue that was there at that time."""
        return any(queue.created_at_ms <= time_ms for queue in self._queues.values())

    def replaying(self, shard: int | None = None) -> list[StoredQueue]:
        """The queues that the past is still replayed for, of one shard or of any."""
        if shard is None:
            return [queue for queue in self._queues.values() if queue.replays]
        wanted = {shard, ALL_BULK_SHARDS} if is_bulk(shard) else {shard}
        return [one for one in self._queues.values() if not wanted.isdisjoint(one.replays)]

    def check_free(self, name: str) -> None:
        """Raise if a queue of that name can't be made."""
        if name in self._queues:
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
            await self.committer.room()
            # Nothing is awaited from here on: what the cursor has passed is replayed, the rest
            # is routed.
            queue = self._make(name, filter, options, max(self.clock.now_ms(), self._made_from_ms))
            queue.put_settings(self.committer.rows)
            queue.put_state(self.committer.rows, everything=True)
            routed = cursors()
            for shard, next_sequence in routed.items():
                self.put_cursor(shard, next_sequence)
            if replay_from_ms is not None:
                # Bulk shards that were registered before are in the past of the queue, all of them.
                past = {**routed, ALL_BULK_SHARDS: self.bulk.next_number}
                ends = past if replayed is None else replayed()
                self._begin_replay(queue, ends, replay_from_ms)
            done = self.committer.commit()
        # Others may follow meanwhile: queues that are made together share commits.
        await self.committer.wait(done)

    def _begin_replay(self, queue: StoredQueue, ends: Mapping[int, int], from_ms: int) -> None:
        for shard, end in ends.items():
            queue.put_replay(shard, Replay(next_sequence=0, end_sequence=end, from_time=from_ms))
        if queue.replays and self.on_replay is not None:
            self.on_replay(queue)

    async def register(self, commit: Commit) -> None:
        """Register a bulk job, for the queues that are there now, and for no later ones."""
        async with self._administering:
            now = max(self.clock.now_ms(), self._made_from_ms)
            self._made_from_ms = now + 1
            await self.bulk.register(commit, now)

    async def update(self, name: str, *, filter: Filter | None, changes: Mapping[str, Any]) -> None:
        """Change what a queue is told; a new filter counts for messages routed from now on."""
        async with self._administering:
            queue = self.queue(name)
            # Only now: another update may have come first, and must not be undone.
            options = queue.options.with_changes(changes)
            filter = queue.filter if filter is None else filter
            await self.committer.room()
            queue.filter, queue.options = filter, options
            queue.state.follow(options.rules())
            queue.changed()
            self.index.add(name, filter)
            queue.put_settings(self.committer.rows)
            done = self.committer.commit()
            queue.wake()
            await self.committer.wait(done)

    async def purge(self, name: str, past: Past) -> int:
        """Drop what waits and is in the past; returns how many messages that were."""
        return await purge(self.queue(name), self.committer, past)

    async def delete(self, name: str) -> None:
        """Delete a queue; returns when nothing is left of it.

        If that is under way already, it waits for the end of it.
        """
        async with self._administering:
            deletion = self._deletions.get(name)
            if deletion is None:
                deletion = await self._begin_deletion(name)
            elif deletion.done():  # it could not read the store
                deletion = self._delete_in_background(name, self._made_from_ms - 1)
        await asyncio.wait([deletion])  # a caller that is cancelled does not stop it
        if deletion.cancelled():
            raise ClosedError(f"{self._database.name} was closed; the next owner deletes {name!r}")
        deletion.result()

    async def _begin_deletion(self, name: str) -> asyncio.Task[None]:
        queue = self.queue(name)
        await self.committer.room()
        # From here on nobody finds it, and who has found it before is refused.
        del self._queues[name]
        self._counts -= Counter([_first_part(name)])  # and none stays that has come to nothing
        self.index.remove(name)
        queue.deleted = True
        self.sweeper.forget(queue)
        queue.wake_all()
        queue.put_settings(self.committer.rows)
        return self._delete_in_background(name, queue.created_at_ms, self.committer.commit())

    def _delete_in_background(
        self, name: str, created_at_ms: int, marked: asyncio.Future[None] | None = None
    ) -> asyncio.Task[None]:
        """Delete all rows of a queue that is marked, or will be when ``marked`` is done."""
        self._made_from_ms = max(self._made_from_ms, created_at_ms + 1)
        task = asyncio.create_task(self._delete_rows(name, marked), name=f"delete queue {name}")
        task.add_done_callback(partial(_log_failure, name))
        self._deletions[name] = task
        return task

    async def _delete_rows(self, name: str, marked: asyncio.Future[None] | None) -> None:
        if marked is not None:
            await self.committer.wait(marked)
        await delete_rows(name.encode(), self._database, self.committer)
        del self._deletions[name]

    # --- filling ----------------------------------------------------------------------------------

    async def cursor(self, shard: int) -> int | None:
        """Up to where the log of a shard is routed; none if it is not known here."""
        key = _cursor_key(shard)
        value = await self._database.get(key)
        if value is None:
            return None
        return self._database.decode(Cursor.decode, key, value).next_sequence

    async def live_shards(self) -> list[int]:
        """The live shards that were routed before, but for that of the owner."""
        span = _cursor_key(OWNERS_SHARD + 1), _cursor_key(FIRST_BULK_SHARD)
        return [
            self._database.decode(CursorKey.decode, key, key).shard
            async for rows in self._database.scan(*span)
            for key, _ in rows
        ]

    def put_cursor(self, shard: int, next_sequence: int) -> None:
        cursor = Cursor.layout.pack_trusted("Cursor", next_sequence)
        self.committer.rows.put(_cursor_key(shard), cursor)

    # --- consuming --------------------------------------------------------------------------------

    async def claim(
        self, name: str, count: int, *, consumer: str, lease_ms: int | None, wait_ms: int
    ) -> tuple[list[Held], Durable]:
        """Up to ``count`` messages; waits up to ``wait_ms`` for the first one.

        The commit of the claims is under way when this returns. Await the second part before the
        messages are handed out, or call ``give_back_unseen``.
        """
        queue = self.queue(name)
        lease = _checked_lease(queue.options, lease_ms)
        _check_claim(count, consumer, wait_ms)
        give_up_at = self.clock.now_ms() + wait_ms
        claimed = await self._claim_now(queue, count, consumer, lease)
        if claimed[0] or not wait_ms:
            return claimed
        patience = asyncio.ensure_future(self.clock.wait_until(give_up_at))
        ticket = queue.draw_ticket()
        try:
            while not claimed[0] and not patience.done():
                # The sweeper wakes us for what time alone brings.
                await queue.wait(patience, ticket)
                self.committer.check_open()
                claimed = await self._claim_now(queue, count, consumer, lease)
            return claimed
        finally:
            patience.cancel()

    def give_back_unseen(self, queue: StoredQueue, held: Iterable[Held]) -> None:
        """Release what was claimed for a caller that was cancelled, and waits for nothing."""
        if queue.deleted:
            return
        now = self.clock.now_ms()
        claims = [one.claim() for one in held]
        # Of a committer that has stopped nobody can ask more: the leases will run out.
        with contextlib.suppress(OdqError):
            self.committer.check_open()
            if any([queue.state.release(claim, now) for claim in claims]):
                self._changed_in_background(queue)

    async def _claim_now(
        self, queue: StoredQueue, count: int, consumer: str, lease_ms: int
    ) -> tuple[list[Held], Durable]:
        claimed: list[Held] = []
        try:
            await self._claim_into(claimed, queue, count, consumer, lease_ms)
            if not claimed:
                return claimed, _at_once
            done = self.committer.commit()
            if queue.state.wants_refill_for(count):
                self._refill_in_background(queue)
            if queue.options.relaxed_claims:
                return claimed, _at_once
            await self.committer.at_work()
        except BaseException:
            self.give_back_unseen(queue, claimed)
            queue.wake()  # it may have been our turn: let somebody else have it
            raise
        return claimed, partial(self.committer.wait, done)

    async def _claim_into(
        self,
        claimed: list[Held],
        queue: StoredQueue,
        count: int,
        consumer: str,
        lease_ms: int,
    ) -> None:
        """Add to ``claimed`` what is claimed, as it is claimed."""
        while len(claimed) < count:
            await self.committer.room()
            now = await self._bring_up_to_date(queue, count - len(claimed))
            queue.check()
            expired = queue.state.expired
            held = queue.state.claim(
                count - len(claimed), lease_ms=lease_ms, consumer=consumer, now=now
            )
            if not held and queue.state.expired == expired:
                break
            claimed += held
            self._note_attempts(held, consumer, now)
            queue.changed()
            if not held:  # nobody waits for what has expired, but it can be seen
                self.committer.commit()

    def _note_attempts(self, held: Sequence[Held], consumer: str, now: int) -> None:
        rows = self.committer.rows
        for_ever = [one.message_id for one in held if not one.retention_deadline]
        self.ledger.claim(for_ever, consumer, rows)
        if len(for_ever) == len(held):
            return
        for one in held:
            if one.retention_deadline:
                ttl_ms = one.retention_deadline - now + self._ttl_grace_ms + 1
                self.ledger.claim([one.message_id], consumer, rows, ttl_ms=ttl_ms)

    async def ack(self, name: str, claims: Sequence[Claim | Held]) -> list[Outcome]:
        queue = self.queue(name)
        await self.room_for(queue)
        outcomes = queue.state.ack(claims, self.clock.now_ms())
        # Each makes room in flight, also while those who were woken before have not claimed yet.
        return await self._settle(queue, outcomes, wake=True)

    async def drop_gone(self, name: str, claims: Sequence[Claim]) -> None:
        """Drop claimed messages that the store does not have any more."""
        queue = self.queue(name)
        await self.room_for(queue)
        dropped = queue.state.drop_gone(claims, self.clock.now_ms())
        await self._settle(queue, [True] * dropped, wake=True)

    async def nack(
        self, name: str, claims: Sequence[Claim | Held], *, error: str, delay_ms: int | None
    ) -> list[Outcome]:
        queue = self.queue(name)
        if delay_ms is not None:
            check_integer("delay_ms", delay_ms, 0, MAX_DELAY_MS)
        if not isinstance(error, str):
            raise InvalidInputError(f"error is a {type(error).__name__}, not text")
        await self._ready_to_give_back(queue)
        now = self.clock.now_ms()
        text = _cut(error, MAX_ERROR_BYTES)
        outcomes = [
            queue.state.nack(
                claim, now, error=text, delay_ms=delay_ms, chance=self._chance.random()
            )
            for claim in claims
        ]
        return await self._settle(queue, outcomes, wake=True)

    async def release(self, name: str, claims: Sequence[Claim | Held]) -> list[Outcome]:
        queue = self.queue(name)
        await self._ready_to_give_back(queue)
        now = self.clock.now_ms()
        outcomes = [queue.state.release(claim, now) for claim in claims]
        return await self._settle(queue, outcomes, wake=True)

    async def extend(
        self, name: str, claims: Sequence[Claim | Held], *, lease_ms: int | None
    ) -> list[int | None]:
        """The new deadlines, none for a claim that is not valid any more."""
        queue = self.queue(name)
        lease = _checked_lease(queue.options, lease_ms)
        await self.room_for(queue)
        now = self.clock.now_ms()
        deadlines = [queue.state.extend(claim, now, lease_ms=lease) for claim in claims]
        await self._settle(queue, [one is not None for one in deadlines], wake=False)
        return deadlines

    async def _settle(
        self, queue: StoredQueue, outcomes: list[bool], *, wake: bool
    ) -> list[Outcome]:
        if any(outcomes):
            queue.changed()
            done = self.committer.commit()
            if wake:
                queue.wake()
            await self.committer.wait(done)
        return ["ok" if outcome else "lease_lost" for outcome in outcomes]

    async def room_for(self, queue: StoredQueue) -> None:
        """Wait until more may be added for a queue, which must not be deleted meanwhile."""
        await self.committer.room()
        queue.check()

    # --- keeping up -------------------------------------------------------------------------------

    async def _bring_up_to_date(self, queue: StoredQueue, count: int) -> int:
        """Take back leases that are over, admit what is due, refill the window.

        Returns the time at which ``count`` messages are ready to be claimed; it has to be claimed
        at that very time, without awaiting: a moment later others would be the first ones.
        """
        state = queue.state
        await self.catch_up_with_time(queue)
        # Others may claim during each of these; what counts is how it is when nothing was awaited.
        while True:
            queue.check()
            now = self.clock.now_ms()
            unknown = self.ledger.unknown(state.first_ids(count, now))
            if state.wants_refill_for(count):
                if not (self._may_refill_from_front(queue) and self._refill_from_front(queue)):
                    await self._refill(queue)
            elif unknown:
                await self.ledger.learn(unknown)
            else:
                return now

    async def catch_up_with_time(self, queue: StoredQueue) -> None:
        """Take back all leases that are over, and admit what is due.

        If that is a great deal, only the first of it while there is something to claim: the rest is
        left to the sweeper, and nobody waits for it (RFC 0006, *Schedule*).
        """
        if self._lease_is_over(queue):
            await self._take_back_leases(queue, None)
        rounds = 0
        while self._is_due(queue) and (rounds < _ROUNDS_OF_DUE or not queue.state.available):
            await self._admit_due(queue)
            rounds += 1

    def _next_event(self, queue: StoredQueue) -> int | None:
        """When time alone will next change this queue; never if it is gone."""
        if self._queues.get(queue.name) is not queue:
            return None
        state = queue.state
        deadline = state.next_lease_deadline
        if deadline is not None:
            deadline += self._grace_ms + 1
        if state.scheduled and (deadline is None or state.scheduled_from < deadline):
            return state.scheduled_from
        return deadline

    async def _sweep(self, queue: StoredQueue) -> None:
        """Do a bounded part of what is due in a queue, though nobody claims from it."""
        if self._queues.get(queue.name) is not queue:
            self.sweeper.forget(queue)
            return
        try:
            if self._lease_is_over(queue):
                await self._take_back_leases(queue, _LEASES_AT_ONCE)
            if self._is_due(queue):
                await self._admit_due(queue)
        except QueueNotFoundError:  # deleted meanwhile
            self.sweeper.forget(queue)

    def _lease_is_over(self, queue: StoredQueue) -> bool:
        deadline = queue.state.next_lease_deadline
        return deadline is not None and deadline + self._grace_ms < self.clock.now_ms()

    async def _take_back_leases(self, queue: StoredQueue, at_most: int | None) -> None:
        await self._ready_to_give_back(queue)
        if queue.state.expire_leases(
            self.clock.now_ms(),
            grace_ms=self._grace_ms,
            chance=self._chance.random,
            at_most=at_most,
        ):
            self._changed_in_background(queue)

    def _is_due(self, queue: StoredQueue) -> bool:
        state = queue.state
        return bool(state.scheduled) and state.scheduled_from <= self.clock.now_ms()

    async def _admit_due(self, queue: StoredQueue) -> None:
        """Admit some hundred messages that are due."""
        async with queue.reading:
            if not self._is_due(queue):
                return
            await self.committer.room()
            due, next_due = await queue.first_of_schedule(self.clock.now_ms())
            queue.check()
            queue.take_due(due, next_due, self.clock.now_ms())
            self._changed_in_background(queue)

    async def _refill(self, queue: StoredQueue) -> None:
        async with queue.reading:
            state = queue.state
            if not state.backlog.total or not state.room:
                return
            # Before the scan: what comes back to the backlog after it would be overtaken.
            await self.committer.room()
            if not state.knows_front:
                if state.several_lanes:
                    first = await queue.backlog_in_turns(state.front_size)
                else:
                    first = await queue.first_of_backlog(state.front_size)
                queue.check()
                state.learn_front(first)
                if not first and state.backlog.total:
                    raise CorruptStoreError(
                        f"queue {queue.name!r} counts {state.backlog.total} messages in its "
                        "backlog, and the store has none"
                    )
            self._refill_from_front(queue)

    def _refill_from_front(self, queue: StoredQueue) -> bool:
        """Refill without reading, if that can be done."""
        queue.check()
        expired = queue.state.expired
        moved = queue.state.refill(self.clock.now_ms())
        if not moved:
            return False
        # No commit for it: should we crash, the messages are where they were. It goes along with
        # the next one, so that nobody's commit has to wait for it.
        queue.changed()
        if queue.state.expired != expired:  # but that can be seen, and must not be undone
            self.committer.commit()
        queue.wake()
        # All that is known to come next is announced at once: reading a thousand messages ahead
        # costs little more than reading a hundred.
        if moved[-1].message_id not in queue.announced:
            self._announce(queue, [*moved, *queue.state.front])
        return True

    def _announce(self, queue: StoredQueue, messages: Sequence[Waiting]) -> None:
        """Say which messages will be claimed soon."""
        if self.on_refill is not None:
            ids = [message.message_id for message in messages]
            queue.announced = frozenset([*ids, *(m.message_id for m in queue.state.front)])
            self.on_refill(ids)

    def _refill_in_background(self, queue: StoredQueue) -> None:
        """Refill while the consumer is busy, so that its next claim need not wait for it."""
        refilled = self._may_refill_from_front(queue) and self._refill_from_front(queue)
        if queue.refilling or (refilled and not queue.state.wants_longer_front):
            return
        queue.refilling = True
        work = self._read_behind_front(queue) if refilled else self._refill(queue)
        task = asyncio.create_task(self._try_to_refill(queue, work), name=f"refill {queue.name}")
        self._refills.add(task)
        task.add_done_callback(self._refills.discard)

    @staticmethod
    def _may_refill_from_front(queue: StoredQueue) -> bool:
        """Whoever holds the lock has read the backlog, and must find it as it was."""
        return queue.reading_ahead or not queue.reading.locked()

    async def _read_behind_front(self, queue: StoredQueue) -> None:
        """Read what the front will need soon, while it is being used."""
        async with queue.reading:
            state = queue.state
            if not state.wants_longer_front:
                return
            last = state.front[-1]
            count = state.front_size - len(state.front)
            queue.reading_ahead = True
            try:
                behind = await queue.first_of_backlog(count, last[:2])
            finally:
                queue.reading_ahead = False
            queue.check()
            if state.lengthen_front(last, behind):
                self._announce(queue, behind)

    async def _try_to_refill(self, queue: StoredQueue, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except OdqError as error:
            # Whoever claims next gets it too.
            logger.info("could not refill queue %s: %s", queue.name, error)
        finally:
            queue.refilling = False

    def _changed_in_background(self, queue: StoredQueue) -> None:
        """Nobody waits for this commit, but it must come soon."""
        queue.changed()
        self.committer.commit(lazy=True)
        queue.wake()

    async def _ready_to_give_back(self, queue: StoredQueue) -> None:
        """Look up what the version-1 records of messages in flight could not hold."""
        unknown = queue.state.lacks_deadline
        if unknown:
            for message_id, deadline in (await self._deadlines(list(unknown))).items():
                queue.state.learn_deadline(message_id, deadline)
        await self.room_for(queue)

    # --- commits ----------------------------------------------------------------------------------

    def _mark(self, queue: StoredQueue) -> None:
        self._changed[queue] = None
        self.sweeper.note(queue)

    def _prepare(self, rows: Rows) -> None:
        changed, self._changed = self._changed, {}
        for queue in changed:
            queue.put_state(rows)
        if not rows:
            return
        claims_after = max((queue.state.claims_after for queue in changed), default=0)
        mark = max(self.clock.now_ms(), self._made_from_ms, claims_after)
        rows.put(_CLOCK_KEY, ClockMark.layout.pack_trusted("ClockMark", mark))
        for queue in changed:
            queue.batch_is_durable()

    # --- looking ----------------------------------------------------------------------------------

    async def failures(self, name: str, *, after_id: int, limit: int) -> list[tuple[int, Failure]]:
        """Failed messages by ascending id: all that had failed when this was called."""
        queue = self.queue(name)
        await self.all_durable()
        since = queue.options.failed_since(self.clock.now_ms())
        return await queue.failures(after_id, limit=limit, since=since)

    async def all_durable(self) -> None:
        """Wait until everything that has happened can be read."""
        await self.committer.wait(self.committer.commit(urgent=True))

    async def failures_in(
        self, queues: Sequence[StoredQueue], message_id: int
    ) -> list[Failure | None]:
        """How one message has failed in each of some queues."""
        return await failures_in(self._database, queues, message_id)

    async def consumers_of(self, message_id: int) -> tuple[str, ...]:
        """Who has claimed a message, in all queues."""
        await self.all_durable()
        return await consumers_of(self._database, message_id)

    def stats(self, name: str) -> QueueStats:
        return self.queue(name).stats()


@lru_cache(maxsize=1024)
def _cursor_key(shard: int) -> bytes:
    return CursorKey(shard=shard).encode()


def _log_failure(name: str, deletion: asyncio.Task[None]) -> None:
    if not deletion.cancelled() and (error := deletion.exception()) is not None:
        logger.warning("queue %r is not deleted completely yet: %s", name, error)


async def _at_once() -> None:
    """There is nothing to wait for."""


def _checked_lease(options: QueueOptions, lease_ms: int | None) -> int:
    if lease_ms is None:
        return options.lease_ms
    is_number = isinstance(lease_ms, int) and not isinstance(lease_ms, bool)
    if not is_number or not 0 < lease_ms <= options.max_lease_ms:
        raise InvalidInputError(
            f"lease_ms is {lease_ms!r}, not within 1 to {options.max_lease_ms}, the queue's longest"
        )
    return lease_ms


def _check_claim(count: int, consumer: str, wait_ms: int) -> None:
    check_integer("count", count, 1, MAX_AT_ONCE)
    check_integer("wait_ms", wait_ms, 0, MAX_WAIT_MS)
    try:
        size = len(consumer.encode())
    except (AttributeError, UnicodeEncodeError):
        raise InvalidInputError(f"consumer is {consumer!r}, which is no text") from None
    if not 0 < size <= MAX_CONSUMER_BYTES:
        raise InvalidInputError(f"consumer has {size} bytes, not 1 to {MAX_CONSUMER_BYTES}")


def _cut(text: str, most_bytes: int) -> str:
    """Text that fits, cut at a character."""
    return text.encode(errors="replace")[:most_bytes].decode(errors="ignore")


def _first_part(name: str) -> str:
    """What is before the first ``/``; nothing in a name without one."""
    first, slash, _ = name.partition("/")
    return first if slash else ""
