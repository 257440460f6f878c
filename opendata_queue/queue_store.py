"""All queues of a root: making them, filling them, and what consumers do with them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from odq_encodings import (
    ClockKey,
    ClockMark,
    Cursor,
    CursorKey,
    FailedMessages,
    Failure,
    QueueConfig,
    QueueOptionsRecord,
    RecordType,
    Row,
    SealedFailedKey,
    decode_any,
)
from opendata_queue.attempts import AttemptsLedger
from opendata_queue.clock import Clock
from opendata_queue.committer import CommitLimits, GroupCommitter
from opendata_queue.errors import InvalidInputError, QueueExistsError, QueueNotFoundError
from opendata_queue.filters import Filter, FilterIndex
from opendata_queue.queue_options import QueueOptions, check_name
from opendata_queue.queue_state import Claim, Held
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.stored_queue import StoredQueue

MAX_AT_ONCE: Final = 1_000
MAX_CONSUMER_BYTES: Final = 255
MAX_ERROR_BYTES: Final = 4_096

_CLOCK_KEY: Final = ClockKey().encode()
_AT_ONCE: Final = 1_000

Outcome = Literal["ok", "lease_lost"]
Deadlines = Callable[[Iterable[int]], Awaitable[dict[int, int]]]
"""Looks up the retention deadlines of messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStats:
    """How many messages of a queue are where."""

    available: int
    delayed: int
    in_flight: int
    done: int
    failed: int
    expired: int


class HighWaterClock:
    """Never shows less than the latest time that a commit has seen, whoever made it."""

    __slots__ = ("_clock", "_mark_ms")

    def __init__(self, clock: Clock, mark_ms: int) -> None:
        self._clock = clock
        self._mark_ms = mark_ms

    def now_ms(self) -> int:
        self._mark_ms = max(self._mark_ms, self._clock.now_ms())
        return self._mark_ms


