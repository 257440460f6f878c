"""What happens to queues as a whole: they come and go, with the process that serves them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from odq_compactor import RetentionCompactor, set_delete_when_done
from opendata_queue import (
    NewMessage,
    QueueExistsError,
    QueueNotFoundError,
    QueueOptions,
    Start,
)
from tests.queues.queue_model import (
    LEASE_MS,
    QueueModel,
    batches,
    filters,
    option_changes,
    queue_options,
)
from tests.queues.queues_machine import COMPACTOR, QueuesMachine, losses, queue_numbers

starts = st.sampled_from(["now", "beginning", 0, 1, 60, 2_000])
"""Where a queue begins: a number is how long ago that is."""

NAMES = {"q/0", "q/1", "q/2"}


class AdminRules(QueuesMachine):
    """Queues are made, changed, emptied and deleted; messages come in, and time passes."""

    # --- queues -----------------------------------------------------------------------------------

    @initialize(
        filters=st.lists(filters, min_size=2, max_size=2),
        options=st.lists(queue_options, min_size=2, max_size=2),
    )
    def begin(self, filters: list[str], options: list[QueueOptions]) -> None:
        self.open()
        for filter, some in zip(filters, options, strict=True):
            self.create_queue(filter, some, "now", None, [])

    @precondition(lambda self: len(self.queues) < len(NAMES))
    @rule(
        filter=filters,
        options=queue_options,
        start=starts,
        lost_after=st.none() | st.integers(0, 4),
        meanwhile=st.lists(batches, max_size=2),
    )
    def create_queue(
        self,
        filter: str,
        options: QueueOptions,
        start: Any,
        lost_after: int | None,
        meanwhile: list[list[NewMessage]],
    ) -> None:
        """Messages are published while the log is replayed.

        Perhaps the memory is lost when it has been replayed for some batches.
        """
        self.let_the_clock_come_up()
        name = min(NAMES - {queue.name for queue in self.queues})
        begin: Start = self.now - start if isinstance(start, int) else start
        info = self.run(self.system.create_queue(name, filter=filter, options=options, start=begin))
        model = QueueModel(name, filter, options, info.created_at_ms)
        model.receipts = self.void_receipts.pop(name, [])
        for message_id, received in self.received.items():
            in_time = begin == "beginning" or (isinstance(begin, int) and received >= begin)
            if in_time and message_id not in self.gone:
                self.comes_in(model, message_id)
        self.queues.append(model)
        more = [self.with_payloads(batch) for batch in meanwhile]
        published: list[list[int]] = []

        async def replay_and_publish() -> None:
            publishing = [asyncio.create_task(self.system.publish_many(batch)) for batch in more]
            try:
                await self.system._replay.finished()
            finally:
                published.extend([await one for one in publishing])

        if lost_after is None:
            self.run(replay_and_publish())
        else:
            self.run(self.lose_memory_in(lost_after, replay_and_publish()))
        for batch, ids in zip(more, published, strict=True):
            self.learn(batch, ids)

    @rule(
        number=queue_numbers,
        filter=st.none() | filters,
        changes=option_changes,
        before=st.lists(batches, max_size=1),
    )
    def update_queue(
        self,
        number: int,
        filter: str | None,
        changes: dict[str, Any],
        before: list[list[NewMessage]],
    ) -> None:
        """The filter counts for what is published from now on, the options for all there is."""
        queue = self.queue(number)
        for batch in before:  # it need not be routed yet
            self.publish_somewhere(batch)
        info = self.run(self.system.update_queue(queue.name, filter=filter, **changes))
        if filter is not None:
            queue.filter = filter
        queue.options = queue.options.with_changes(changes)
        assert (info.filter, info.options.window) == (queue.filter, queue.options.window)

    @rule(number=queue_numbers)
    def pause_or_resume(self, number: int) -> None:
        queue = self.queue(number)
        queue.paused = not queue.paused
        call = self.system.pause_queue if queue.paused else self.system.resume_queue
        self.run(call(queue.name))

    @precondition(lambda self: len(self.queues) > 1)
    @rule(number=queue_numbers, lost_after=losses)
    def delete_queue(self, number: int, lost_after: int | None) -> None:
        self.delete(self.queue(number), lost_after)

    @rule(batch=batches, start=starts, filter=filters, options=queue_options, closing=st.booleans())
    def begin_again(
        self,
        batch: list[NewMessage],
        start: Any,
        filter: str,
        options: QueueOptions,
        closing: bool,
    ) -> None:
        """All queues go, messages are published to none, and then there is one again."""
        for queue in list(self.queues):
            self.delete(queue, None)
        self.publish(batch)
        self.take_over(closing)
        self.publish(batch)
        self.create_queue(filter, options, start, None, [])

    def delete(self, queue: QueueModel, lost_after: int | None) -> None:
        """Nothing is left, also when it was cut off."""
        self.let_the_clock_come_up()
        if queue.created_at == self.now:  # then its successor is later, by a mark
            self.time_passes(1, [0, 0, 0])
        if lost_after is None:
            self.run(self.system.delete_queue(queue.name))
        else:
            self.run(self.lose_memory_in(lost_after, self.system.delete_queue(queue.name)))
            if queue.name in self.run(self.system.list_queues()):
                return  # it was never said to be deleted
            self.run(self.wait_for_deletion(queue.name))
        self.queues.remove(queue)
        self.void_receipts[queue.name] = queue.receipts
        with pytest.raises(QueueNotFoundError):
            self.run(self.system.ack(queue.name, *queue.receipts[:1]))

    async def wait_for_deletion(self, name: str) -> None:
        if name in self.system._queues.admin.being_deleted:
            with pytest.raises(QueueExistsError):
                await self.system.create_queue(name)
            await self.system.delete_queue(name)

    @rule(number=queue_numbers, lost_after=losses)
    def purge_queue(self, number: int, lost_after: int | None) -> None:
        """What waits is gone; if it was cut off, a part of it, and the rest is as it was."""
        queue = self.queue(number)
        self.let_the_clock_come_up()
        self.run(self.caught_up())
        before = self.run(self.system.stats(queue.name))
        purge = self.system.purge_queue(queue.name)
        dropped: int | None
        if lost_after is None:
            dropped = self.run(purge)
        else:
            dropped = self.run(self.lose_memory_in(lost_after, purge))
        assert dropped in (None, before.available + before.delayed)
        rows = self.run(self.durable_rows())[queue.name]
        left = {m.message_id: m for m in (*rows.window(), *rows.backlog, *rows.schedule)}
        assert left.items() <= queue.waiting.items()
        assert not left or dropped is None
        queue.waiting = dict(left)
        queue.expired = before.expired

    # --- the process ------------------------------------------------------------------------------

    @rule(closing=st.booleans())
    def reopen(self, closing: bool) -> None:
        """Another owner; without ``closing`` the old one never got to close."""
        self.let_the_clock_come_up()
        before = [self.steady_stats(queue) for queue in self.queues]
        told = [self.run(self.system.get_queue(queue.name)) for queue in self.queues]
        self.take_over(closing)
        assert self.run(self.system.list_queues()) == sorted(queue.name for queue in self.queues)
        assert [self.run(self.system.get_queue(queue.name)) for queue in self.queues] == told
        self.run(self.caught_up())
        assert [self.steady_stats(queue) for queue in self.queues] == before
        for message_id in self.claims.keys() - self.gone:
            if not self.is_over(message_id):  # then its attempts may go before it does
                self.check_attempts(message_id)

    @rule(batch=batches, closing=st.booleans(), routing=st.booleans())
    def publish_and_reopen(self, batch: list[NewMessage], closing: bool, routing: bool) -> None:
        """What was published and perhaps not routed is routed by the next owner, once."""
        self.let_the_clock_come_up()
        if not routing:
            self.run(self.system._tailer.close())
        self.publish(batch)
        self.take_over(closing)

    # --- messages and time ------------------------------------------------------------------------

    @rule(batch=batches)
    def publish(self, batch: list[NewMessage]) -> None:
        batch = self.with_payloads(batch)
        self.learn(batch, self.run(self.system.publish_many(batch)))

    def publish_somewhere(self, batch: list[NewMessage]) -> None:
        self.publish(batch)

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

    # --- retention --------------------------------------------------------------------------------

    @rule(when_done=st.booleans(), lost_after=losses)
    def compact(self, when_done: bool, lost_after: int | None) -> None:
        """A pass removes what is past its time, or done with, and no more; also after a kill."""
        self.let_the_clock_come_up()
        for queue in self.queues:
            self.run(self.catch_up(queue))
        self.run(set_delete_when_done(self.system.stores.queues, when_done))
        if lost_after is not None:
            cut_off = RetentionCompactor(self.system, COMPACTOR).run_once(thorough=True)
            self.run(self.lose_memory_in(lost_after, cut_off))
        self.run(self.caught_up())
        self.run(self.passes())
        for queue in self.queues:
            queue.forget_finished(self.now)
        self.learn_gone(when_done)

    async def passes(self) -> None:
        await RetentionCompactor(self.system, COMPACTOR).run_once(thorough=True)

    async def ids_there(self) -> set[int]:
        """The messages that are in the log, expired or not."""
        there = await self.system._messages.metadata(self.published)
        shards = {one >> 32 for one in there}
        seen = {one for one in shards if await self.system._reading.is_visible(one)}
        return {one for one in there if one >> 32 in seen}

    def learn_gone(self, when_done: bool) -> None:
        gone = self.published.keys() - self.run(self.ids_there()) - self.gone
        may_go = {
            one
            for one in self.published
            if self.is_over(one)
            or (when_done and self.queues and not any(q.needs(one) for q in self.queues))
        }
        assert gone <= may_go
        assert {one for one in may_go - self.gone if one >> 32 == 0} <= gone
        self.gone |= gone
