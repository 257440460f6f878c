"""Threads that never keep a process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Work = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(ThreadPoolExecutor):
    """A pool of daemon threads.

    The standard pool's threads are waited for when the interpreter ends, so a handler that hangs
    would hang the process; and from then on it takes no work, which is just when a system that
    was not closed is closed.
    """

    def __init__(self, size: int, name: str) -> None:
        super().__init__(size)  # for asyncio, which wants this very class; its threads never start
        self._size = size
        self._name = name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0
        self._over = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._over:
                raise RuntimeError(f"the threads of {self._name} were shut down")
            self._work.put((future, lambda: fn(*args, **kwargs)))
            if self._idle:
                self._idle -= 1
            elif self._started < self._size:
                self._started += 1
                name = f"{self._name} {self._started}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after what they have been given. This does not wait for them."""
        with self._lock:
            if not self._over:
                self._over = True
                for _ in range(self._started):
                    self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, call = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del work, future, call  # nothing is kept while it waits for more
            with self._lock:
                self._idle += 1
