"""The operations of ``AsyncSystem`` for code that blocks. See ``sync``.

Made from the declarations by ``tools/make_sync.py``: change those, and run it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opendata_queue.api.system import AsyncSystem
from opendata_queue.model.messages import ClaimedMessage, NewMessage, PeekedMessage, StoredMessage
from opendata_queue.model.options import QueueOptions
from opendata_queue.model.values import (
    BrowsedState,
    FailedMessage,
    FoundPage,
    MessageHistory,
    Outcome,
    QueueInfo,
    QueuePage,
    QueueStats,
    Start,
)
from opendata_queue.runtime.loop_thread import LoopThread


class SyncOperations:
    """Every call waits for an event loop in another thread, for ``timeout_ms`` at most."""

    _system: AsyncSystem
    _thread: LoopThread

    # --- publishing and reading -------------------------------------------------------------------

    def publish(
        self,
        payload: bytes | None = None,
        *,
        payload_uri: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay_ms: int | None = None,
        visible_at_ms: int | None = None,
        created_at_ms: int | None = None,
        retention_seconds: int = 0,
        idempotency_key: str | None = None,
        timeout_ms: int | None = None,
    ) -> int:
        """Publish one message; returns its id when it is durable. See ``NewMessage``."""
        calling = self._system.publish(
            payload,
            payload_uri=payload_uri,
            headers=headers,
            delay_ms=delay_ms,
            visible_at_ms=visible_at_ms,
            created_at_ms=created_at_ms,
            retention_seconds=retention_seconds,
            idempotency_key=idempotency_key,
        )
        return self._thread.call(calling, timeout_ms)

    def publish_many(
        self,
        messages: Sequence[NewMessage],
        *,
        timeout_ms: int | None = None,
    ) -> list[int]:
        """Publish messages, all of them or none; returns their ids when they are durable."""
        return self._thread.call(self._system.publish_many(messages), timeout_ms)

    def read(self, message_id: int, *, timeout_ms: int | None = None) -> StoredMessage | None:
        """A message by its id; none if there is no such message."""
        return self._thread.call(self._system.read(message_id), timeout_ms)

    def read_many(
        self,
        message_ids: Iterable[int],
        *,
        timeout_ms: int | None = None,
    ) -> list[StoredMessage | None]:
        """Messages by their ids, in their order; none for an id that has none."""
        return self._thread.call(self._system.read_many(message_ids), timeout_ms)

    # --- queues -----------------------------------------------------------------------------------

    def create_queue(
        self,
        name: str,
        *,
        filter: str = "",
        options: QueueOptions | None = None,
        start: Start = "now",
        timeout_ms: int | None = None,
    ) -> QueueInfo:
        """Make a queue of the messages that satisfy ``filter``.

        It holds those that are published from now on; with ``start="beginning"`` also all that
        were published before, and with a time (in ms since the epoch) those of them that were
        received then or later. These are brought in the background, oldest first, while the queue
        is used already; ``stats`` says how much is left.
        """
        calling = self._system.create_queue(name, filter=filter, options=options, start=start)
        return self._thread.call(calling, timeout_ms)

    def update_queue(
        self,
        name: str,
        *,
        filter: str | None = None,
        timeout_ms: int | None = None,
        **options: Any,
    ) -> QueueInfo:
        """Change a queue's filter, or any of its options by its name.

        A new filter counts for messages that are published from now on, and for what bulk jobs and
        a replay of the log still bring.
        """
        calling = self._system.update_queue(name, filter=filter, **options)
        return self._thread.call(calling, timeout_ms)

    def pause_queue(self, name: str, *, timeout_ms: int | None = None) -> QueueInfo:
        """Let claims get nothing until the queue is resumed; messages still come in."""
        return self._thread.call(self._system.pause_queue(name), timeout_ms)

    def resume_queue(self, name: str, *, timeout_ms: int | None = None) -> QueueInfo:
        """Let claims get messages again."""
        return self._thread.call(self._system.resume_queue(name), timeout_ms)

    def purge_queue(self, name: str, *, timeout_ms: int | None = None) -> int:
        """Drop the messages that wait, available and delayed; returns how many.

        What is in flight, done or failed stays, and so does what is published after the call.
        A message that is given back while it goes on may be dropped too. If it is interrupted,
        what was dropped until then is gone, and the rest is still there.
        """
        return self._thread.call(self._system.purge_queue(name), timeout_ms)

    def delete_queue(self, name: str, *, timeout_ms: int | None = None) -> None:
        """Delete a queue and all that it holds; returns when nothing is left of it.

        From the call on there is no such queue: consumers that wait get ``QueueNotFoundError``.
        Until it returns the name can't be used for another one. If it is interrupted, it goes on
        in the background, after a crash at the next open; calling it again waits for the end.
        """
        self._thread.call(self._system.delete_queue(name), timeout_ms)

    def get_queue(self, name: str, *, timeout_ms: int | None = None) -> QueueInfo:
        """How a queue is configured; ``QueueNotFoundError`` if there is none of that name."""
        return self._thread.call(self._system.get_queue(name), timeout_ms)

    def list_queues(
        self,
        *,
        prefix: str = "",
        after: str = "",
        limit: int | None = None,
        timeout_ms: int | None = None,
    ) -> list[str]:
        """The names of all queues, sorted; or of those whose names begin with ``prefix``.

        With ``limit`` no more than so many of them; ``after`` is the last name of the page before.
        """
        calling = self._system.list_queues(prefix=prefix, after=after, limit=limit)
        return self._thread.call(calling, timeout_ms)

    def stats(self, name: str, *, timeout_ms: int | None = None) -> QueueStats:
        """How many messages of a queue are where, without counting; a read or two at most."""
        return self._thread.call(self._system.stats(name), timeout_ms)

    # --- what queues hold -------------------------------------------------------------------------

    def peek(
        self,
        name: str,
        count: int = 1,
        *,
        timeout_ms: int | None = None,
    ) -> list[PeekedMessage]:
        """The next messages in the order of claiming, up to 1,000, without claiming them.

        A queue that is paused shows them too. Those of several publishers take turns when they are
        claimed; here they are in the order of their ids.
        """
        return self._thread.call(self._system.peek(name, count), timeout_ms)

    def browse(
        self,
        name: str,
        state: BrowsedState,
        *,
        after: str | None = None,
        limit: int = 100,
        timeout_ms: int | None = None,
    ) -> QueuePage:
        """The messages of a queue that are in one state, a page of up to 1,000 at a time.

        ``after`` is the ``next`` of the page before. The order is: of available ones that of
        claiming; of delayed ones by the time they are due; of those in flight and failed by
        ascending id; of done ones the latest first.

        A page shows how it was in one moment of the call. Between pages the queue goes on: an
        entry that stays where it is, is seen once; one that comes or moves may be missed if its
        new place is before ``after``, and one that moves behind it is seen again.
        """
        calling = self._system.browse(name, state, after=after, limit=limit)
        return self._thread.call(calling, timeout_ms)

    def find(
        self,
        name: str,
        state: BrowsedState,
        *,
        filter: str | None = None,
        error: str | None = None,
        consumer: str | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        after: str | None = None,
        limit: int = 100,
        timeout_ms: int | None = None,
    ) -> FoundPage:
        """The messages of a queue in one state that satisfy all conditions that are given.

        ``filter`` is about headers, ``error`` is a part of the error text of failed ones, and
        ``consumer`` is who has them in flight or failed with them. From ``since_ms`` on and before
        ``until_ms`` is the time since or from when they can be claimed (available, delayed), when
        they were claimed (in flight), or when they were finished (done, failed).

        A page examines up to 2,000 messages, in the order of ``browse``, and has up to ``limit`` of
        them, 1,000 at most. So it may have few or none though there are more: go on with its
        ``next`` as ``after`` until that is none.
        """
        calling = self._system.find(
            name,
            state,
            filter=filter,
            error=error,
            consumer=consumer,
            since_ms=since_ms,
            until_ms=until_ms,
            after=after,
            limit=limit,
        )
        return self._thread.call(calling, timeout_ms)

    def history(self, message_id: int, *, timeout_ms: int | None = None) -> MessageHistory | None:
        """Where a message is in every queue, and who has claimed it; none if it is not there.

        It searches up to 256 queues: first those whose filter the message satisfies now, then
        others, whose filter was another one when it came. In those it is found if it is in flight,
        failed, among the next ones to be claimed or the last ones done. A queue that the message
        has left without a trace, expired or purged, or has never been in, does not appear. The
        state is ``unknown`` where it may be in a part that would take too long to search: a retry
        behind the first 1,000 delayed messages, or a message that was done after 64 full buckets
        of others since it was received.
        """
        return self._thread.call(self._system.history(message_id), timeout_ms)

    # --- consuming --------------------------------------------------------------------------------

    def claim(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str | None = None,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        timeout_ms: int | None = None,
    ) -> list[ClaimedMessage]:
        """Up to ``count`` messages, best priority first, then the oldest.

        They are yours for ``lease_ms``; after that other consumers get them. With ``wait_ms`` it
        waits so long for the first one. A call that times out gives back what it has taken.
        """
        calling = self._system.claim(
            name,
            count,
            consumer=consumer,
            lease_ms=lease_ms,
            wait_ms=wait_ms,
        )
        return self._thread.call(calling, timeout_ms)

    def ack(
        self,
        name: str,
        *receipts: str | ClaimedMessage,
        timeout_ms: int | None = None,
    ) -> list[Outcome]:
        """Finish messages; ``lease_lost`` for those that are not yours any more."""
        return self._thread.call(self._system.ack(name, *receipts), timeout_ms)

    def nack(
        self,
        name: str,
        *receipts: str | ClaimedMessage,
        error: str = "",
        delay_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> list[Outcome]:
        """Report failure: the messages come back after a back-off, or ``delay_ms``.

        Those without attempts left are moved to the failed ones.
        """
        calling = self._system.nack(name, *receipts, error=error, delay_ms=delay_ms)
        return self._thread.call(calling, timeout_ms)

    def release(
        self,
        name: str,
        *receipts: str | ClaimedMessage,
        timeout_ms: int | None = None,
    ) -> list[Outcome]:
        """Give messages back at once, as if they had not been claimed."""
        return self._thread.call(self._system.release(name, *receipts), timeout_ms)

    def extend(
        self,
        name: str,
        *receipts: str | ClaimedMessage,
        lease_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> list[int | None]:
        """Hold messages for longer, from now on; their new deadlines, none for lost ones."""
        calling = self._system.extend(name, *receipts, lease_ms=lease_ms)
        return self._thread.call(calling, timeout_ms)

    # --- failed messages --------------------------------------------------------------------------

    def failed(
        self,
        name: str,
        *,
        filter: str | None = None,
        after_id: int = -1,
        limit: int = 100,
        timeout_ms: int | None = None,
    ) -> list[FailedMessage]:
        """Messages that were given up, by ascending id, from behind ``after_id`` on.

        With ``filter`` those whose headers satisfy it; then it searches all failed ones, in
        batches, until it has found ``limit``. Fewer than ``limit``, which is at most 1,000, are
        the last ones.
        """
        calling = self._system.failed(name, filter=filter, after_id=after_id, limit=limit)
        return self._thread.call(calling, timeout_ms)

    def replay(
        self,
        name: str,
        *message_ids: int,
        all: bool = False,
        filter: str | None = None,
        limit: int = 10_000,
        timeout_ms: int | None = None,
    ) -> list[int]:
        """Make failed messages available again, with all their attempts; returns their ids.

        Say which: by their ids, ``all`` of them, or those that satisfy ``filter``; of the last
        two up to ``limit``, so call it again until nothing is returned. They are moved some
        hundred at a time, each time durably. Ids that are not failed are passed over. Messages
        whose retention is over are dropped and counted as expired; they are not returned.
        """
        calling = self._system.replay(name, *message_ids, all=all, filter=filter, limit=limit)
        return self._thread.call(calling, timeout_ms)

    def purge_failed(
        self,
        name: str,
        *message_ids: int,
        all: bool = False,
        filter: str | None = None,
        limit: int = 10_000,
        timeout_ms: int | None = None,
    ) -> list[int]:
        """Forget failed messages; returns their ids. Say which as with ``replay``."""
        calling = self._system.purge_failed(name, *message_ids, all=all, filter=filter, limit=limit)
        return self._thread.call(calling, timeout_ms)
