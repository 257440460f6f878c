"""Handlers that are called with the messages of a queue, several at a time."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

from opendata_queue.api.claiming import ClaimingSystem
from opendata_queue.api.consumers import MAX_BATCH, failure_text, nack_for
from opendata_queue.api.lease_keeper import LeaseKeeper
from opendata_queue.model.errors import InvalidInputError, OdqError, WrongContextError
from opendata_queue.model.messages import ClaimedMessage
from opendata_queue.model.values import Outcome
from opendata_queue.runtime.loop_thread import seconds_of
from opendata_queue.runtime.threads import DaemonThreads

logger = logging.getLogger(__name__)

Handler = Callable[[ClaimedMessage], Any]
"""A plain function, which gets a thread, or an ``async`` one, which runs in the event loop."""

MAX_CONCURRENCY: Final = 1_000
STOP_TIMEOUT_MS: Final = 30_000
CLOSE_TIMEOUT_MS: Final = 5_000
"""How long handlers may take to finish when the system is closed before they are stopped."""
CANCEL_TIMEOUT_MS: Final = 1_000
"""How long an async handler that was cancelled may take to come to its end."""


class AsyncWorker:
    """Calls a handler for each message of a queue, ``concurrency`` at a time.

        @system.worker("emails", concurrency=8)
        async def send(message: ClaimedMessage) -> None: ...

    A handler that returns has done its message; one that raises has failed, and the error's text
    is kept. ``RetryLater`` says when to try again. After the queue's ``max_attempts`` a message is
    moved to the failed ones. Leases are extended while a handler runs.

    ``prefetch`` messages more than can be handled are claimed ahead of time. That hides the time
    that a claim takes, which counts on S3, and keeps them from other workers meanwhile.

    A handler can't wait for its own worker to stop, but it can ask for it: ``request_stop``.
    If the system fails, the worker ends, and ``join`` and ``run_workers`` raise the error.
    The worker can be called like its handler.
    """

    def __init__(
        self,
        system: ClaimingSystem,
        queue: str,
        handler: Handler,
        *,
        concurrency: int = 1,
        prefetch: int = 0,
        lease_ms: int | None = None,
        wait_ms: int = 10_000,
        consumer: str | None = None,
    ) -> None:
        if not callable(handler):
            raise InvalidInputError(f"{handler!r} is no handler: it can't be called")
        if not isinstance(concurrency, int) or not 0 < concurrency <= MAX_CONCURRENCY:
            raise InvalidInputError(
                f"concurrency is {concurrency!r}, not within 1 to {MAX_CONCURRENCY}"
            )
        if not isinstance(prefetch, int) or not 0 <= prefetch <= concurrency:
            raise InvalidInputError(f"prefetch is {prefetch!r}, not within 0 to {concurrency}")
        if not isinstance(wait_ms, int) or wait_ms < 1:
            raise InvalidInputError(f"wait_ms is {wait_ms!r}, not 1 or more")
        self.queue = queue
        self.handler = handler
        self.owner: object = None
        """Kept alive for as long as the worker runs."""
        self._system = system
        self._concurrency = concurrency
        self._most_held = concurrency + prefetch
        self._wait_ms = wait_ms
        self._consumer = consumer
        self._keeper = LeaseKeeper(system, queue, lease_ms)
        self._ready: deque[ClaimedMessage] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy = 0
        self._handling: set[asyncio.Task[None]] = set()
        self._handlers: set[asyncio.Task[BaseException | None]] = set()
        self._handler_threads: set[int] = set()
        self._out_of_time = False
        self._room = asyncio.Event()
        self._threads: DaemonThreads | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def __call__(self, message: ClaimedMessage) -> Any:
        return self.handler(message)

    # --- starting and stopping --------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._main is not None and not self._main.done()

    def start(self) -> None:
        """Begin to claim and handle messages, in the event loop that runs."""
        if self.running:
            raise WrongContextError(f"this worker of queue {self.queue} runs already")
        self._failure = None
        self._out_of_time = False
        if not _is_async(self.handler):
            self._threads = DaemonThreads(self._concurrency, f"odq {self.queue}")
        self._feeding = asyncio.create_task(self._feed(), name=f"feed worker of {self.queue}")
        self._main = asyncio.create_task(self._run(), name=f"worker of {self.queue}")
        self._main.add_done_callback(_seen)

    async def stop(self, *, timeout_ms: int | None = STOP_TIMEOUT_MS) -> None:
        """Claim nothing more, and wait for the handlers that run.

        What was claimed and not started is released. Handlers that take longer than
        ``timeout_ms`` lose their messages, which are released too: async ones are cancelled, and
        have a second to come to their end; plain ones can't be. Those that don't end may still be
        at it when another consumer gets the message.
        """
        self.check_outside()
        seconds = seconds_of(timeout_ms)
        if self._main is None or self._feeding is None:
            return
        self._feeding.cancel()
        await asyncio.wait([self._main], timeout=seconds)
        if not self._main.done():
            self._hand_over()
            await asyncio.wait([self._main])

    def request_stop(self) -> None:
        """Claim nothing more, and end when the handlers that run are done.

        It does not wait, and may be called from everywhere, the worker's own handlers included.
        """
        if self._feeding is None:
            return
        with contextlib.suppress(RuntimeError):  # its event loop is closed: nothing runs
            self._feeding.get_loop().call_soon_threadsafe(self._feeding.cancel)

    async def join(self) -> None:
        """Wait until the worker is stopped; raises what made it fail."""
        self.check_outside()
        if self._main is not None:
            await asyncio.shield(self._main)

    async def close(self) -> None:
        """Stop; the system is about to be closed."""
        await self.stop(timeout_ms=CLOSE_TIMEOUT_MS)

    def check_outside(self) -> None:
        """Refuse a handler that would wait for itself."""
        if threading.get_ident() in self._handler_threads or _current_task() in self._handlers:
            raise WrongContextError(
                f"a handler can't wait for its own worker of queue {self.queue} to stop: "
                "use request_stop, which does not wait"
            )

    # --- the life of a worker ---------------------------------------------------------------------

    async def _run(self) -> None:
        assert self._feeding is not None
        try:
            await asyncio.wait([self._feeding])
            if not self._feeding.cancelled() and (error := self._feeding.exception()):
                self._fail(error)
            await self._release(list(self._ready))
            self._ready.clear()
            if self._failure is not None:
                self._hand_over()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self._feeding.cancel()
            self._hand_over()
            await self._keeper.stop()
            if self._threads is not None:
                self._threads.shutdown(wait=False)
        if self._failure is not None:
            logger.error("the worker of queue %s has ended: %s", self.queue, self._failure)
            raise self._failure

    async def _feed(self) -> None:
        while True:
            free = self._most_held - len(self._tasks) - len(self._ready)
            if not free:
                self._room.clear()
                await self._room.wait()
                continue
            claimed = await self._keeper.claim(
                min(free, MAX_BATCH), consumer=self._consumer, wait_ms=self._wait_ms
            )
            self._keeper.hold(claimed)
            self._ready.extend(claimed)
            self._begin_ready()

    def _begin_ready(self) -> None:
        stopping = self._feeding is None or self._feeding.done() or self._feeding.cancelling()
        while self._ready and self._busy < self._concurrency and not stopping:
            message = self._ready.popleft()
            if not self._keeper.holds(message):
                continue
            task = asyncio.create_task(self._work(message), name=f"message {message.message_id}")
            self._tasks.add(task)
            self._busy += 1
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._begin_ready()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        if self._feeding is not None:
            self._feeding.cancel()

    def _hand_over(self) -> None:
        """Take their messages from the handlers that run."""
        self._out_of_time = True
        for task in list(self._handling):
            task.cancel()

    async def _release(self, messages: Sequence[ClaimedMessage]) -> None:
        held = [message for message in messages if self._keeper.drop(message)]
        if not held:
            return
        try:
            await self._system.release(self.queue, *held)
        except OdqError as error:
            logger.warning(
                "messages of queue %s come back when their leases end: %s", self.queue, error
            )

    # --- one message ------------------------------------------------------------------------------

    async def _work(self, message: ClaimedMessage) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._out_of_time:
            self._busy -= 1
            await self._release([message])
            return
        self._handling.add(task)
        try:
            failure = await self._handle(message)
        except asyncio.CancelledError:
            logger.warning(
                "message %d of queue %s is given back: its handler was not done in time",
                message.message_id,
                self.queue,
            )
            await self._release([message])
            return
        finally:
            # Only handlers are cancelled, not what follows.
            self._handling.discard(task)
            self._busy -= 1
        self._begin_ready()
        await self._settle(message, failure)

    async def _handle(self, message: ClaimedMessage) -> BaseException | None:
        """Call the handler; what it raises is a result like any other, whatever it is."""
        try:
            if self._threads is None:
                result = self.handler(message)
            else:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, self._call, message)
            if isinstance(result, _Raised):
                return result.error
            if inspect.isawaitable(result):
                return await self._handled(result)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return error
        except BaseException as error:
            return error
        return None

    def _call(self, message: ClaimedMessage) -> Any:
        """Call a plain handler, in a thread."""
        thread = threading.get_ident()
        self._handler_threads.add(thread)
        try:
            return self.handler(message)
        except BaseException as error:
            return _Raised(error)
        finally:
            self._handler_threads.discard(thread)

    async def _handled(self, result: Awaitable[Any]) -> BaseException | None:
        """How an async handler ends. It is left behind if it does not heed its cancellation."""
        handler = asyncio.create_task(_outcome(result), name=f"handler of {self.queue}")
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        try:
            return await asyncio.shield(handler)
        except asyncio.CancelledError:
            handler.cancel()
            await asyncio.wait([handler], timeout=CANCEL_TIMEOUT_MS / 1000)
            if handler.done() and not isinstance(handler.result(), asyncio.CancelledError):
                return handler.result()
            raise

    async def _settle(self, message: ClaimedMessage, failure: BaseException | None) -> None:
        if not self._keeper.drop(message):
            outcome: Outcome = "lease_lost"
        elif failure is None:
            (outcome,) = await self._system.ack(self.queue, message)
        else:
            logger.info(
                "message %d of queue %s failed, attempt %d: %s",
                message.message_id,
                self.queue,
                message.attempts,
                failure_text(failure),
                exc_info=failure,
            )
            outcome = await nack_for(self._system, self.queue, message, failure)
        if outcome != "ok":
            logger.warning(
                "message %d of queue %s was handled in vain: its lease was lost",
                message.message_id,
                self.queue,
            )


class _Raised:
    """An error on its way out of a thread. A future can't carry every kind of it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


