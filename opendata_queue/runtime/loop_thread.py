"""An event loop in a thread of its own, and calls into it from other threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, Final, Generic, TypeVar

from opendata_queue.model.errors import (
    ClosedError,
    InvalidInputError,
    TimedOutError,
    WrongContextError,
)
from opendata_queue.runtime.threads import DaemonThreads

T = TypeVar("T")

_EXECUTOR_THREADS: Final = 8
_CANCEL_SECONDS: Final = 1.0
"""How long a call that timed out may take to say what became of it."""


class LoopThread:
    """Runs coroutines for threads that wait for them."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._calls: set[_Call[Any]] = set()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork, which has a copy of everything but the thread."""
        return os.getpid() != self._pid

    @property
    def inside(self) -> bool:
        """Whether the caller runs in the loop."""
        return threading.get_ident() == self._thread.ident

    def check(self) -> None:
        """Refuse a caller that could only wait for ever."""
        if self.forked:
            raise WrongContextError(
                f"this system was opened in process {self._pid}, and does not work in its fork "
                f"{os.getpid()}: open it after the fork, or start processes with 'spawn'"
            )
        if self.inside:
            raise WrongContextError(
                "this call would wait for the event loop that it runs in: make the handler a "
                "plain function, which gets a thread, or use opendata_queue.open_async"
            )
        if self._ended:
            raise ClosedError("the system is closed")

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_ms: int | None = None) -> T:
        """What the coroutine returns, or raises, when it has run in the loop.

        After ``timeout_ms`` it is cancelled; so it is when the waiting is interrupted.
        """
        try:
            seconds = seconds_of(timeout_ms)
            self.check()
        except BaseException:
            coroutine.close()
            raise
        call = _Call(coroutine)
        self._calls.add(call)
        try:
            self._post(call)
            if not call.wait(seconds):
                self._cancel(call)
                # It may have ended meanwhile: then its result is not thrown away.
                if not call.wait(_CANCEL_SECONDS) or isinstance(call.error, asyncio.CancelledError):
                    raise TimedOutError(f"not done within {timeout_ms} ms; it may still happen")
            return call.result()
        except BaseException:
            if not call.ended:
                self._cancel(call)
            raise
        finally:
            self._calls.discard(call)

    def post(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine without waiting for it, if the loop still runs."""
        try:
            if self.forked or self._ended:
                raise RuntimeError
            self.loop.call_soon_threadsafe(self._begin, _Call(coroutine))
        except RuntimeError:
            coroutine.close()

    def _post(self, call: _Call[Any]) -> None:
        try:
            self.loop.call_soon_threadsafe(self._begin, call)
        except RuntimeError:  # the loop is closed
            self._ended = True
        # Either this sees that the loop has ended, or the loop's end sees the call.
        if self._ended and not call.begun:
            call.coroutine.close()
            raise ClosedError("the system is closed")

    def _begin(self, call: _Call[Any]) -> None:
        if not self._ended:
            call.begin()

    def _cancel(self, call: _Call[Any]) -> None:
        try:
            self.loop.call_soon_threadsafe(call.cancel)
        except RuntimeError:
            return

    def stop(self, timeout_ms: int | None = None) -> None:
        """End the loop and its thread. Calls that are under way raise ``ClosedError``."""
        if self.forked or self._ended:
            return
        try:
            self.loop.call_soon_threadsafe(self.loop.stop)
        except RuntimeError:
            return
        if not self.inside:
            self._thread.join(seconds_of(timeout_ms))

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_default_executor(DaemonThreads(_EXECUTOR_THREADS, "odq-work"))
        try:
            self.loop.run_forever()
        finally:
            self._ended = True
            self._end_tasks()
            self.loop.close()
            for call in list(self._calls):
                call.abandon()

    def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_SECONDS))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())


class _Call(Generic[T]):
    """One coroutine, and the thread that waits for it.

    A bare lock is all that is needed to wait once: an ``Event`` or a ``Future`` makes more.
    """

    __slots__ = ("_entered", "_lock", "_result", "_task", "begun", "coroutine", "ended", "error")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.coroutine = coroutine
        self.begun = False
        self._entered = False
        self.ended = False
        self.error: BaseException | None = None
        self._result: T | None = None
        self._task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    # --- in the loop ------------------------------------------------------------------------------

    def begin(self) -> None:
        self.begun = True
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        if self._task is None:
            return
        if not self._entered:  # cancelled now, it would never run, and so never end
            asyncio.get_running_loop().call_soon(self.cancel)
            return
        self._task.cancel()

    async def _run(self) -> None:
        self._entered = True
        try:
            self._result = await self.coroutine
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def abandon(self) -> None:
        """The loop has ended: wake the thread that waits."""
        if not self.ended:
            self.error = asyncio.CancelledError()
            if not self._entered:
                self.coroutine.close()
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._lock.release()

    # --- in the thread that waits -----------------------------------------------------------------

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended; asked again only after a no."""
        return self._lock.acquire(timeout=-1 if seconds is None else seconds)

    def result(self) -> T:
        if self.error is None:
            return self._result  # type: ignore[return-value]
        try:
            if isinstance(self.error, asyncio.CancelledError):
                raise ClosedError("the system was closed meanwhile") from None
            raise self.error
        finally:
            self.error = None  # no circle of error, traceback and frame


def seconds_of(timeout_ms: int | None) -> float | None:
    """A timeout as the standard library wants it; refuses what makes no sense."""
    if timeout_ms is None:
        return None
    if not isinstance(timeout_ms, int) or not 0 <= timeout_ms <= threading.TIMEOUT_MAX * 1000:
        raise InvalidInputError(f"timeout_ms is {timeout_ms!r}, not 0 or more")
    return timeout_ms / 1000
