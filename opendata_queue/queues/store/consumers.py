"""What consumers do with the messages of a queue: claim, finish, give back, and hold for longer."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final

from opendata_queue.model.checks import check_integer
from opendata_queue.model.errors import InvalidInputError, OdqError
from opendata_queue.model.options import QueueOptions
from opendata_queue.model.values import Outcome
from opendata_queue.queues.attempts import AttemptsLedger
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.state import Claim, Held, in_order
from opendata_queue.queues.store.commits import QueueCommits
from opendata_queue.queues.store.due import DueWork
from opendata_queue.queues.store.refill import Refills
from opendata_queue.queues.store.registry import QueueRegistry
from opendata_queue.root.clock import RootClock

MAX_AT_ONCE: Final = 1_000
MAX_CONSUMER_BYTES: Final = 255
MAX_ERROR_BYTES: Final = 4_096
MAX_DELAY_MS: Final = 100 * 365 * 24 * 3_600_000
MAX_WAIT_MS: Final = MAX_DELAY_MS

Durable = Callable[[], Awaitable[None]]
"""Waits until what was done is durable."""


class Consumers:
    """Claims, and what becomes of them."""

    def __init__(
        self,
        registry: QueueRegistry,
        commits: QueueCommits,
        due: DueWork,
        refills: Refills,
        ledger: AttemptsLedger,
        clock: RootClock,
        *,
        ttl_grace_ms: int,
        chance: random.Random,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._committer = commits.committer
        self._due = due
        self._refills = refills
        self._ledger = ledger
        self._clock = clock
        self._ttl_grace_ms = ttl_grace_ms
        self._chance = chance

    async def claim(
        self, name: str, count: int, *, consumer: str, lease_ms: int | None, wait_ms: int
    ) -> tuple[list[Held], Durable]:
        """Up to ``count`` messages; waits up to ``wait_ms`` for the first one.

        The commit of the claims is under way when this returns. Await the second part before the
        messages are handed out, or call ``give_back_unseen``.
        """
        queue = self._registry.queue(name)
        lease = _checked_lease(queue.options, lease_ms)
        _check_claim(count, consumer, wait_ms)
        give_up_at = self._clock.now_ms() + wait_ms
        claimed = await self.claim_now(queue, count, consumer, lease)
        if claimed[0] or not wait_ms:
            return claimed
        patience = asyncio.ensure_future(self._clock.wait_until(give_up_at))
        ticket = queue.waiters.draw_ticket()
        try:
            while not claimed[0] and not patience.done():
                # The sweeper wakes us for what time alone brings.
                await queue.waiters.wait(patience, ticket)
                self._committer.check_open()
                claimed = await self.claim_now(queue, count, consumer, lease)
            return claimed
        finally:
            patience.cancel()

    def give_back_unseen(self, queue: StoredQueue, held: Iterable[Held]) -> None:
        """Release what was claimed for a caller that was cancelled, and waits for nothing."""
        if queue.deleted:
            return
        now = self._clock.now_ms()
        claims = [one.claim() for one in held]
        # A committer that has stopped takes no more: the leases will run out.
        with contextlib.suppress(OdqError):
            self._committer.check_open()
            if any([queue.state.release(claim, now) for claim in claims]):
                self._commits.changed_in_background(queue)

    async def claim_now(
        self, queue: StoredQueue, count: int, consumer: str, lease_ms: int
    ) -> tuple[list[Held], Durable]:
        """``claim`` what there is, without waiting for more."""
        claimed: list[Held] = []
        try:
            await self._claim_into(claimed, queue, count, consumer, lease_ms)
            if not claimed:
                return claimed, _at_once
            done = self._committer.commit()
            if queue.state.ready.wants_refill_for(count):
                self._refills.in_background(queue)
            if queue.options.relaxed_claims:
                return claimed, _at_once
            await self._committer.at_work()
        except BaseException:
            self.give_back_unseen(queue, claimed)
            queue.waiters.wake()  # it may have been our turn: let the next one have it
            raise
        return claimed, partial(self._committer.wait, done)

    async def _claim_into(
        self,
        claimed: list[Held],
        queue: StoredQueue,
        count: int,
        consumer: str,
        lease_ms: int,
    ) -> None:
        """Add to ``claimed`` what is claimed, as it is claimed; in order in the end.

        Time goes on meanwhile: a message whose rest has just ended may come before what is there.
        """
        moments = 0
        while len(claimed) < count:
            await self._committer.room()
            now = await self.bring_up_to_date(queue, count - len(claimed))
            queue.check()
            expired = queue.state.expired
            held = queue.state.claim(
                count - len(claimed), lease_ms=lease_ms, consumer=consumer, now=now
            )
            if not held and queue.state.expired == expired:
                break
            claimed += held
            moments += bool(held)
            self._note_attempts(held, consumer, now)
            queue.changed()
            if not held:  # no caller waits for it, but expiry can be seen
                self._committer.commit()
        if moments > 1:
            claimed[:] = in_order(claimed)

    async def bring_up_to_date(self, queue: StoredQueue, count: int) -> int:
        """Take back leases that are over, admit what is due, refill the window.

        Returns the time at which ``count`` messages are ready to be claimed; it has to be claimed
        at that very time, without awaiting: a moment later others would be the first ones.
        """
        state = queue.state
        await self._due.catch_up_with_time(queue)
        # Others may claim during each of these; what counts is how it is when nothing was awaited.
        while True:
            queue.check()
            now = self._clock.now_ms()
            unknown = self._ledger.unknown(state.ready.first_ids(count, now))
            if state.ready.wants_refill_for(count):
                if not (queue.front_may_be_taken and self._refills.from_front(queue)):
                    await self._refills.refill(queue)
            elif unknown:
                await self._ledger.learn(unknown)
            else:
                return now

    def _note_attempts(self, held: Sequence[Held], consumer: str, now: int) -> None:
        rows = self._committer.rows
        for_ever = [one.message_id for one in held if not one.retention_deadline]
        self._ledger.claim(for_ever, consumer, rows)
        if len(for_ever) == len(held):
            return
        for one in held:
            if one.retention_deadline:
                ttl_ms = one.retention_deadline - now + self._ttl_grace_ms + 1
                self._ledger.claim([one.message_id], consumer, rows, ttl_ms=ttl_ms)

    async def ack(self, name: str, claims: Sequence[Claim | Held]) -> list[Outcome]:
        queue = self._registry.queue(name)
        await self._commits.room_for(queue)
        outcomes = queue.state.ack(claims, self._clock.now_ms())
        # Each makes room in flight, also while those who were woken before have not claimed yet.
        return await self._commits.settle(queue, outcomes, wake=True)

    async def drop_gone(self, name: str, claims: Sequence[Claim]) -> None:
        """Drop claimed messages that the store does not have any more."""
        queue = self._registry.queue(name)
        await self._commits.room_for(queue)
        dropped = queue.state.drop_gone(claims, self._clock.now_ms())
        await self._commits.settle(queue, [True] * dropped, wake=True)

    async def nack(
        self, name: str, claims: Sequence[Claim | Held], *, error: str, delay_ms: int | None
    ) -> list[Outcome]:
        queue = self._registry.queue(name)
        if delay_ms is not None:
            check_integer("delay_ms", delay_ms, 0, MAX_DELAY_MS)
        if not isinstance(error, str):
            raise InvalidInputError(f"error is a {type(error).__name__}, not text")
        await self._due.ready_to_give_back(queue)
        now = self._clock.now_ms()
        text = _cut(error, MAX_ERROR_BYTES)
        outcomes = [
            queue.state.nack(
                claim, now, error=text, delay_ms=delay_ms, chance=self._chance.random()
            )
            for claim in claims
        ]
        return await self._commits.settle(queue, outcomes, wake=True)

    async def release(self, name: str, claims: Sequence[Claim | Held]) -> list[Outcome]:
        queue = self._registry.queue(name)
        await self._due.ready_to_give_back(queue)
        now = self._clock.now_ms()
        outcomes = [queue.state.release(claim, now) for claim in claims]
        return await self._commits.settle(queue, outcomes, wake=True)

    async def extend(
        self, name: str, claims: Sequence[Claim | Held], *, lease_ms: int | None
    ) -> list[int | None]:
        """The new deadlines, none for a claim that is not valid any more."""
        queue = self._registry.queue(name)
        lease = _checked_lease(queue.options, lease_ms)
        await self._commits.room_for(queue)
        now = self._clock.now_ms()
        deadlines = [queue.state.extend(claim, now, lease_ms=lease) for claim in claims]
        await self._commits.settle(queue, [one is not None for one in deadlines], wake=False)
        return deadlines


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
