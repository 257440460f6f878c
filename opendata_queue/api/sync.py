"""The same system for code that blocks: every call waits for an event loop in another thread.

Operations come from their declarations (``sync_operations``); loops, workers and the end are here.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Final, Self

from opendata_queue.api.consumers import AsyncConsumer
from opendata_queue.api.sync_operations import SyncOperations
from opendata_queue.api.system import AsyncSystem
from opendata_queue.api.workers import (
    STOP_TIMEOUT_MS,
    AsyncWorker,
    Handler,
    first_signal,
    run_workers,
)
from opendata_queue.model.errors import OdqError, TimedOutError
from opendata_queue.model.messages import ClaimedMessage
from opendata_queue.runtime.loop_thread import LoopThread, seconds_of

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_MS: Final = 10_000
_ABANDON_TIMEOUT_MS: Final = 5_000


class System(SyncOperations):
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

    ``for message in system.consumer("emails"):`` works too. But a loop's iterator does
    not learn why the loop was left, so a message in hand is then always nacked, after a ``break``
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
            # A worker goes on without a reference to it, and so must its system.
            self._worker.owner = self

        self._thread.call(start())

    def stop(self, *, timeout_ms: int | None = STOP_TIMEOUT_MS) -> None:
        """Claim nothing more, and wait for the handlers that run.

        What was claimed and not started is released. Handlers that take longer than
        ``timeout_ms`` lose their messages, which are released too: async ones are cancelled, and
        have a second to come to their end; plain ones can't be. Those that don't end may still be
        at it when another consumer gets the message.
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


# --- systems that are never closed ----------------------------------------------------------------

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
