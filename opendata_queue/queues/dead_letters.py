"""Failed messages that are made available again, or forgotten.

A failed message has a row of its own, and an entry in the open bucket or in a sealed one (RFC
0006); all of them go together, in one commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from odq_encodings import Failure
from opendata_queue.model.errors import MessageExpiredError
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.rows.indexes import Indexes
from opendata_queue.queues.store import QueueStore

FAILED_AT_ONCE: Final = 200
"""How many a batch has. It is one step on the event loop, since buckets must not be sealed between
the read and the commit: some 4 ms."""

Choice = Callable[[Sequence[int]], Awaitable[Sequence[int]]]
"""Says which ones of some messages are meant."""


class DeadLetters:
    """The failed messages of all queues."""

    def __init__(self, store: QueueStore) -> None:
        self._store = store

    async def finish(self, name: str, ids: Iterable[int], *, again: bool) -> list[int]:
        """Replay failed messages (``again``) or forget them; those that this was done to."""
        queue = self._store.queue(name)
        wanted = list(dict.fromkeys(ids))
        if again:
            await self._refuse_expired(queue, wanted)
        finished: list[int] = []
        for start in range(0, len(wanted), FAILED_AT_ONCE):
            some = wanted[start : start + FAILED_AT_ONCE]
            finished += await self._finish(queue, some, again=again)
        return finished

    async def _refuse_expired(self, queue: StoredQueue, ids: Sequence[int]) -> None:
        """Refuse ids of messages that can't come back, before anything is done."""
        await self._store.all_durable()
        now = self._store.clock.now_ms()
        for start in range(0, len(ids), FAILED_AT_ONCE):
            some = ids[start : start + FAILED_AT_ONCE]
            failed = await queue.finished.failures_of(some, since=queue.options.failed_since(now))
            for message_id, failure in failed.items():
                if 0 < failure.retention_deadline < now:
                    raise MessageExpiredError(
                        f"message {message_id} of queue {queue.name!r} can't be replayed: its "
                        f"retention ended {now - failure.retention_deadline} ms ago, and its "
                        "payload is gone; purge it"
                    )

    async def finish_chosen(
        self, name: str, chosen: Choice, *, again: bool, limit: int
    ) -> list[int]:
        """The same with up to ``limit`` messages, by ascending id, of which ``chosen`` says so."""
        queue = self._store.queue(name)
        finished: list[int] = []
        after_id = -1
        while len(finished) < limit:
            failures = await self._store.failures(name, after_id=after_id, limit=FAILED_AT_ONCE)
            if not failures:
                break
            # What fails again meanwhile is not met again: this ends.
            after_id = failures[-1][0]
            some = (await chosen([one for one, _ in failures]))[: limit - len(finished)]
            finished += await self._finish(queue, some, again=again)
        return finished

    async def _finish(self, queue: StoredQueue, ids: Sequence[int], *, again: bool) -> list[int]:
        """One batch of them, in one commit."""
        committer = self._store.committer
        finished = []
        # Held until the commit is durable: the next holder must see that they are gone.
        async with queue.reading() as indexes:
            failed, buckets = await self._read(queue, indexes, ids)
            now = self._store.clock.now_ms()
            for message_id, failure in failed.items():
                if again:
                    was_open = queue.state.replay(message_id, failure, now)
                else:
                    was_open = queue.state.forget_failed(message_id)
                if not was_open:
                    buckets[failure.bucket].pop(message_id)
                if not again or not 0 < failure.retention_deadline < now:
                    finished.append(message_id)
            for bucket, entries in buckets.items():
                indexes.rewrite_failed(bucket, entries)
            if failed:
                queue.changed()
                done = committer.commit()
                queue.waiters.wake()
                await committer.wait(done)
        return finished

    async def _read(
        self, queue: StoredQueue, indexes: Indexes, ids: Sequence[int]
    ) -> tuple[dict[int, Failure], dict[int, dict[int, bytes]]]:
        """Those ids that have failed, in their order, and the sealed buckets that they are in.

        A bucket can be sealed while we read; then it is read again.
        """
        while True:
            # Reads see what is durable: first let everything become that.
            await self._store.all_durable()
            since = queue.options.failed_since(self._store.clock.now_ms())
            found = await queue.finished.failures_of(ids, since=since)
            failed = {one: found[one] for one in ids if one in found}
            buckets = await indexes.sealed_failed({f.bucket for f in failed.values()})
            await self._store.room_for(queue)
            if all(
                queue.state.finished.failed_open(one) or one in buckets.get(failure.bucket, {})
                for one, failure in failed.items()
            ):
                return failed, buckets
