"""A state machine: queues of a real root, crashed and reopened, against a simple model."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from odq_encodings import (
    ActiveMessages,
    Attempts,
    AttemptsKey,
    BacklogEntry,
    BacklogKey,
    DoneMessage,
    DoneMessages,
    FailedMessages,
    Failure,
    FailureKey,
    QueueCounters,
    ScheduleEntry,
    ScheduleKey,
    SealedDoneKey,
    SealedFailedKey,
    decode_any,
)
from opendata_queue import ClaimedMessage, InvalidInputError, NewMessage, QueueOptions, System
from opendata_queue.store import Rows, forget_memory_root
from opendata_queue.testing import ManualClock

T = TypeVar("T")

LEASE_MS: Final = 1_000
BACKOFF_MS: Final = 50
NO_PRIORITY: Final = 128
LEASE_OVER: Final = "the lease ran out"

_numbers = itertools.count()

Headers = dict[str, str]


def _header_priority(headers: Headers) -> int:
    return int(headers.get("priority", NO_PRIORITY))


# What a filter says, and what it must mean: the priority of a message that it matches.
FILTERS: Final[dict[str, Callable[[Headers], int | None]]] = {
    "": _header_priority,
    "kind = 'a'": lambda h: _header_priority(h) if h.get("kind") == "a" else None,
    "kind = 'b' PRIORITY 5": lambda h: 5 if h.get("kind") == "b" else None,
    "kind = 'a' PRIORITY 1; TRUE": lambda h: 1 if h.get("kind") == "a" else _header_priority(h),
}

new_messages = st.builds(
    lambda kind, priority, delay, retention: NewMessage(
        headers={name: value for name, value in (("kind", kind), ("priority", priority)) if value},
        delay_ms=delay,
        retention_seconds=retention,
    ),
    kind=st.sampled_from(["a", "b", ""]),
    priority=st.sampled_from(["", "", "0", "4", "5", "200"]),
    delay=st.sampled_from([None, None, None, 0, 1, 60, 1_500]),
    retention=st.sampled_from([0, 0, 0, 0, 1, 2]),
)
batches = st.lists(new_messages, min_size=1, max_size=8)
queue_options = st.builds(
    QueueOptions,
    window=st.integers(2, 4),
    bucket=st.integers(2, 3),
    max_attempts=st.integers(0, 3),
    max_in_flight=st.integers(2, 7),
    lease_ms=st.just(LEASE_MS),
    backoff_ms=st.just(BACKOFF_MS),
    backoff_jitter=st.just(0),
)
queue_numbers = st.integers(0, 2)
counts = st.integers(1, 6)
consumers = st.sampled_from(["ann", "bob"])
# Which ones of what there is: it must not be drawn from what there is, since with several
# consumers at once that is not the same in every run.
picks = st.lists(st.integers(0, 15), max_size=4)


class Waits(NamedTuple):
    """Compares in the order of claiming."""

    priority: int
    message_id: int
    visible_at: int
    deadline: int
    attempts: int

    def is_over(self, now: int) -> bool:
        """Past its retention: the deadline itself still counts."""
        return self.deadline != 0 and now > self.deadline


@dataclass(slots=True)
class InFlight:
    was: Waits
    attempts: int
    lease_deadline: int
    receipt: str
    consumer: str


class HasFailed(NamedTuple):
    was: Waits
    attempts: int
    failed_at: int
    error: str


@dataclass(slots=True)
class QueueModel:
    """Where each message of a queue must be.

    Messages whose retention is over stay in ``waiting``: when they are dropped is not told.
    """

    name: str
    filter: str
    options: QueueOptions
    paused: bool = False
    waiting: dict[int, Waits] = field(default_factory=dict)
    held: dict[int, InFlight] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    failed: dict[int, HasFailed] = field(default_factory=dict)
    receipts: list[str] = field(default_factory=list)

    def claimable(self, now: int) -> list[Waits]:
        """What is there for consumers, in order, if they could hold all of it."""
        if self.paused:
            return []
        return sorted(
            m for m in self.waiting.values() if m.visible_at <= now and not m.is_over(now)
        )

    @property
    def room_in_flight(self) -> int:
        return max(0, self.options.max_in_flight - len(self.held))

    def claimed(self, message: ClaimedMessage, consumer: str) -> None:
        was = self.waiting.pop(message.message_id)
        self.held[was.message_id] = InFlight(
            was, was.attempts + 1, message.lease_deadline_ms, message.receipt, consumer
        )
        self.receipts.append(message.receipt)

    def holder_of(self, receipt: str, now: int) -> InFlight | None:
        for held in self.held.values():
            if held.receipt == receipt and now <= held.lease_deadline:
                return held
        return None

    def take_back_leases(self, now: int) -> None:
        for held in [h for h in self.held.values() if now > h.lease_deadline]:
            self.give_back(held, now, error=LEASE_OVER, delay_ms=None)

    def give_back(self, held: InFlight, now: int, *, error: str, delay_ms: int | None) -> None:
        message_id, limit = held.was.message_id, self.options.max_attempts
        del self.held[message_id]
        if limit and held.attempts >= limit and not held.was.is_over(now):
            self.failed[message_id] = HasFailed(held.was, held.attempts, now, error)
            return
        pause = BACKOFF_MS * 2 ** (held.attempts - 1) if delay_ms is None else delay_ms
        self.waits_again(held.was, now + pause, held.attempts)

    def waits_again(self, was: Waits, visible_at: int, attempts: int) -> None:
        again = was._replace(visible_at=visible_at, attempts=attempts)
        self.waiting[was.message_id] = again


@dataclass(slots=True)
class QueueRows:
    """All rows of one queue, as they are in the store."""

    active: ActiveMessages | None = None
    counters: QueueCounters | None = None
    backlog: list[Waits] = field(default_factory=list)
    schedule: list[Waits] = field(default_factory=list)
    done: list[DoneMessage] = field(default_factory=list)
    sealed_done: dict[int, int] = field(default_factory=dict)
    failed: list[tuple[int, int, int]] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)
    failed_buckets: dict[int, int | None] = field(default_factory=dict)

    def add(self, key: Any, value: Any) -> None:
        match value:
            case ActiveMessages():
                self.active = value
            case QueueCounters():
                self.counters = value
            case BacklogEntry():
                assert isinstance(key, BacklogKey)
                self.backlog.append(
                    Waits(
                        key.priority,
                        key.message_id,
                        value.visible_at,
                        value.retention_deadline,
                        value.attempts,
                    )
                )
            case ScheduleEntry():
                assert isinstance(key, ScheduleKey)
                self.schedule.append(
                    Waits(
                        value.priority,
                        key.message_id,
                        key.visible_at,
                        value.retention_deadline,
                        value.attempts,
                    )
                )
            case DoneMessages():
                self.done += value.messages
                if isinstance(key, SealedDoneKey):
                    self.sealed_done[key.bucket] = len(value.messages)
            case FailedMessages():
                bucket = key.bucket if isinstance(key, SealedFailedKey) else None
                assert value.messages or bucket is None, "an empty bucket was left behind"
                for message in value.messages:
                    self.failed.append((message.message_id, message.failed_at, message.attempts))
                    self.failed_buckets[message.message_id] = bucket
            case Failure():
                assert isinstance(key, FailureKey)
                self.failures[key.message_id] = value

    def window(self) -> list[Waits]:
        assert self.active is not None
        return [
            Waits(m.priority, m.message_id, m.visible_at, m.retention_deadline, m.attempts)
            for m in self.active.available
        ]


class Queues(RuleBasedStateMachine):
    """Every message is in one place, comes in order, and is finished once."""

    system: System

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.url = f"memory:///queues-model-{next(_numbers)}"
        self.queues: list[QueueModel] = []
        self.published: dict[int, NewMessage] = {}
        self.claims: dict[int, list[str]] = {}
        self.payloads = itertools.count()
        self.monkeypatch = pytest.MonkeyPatch()
        self.slowness = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @property
    def now(self) -> int:
        return self.clock.now_ms()

    def queue(self, number: int) -> QueueModel:
        return self.queues[number % len(self.queues)]

    # --- queues are made, and the process comes and goes ------------------------------------------

    @initialize(
        filters=st.lists(st.sampled_from(sorted(FILTERS)), min_size=2, max_size=2),
        options=st.lists(queue_options, min_size=2, max_size=2),
    )
    def begin(self, filters: list[str], options: list[QueueOptions]) -> None:
        self.open()
        for filter, some in zip(filters, options, strict=True):
            self.create_queue(filter, some)

    @precondition(lambda self: len(self.queues) < 3)
    @rule(filter=st.sampled_from(sorted(FILTERS)), options=queue_options)
    def create_queue(self, filter: str, options: QueueOptions) -> None:
        model = QueueModel(f"q/{len(self.queues)}", filter, options)
        self.run(self.system.create_queue(model.name, filter=filter, options=options))
        self.queues.append(model)

    def open(self) -> None:
        self.system = self.run(System.open(self.url, clock=self.clock))
        database = self.system._queues._database
        commit = database.commit

        async def commit_slowly(rows: Rows) -> None:
            for _ in range(self.slowness):  # as long as so many reads
                await database.get(b"\x01\x10")
            await commit(rows)

        self.monkeypatch.setattr(database, "commit", commit_slowly)

    @rule(closing=st.booleans())
    def reopen(self, closing: bool) -> None:
        """Another owner; without ``closing`` the old one never got to close."""
        before = [self.system.stats(queue.name) for queue in self.queues]
        told = [self.system.get_queue(queue.name) for queue in self.queues]
        self.take_over(closing)
        assert self.system.list_queues() == sorted(queue.name for queue in self.queues)
        assert [self.system.get_queue(queue.name) for queue in self.queues] == told
        self.run(self.system._tailer.caught_up())
        assert [self.system.stats(queue.name) for queue in self.queues] == before
        for message_id in self.claims:
            self.check_attempts(message_id)

    @rule(batch=batches, closing=st.booleans(), routing=st.booleans())
    def publish_and_reopen(self, batch: list[NewMessage], closing: bool, routing: bool) -> None:
        """What was published and perhaps not routed is routed by the next owner, once."""
        if not routing:
            self.run(self.system._tailer.close())
        self.publish(batch)
        self.take_over(closing)

    def take_over(self, closing: bool) -> None:
        lost = self.system
        if closing:
            self.run(lost.close())
        self.open()
        self.run(lost.close())

    # --- messages come in and time passes ---------------------------------------------------------

    @rule(batch=batches)
    def publish(self, batch: list[NewMessage]) -> None:
        batch = self.with_payloads(batch)
        self.learn(batch, self.run(self.system.publish_many(batch)))

    def with_payloads(self, batch: list[NewMessage]) -> list[NewMessage]:
        return [
            NewMessage(
                b"%d" % next(self.payloads),
                headers=message.headers,
                delay_ms=message.delay_ms,
                retention_seconds=message.retention_seconds,
            )
            for message in batch
        ]

    def learn(self, batch: list[NewMessage], ids: list[int]) -> None:
        for message_id, message in zip(ids, batch, strict=True):
            assert message_id not in self.published
            self.published[message_id] = message
            life = message.retention_seconds * 1_000
            for queue in self.queues:
                priority = FILTERS[queue.filter](dict(message.headers))
                if priority is not None:
                    queue.waiting[message_id] = Waits(
                        priority,
                        message_id,
                        self.now + (message.delay_ms or 0),
                        self.now + life if life else 0,
                        0,
                    )

    @rule(
        milliseconds=st.sampled_from([1, 49, 50, 60, 500, LEASE_MS, LEASE_MS + 1, 2_001]),
        wanted=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    )
    def time_passes(self, milliseconds: int, wanted: list[int]) -> None:
        """Afterwards every queue has seen what time it is, some by a claim."""
        self.clock.advance_ms(milliseconds)
        for queue, count in zip(self.queues, wanted, strict=False):
            self.use_void_receipts(queue)
            if count:
                self.claim_from(queue, count, "ann", LEASE_MS)
            else:
                self.run(self.catch_up(queue))

    async def catch_up(self, queue: QueueModel) -> None:
        await self.system._tailer.caught_up()
        await self.system._queues._bring_up_to_date(self.system._queues.queue(queue.name), 1)
        queue.take_back_leases(self.now)

    # --- consumers --------------------------------------------------------------------------------

    @rule(number=queue_numbers, count=counts, consumer=consumers, lease=st.sampled_from([1, 5_000]))
    def claim(self, number: int, count: int, consumer: str, lease: int) -> None:
        self.claim_from(self.queue(number), count, consumer, lease)

    def claim_from(self, queue: QueueModel, count: int, consumer: str, lease: int) -> None:
        self.run(self.system._tailer.caught_up())
        queue.take_back_leases(self.now)
        expected = queue.claimable(self.now)[: min(count, queue.room_in_flight)]
        claimed = self.run(self.system.claim(queue.name, count, consumer=consumer, lease_ms=lease))
        assert [message.message_id for message in claimed] == [m.message_id for m in expected]
        for message in claimed:
            self.check_claimed(queue, message, lease)
            self.note_claim(queue, message, consumer)

    @rule(
        number=queue_numbers,
        some=st.lists(counts, min_size=2, max_size=4),
        slowness=st.integers(0, 5),
    )
    def claim_at_once(self, number: int, some: list[int], slowness: int) -> None:
        """Several consumers get different messages, which are together the first ones."""
        queue = self.queue(number)

        async def claim_all() -> list[list[ClaimedMessage]]:
            await self.system._tailer.caught_up()
            return await asyncio.gather(
                *(self.system.claim(queue.name, count, consumer="ann") for count in some)
            )

        queue.take_back_leases(self.now)
        expected = queue.claimable(self.now)[: min(sum(some), queue.room_in_flight)]
        self.slowness = slowness
        claimed = self.run(claim_all())
        self.slowness = 0
        for count, messages in zip(some, claimed, strict=True):
            ids = [(message.priority, message.message_id) for message in messages]
            assert ids == sorted(ids)
            assert len(ids) <= count
        together = sorted((m.priority, m.message_id) for messages in claimed for m in messages)
        assert together == [(m.priority, m.message_id) for m in expected]
        for message in itertools.chain(*claimed):
            self.check_claimed(queue, message, LEASE_MS)
            self.note_claim(queue, message, "ann")

    def check_claimed(self, queue: QueueModel, message: ClaimedMessage, lease: int) -> None:
        was = queue.waiting[message.message_id]
        original = self.published[message.message_id]
        assert message.payload == original.payload
        assert dict(message.headers) == original.headers
        assert (message.queue, message.priority) == (queue.name, was.priority)
        assert message.attempts == was.attempts + 1
        assert message.lease_deadline_ms == self.now + lease

    def note_claim(self, queue: QueueModel, message: ClaimedMessage, consumer: str) -> None:
        queue.claimed(message, consumer)
        self.claims.setdefault(message.message_id, []).append(consumer)
        self.check_attempts(message.message_id)

    def check_attempts(self, message_id: int) -> None:
        """The claims of a message over all queues, in their order."""
        key = AttemptsKey(message_id=message_id).encode()
        value = self.run(self.system._queues._database.get(key))
        assert value is not None
        assert Counter(Attempts.decode(value).consumer_ids) == Counter(self.claims[message_id])

    def pick(self, queue: QueueModel, picks: list[int]) -> list[str]:
        """Receipts that were once given out; perhaps they are not valid any more."""
        current = [held.receipt for _, held in sorted(queue.held.items())]
        receipts = current + queue.receipts[-8:]
        return [receipts[pick % len(receipts)] for pick in picks] if receipts else []

    def holders(self, queue: QueueModel, receipts: list[str]) -> list[InFlight | None]:
        """Whose receipts are valid, if each is finished before the next one is looked at."""
        found: list[InFlight | None] = []
        for place, receipt in enumerate(receipts):
            repeated = receipt in receipts[:place]
            found.append(None if repeated else queue.holder_of(receipt, self.now))
        return found

    @rule(number=queue_numbers, picks=picks)
    def ack(self, number: int, picks: list[int]) -> None:
        queue = self.queue(number)
        receipts = self.pick(queue, picks)
        holders = self.holders(queue, receipts)
        assert self.run(self.system.ack(queue.name, *receipts)) == outcomes(holders)
        for held in filter(None, holders):
            self.is_done(queue, held)

    def is_done(self, queue: QueueModel, held: InFlight) -> None:
        assert held.was.message_id not in queue.done
        del queue.held[held.was.message_id]
        queue.done[held.was.message_id] = held.attempts

    @rule(
        number=queue_numbers,
        picks=picks,
        error=st.sampled_from(["", "broken", "wért"]),
        delay=st.sampled_from([None, None, 0, 70]),
    )
    def nack(self, number: int, picks: list[int], error: str, delay: int | None) -> None:
        queue = self.queue(number)
        receipts = self.pick(queue, picks)
        holders = self.holders(queue, receipts)
        found = self.run(self.system.nack(queue.name, *receipts, error=error, delay_ms=delay))
        assert found == outcomes(holders)
        for held in filter(None, holders):
            queue.give_back(held, self.now, error=error, delay_ms=delay)

    @rule(number=queue_numbers, picks=picks)
    def release(self, number: int, picks: list[int]) -> None:
        queue = self.queue(number)
        receipts = self.pick(queue, picks)
        holders = self.holders(queue, receipts)
        assert self.run(self.system.release(queue.name, *receipts)) == outcomes(holders)
        for held in filter(None, holders):
            self.is_released(queue, held)

    def is_released(self, queue: QueueModel, held: InFlight) -> None:
        del queue.held[held.was.message_id]
        queue.waits_again(held.was, self.now, held.attempts - 1)

    @rule(number=queue_numbers, picks=picks, lease=st.sampled_from([1, 50, 5_000]))
    def extend(self, number: int, picks: list[int], lease: int) -> None:
        queue = self.queue(number)
        receipts = self.pick(queue, picks)
        holders = [queue.holder_of(receipt, self.now) for receipt in receipts]
        assert self.run(self.system.extend(queue.name, *receipts, lease_ms=lease)) == [
            None if held is None else self.now + lease for held in holders
        ]
        for held in filter(None, holders):
            held.lease_deadline = self.now + lease

    @rule(number=queue_numbers)
    def use_old_receipts(self, number: int) -> None:
        self.use_void_receipts(self.queue(number))

    def use_void_receipts(self, queue: QueueModel) -> None:
        """Whatever is not valid any more, by time or by what has happened since, does nothing."""
        receipts = [one for one in queue.receipts if queue.holder_of(one, self.now) is None]
        if not receipts:
            return

        async def use() -> list[Sequence[object]]:
            return [
                await self.system.extend(queue.name, *receipts),
                await self.system.ack(queue.name, *receipts),
                await self.system.nack(queue.name, *receipts, error="late"),
                await self.system.release(queue.name, *receipts),
            ]

        lost = ["lease_lost"] * len(receipts)
        assert self.run(use()) == [[None] * len(receipts), lost, lost, lost]

    @rule(number=queue_numbers, of=queue_numbers, picks=picks)
    def use_a_receipt_of_another_queue(self, number: int, of: int, picks: list[int]) -> None:
        queue, other = self.queue(number), self.queue(of)
        receipts = self.pick(other, picks)
        if queue is other or not receipts:
            return
        for finish in (self.system.ack, self.system.nack, self.system.release):
            with pytest.raises(InvalidInputError, match="is no receipt of queue"):
                self.run(finish(queue.name, *receipts))

    @rule(
        number=queue_numbers,
        batch=batches,
        some=st.lists(counts, max_size=3),
        ways=st.lists(st.sampled_from(["ack", "nack", "release", ""]), min_size=7, max_size=7),
        picks=picks,
        delay=st.sampled_from([None, 0]),
        slowness=st.integers(0, 5),
    )
    def everything_at_once(
        self,
        number: int,
        batch: list[NewMessage],
        some: list[int],
        ways: list[str],
        picks: list[int],
        delay: int | None,
        slowness: int,
    ) -> None:
        """Who comes first is not said, but every call takes effect once."""
        queue = self.queue(number)
        held = sorted(queue.held.values(), key=lambda one: one.was)
        acked, nacked, released = (
            [one for one, way in zip(held, ways, strict=False) if way == wanted]
            for wanted in ("ack", "nack", "release")
        )
        again = [one for one in self.pick_failed(queue, picks) if one in queue.failed]
        batch = self.with_payloads(batch)
        name, system = queue.name, self.system
        ids: list[int] = []
        results: list[Sequence[object]] = []
        claimed: list[ClaimedMessage] = []
        replayed: list[int] = []

        async def publish() -> None:
            ids.extend(await system.publish_many(batch))

        async def claim(count: int) -> None:
            claimed.extend(await system.claim(name, count, consumer="bob"))

        async def finish(call: Coroutine[Any, Any, Sequence[object]]) -> None:
            results.append(await call)

        async def replay() -> None:
            replayed.extend(await system.replay(name, *again))

        async def all_at_once() -> None:
            await system._tailer.caught_up()
            await asyncio.gather(
                publish(),
                *(claim(count) for count in some),
                *(finish(system.ack(name, one.receipt)) for one in acked),
                *(finish(system.release(name, one.receipt)) for one in released),
                *(
                    finish(system.nack(name, one.receipt, error="e", delay_ms=delay))
                    for one in nacked
                ),
                replay(),
            )
            await system._tailer.caught_up()

        self.slowness = slowness
        self.run(all_at_once())
        self.slowness = 0
        assert results == [["ok"]] * (len(acked) + len(nacked) + len(released))
        assert replayed == list(dict.fromkeys(again))
        self.learn(batch, ids)
        self.are_replayed(queue, again)
        for one in acked:
            self.is_done(queue, one)
        for one in nacked:
            queue.give_back(one, self.now, error="e", delay_ms=delay)
        for one in released:
            self.is_released(queue, one)
        assert {m.message_id for m in claimed} <= {m.message_id for m in queue.claimable(self.now)}
        for message in claimed:
            self.check_claimed(queue, message, LEASE_MS)
            self.note_claim(queue, message, "bob")
        assert len(queue.held) <= queue.options.max_in_flight

    @rule(number=queue_numbers)
    def pause_or_resume(self, number: int) -> None:
        queue = self.queue(number)
        queue.paused = not queue.paused
        self.run(self.system.update_queue(queue.name, paused=queue.paused))

    # --- failed messages --------------------------------------------------------------------------

    def pick_failed(self, queue: QueueModel, picks: list[int]) -> list[int]:
        """Ids of failed messages, some twice, and some that are not failed."""
        ids = sorted(queue.failed)[:12] + sorted(self.published)[-3:]
        return [ids[pick % len(ids)] for pick in picks] if ids else []

    @rule(number=queue_numbers, picks=picks)
    def replay(self, number: int, picks: list[int]) -> None:
        queue = self.queue(number)
        ids = self.pick_failed(queue, picks)
        failed = [one for one in dict.fromkeys(ids) if one in queue.failed]
        assert self.run(self.system.replay(queue.name, *ids)) == failed
        self.are_replayed(queue, failed)

    def are_replayed(self, queue: QueueModel, ids: list[int]) -> None:
        for message_id in dict.fromkeys(ids):
            queue.waits_again(queue.failed.pop(message_id).was, self.now, 0)

    @rule(number=queue_numbers, picks=picks)
    def purge_failed(self, number: int, picks: list[int]) -> None:
        queue = self.queue(number)
        ids = self.pick_failed(queue, picks)
        failed = [one for one in dict.fromkeys(ids) if one in queue.failed]
        assert self.run(self.system.purge_failed(queue.name, *ids)) == failed
        for message_id in failed:
            del queue.failed[message_id]

    # --- what must always hold --------------------------------------------------------------------

    @precondition(lambda self: self.queues)
    @invariant()
    def all_is_as_the_model_says(self) -> None:
        stored = self.run(self.durable_rows())
        for queue in self.queues:
            self.check_stats(queue)
            self.check_rows(queue, stored[queue.name])
            failed = self.run(self.system.failed(queue.name, limit=1_000))
            assert {
                f.message_id: (f.priority, f.attempts, f.failed_at_ms, f.error) for f in failed
            } == {
                one: (f.was.priority, f.attempts, f.failed_at, f.error)
                for one, f in queue.failed.items()
            }
            assert [f.message_id for f in failed] == sorted(queue.failed)

    async def durable_rows(self) -> dict[str, QueueRows]:
        """What is in the store after all is routed, and after the commits of the background."""
        await self.system._tailer.caught_up()
        committer = self.system._queues.committer
        await committer.wait(committer.commit())
        found = {queue.name: QueueRows() for queue in self.queues}
        async for chunk in self.system._queues._database.scan(b"\x00", b"\xff"):
            for key, value in chunk:
                row = decode_any(key, value)
                queue_id = getattr(row.key, "queue_id", None)
                if queue_id is not None:
                    found[queue_id.decode()].add(row.key, row.value)
        return found

    def check_stats(self, queue: QueueModel) -> None:
        stats = self.system.stats(queue.name)
        assert stats.in_flight == len(queue.held)
        assert stats.done == len(queue.done)
        assert stats.failed == len(queue.failed)
        visible = [m for m in queue.waiting.values() if m.visible_at <= self.now]
        delayed = [m for m in queue.waiting.values() if m.visible_at > self.now]
        over = [m for m in queue.waiting.values() if m.is_over(self.now)]
        assert len(visible) - len(over) <= stats.available <= len(visible)
        assert len(delayed) - len(over) <= stats.delayed <= len(delayed)
        assert stats.expired <= len(over)
        assert stats.available + stats.delayed + stats.expired == len(queue.waiting)

    def check_rows(self, queue: QueueModel, rows: QueueRows) -> None:
        assert rows.active is not None
        window, backlog, schedule = rows.window(), sorted(rows.backlog), rows.schedule
        waiting = {m.message_id: m for m in (*window, *backlog, *schedule)}
        assert len(waiting) == len(window) + len(backlog) + len(schedule), "in two places"
        assert waiting.items() <= queue.waiting.items()
        missing = queue.waiting.keys() - waiting.keys()
        assert all(queue.waiting[one].is_over(self.now) for one in missing), "a message is lost"
        assert all(m.visible_at > self.now for m in schedule)
        assert all(m.visible_at <= self.now for m in (*window, *backlog))
        # The order over the whole backlog, and the bound of what every commit rewrites.
        assert sorted(window) == window
        assert len(window) <= queue.options.window
        assert not (window and backlog) or window[-1] < backlog[0]
        assert {(m.message_id, m.attempts, m.lease_deadline) for m in rows.active.in_flight} == {
            (h.was.message_id, h.attempts, h.lease_deadline) for h in queue.held.values()
        }
        assert len(rows.active.in_flight) == len(queue.held) <= queue.options.max_in_flight
        assert sorted((m.message_id, m.attempts) for m in rows.done) == sorted(queue.done.items())
        self.check_failed_rows(queue, rows)
        self.check_counters(queue, rows)

    def check_failed_rows(self, queue: QueueModel, rows: QueueRows) -> None:
        counters = rows.counters
        assert counters is not None
        assert sorted(rows.failed) == sorted(
            (one, f.failed_at, f.attempts) for one, f in queue.failed.items()
        )
        assert rows.failures.keys() == queue.failed.keys()
        for message_id, failure in rows.failures.items():
            bucket = rows.failed_buckets[message_id]
            assert failure.bucket == (counters.failed_bucket if bucket is None else bucket)

    def check_counters(self, queue: QueueModel, rows: QueueRows) -> None:
        counters = rows.counters
        assert counters is not None
        assert counters.scheduled == len(rows.schedule)
        assert all(counters.scheduled_from <= m.visible_at for m in rows.schedule)
        assert (counters.done, counters.failed) == (len(queue.done), len(queue.failed))
        assert rows.sealed_done == dict.fromkeys(range(counters.done_bucket), queue.options.bucket)
        by_priority = Counter(m.priority for m in rows.backlog)
        assert {c.priority: c.rows for c in counters.backlog} == by_priority
        starts = {c.priority: c.from_message_id for c in counters.backlog}
        assert all(starts[m.priority] <= m.message_id for m in rows.backlog)

    def teardown(self) -> None:
        if hasattr(self, "system"):
            self.run(self.system.close())
        self.runner.close()
        self.monkeypatch.undo()
        forget_memory_root(self.url)


def outcomes(holders: list[InFlight | None]) -> list[str]:
    return ["lease_lost" if held is None else "ok" for held in holders]


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
