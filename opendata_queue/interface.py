"""What a system of queues offers, wherever it runs: in this process or behind a broker."""

from __future__ import annotations

import asyncio
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from opendata_queue.consumers import AsyncConsumer
from opendata_queue.messages import ClaimedMessage, NewMessage, PeekedMessage, StoredMessage
from opendata_queue.queue_options import QueueOptions
from opendata_queue.workers import (
    STOP_TIMEOUT_MS,
    AsyncWorker,
    Handler,
    first_signal,
    run_workers,
)

logger = logging.getLogger(__name__)

Start = Literal["now", "beginning"] | int
"""Where a new queue begins: a time is in milliseconds since the Unix epoch."""

Outcome = Literal["ok", "lease_lost"]
"""What became of one receipt: it was valid, or the message is not yours any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueInfo:
    """What a queue was told."""

    name: str
    filter: str
    options: QueueOptions
    created_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStats:
    """How many messages of a queue are where.

    ``oldest_age_ms`` is for how long the available message with the smallest id has been there
    to be claimed: since it was received, or since its delay ended. Going through retries does
    not make it younger. It is none when nothing is available. In a queue with more than 32
    priorities behind its window it may be that of the second oldest.
    """

    available: int
    delayed: int
    in_flight: int
    done: int
    failed: int
    expired: int
    oldest_age_ms: int | None = None
    replaying: int = 0
    """How much of the log is still to be looked at, for a queue that begins in the past."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedMessage:
    """A message that was given up, and why.

    ``headers`` are none when the message itself is gone from the store, its retention over.
    """

    message_id: int
    failed_at_ms: int
    attempts: int
    priority: int
    consumer: str
    error: str
    headers: tuple[tuple[str, str], ...]


