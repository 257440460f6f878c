"""What a system of queues offers, wherever it runs: in this process or behind a broker.

Each operation is declared here once, with a docstring and no body: see ``operation``.

One module because it is one class, whose docstrings are the reference of all operations.
"""

# mypy: disable-error-code="empty-body"
# ruff: noqa: B027

from __future__ import annotations

import asyncio
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from opendata_queue.api.consumers import AsyncConsumer
from opendata_queue.api.operation import Operation, operation, operations_of
from opendata_queue.api.workers import (
    STOP_TIMEOUT_MS,
    AsyncWorker,
    Handler,
    first_signal,
    run_workers,
)
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

logger = logging.getLogger(__name__)


class AsyncSystem(ABC):
    """Publish messages, and consume them from queues.

    Nothing is acknowledged before it is durable in the store. Times are milliseconds; absolute
    ones count from the Unix epoch.

        async with await open_async("file:///var/lib/orders") as system:
            await system.create_queue("emails", filter="type = 'order.created'")
            await system.publish(b"…", headers={"type": "order.created"})
            for message in await system.claim("emails", 10, wait_ms=1_000):
                await system.ack("emails", message)
    """

    consumer_id: str
    """How this process is called in attempts, unless a claim says otherwise."""

    def __init__(self) -> None:
        self._consumers: weakref.WeakSet[AsyncConsumer] = weakref.WeakSet()
        self.workers: list[AsyncWorker] = []
        """Those that ``run_workers`` runs."""

    async def _perform(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Do an operation, or refuse it, for which the system has no method of its own."""
        raise NotImplementedError(f"{type(self).__name__} has no {operation.name}")

    # --- publishing and reading -------------------------------------------------------------------

    async def publish(
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
    ) -> int:
        """Publish one message; returns its id when it is durable. See ``NewMessage``."""
        message = NewMessage(
            payload,
            payload_uri=payload_uri,
            headers={} if headers is None else headers,
            delay_ms=delay_ms,
            visible_at_ms=visible_at_ms,
            created_at_ms=created_at_ms,
            retention_seconds=retention_seconds,
            idempotency_key=idempotency_key,
        )
        (message_id,) = await self.publish_many([message])
        return message_id

    @operation(
        name="publish",
        action="publish",
        summary="Publish messages, all of them or none",
        answer="message_ids",
        repeatable=False,
    )
    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        """Publish messages, all of them or none; returns their ids when they are durable."""

    async def read(self, message_id: int) -> StoredMessage | None:
        """A message by its id; none if there is no such message."""
        (message,) = await self.read_many([message_id])
        return message

    @operation(
        name="read",
        action="view",
        summary="Messages by their ids",
        answer="messages",
        gives_much=True,
    )
    async def read_many(self, message_ids: Iterable[int]) -> list[StoredMessage | None]:
        """Messages by their ids, in their order; none for an id that has none."""

    # --- queues -----------------------------------------------------------------------------------

    @operation(
        action="admin",
        summary="Make a queue of the messages that satisfy a filter",
        doing="create a queue",
    )
    async def create_queue(
        self,
        name: str,
        *,
        filter: str = "",
        options: QueueOptions | None = None,
        start: Start = "now",
    ) -> QueueInfo:
        """Make a queue of the messages that satisfy ``filter``.

        It holds those that are published from now on; with ``start="beginning"`` also all that
        were published before, and with a time (in ms since the epoch) those of them that were
        received then or later. These are brought in the background, oldest first, while the queue
        is used already; ``stats`` says how much is left.
        """

    @operation(action="admin", summary="Change a queue's filter or options", doing="change a queue")
    async def update_queue(
        self, name: str, *, filter: str | None = None, **options: Any
    ) -> QueueInfo:
        """Change a queue's filter, or any of its options by its name.

        A new filter counts for messages that are published from now on, and for what bulk jobs and
        a replay of the log still bring.
        """

    async def pause_queue(self, name: str) -> QueueInfo:
        """Let claims get nothing until the queue is resumed; messages still come in."""
        return await self.update_queue(name, paused=True)

    async def resume_queue(self, name: str) -> QueueInfo:
        """Let claims get messages again."""
        return await self.update_queue(name, paused=False)

    @operation(
        action="admin",
        summary="Drop the messages that wait",
        doing="purge a queue",
        answer="count",
        repeatable=False,
    )
    async def purge_queue(self, name: str) -> int:
        """Drop the messages that wait, available and delayed; returns how many.

        What is in flight, done or failed stays, and so does what is published after the call.
        A message that is given back while it goes on may be dropped too. If it is interrupted,
        what was dropped until then is gone, and the rest is still there.
        """

    @operation(
        action="admin", summary="Delete a queue and all that it holds", doing="delete a queue"
    )
    async def delete_queue(self, name: str) -> None:
        """Delete a queue and all that it holds; returns when nothing is left of it.

        From the call on there is no such queue: consumers that wait get ``QueueNotFoundError``.
        Until it returns the name can't be used for another one. If it is interrupted, it goes on
        in the background, after a crash at the next open; calling it again waits for the end.
        """

    @operation(action="view", summary="How a queue is configured")
    async def get_queue(self, name: str) -> QueueInfo:
        """How a queue is configured; ``QueueNotFoundError`` if there is none of that name."""

    @operation(action="view", summary="The names of queues, by pages", gives_much=True)
    async def list_queues(
        self, *, prefix: str = "", after: str = "", limit: int | None = None
    ) -> list[str]:
        """The names of all queues, sorted; or of those whose names begin with ``prefix``.

        With ``limit`` no more than so many of them; ``after`` is the last name of the page before.
        """

    @operation(action="view", summary="How many messages of a queue are where")
    async def stats(self, name: str) -> QueueStats:
        """How many messages of a queue are where, without counting; a read or two at most."""

    # --- what queues hold -------------------------------------------------------------------------

    @operation(
        action="view",
        summary="The next messages, without claiming them",
        answer="messages",
        gives_much=True,
    )
    async def peek(self, name: str, count: int = 1) -> list[PeekedMessage]:
        """The next messages in the order of claiming, up to 1,000, without claiming them.

        A queue that is paused shows them too. Those of several publishers take turns when they are
        claimed; here they are in the order of their ids.
        """

    @operation(
        action="view",
        summary="The messages of a queue that are in one state, by pages",
        gives_much=True,
    )
    async def browse(
        self, name: str, state: BrowsedState, *, after: str | None = None, limit: int = 100
    ) -> QueuePage:
        """The messages of a queue that are in one state, a page of up to 1,000 at a time.

        ``after`` is the ``next`` of the page before. The order is: of available ones that of
        claiming; of delayed ones by the time they are due; of those in flight and failed by
        ascending id; of done ones the latest first.

        A page shows how it was in one moment of the call. Between pages the queue goes on: an
        entry that stays where it is, is seen once; one that comes or moves may be missed if its
        new place is before ``after``, and one that moves behind it is seen again.
        """

    @operation(
        action="view",
        summary="The messages of a queue in one state that satisfy a filter, by pages",
        gives_much=True,
    )
    async def find(
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

    @operation(
        action="view",
        summary="Where a message is in every queue",
        answer="history",
        gives_much=True,
    )
    async def history(self, message_id: int) -> MessageHistory | None:
        """Where a message is in every queue, and who has claimed it; none if it is not there.

        It searches up to 256 queues: first those whose filter the message satisfies now, then
        others, whose filter was another one when it came. In those it is found if it is in flight,
        failed, among the next ones to be claimed or the last ones done. A queue that the message
        has left without a trace, expired or purged, or has never been in, does not appear. The
        state is ``unknown`` where it may be in a part that would take too long to search: a retry
        behind the first 1,000 delayed messages, or a message that was done after 64 full buckets
        of others since it was received.
        """

    # --- consuming --------------------------------------------------------------------------------

    @operation(
        action="consume",
        summary="Take messages under a lease, and wait for some",
        answer="messages",
        repeatable=False,
        gives_much=True,
    )
    async def claim(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str | None = None,
        lease_ms: int | None = None,
        wait_ms: int = 0,
    ) -> list[ClaimedMessage]:
        """Up to ``count`` messages, best priority first, then the oldest.

        They are yours for ``lease_ms``; after that other consumers get them. With ``wait_ms`` it
        waits so long for the first one. A call that is cancelled gives back what it has taken.
        """

    async def _claim_in_loop(
        self, name: str, count: int, *, consumer: str | None, lease_ms: int | None, wait_ms: int
    ) -> list[ClaimedMessage]:
        """As ``claim``, for loops that call it again if its outcome is unknown.

        What such a call has claimed comes back when its leases end.
        """
        return await self.claim(name, count, consumer=consumer, lease_ms=lease_ms, wait_ms=wait_ms)

    @operation(action="consume", summary="Finish messages", answer="outcomes")
    async def ack(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        """Finish messages; ``lease_lost`` for those that are not yours any more."""

    @operation(
        action="consume",
        summary="Report failure: the messages come back, or fail",
        answer="outcomes",
    )
    async def nack(
        self,
        name: str,
        *receipts: str | ClaimedMessage,
        error: str = "",
        delay_ms: int | None = None,
    ) -> list[Outcome]:
        """Report failure: the messages come back after a back-off, or ``delay_ms``.

        Those without attempts left are moved to the failed ones.
        """

    @operation(action="consume", summary="Give messages back, uncounted", answer="outcomes")
    async def release(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        """Give messages back at once, as if they had not been claimed."""

    @operation(
        action="consume",
        summary="Hold messages for longer",
        doing="extend a lease",
        answer="lease_deadlines_ms",
    )
    async def extend(
        self, name: str, *receipts: str | ClaimedMessage, lease_ms: int | None = None
    ) -> list[int | None]:
        """Hold messages for longer, from now on; their new deadlines, none for lost ones."""

    # --- loops and workers ------------------------------------------------------------------------

    def consumer(
        self,
        name: str,
        *,
        batch: int = 10,
        lease_ms: int | None = None,
        wait_ms: int = 10_000,
        consumer: str | None = None,
        limit: int | None = None,
        idle_ms: int | None = None,
    ) -> AsyncConsumer:
        """A loop over the messages of a queue: acked one by one, nacked on an exception.

        It claims up to ``batch`` messages at a time; with a batch of 1, each one is acked durably
        before the next one is claimed. The loop ends after ``limit`` messages, or when none has
        come for ``idle_ms``; without these it goes on for ever.
        """
        made = AsyncConsumer(
            self,
            name,
            batch=batch,
            lease_ms=lease_ms,
            wait_ms=wait_ms,
            consumer=consumer,
            limit=limit,
            idle_ms=idle_ms,
        )
        self._consumers.add(made)
        return made

    def worker(
        self,
        name: str,
        *,
        concurrency: int = 1,
        prefetch: int = 0,
        lease_ms: int | None = None,
        wait_ms: int = 10_000,
        consumer: str | None = None,
    ) -> Callable[[Handler], AsyncWorker]:
        """Make a handler of a queue's messages, plain or ``async``, into a worker.

        Start it with ``start``, or all of them with ``run_workers``. See ``AsyncWorker``.
        """

        def decorate(handler: Handler) -> AsyncWorker:
            made = AsyncWorker(
                self,
                name,
                handler,
                concurrency=concurrency,
                prefetch=prefetch,
                lease_ms=lease_ms,
                wait_ms=wait_ms,
                consumer=consumer,
            )
            self.workers.append(made)
            return made

        return decorate

    async def run_workers(self, *, stop_timeout_ms: int | None = STOP_TIMEOUT_MS) -> None:
        """Run all workers until SIGINT or SIGTERM, then stop them; raises what made one fail.

        Signals are only seen from the main thread. It also returns when all workers are stopped.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        with first_signal(lambda: loop.call_soon_threadsafe(stop.set)):
            await run_workers(self.workers, stop, stop_timeout_ms=stop_timeout_ms)

    async def _let_go(self) -> None:
        """Stop workers and loops while what they hold can still be settled."""
        holders: list[AsyncWorker | AsyncConsumer] = [*self.workers, *self._consumers]
        closing = (holder.close() for holder in holders)
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if error is not None:
                logger.error("could not stop what still used the system", exc_info=error)

    # --- failed messages --------------------------------------------------------------------------

    @operation(action="view", summary="Messages that were given up", gives_much=True)
    async def failed(
        self, name: str, *, filter: str | None = None, after_id: int = -1, limit: int = 100
    ) -> list[FailedMessage]:
        """Messages that were given up, by ascending id, from behind ``after_id`` on.

        With ``filter`` those whose headers satisfy it; then it searches all failed ones, in
        batches, until it has found ``limit``. Fewer than ``limit``, which is at most 1,000, are
        the last ones.
        """

    @operation(
        action="admin",
        summary="Make failed messages available again",
        doing="replay failed messages",
        answer="message_ids",
        repeatable=False,
    )
    async def replay(
        self,
        name: str,
        *message_ids: int,
        all: bool = False,
        filter: str | None = None,
        limit: int = 10_000,
    ) -> list[int]:
        """Make failed messages available again, with all their attempts; returns their ids.

        Say which: by their ids, ``all`` of them, or those that satisfy ``filter``; of the last
        two up to ``limit``, so call it again until nothing is returned. They are moved some
        hundred at a time, each time durably. Ids that are not failed are passed over. Messages
        whose retention is over are dropped and counted as expired; they are not returned.
        """

    @operation(
        action="admin",
        summary="Forget failed messages",
        doing="purge failed messages",
        answer="message_ids",
        repeatable=False,
    )
    async def purge_failed(
        self,
        name: str,
        *message_ids: int,
        all: bool = False,
        filter: str | None = None,
        limit: int = 10_000,
    ) -> list[int]:
        """Forget failed messages; returns their ids. Say which as with ``replay``."""

    # --- closing ----------------------------------------------------------------------------------

    @abstractmethod
    async def close(self) -> None:
        """Stop workers, make durable what is under way, and let go. Closing twice does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


OPERATIONS: Final = operations_of(AsyncSystem)
"""By the names under which brokers offer them."""
