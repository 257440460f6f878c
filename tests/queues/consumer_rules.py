"""What consumers do, and those who look at queues and see to what has failed."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from odq_encodings import InFlightMessage
from opendata_queue import ClaimedMessage, InvalidInputError, MessageExpiredError, NewMessage
from tests.queues.queue_model import FILTERS, LEASE_MS, InFlight, QueueModel, batches, outcomes
from tests.queues.queues_machine import QueuesMachine, consumers, counts, picks, queue_numbers

GUARD_SECONDS: Final = 20
"""Nobody waits this long, unless it is for ever."""


class ConsumerRules(QueuesMachine):
    """Claims and all that follows, one by one and many at once."""

    @rule(number=queue_numbers, count=counts, consumer=consumers, lease=st.sampled_from([1, 5_000]))
    def claim(self, number: int, count: int, consumer: str, lease: int) -> None:
        self.claim_from(self.queue(number), count, consumer, lease)

    @rule(
        number=queue_numbers,
        some=st.lists(counts, min_size=2, max_size=4),
        slowness=st.integers(0, 5),
    )
    def claim_at_once(self, number: int, some: list[int], slowness: int) -> None:
        """Several consumers get different messages, which are together the first ones."""
        queue = self.queue(number)

        async def claim_all() -> list[list[ClaimedMessage]]:
            await self.caught_up()
            return await asyncio.gather(
                *(self.system.claim(queue.name, count, consumer="ann") for count in some)
            )

        queue.take_back_leases(self.now)
        self.slowness = slowness
        claimed = self.run(claim_all())
        self.slowness = 0
        for count, messages in zip(some, claimed, strict=True):
            priorities = [message.priority for message in messages]
            assert priorities == sorted(priorities)
            assert len(messages) <= count
        together = sorted((m.priority, m.message_id) for messages in claimed for m in messages)
        self.check_first(queue, [message_id for _, message_id in together], sum(some))
        for message in itertools.chain(*claimed):
            self.check_claimed(queue, message, LEASE_MS)
            self.note_claim(queue, message, "ann")

    @rule(number=queue_numbers, count=counts, lost_after=st.integers(0, 2), acks=st.integers(0, 2))
    def claim_and_lose_memory(self, number: int, count: int, lost_after: int, acks: int) -> None:
        """What was told is durable, but for relaxed claims: then it is as if nobody had claimed."""
        queue = self.queue(number)
        self.let_the_clock_come_up()
        self.run(self.catch_up(queue))
        claimed: list[ClaimedMessage] = []
        acked: list[ClaimedMessage] = []

        async def work() -> None:
            claimed.extend(await self.system.claim(queue.name, count, consumer="bob"))
            for message in claimed[:acks]:
                assert await self.system.ack(queue.name, message.receipt) == ["ok"]
                acked.append(message)

        self.run(self.lose_memory_in(lost_after, work()))
        if claimed:
            self.check_first(queue, [message.message_id for message in claimed], count)
        active = self.run(self.durable_rows())[queue.name].active
        assert active is not None
        in_flight = {held.message_id for held in active.in_flight}
        for message in claimed:
            if message in acked or message.message_id in in_flight:
                self.check_claimed(queue, message, LEASE_MS)
                self.note_claim(queue, message, "bob")
            else:
                assert queue.options.relaxed_claims
                queue.receipts.append(message.receipt)
        for message in acked:
            self.is_done(queue, queue.held[message.message_id])
        untold = [held for held in active.in_flight if held.message_id in queue.waiting]
        for held in untold:
            self.note_untold_claim(queue, held, "bob")
        # Another claim in the very millisecond of a lost one could not be told from it.
        self.clock.advance_ms(LEASE_MS + 1 if untold else 1)
        for one in self.queues:
            self.run(self.catch_up(one))

    def note_untold_claim(self, queue: QueueModel, held: InFlightMessage, consumer: str) -> None:
        """A claim became durable, or a part of it, along with others, before its caller was told.

        Nobody has its receipt: it comes back when its lease ends.
        """
        was = queue.waiting.pop(held.message_id)
        assert held.attempts == was.attempts + 1
        queue.held[held.message_id] = InFlight(
            was, held.attempts, held.lease_deadline, "nobody has it", consumer
        )
        self.claims.setdefault(held.message_id, []).append(consumer)

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
        in_line=st.booleans(),
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
        in_line: bool,
    ) -> None:
        """Who comes first is not said, but every call takes effect once.

        Perhaps those who claim are in line for it before: then nobody is left there while there is
        something for them.
        """
        queue = self.queue(number)
        held = sorted(queue.held.values(), key=lambda one: one.was)
        acked, nacked, released = (
            [one for one, way in zip(held, ways, strict=False) if way == wanted]
            for wanted in ("ack", "nack", "release")
        )
        failed = queue.shown_failed(self.now)
        again = [one for one in self.pick_failed(queue, picks) if one in failed]
        again = self.not_over(queue, again)
        most_held = max(queue.options.max_in_flight, len(queue.held))
        batch = self.with_payloads(batch)
        name, system = queue.name, self.system
        ids: list[int] = []
        results: list[Sequence[object]] = []
        claimed: list[ClaimedMessage] = []
        replayed: list[int] = []

        async def publish() -> None:
            ids.extend(await system.publish_many(batch))

        async def claim(count: int) -> None:
            wait_ms = LEASE_MS if in_line else 0
            claimed.extend(await system.claim(name, count, consumer="bob", wait_ms=wait_ms))

        async def finish(call: Coroutine[Any, Any, Sequence[object]]) -> None:
            results.append(await call)

        async def replay() -> None:
            if again:
                replayed.extend(await system.replay(name, *again))

        async def all_at_once() -> None:
            await self.caught_up()
            claims = [asyncio.ensure_future(claim(count)) for count in some]
            if in_line:
                await self.served(queue, claims)
            await asyncio.gather(
                publish(),
                *(finish(system.ack(name, one.receipt)) for one in acked),
                *(finish(system.release(name, one.receipt)) for one in released),
                *(
                    finish(system.nack(name, one.receipt, error="e", delay_ms=delay))
                    for one in nacked
                ),
                replay(),
            )
            await self.caught_up()
            await self.served(queue, claims)
            for one in claims:
                one.cancel()
            await asyncio.gather(*claims, return_exceptions=True)

        self.slowness = slowness
        self.run(all_at_once())
        self.slowness = 0
        assert results == [["ok"]] * (len(acked) + len(nacked) + len(released))
        assert replayed == again
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
        assert len(queue.held) <= most_held

    async def served(self, queue: QueueModel, claims: Sequence[asyncio.Future[None]]) -> None:
        """Wait until those who claim have something, or are in line and there is nothing."""
        stored = self.system._queues.queue(queue.name)
        async with asyncio.timeout(GUARD_SECONDS):
            while True:
                left = sum(not one.done() for one in claims)
                waiting = len(stored.waiters)
                if left == waiting and not (left and stored.state.promised):
                    return
                await asyncio.sleep(0)

    # --- failed messages --------------------------------------------------------------------------

    def pick_failed(self, queue: QueueModel, picks: list[int]) -> list[int]:
        """Ids of failed messages, some twice, and some that are not failed."""
        ids = sorted(queue.failed)[:12] + sorted(self.published)[-3:]
        return [ids[pick % len(ids)] for pick in picks] if ids else []

    @rule(number=queue_numbers, picks=picks)
    def replay(self, number: int, picks: list[int]) -> None:
        queue = self.queue(number)
        ids = self.pick_failed(queue, picks)
        shown = queue.shown_failed(self.now)
        failed = [one for one in dict.fromkeys(ids) if one in shown]
        if self.not_over(queue, failed) != failed:
            with pytest.raises(MessageExpiredError):
                self.run(self.system.replay(queue.name, *ids))
        elif ids:
            assert self.run(self.system.replay(queue.name, *ids)) == failed
            self.are_replayed(queue, failed)

    def not_over(self, queue: QueueModel, failed: list[int]) -> list[int]:
        """Those that come back; the others are dropped, for their retention is over."""
        return [one for one in dict.fromkeys(failed) if not queue.failed[one].was.is_over(self.now)]

    @rule(number=queue_numbers, kind=st.sampled_from(["a", "b", "", None]), purging=st.booleans())
    def finish_many_failed(self, number: int, kind: str | None, purging: bool) -> None:
        """All of them, or those of a kind, or those without one."""
        queue = self.queue(number)
        failed = [
            one
            for one in sorted(queue.shown_failed(self.now))
            if kind is None
            or (one not in self.gone and self.published[one].headers.get("kind", "") == kind)
        ]
        filter = f"kind = '{kind}'" if kind else "kind IS NULL"
        call = self.system.purge_failed if purging else self.system.replay
        which: dict[str, Any] = {"all": True} if kind is None else {"filter": filter}
        found = self.run(call(queue.name, **which))
        assert found == (failed if purging else self.not_over(queue, failed))
        if purging:
            for message_id in failed:
                del queue.failed[message_id]
        else:
            self.are_replayed(queue, failed)

    def are_replayed(self, queue: QueueModel, ids: list[int]) -> None:
        for message_id in dict.fromkeys(ids):
            queue.waits_again(queue.failed.pop(message_id).was, self.now, 0)

    @rule(number=queue_numbers, picks=picks)
    def purge_failed(self, number: int, picks: list[int]) -> None:
        queue = self.queue(number)
        ids = self.pick_failed(queue, picks)
        shown = queue.shown_failed(self.now)
        failed = [one for one in dict.fromkeys(ids) if one in shown]
        if ids:
            assert self.run(self.system.purge_failed(queue.name, *ids)) == failed
        for message_id in failed:
            del queue.failed[message_id]

    # --- looking ----------------------------------------------------------------------------------

    @rule(number=queue_numbers, limit=st.integers(1, 5), picks=picks)
    def look(self, number: int, limit: int, picks: list[int]) -> None:
        """Pages of every state, and the history of some messages, say what the model says."""
        queue = self.queue(number)
        self.run(self.caught_up())
        waiting = sorted(queue.waiting.values())
        available = [m for m in waiting if m.visible_at <= self.now and not m.is_over(self.now)]
        peeked = self.run(self.system.peek(queue.name, limit))
        assert [m.message_id for m in peeked] == [m.message_id for m in available[:limit]]
        delayed = [m for m in waiting if m.visible_at > self.now and not m.is_over(self.now)]
        delayed.sort(key=lambda m: (m.visible_at, m.message_id))
        over = {m.message_id for m in waiting if m.is_over(self.now)}
        for state, expected in (
            ("available", [m.message_id for m in available]),
            ("delayed", [m.message_id for m in delayed]),
            ("in_flight", sorted(queue.held)),
            ("done", list(queue.shown_done(self.now))[::-1]),
            ("failed", sorted(queue.shown_failed(self.now))),
        ):
            found = [e for e in self.run(self.pages(queue, state, limit)) if e not in over]
            assert sorted(found) == sorted(expected) if state == "done" else found == expected
            for pick in picks[:2] if expected else ():
                self.check_history(queue, expected[pick % len(expected)], state)

    async def pages(self, queue: QueueModel, state: Any, limit: int) -> list[int]:
        page = await self.system.browse(queue.name, state, limit=limit)
        found = [*page.entries]
        while page.next is not None:
            page = await self.system.browse(queue.name, state, after=page.next, limit=limit)
            found += page.entries
        return [entry.message_id for entry in found]

    def check_history(self, queue: QueueModel, message_id: int, state: str) -> None:
        history = self.run(self.system.history(message_id))
        if message_id in self.gone:
            assert history is None
            return
        assert history is not None
        if not self.is_over(message_id):  # then its attempts may go before it does
            assert Counter(history.consumers) == Counter(self.claims.get(message_id, []))
        found = next((e.state for e in history.entries if e.queue == queue.name), None)
        matches = FILTERS[queue.filter](dict(self.published[message_id].headers)) is not None
        # The filter may be another one by now: then only what is at hand, or failed, is found.
        surely = matches or state in ("in_flight", "failed")
        assert found == state or (found is None and not surely)