BrowsedState = Literal["available", "delayed", "in_flight", "done", "failed"]
"""Where a message of a queue can be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueEntry:
    """A message as one queue sees it. What its state does not have is none.

    | state | has |
    |---|---|
    | ``available``, ``delayed`` | ``visible_at_ms``: since or from when it can be claimed |
    | ``in_flight`` | ``claimed_at_ms``, ``lease_deadline_ms``, ``consumer`` |
    | ``done`` | ``finished_at_ms``; its priority is forgotten |
    | ``failed`` | ``finished_at_ms``, ``consumer`` (the last one), ``error`` |
    | ``unknown`` | nothing: it could not be found with bounded work (see ``history``) |

    ``attempts`` counts the claims in this queue. The consumer of a message in flight is not known
    any more after the root was opened anew. ``expires_at_ms`` is when its retention ends, where
    it ends and that is known; one that is over it is still counted until somebody comes across it.
    """

    queue: str
    message_id: int
    state: BrowsedState | Literal["unknown"]
    priority: int | None = None
    attempts: int | None = None
    visible_at_ms: int | None = None
    claimed_at_ms: int | None = None
    lease_deadline_ms: int | None = None
    consumer: str | None = None
    finished_at_ms: int | None = None
    error: str | None = None
    expires_at_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuePage:
    """Some entries of a queue, and what to give as ``after`` for those behind them."""

    entries: tuple[QueueEntry, ...]
    next: str | None
    """None on the last page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageHistory:
    """What is known of a message, over all queues. Its payload is had with ``read``."""

    message_id: int
    headers: tuple[tuple[str, str], ...]
    created_at_ms: int
    received_at_ms: int
    visible_at_ms: int
    retention_seconds: int
    consumers: tuple[str, ...]
    """Who has claimed it, in their order, whichever queue it was.

    To a token that is not for all namespaces a broker shows those alone who hold it, or have failed
    with it, in a queue of the token's."""
    entries: tuple[QueueEntry, ...]
    """Where it is in each queue that was found to hold it."""
    queues_left_out: int
    """How many queues were not looked at, since there are too many."""


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

    @abstractmethod
    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        """Publish messages, all of them or none; returns their ids when they are durable."""

    async def read(self, message_id: int) -> StoredMessage | None:
        """A message by its id; none if there is no such message."""
        (message,) = await self.read_many([message_id])
        return message

    @abstractmethod
    async def read_many(self, message_ids: Iterable[int]) -> list[StoredMessage | None]:
        """Messages by their ids, in their order; none for an id that has none."""

    # --- queues -----------------------------------------------------------------------------------

    @abstractmethod
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
        is used already; ``stats`` says how much there is left to look at.
        """

    @abstractmethod
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

    @abstractmethod
    async def purge_queue(self, name: str) -> int:
        """Drop the messages that wait, available and delayed; returns how many.

        What is in flight, done or failed stays, and so does what is published after the call.
        A message that is given back while it goes on may be dropped too. If it is interrupted,
        what was dropped until then is gone, and the rest is still there.
        """

    @abstractmethod
    async def delete_queue(self, name: str) -> None:
        """Delete a queue and all that it holds; returns when nothing is left of it.

        From the call on there is no such queue: consumers that wait get ``QueueNotFoundError``.
        Until it returns the name can't be used for another one. If it is interrupted, it goes on
        in the background, after a crash at the next open; calling it again waits for the end.
        """

    @abstractmethod
    async def get_queue(self, name: str) -> QueueInfo:
        """What a queue was told; ``QueueNotFoundError`` if there is none of that name."""

    @abstractmethod
    async def list_queues(self) -> list[str]:
        """The names of all queues, sorted."""

    @abstractmethod
    async def stats(self, name: str) -> QueueStats:
        """How many messages of a queue are where, without counting; a read or two at most."""

    # --- looking into queues ----------------------------------------------------------------------

    @abstractmethod
    async def peek(self, name: str, count: int = 1) -> list[PeekedMessage]:
        """The next messages in the order of claiming, up to 1,000, without claiming them.

        A queue that is paused shows them too. Those of several publishers take turns when they are
        claimed; here they are in the order of their ids.
        """

    @abstractmethod
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

    @abstractmethod
    async def history(self, message_id: int) -> MessageHistory | None:
        """Where a message is in every queue, and who has claimed it; none if it is not there.

        It looks at up to 256 queues: first those whose filter the message satisfies now, then
        others, whose filter was another one when it came. In those it is found if it is in flight,
        failed, among the next ones to be claimed or the last ones done. A queue that the message
        has left without a trace, expired or purged, or has never been in, does not appear. The
        state is ``unknown`` where it may be in a part that would take too long to search: a retry
        behind the first 1,000 delayed messages, or a message that was done after 64 full buckets
        of others since it was received.
        """

    # --- consuming --------------------------------------------------------------------------------

    @abstractmethod
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

        They are yours for ``lease_ms``; after that somebody else gets them. With ``wait_ms`` it
        waits so long for the first one. A call that is cancelled gives back what it has taken.
        """

    async def _claim_in_loop(
        self, name: str, count: int, *, consumer: str | None, lease_ms: int | None, wait_ms: int
    ) -> list[ClaimedMessage]:
        """As ``claim``, for those who would call it again if they can't know what became of it.

        What was claimed without anybody's knowing comes back when its leases end.
        """
        return await self.claim(name, count, consumer=consumer, lease_ms=lease_ms, wait_ms=wait_ms)

    @abstractmethod
    async def ack(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        """Finish messages; ``lease_lost`` for those that are not yours any more."""

    @abstractmethod
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

    @abstractmethod
    async def release(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]:
        """Give messages back at once, as if they had not been claimed."""

    @abstractmethod
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

    @abstractmethod
    async def failed(
        self, name: str, *, filter: str | None = None, after_id: int = -1, limit: int = 100
    ) -> list[FailedMessage]:
        """Messages that were given up, by ascending id, from behind ``after_id`` on.

        With ``filter`` those whose headers satisfy it; then it looks through all failed ones, in
        batches, until it has found ``limit``. Fewer than ``limit``, which is at most 1,000, are
        the last ones.
        """

    @abstractmethod
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

    @abstractmethod
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
