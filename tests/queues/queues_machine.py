"""The state machines of queues: a real root, crashed and reopened, against a simple model.

This is what all of them share: the root, the process that owns it, what the model knows, and what
must always hold. The rules are in ``admin_rules`` and ``consumer_rules``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition

from odq_compactor import CompactorOptions
from odq_encodings import Attempts, AttemptsKey, decode_any
from opendata_queue import (
    ClaimedMessage,
    Engine,
    FencedError,
    NewMessage,
    QueueStats,
    StoreSettings,
)
from opendata_queue.queues import removal as queue_removal
from opendata_queue.routing import replay as log_replay
from opendata_queue.routing import router as routing
from opendata_queue.runtime import turns
from opendata_queue.store import Rows, forget_memory_root
from opendata_queue.testing import ManualClock
from tests.queues.queue_model import InFlight, IsDone, QueueModel, are_the_first
from tests.queues.queue_rows import QueueRows

T = TypeVar("T")

_numbers = itertools.count()

queue_numbers = st.integers(0, 2)
counts = st.integers(1, 6)
consumers = st.sampled_from(["ann", "bob"])
# Which ones of what there is: it must not be drawn from what there is, since with several
# consumers at once that is not the same in every run.
picks = st.lists(st.integers(0, 15), max_size=4)
losses = st.none() | st.integers(0, 6)
"""After how many batches of the queue store the memory is lost, if it is."""

COMPACTOR: Final = CompactorOptions(work_share=1.0, erase=True, space=False, batch_messages=4)


class QueuesMachine(RuleBasedStateMachine):
    """Every message is in one place, comes in order, and is finished once."""

    system: Engine

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.url = f"memory:///queues-model-{next(_numbers)}"
        self.store_settings = StoreSettings()
        self.queues: list[QueueModel] = []
        self.published: dict[int, NewMessage] = {}
        self.received: dict[int, int] = {}
        self.gone: set[int] = set()
        """Messages that a pass of the compactor has removed."""
        self.void_receipts: dict[str, list[str]] = {}
        self.claims: dict[int, list[str]] = {}
        self.payloads = itertools.count()
        self.monkeypatch = pytest.MonkeyPatch()
        self.monkeypatch.setattr(queue_removal, "ROWS_AT_ONCE", 2)
        self.monkeypatch.setattr(log_replay, "ENTRIES_AT_ONCE", 3)
        # Turns are over when they have begun: each step of the background is a batch of its own.
        self.monkeypatch.setattr(log_replay, "_ROUTED_AT_ONCE", 2)
        self.monkeypatch.setattr(turns, "TURN_S", 0.0)
        self.monkeypatch.setattr(turns, "SHORT_TURN_S", 0.0)
        self.monkeypatch.setattr(turns, "CALLING_S", 0.0)
        for name in ("_PLACES_AT_FIRST", "_PLACES_AT_LEAST", "_PLACES_AT_MOST"):
            self.monkeypatch.setattr(routing, name, 2)
        self.slowness = 0
        self.batches_left: int | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        # Not ``runner.run``, which sees to signals each time: there are tens of thousands.
        return self.runner.get_loop().run_until_complete(work)

    @property
    def now(self) -> int:
        return self.clock.now_ms()

    def queue(self, number: int) -> QueueModel:
        return self.queues[number % len(self.queues)]

    # --- the process comes and goes ---------------------------------------------------------------

    def open(self, *, takeover: bool = False) -> None:
        self.system = self.run(self.opened(takeover=takeover))

    async def opened(self, *, takeover: bool) -> Engine:
        system = await Engine.open(
            self.url, settings=self.store_settings, clock=self.clock, takeover=takeover
        )
        assert system._queues.clock.now_ms() == self.now
        database = system._queues.database
        commit = database.commit

        async def commit_slowly(rows: Rows, **options: Any) -> None:
            for _ in range(self.slowness):  # as long as so many reads
                await database.get(b"\x01\x10")
            if self.batches_left is not None:
                if not self.batches_left:
                    raise FencedError("it was killed")
                self.batches_left -= 1
            await commit(rows, **options)

        self.monkeypatch.setattr(database, "commit", commit_slowly)
        return system

    def let_the_clock_come_up(self) -> None:
        """What is done again within a millisecond is marked with a later time.

        The clock of the next owner begins there, so time has to pass before it comes; a call that
        goes on until then must not be of that kind itself.
        """
        queues = self.system._queues
        marks = [
            queues.registry.made_from_ms,
            *(one.state.in_flight.claims_after for one in queues.queues()),
        ]
        ahead = max(marks) - self.now
        if ahead > 0:
            self.clock.advance_ms(ahead)
            for queue in self.queues:
                self.run(self.catch_up(queue))

    def take_over(self, closing: bool) -> None:
        """Another owner; without ``closing`` the old one never got to close."""
        self.let_the_clock_come_up()
        lost = self.system
        if closing:
            self.run(lost.close())
        self.open(takeover=not closing)
        self.run(lost.close())
        for one in self.queues:
            self.run(self.catch_up(one))

    async def lose_memory_in(self, batches: int, work: Coroutine[Any, Any, T]) -> T | None:
        """The process is killed when so many further batches of the queue store are durable.

        What the work returned, if it came to that before.
        """
        self.batches_left = batches
        lost = self.system
        try:
            result = await work
        except FencedError:
            result = None
        self.batches_left = None
        self.system = await self.opened(takeover=True)
        await lost.close()
        return result

    async def caught_up(self) -> None:
        """Wait until all that is published is where it belongs."""
        await self.system._tailer.caught_up()
        await self.system._replay.finished()

    # --- messages come in -------------------------------------------------------------------------

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

    def learn(self, batch: list[NewMessage], ids: Sequence[int]) -> None:
        for message_id, message in zip(ids, batch, strict=True):
            assert message_id not in self.published
            self.published[message_id] = message
            self.received[message_id] = self.now
            for queue in self.queues:
                self.comes_in(queue, message_id)

    def comes_in(self, queue: QueueModel, message_id: int) -> None:
        queue.takes_in(self.published[message_id], message_id, self.received[message_id])

    def is_over(self, message_id: int) -> bool:
        life = self.published[message_id].retention_seconds * 1_000
        return life != 0 and self.now > self.received[message_id] + life

    async def catch_up(self, queue: QueueModel) -> None:
        """Let a queue see what time it is."""
        await self.caught_up()
        await self.system._queues.consumers.bring_up_to_date(
            self.system._queues.queue(queue.name), 1
        )
        queue.take_back_leases(self.now)

    # --- messages are claimed and finished --------------------------------------------------------

    def claim_from(self, queue: QueueModel, count: int, consumer: str, lease: int) -> None:
        self.run(self.caught_up())
        queue.take_back_leases(self.now)
        claimed = self.run(self.system.claim(queue.name, count, consumer=consumer, lease_ms=lease))
        self.check_first(queue, [message.message_id for message in claimed], count)
        for message in claimed:
            self.check_claimed(queue, message, lease)
            self.note_claim(queue, message, consumer)

    def check_first(self, queue: QueueModel, claimed: Sequence[int], count: int) -> None:
        """They are as many as can be, and those that are next, in order."""
        there = queue.claimable(self.now)
        assert len(claimed) == min(count, queue.room_in_flight, len(there))
        assert are_the_first(claimed, there)

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
        if not queue.options.relaxed_claims:
            self.check_attempts(message.message_id)

    def check_attempts(self, message_id: int) -> None:
        """The claims of a message over all queues, in their order."""
        key = AttemptsKey(message_id=message_id).encode()
        value = self.run(self.system._queues.database.get(key))
        assert value is not None
        assert Counter(Attempts.decode(value).consumer_ids) == Counter(self.claims[message_id])

    def is_done(self, queue: QueueModel, held: InFlight) -> None:
        assert held.was.message_id not in queue.done
        del queue.held[held.was.message_id]
        queue.done[held.was.message_id] = IsDone(held.attempts, self.now)

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

    # --- what must always hold --------------------------------------------------------------------

    @precondition(lambda self: self.queues)
    @invariant()
    def all_is_as_the_model_says(self) -> None:
        stored = self.run(self.durable_rows())
        for queue in self.queues:
            self.check_stats(queue)
            stored[queue.name].check(queue, self.now)
            failed = self.run(self.system.failed(queue.name, limit=1_000))
            expected = queue.shown_failed(self.now)
            assert {
                f.message_id: (f.priority, f.attempts, f.failed_at_ms, f.error) for f in failed
            } == {
                one: (f.was.priority, f.attempts, f.failed_at, f.error)
                for one, f in expected.items()
            }
            assert [f.message_id for f in failed] == sorted(expected)

    async def durable_rows(self) -> dict[str, QueueRows]:
        """What is in the store after all is routed, and after the commits of the background."""
        await self.caught_up()
        committer = self.system._queues.committer
        await committer.wait(committer.commit())
        found = {queue.name: QueueRows() for queue in self.queues}
        async for chunk in self.system._queues.database.scan(b"\x01", b"\xff"):
            for key, value in chunk:
                row = decode_any(key, value)
                queue_id = getattr(row.key, "queue_id", None)
                if queue_id is not None:
                    found[queue_id.decode()].add(row.key, row.value)
        return found

    def check_stats(self, queue: QueueModel) -> None:
        stats = self.run(self.system.stats(queue.name))
        assert stats.in_flight == len(queue.held)
        assert stats.done == len(queue.done)
        assert stats.failed == len(queue.failed)
        visible = [m for m in queue.waiting.values() if m.visible_at <= self.now]
        delayed = [m for m in queue.waiting.values() if m.visible_at > self.now]
        over = [m for m in queue.waiting.values() if m.is_over(self.now)]
        assert len(visible) - len(over) <= stats.available <= len(visible)
        assert len(delayed) - len(over) <= stats.delayed <= len(delayed)
        assert stats.expired <= len(over) + queue.expired
        waiting = len(queue.waiting) + queue.expired
        assert stats.available + stats.delayed + stats.expired == waiting
        assert stats.replaying == 0

    def steady_stats(self, queue: QueueModel) -> QueueStats:
        """What another owner must say, too."""
        return self.run(self.system.stats(queue.name))

    def teardown(self) -> None:
        if hasattr(self, "system"):
            self.run(self.system.close())
        self.runner.close()
        self.monkeypatch.undo()
        forget_memory_root(self.url)