class QueueStore:
    """The one owner of the queue store.

    Whatever it returns is durable, unless a queue has relaxed claims.
    """

    def __init__(
        self,
        database: Database,
        clock: HighWaterClock,
        deadlines: Deadlines,
        *,
        limits: CommitLimits,
        lease_grace_ms: int,
        chance: random.Random,
    ) -> None:
        self._database = database
        self.clock = clock
        self._deadlines = deadlines
        self._grace_ms = lease_grace_ms
        self._chance = chance
        self._queues: dict[str, StoredQueue] = {}
        self._changed: dict[StoredQueue, None] = {}
        self.index: FilterIndex[str] = FilterIndex()
        self.committer = GroupCommitter(database, limits, self._prepare, self._wake_everybody)
        self.ledger = AttemptsLedger(database)
        self._administering = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        objects: Objects,
        clock: Clock,
        deadlines: Deadlines,
        *,
        limits: CommitLimits | None = None,
        lease_grace_ms: int = 0,
        chance: random.Random | None = None,
    ) -> QueueStore:
        """Become the owner of the queue store; whoever was it before is fenced."""
        database = await Database.open(objects, "queues/00000")
        try:
            mark = await database.get(_CLOCK_KEY)
            marked = 0
            if mark is not None:
                marked = database.decode(ClockMark.decode, _CLOCK_KEY, mark).now
            store = cls(
                database,
                HighWaterClock(clock, marked),
                deadlines,
                limits=limits or CommitLimits(),
                lease_grace_ms=lease_grace_ms,
                chance=chance or random.Random(),
            )
            await store._load()
        except BaseException:
            await database.close()
            raise
        return store

    async def close(self) -> None:
        """End all waiting, commit what has gathered, and close."""
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
        records: dict[bytes, dict[RecordType, Row]] = {}
        for first, behind in (
            (RecordType.ACTIVE_MESSAGES, RecordType.ATTEMPTS),
            (RecordType.QUEUE_CONFIG, RecordType.IDEMPOTENCY),
            (RecordType.QUEUE_OPTIONS, RecordType.BACKLOG),
        ):
            async for chunk in self._database.scan(first.prefix, behind.prefix):
                for key, value in chunk:
                    row = self._database.decode(partial(decode_any, key), key, value)
                    of_queue = records.setdefault(row.key.queue_id, {})  # type: ignore[attr-defined]
                    of_queue[RecordType(key[1])] = row
        for queue_id, rows in sorted(records.items()):
            self._load_queue(queue_id.decode(), rows)

    def _load_queue(self, name: str, rows: dict[RecordType, Row]) -> None:
        config, options = rows[RecordType.QUEUE_CONFIG].value, rows[RecordType.QUEUE_OPTIONS].value
        assert isinstance(config, QueueConfig)
        assert isinstance(options, QueueOptionsRecord)
        queue = self._make(
            name,
            Filter.parse(config.filter),
            QueueOptions.from_records(config, options),
            options.created_at,
        )
        queue.load({kind: row.value.encode() for kind, row in rows.items()})

    def _make(
        self, name: str, filter: Filter, options: QueueOptions, created_at_ms: int
    ) -> StoredQueue:
        queue = StoredQueue(
            name, filter, options, created_at_ms, self._database, self.committer, self._mark
        )
        self._queues[name] = queue
        self.index.add(name, filter)
        return queue

    # --- administration ---------------------------------------------------------------------------

    def queue(self, name: str) -> StoredQueue:
        try:
            return self._queues[name]
        except KeyError:
            raise QueueNotFoundError(f"there is no queue {name!r}") from None

    def names(self) -> list[str]:
        return sorted(self._queues)

    async def create(
        self,
        name: str,
        filter: Filter,
        options: QueueOptions,
        cursor: Callable[[], tuple[int, int]],
    ) -> None:
        """Make a queue; it gets the messages that are routed from now on, from ``cursor`` on."""
        check_name(name)
        async with self._administering:
            if name in self._queues:
                raise QueueExistsError(f"there is a queue {name!r} already")
            await self.committer.room()
            queue = self._make(name, filter, options, self.clock.now_ms())
            queue.put_settings(self.committer.rows)
            queue.put_state(self.committer.rows, everything=True)
            self.put_cursor(*cursor())
            await self.committer.wait(self.committer.commit())

    async def update(self, name: str, *, filter: Filter, options: QueueOptions) -> None:
        """Change what a queue is told; a new filter counts for messages routed from now on."""
        async with self._administering:
            queue = self.queue(name)
            await self.committer.room()
            queue.filter, queue.options = filter, options
            queue.state.rules = options.rules()
            self.index.add(name, filter)
            queue.put_settings(self.committer.rows)
            done = self.committer.commit()
            queue.wake()
            await self.committer.wait(done)

    # --- filling ----------------------------------------------------------------------------------

    async def cursor(self, shard: int) -> int:
        key = CursorKey(shard=shard).encode()
        value = await self._database.get(key)
        return (
            0 if value is None else self._database.decode(Cursor.decode, key, value).next_sequence
        )

    def put_cursor(self, shard: int, next_sequence: int) -> None:
        self.committer.rows.put(
            CursorKey(shard=shard).encode(), Cursor(next_sequence=next_sequence).encode()
        )

    # --- consuming --------------------------------------------------------------------------------

    async def claim(
        self, name: str, count: int, *, consumer: str, lease_ms: int | None, wait_ms: int
    ) -> list[Held]:
        """Up to ``count`` messages; waits up to ``wait_ms`` for the first one."""
        queue = self.queue(name)
        lease = _checked_lease(queue.options, lease_ms)
        _check_claim(count, consumer, wait_ms)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + wait_ms / 1000
        while True:
            claimed = await self._claim_now(queue, count, consumer, lease)
            left = give_up_at - loop.time()
            if claimed or left <= 0:
                return claimed
            await queue.wait(min(left, self._seconds_to_next_event(queue)))
            self.committer.check_open()

    def _seconds_to_next_event(self, queue: StoredQueue) -> float:
        """When time alone will give this queue something to hand out."""
        state = queue.state
        events = []
        if state.scheduled:
            events.append(state.scheduled_from)
        if state.next_lease_deadline is not None:
            events.append(state.next_lease_deadline + self._grace_ms + 1)
        if not events:
            return float("inf")
        return max(0, min(events) - self.clock.now_ms()) / 1000

    async def _claim_now(
        self, queue: StoredQueue, count: int, consumer: str, lease_ms: int
    ) -> list[Held]:
        claimed: list[Held] = []
        while len(claimed) < count:
            await self.committer.room()
            await self._bring_up_to_date(queue, count - len(claimed))
            expired = queue.state.expired
            held = queue.state.claim(
                count - len(claimed),
                lease_ms=lease_ms,
                consumer=consumer,
                now=self.clock.now_ms(),
            )
            if not held and queue.state.expired == expired:
                break
            rows = self.committer.rows
            for one in held:
                self.ledger.claim(one.message_id, consumer, rows)
            queue.changed()
            claimed += held
        if not claimed:
            return []
        done = self.committer.commit()
        if not queue.options.relaxed_claims:
            await self.committer.wait(done)
        return claimed

    async def ack(self, name: str, claims: Sequence[Claim]) -> list[Outcome]:
        queue = self.queue(name)
        await self.committer.room()
        now = self.clock.now_ms()
        was_full = not queue.state.promised
        outcomes = [queue.state.ack(claim, now) for claim in claims]
        return await self._settle(queue, outcomes, wake=was_full)

    async def nack(
        self, name: str, claims: Sequence[Claim], *, error: str, delay_ms: int | None
    ) -> list[Outcome]:
        queue = self.queue(name)
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

    async def release(self, name: str, claims: Sequence[Claim]) -> list[Outcome]:
        queue = self.queue(name)
        await self._ready_to_give_back(queue)
        now = self.clock.now_ms()
        outcomes = [queue.state.release(claim, now) for claim in claims]
        return await self._settle(queue, outcomes, wake=True)

    async def extend(
        self, name: str, claims: Sequence[Claim], *, lease_ms: int | None
    ) -> list[int | None]:
        """The new deadlines, none for a claim that is not valid any more."""
        queue = self.queue(name)
        lease = _checked_lease(queue.options, lease_ms)
        await self.committer.room()
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

    # --- keeping up -------------------------------------------------------------------------------

    async def _bring_up_to_date(self, queue: StoredQueue, count: int) -> None:
        """Take back leases that are over, admit what is due, refill the window."""
        state = queue.state
        now = self.clock.now_ms()
        deadline = state.next_lease_deadline
        if deadline is not None and deadline + self._grace_ms < now:
            await self._ready_to_give_back(queue)
            if state.expire_leases(now, grace_ms=self._grace_ms, chance=self._chance.random):
                self._changed_in_background(queue)
        if state.scheduled and state.scheduled_from <= now:
            await self._admit_due(queue)
        # Others may claim during each of these; what counts is how it is when nothing was awaited.
        while True:
            unknown = [
                m.message_id for m in state.first(count) if not self.ledger.knows(m.message_id)
            ]
            if state.wants_refill_for(count):
                await self._refill(queue)
            elif unknown:
                await self.ledger.learn(unknown)
            else:
                return

    async def _admit_due(self, queue: StoredQueue) -> None:
        async with queue.reading:
            while queue.state.scheduled and queue.state.scheduled_from <= self.clock.now_ms():
                await self.committer.room()
                due, next_due = await queue.first_of_schedule(self.clock.now_ms())
                queue.state.take_due(due, self.clock.now_ms())
                queue.state.scheduled_from = next_due
                self._changed_in_background(queue)

    async def _refill(self, queue: StoredQueue) -> None:
        async with queue.reading:
            room = queue.state.room
            if not queue.state.backlog.total or not room:
                return
            best = await queue.first_of_backlog(room)
            await self.committer.room()
            queue.state.refill(best, self.clock.now_ms())
            self._changed_in_background(queue)

    def _changed_in_background(self, queue: StoredQueue) -> None:
        """Nobody waits for this commit, but it must come soon."""
        queue.changed()
        self.committer.commit()
        queue.wake()

    async def _ready_to_give_back(self, queue: StoredQueue) -> None:
        """Look up what the version-1 records of messages in flight could not hold."""
        unknown = queue.state.lacks_deadline
        if unknown:
            for message_id, deadline in (await self._deadlines(list(unknown))).items():
                queue.state.learn_deadline(message_id, deadline)
        await self.committer.room()

    # --- commits ----------------------------------------------------------------------------------

    def _mark(self, queue: StoredQueue) -> None:
        self._changed[queue] = None

    def _prepare(self, rows: Rows) -> None:
        changed, self._changed = self._changed, {}
        for queue in changed:
            queue.put_state(rows)
        if not rows:
            return
        rows.put(_CLOCK_KEY, ClockMark(now=self.clock.now_ms()).encode())
        for queue in changed:
            queue.batch_is_durable()

    # --- failed messages --------------------------------------------------------------------------

    async def failures(self, name: str, *, after_id: int, limit: int) -> list[tuple[int, Failure]]:
        return await self.queue(name).failures(after_id, limit=limit)

    async def replay(self, name: str, message_ids: Iterable[int]) -> list[int]:
        """Make failed messages available again; returns those that were failed."""
        return await self._finish_failed(name, message_ids, again=True)

    async def forget_failed(self, name: str, message_ids: Iterable[int]) -> list[int]:
        """Drop failed messages; returns those that were failed."""
        return await self._finish_failed(name, message_ids, again=False)

    async def _finish_failed(
        self, name: str, message_ids: Iterable[int], *, again: bool
    ) -> list[int]:
        queue = self.queue(name)
        ids = list(dict.fromkeys(message_ids))
        finished = []
        # Held until the commit is durable: whoever comes next must see that they are gone.
        async with queue.reading:
            failed, buckets = await self._read_failed(queue, ids)
            now = self.clock.now_ms()
            for message_id, failure in failed:
                if again:
                    was_open = queue.state.replay(message_id, failure, now)
                else:
                    was_open = queue.state.forget_failed(message_id, failure)
                if not was_open:
                    buckets[failure.bucket].pop(message_id)
                finished.append(message_id)
            for bucket, entries in buckets.items():
                self._rewrite_bucket(queue, bucket, entries)
            if finished:
                queue.changed()
                done = self.committer.commit()
                queue.wake()
                await self.committer.wait(done)
        return finished

    async def _read_failed(
        self, queue: StoredQueue, message_ids: list[int]
    ) -> tuple[list[tuple[int, Failure]], dict[int, dict[int, bytes]]]:
        """Those ids that have failed, and the sealed buckets that they are in.

        A bucket can be sealed while we read; then it is read again.
        """
        while True:
            # Reads see what is durable: first let everything become that.
            await self.committer.wait(self.committer.commit())
            found = [(one, await queue.failure(one)) for one in message_ids]
            failed = [(one, failure) for one, failure in found if failure is not None]
            buckets = await self._sealed_buckets(queue, {f.bucket for _, f in failed})
            await self.committer.room()
            if all(
                queue.state.failed_open(one) or one in buckets.get(failure.bucket, {})
                for one, failure in failed
            ):
                return failed, buckets

    async def _sealed_buckets(
        self, queue: StoredQueue, numbers: set[int]
    ) -> dict[int, dict[int, bytes]]:
        buckets = {}
        for number in sorted(numbers):
            key = SealedFailedKey(queue_id=queue.queue_id, bucket=number).encode()
            value = await self._database.get(key)
            if value is not None:
                bucket = self._database.decode(FailedMessages.decode, key, value)
                buckets[number] = {m.message_id: m.encode() for m in bucket.messages}
        return buckets

    def _rewrite_bucket(self, queue: StoredQueue, number: int, entries: dict[int, bytes]) -> None:
        key = SealedFailedKey(queue_id=queue.queue_id, bucket=number).encode()
        if entries:
            self.committer.rows.put(key, FailedMessages.join(entries.values()))
        else:
            self.committer.rows.delete(key)

    def stats(self, name: str) -> QueueStats:
        state = self.queue(name).state
        return QueueStats(
            available=state.available,
            delayed=state.scheduled,
            in_flight=state.in_flight,
            done=state.done,
            failed=state.failed,
            expired=state.expired,
        )


def _checked_lease(options: QueueOptions, lease_ms: int | None) -> int:
    if lease_ms is None:
        return options.lease_ms
    if not isinstance(lease_ms, int) or not 0 < lease_ms <= options.max_lease_ms:
        raise InvalidInputError(
            f"lease_ms is {lease_ms!r}, not within 1 to {options.max_lease_ms}, the queue's longest"
        )
    return lease_ms


def _check_claim(count: int, consumer: str, wait_ms: int) -> None:
    if not isinstance(count, int) or not 0 < count <= MAX_AT_ONCE:
        raise InvalidInputError(f"count is {count!r}, not within 1 to {MAX_AT_ONCE}")
    if not 0 < len(consumer.encode(errors="replace")) <= MAX_CONSUMER_BYTES:
        raise InvalidInputError(f"consumer is not 1 to {MAX_CONSUMER_BYTES} bytes long")
    if wait_ms < 0:
        raise InvalidInputError(f"wait_ms is {wait_ms}, which is negative")


def _cut(text: str, most_bytes: int) -> str:
    """Text that fits, cut at a character."""
    return text.encode(errors="replace")[:most_bytes].decode(errors="ignore")