async def _outcome(result: Awaitable[Any]) -> BaseException | None:
    """What it raises, if it does. A task can't carry every kind of it."""
    try:
        await result
    except BaseException as error:
        return error
    return None


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )


def _seen(task: asyncio.Task[None]) -> None:
    """Mark the error of a task as seen: it was logged, and not every worker is joined."""
    if not task.cancelled():
        task.exception()


# --- all workers of a system ----------------------------------------------------------------------


async def run_workers(
    workers: Sequence[AsyncWorker], stop: asyncio.Event, *, stop_timeout_ms: int | None
) -> None:
    """Run until ``stop`` is set, a worker fails, or all are stopped; raises what failed."""
    seconds_of(stop_timeout_ms)  # refused now, not when it is time to stop
    if not workers:
        raise InvalidInputError("there are no workers to run: make some with @system.worker(…)")
    for worker in workers:
        if not worker.running:
            worker.start()
    stopping = asyncio.create_task(stop.wait())
    joins = {asyncio.create_task(worker.join()) for worker in workers}
    try:
        running = set(joins)
        while running and not stopping.done():
            done, _ = await asyncio.wait({stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
            running -= done
            if any(one.exception() for one in done):
                break
    finally:
        stopping.cancel()
        await asyncio.gather(*(worker.stop(timeout_ms=stop_timeout_ms) for worker in workers))
    await asyncio.gather(*joins)


@contextlib.contextmanager
def first_signal(call: Callable[[], object]) -> Iterator[None]:
    """Call something at the first SIGINT or SIGTERM; a second one has its usual effect.

    Only the main thread gets signals: elsewhere nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def caught(*_: object) -> None:
        restore()
        call()

    for number in usual:
        signal.signal(number, caught)
    try:
        yield
    finally:
        restore()
