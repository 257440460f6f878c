"""The same system for code that blocks: every call waits for an event loop in another thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from opendata_queue.consumers import AsyncConsumer
from opendata_queue.errors import OdqError, TimedOutError
from opendata_queue.interface import (
    AsyncSystem,
    BrowsedState,
    FailedMessage,
    MessageHistory,
    Outcome,
    QueueInfo,
    QueuePage,
    QueueStats,
    Start,
)
from opendata_queue.loop_thread import LoopThread, seconds_of
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

T = TypeVar("T")

_EXIT_TIMEOUT_MS: Final = 10_000
_ABANDON_TIMEOUT_MS: Final = 5_000


class System:
    """Publish messages, and consume them from queues: ``AsyncSystem`` without ``await``.

        with opendata_queue.open("file:///var/lib/orders") as system:
            system.create_queue("emails", filter="type = 'order.created'")
            system.publish(b"…", headers={"type": "order.created"})
            for message in system.claim("emails", 10, wait_ms=1_000):
                system.ack("emails", message)

    It may be used from many threads at once. A call that takes longer than its ``timeout_ms``
    raises ``TimedOutError``. Ctrl-C during a call cancels that call and nothing else. A script
    that ends without ``close`` is closed all the same. A forked process must open its own.
    """

    def __init__(self, system: AsyncSystem, thread: LoopThread) -> None:
        self._system = system
        self._thread = thread
        self._closing = threading.Lock()
        self._closed = False
        _open_systems.add(self)
        # Dropped without being closed: what runs in the thread would never end.
        self._dropped = weakref.finalize(self, _close_behind, system, thread)
        self._dropped.atexit = False

    @classmethod
    def opened_by(
        cls,
        opening: Callable[[], Coroutine[Any, Any, AsyncSystem]],
        timeout_ms: int | None = None,
    ) -> Self:
        """A system that is opened, and lives, in a thread of its own."""
        thread = LoopThread("odq-loop")
        try:
            return cls(thread.call(opening(), timeout_ms), thread)
        except BaseException:
            thread.stop()
            raise

    @property
    def consumer_id(self) -> str:
        """How this process is called in attempts, unless a claim says otherwise."""
        return self._system.consumer_id

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
        publishing = self._system.publish(
            payload,
            payload_uri=payload_uri,
            headers=headers,
            delay_ms=delay_ms,
            visible_at_ms=visible_at_ms,
            created_at_ms=created_at_ms,
            retention_seconds=retention_seconds,
            idempotency_key=idempotency_key,
        )
        return self._thread.call(publishing, timeout_ms)

    def publish_many(
        self, messages: Sequence[NewMessage], *, timeout_ms: int | None = None
    ) -> list[int]:
        """Publish messages, all of them or none; returns their ids when they are durable."""
        return self._thread.call(self._system.publish_many(messages), timeout_ms)

    def read(self, message_id: int, *, timeout_ms: int | None = None) -> StoredMessage | None:
        """A message by its id; none if there is no such message."""
        return self._thread.call(self._system.read(message_id), timeout_ms)

    def read_many(
        self, message_ids: Iterable[int], *, timeout_ms: int | None = None
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

        It holds those that are published from now on; with ``start="beginning"``, or a time in ms
        since the epoch, also those from before. See ``AsyncSystem.create_queue``.
        """
        creating = self._system.create_queue(name, filter=filter, options=options, start=start)
        return self._thread.call(creating, timeout_ms)

    def update_queue(
        self, name: str, *, filter: str | None = None, timeout_ms: int | None = None, **options: Any
    ) -> QueueInfo:
        """Change a queue's filter, or any of its options by its name."""
        updating = self._system.update_queue(name, filter=filter, **options)
        return self._thread.call(updating, timeout_ms)

    def pause_queue(self, name: str, *, timeout_ms: int | None = None) -> QueueInfo:
        """Let claims get nothing until the queue is resumed; messages still come in."""
        return self._thread.call(self._system.pause_queue(name), timeout_ms)

    def resume_queue(self, name: str, *, timeout_ms: int | None = None) -> QueueInfo:
        """Let claims get messages again."""
        return self._thread.call(self._system.resume_queue(name), timeout_ms)

    def purge_queue(self, name: str, *, timeout_ms: int | None = None) -> int:
        """Drop the messages that wait, available and delayed; returns how many.

        What is in flight, done or failed stays. See ``AsyncSystem.purge_queue``.
        """
        return self._thread.call(self._system.purge_queue(name), timeout_ms)

    def delete_queue(self, name: str, *, timeout_ms: int | None = None) -> None:
        """Delete a queue and all that it holds; returns when nothing is left of it.

        From the call on there is no such queue. See ``AsyncSystem.delete_queue``.
        """
        self._thread.call(self._system.delete_queue(name), timeout_ms)

    def get_queue(self, name: str, *, timeout_ms: int | None = None) -> QueueInfo:
        """What a queue was told; ``QueueNotFoundError`` if there is none of that name."""
        return self._thread.call(self._system.get_queue(name), timeout_ms)

    def list_queues(self, *, timeout_ms: int | None = None) -> list[str]:
        """The names of all queues, sorted."""
        return self._thread.call(self._system.list_queues(), timeout_ms)

    def stats(self, name: str, *, timeout_ms: int | None = None) -> QueueStats:
        """How many messages of a queue are where, without counting; a read or two at most."""
        return self._thread.call(self._system.stats(name), timeout_ms)

    # --- looking into queues ----------------------------------------------------------------------

    def peek(
        self, name: str, count: int = 1, *, timeout_ms: int | None = None
    ) -> list[PeekedMessage]:
        """The next messages in the order of claiming, up to 1,000, without claiming them.

        A queue that is paused shows them too.
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

        ``after`` is the ``next`` of the page before. See ``AsyncSystem.browse`` for the order.
        """
        browsing = self._system.browse(name, state, after=after, limit=limit)
        return self._thread.call(browsing, timeout_ms)

    def history(self, message_id: int, *, timeout_ms: int | None = None) -> MessageHistory | None:
        """Where a message is in every queue, and who has claimed it; none if it is not there.

        See ``AsyncSystem.history`` for how far it looks.
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

        They are yours for ``lease_ms``; after that somebody else gets them. With ``wait_ms`` it
        waits so long for the first one. A call that times out gives back what it has taken.
        """
        claiming = self._system.claim(
            name, count, consumer=consumer, lease_ms=lease_ms, wait_ms=wait_ms
        )
        return self._thread.call(claiming, timeout_ms)

    def ack(
        self, name: str, *receipts: str | ClaimedMessage, timeout_ms: int | None = None
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
        nacking = self._system.nack(name, *receipts, error=error, delay_ms=delay_ms)
        return self._thread.call(nacking, timeout_ms)

    def release(
        self, name: str, *receipts: str | ClaimedMessage, timeout_ms: int | None = None
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
        return self._thread.call(
            self._system.extend(name, *receipts, lease_ms=lease_ms), timeout_ms
        )

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
    ) -> Consumer:
        """A loop over the messages of a queue: acked one by one, nacked on an exception.

        It claims up to ``batch`` messages at a time; with a batch of 1, each one is acked durably
        before the next one is claimed. The loop ends after ``limit`` messages, or when none has
        come for ``idle_ms``; without these it goes on for ever. See ``Consumer``.
        """
        made = self._system.consumer(
            name,
            batch=batch,
            lease_ms=lease_ms,
            wait_ms=wait_ms,
            consumer=consumer,
            limit=limit,
            idle_ms=idle_ms,
        )
        return Consumer(self, self._thread, made)

    def worker(
        self,
        name: str,
        *,
        concurrency: int = 1,
        prefetch: int = 0,
        lease_ms: int | None = None,
        wait_ms: int = 10_000,
        consumer: str | None = None,
    ) -> Callable[[Handler], Worker]:
        """Make a handler of a queue's messages, plain or ``async``, into a worker.

        Start it with ``start``, or all of them with ``run_workers``. See ``Worker``.
        """
        decorate = self._system.worker(
            name,
            concurrency=concurrency,
            prefetch=prefetch,
            lease_ms=lease_ms,
            wait_ms=wait_ms,
            consumer=consumer,
        )
        return lambda handler: Worker(self, self._thread, decorate(handler))

    def run_workers(self, *, stop_timeout_ms: int | None = STOP_TIMEOUT_MS) -> None:
        """Run all workers until SIGINT or SIGTERM, then stop them; raises what made one fail.

        Signals are only seen from the main thread. It also returns when all workers are stopped.
        """
        stop = asyncio.Event()
        running = run_workers(self._system.workers, stop, stop_timeout_ms=stop_timeout_ms)
        with first_signal(lambda: self._thread.loop.call_soon_threadsafe(stop.set)):
            self._thread.call(running)

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

        With ``filter`` those whose headers satisfy it. Fewer than ``limit``, which is at most
        1,000, are the last ones.
        """
        listing = self._system.failed(name, filter=filter, after_id=after_id, limit=limit)
        return self._thread.call(listing, timeout_ms)

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
        two up to ``limit``, so call it again until nothing is returned.
        """
        replaying = self._system.replay(name, *message_ids, all=all, filter=filter, limit=limit)
        return self._thread.call(replaying, timeout_ms)

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
        purging = self._system.purge_failed(name, *message_ids, all=all, filter=filter, limit=limit)
        return self._thread.call(purging, timeout_ms)

    # --- closing ----------------------------------------------------------------------------------

    def close(self, *, timeout_ms: int | None = None) -> None:
        """Stop workers, make durable what is under way, and let go. Closing twice does nothing.

        A forked process has nothing to close. After ``TimedOutError`` it can be called again.
        Handlers of workers can't call it: they would wait for themselves.
        """
        if self._thread.forked or self._closed:
            return
        for worker in list(self._system.workers):
            worker.check_outside()
        self._thread.check()
        seconds = seconds_of(timeout_ms)
        if not self._closing.acquire(timeout=-1 if seconds is None else seconds):
            raise TimedOutError(f"not closed within {timeout_ms} ms: another thread is at it")
        try:
            self._close(timeout_ms)
        finally:
            self._closing.release()

    def _close(self, timeout_ms: int | None) -> None:
        if self._closed:
            return
        try:
            self._thread.call(self._system.close(), timeout_ms)
        except (TimedOutError, KeyboardInterrupt):
            raise  # it goes on in the loop
        except BaseException:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._dropped.detach()
        self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Consumer:
    """The messages of a queue, one after the other.

        with system.consumer("emails") as messages:
            for message in messages:
                send(message.payload)

    A message is acked when the loop asks for the next one, and when the block is left without an
    exception. An exception that leaves the block is a nack with its text; ``KeyboardInterrupt``
    and ``SystemExit`` release the message, uncounted. ``nack`` and ``release`` decide about the
    message in hand without leaving the loop. Messages that were claimed and not handed out are
    released when the block is left. Leases are extended for as long as the body takes.

    ``for message in system.consumer("emails"):`` works too. But Python does not tell a loop's
    iterator why the loop was left, so a message in hand is then always nacked, after a ``break``
    and Ctrl-C as after an exception.
    """

    def __init__(self, system: System, thread: LoopThread, consumer: AsyncConsumer) -> None:
        self._system = system  # kept open for as long as it is used
        self._thread = thread
        self._consumer = consumer

    def __iter__(self) -> Generator[ClaimedMessage, None, None]:
        # A generator that only the loop refers to: CPython closes it as soon as the loop is left.
        self._consumer.begin()
        try:
            while (message := self._thread.call(self._consumer.take())) is not None:
                yield message
        except BaseException as error:
            self._abandon(error)
            raise
        self._thread.call(self._consumer.end())

    def _abandon(self, error: BaseException) -> None:
        if self._thread.inside:  # collected there as garbage: waiting is not possible
            self._thread.post(self._consumer.abandon(error))
            return
        with contextlib.suppress(OdqError):  # closed, or not in time: the leases will run out
            self._thread.call(self._consumer.abandon(error), _ABANDON_TIMEOUT_MS)

    def __enter__(self) -> Self:
        self._thread.call(self._consumer.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.call(self._consumer.leave(error))

    def ack(self, *, timeout_ms: int | None = None) -> bool:
        """Finish the message in hand now, and know that it is durable; false if it was lost."""
        return self._thread.call(self._consumer.ack(), timeout_ms)

    def nack(
        self, error: str = "", *, delay_ms: int | None = None, timeout_ms: int | None = None
    ) -> bool:
        """Report that the message in hand failed, and stay in the loop; false if it was lost."""
        return self._thread.call(self._consumer.nack(error, delay_ms=delay_ms), timeout_ms)

    def release(self, *, timeout_ms: int | None = None) -> None:
        """Give the message in hand back, and stay in the loop."""
        self._thread.call(self._consumer.release(), timeout_ms)

    def close(self, *, timeout_ms: int | None = None) -> None:
        """Give everything back, the message in hand too. Its loop can't go on."""
        self._thread.call(self._consumer.close(), timeout_ms)


class Worker:
    """Calls a handler for each message of a queue, ``concurrency`` at a time.

        @system.worker("emails", concurrency=8)
        def send(message: ClaimedMessage) -> None: ...

        system.run_workers()

    Plain handlers run in threads, and may use the system. ``async`` ones run in the system's own
    event loop: they must not block it. Everything else is as ``AsyncWorker`` says.
    """

    def __init__(self, system: System, thread: LoopThread, worker: AsyncWorker) -> None:
        self._system = system
        self._thread = thread
        self._worker = worker

    def __call__(self, message: ClaimedMessage) -> Any:
        return self._worker(message)

    @property
    def queue(self) -> str:
        return self._worker.queue

    @property
    def handler(self) -> Handler:
        return self._worker.handler

    @property
    def running(self) -> bool:
        return self._worker.running

    def start(self) -> None:
        """Begin to claim and handle messages, in the background."""

        async def start() -> None:
            self._worker.start()
            # A worker goes on when nobody refers to it, and so must its system.
            self._worker.owner = self

        self._thread.call(start())

    def stop(self, *, timeout_ms: int | None = STOP_TIMEOUT_MS) -> None:
        """Claim nothing more, and wait for the handlers that run.

        What was claimed and not started is released. Handlers that take longer than
        ``timeout_ms`` lose their messages, which are released too: async ones are cancelled, and
        have a second to come to their end; plain ones can't be. Those that don't end may still be
        at it when somebody else gets the message.
        """
        self._worker.check_outside()
        self._thread.call(self._worker.stop(timeout_ms=timeout_ms))

    def request_stop(self) -> None:
        """Claim nothing more, and end when the handlers that run are done.

        It does not wait, and may be called from everywhere, the worker's own handlers included.
        """
        self._worker.request_stop()

    def join(self, *, timeout_ms: int | None = None) -> None:
        """Wait until the worker is stopped; raises what made it fail."""
        self._worker.check_outside()
        self._thread.call(self._worker.join(), timeout_ms)


# --- systems that nobody closes -------------------------------------------------------------------

_open_systems: weakref.WeakSet[System] = weakref.WeakSet()


def _close_behind(system: AsyncSystem, thread: LoopThread) -> None:
    async def close() -> None:
        try:
            await system.close()
        finally:
            thread.loop.stop()

    thread.post(close())


@atexit.register
def _close_at_exit() -> None:
    """What was acknowledged is durable anyway; this settles what is under way."""
    for system in list(_open_systems):
        try:
            system.close(timeout_ms=_EXIT_TIMEOUT_MS)
        except Exception as error:
            logger.warning("could not close a system at exit: %s", error)
