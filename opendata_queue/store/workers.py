"""Python threads for calls that block until a store or a disk answers."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from opendata_queue.store.native.jobs import log_unheard


class _Workers:
    """Threads for blocking calls, started when all others are busy.

    Not asyncio's executor: it is shut down with its loop, is shared with whatever else blocks, and
    costs a second future for each call. The threads are daemons, so a store that does not answer
    cannot keep the process from ending; a commit cut off like that was never acknowledged.
    """

    MAX_THREADS = 64

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._threads < self.MAX_THREADS:
                self._threads += 1
                threading.Thread(target=self._run, name="odq-commit", daemon=True).start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


_workers = _Workers()


async def in_worker(work: Callable[[], None], on_start: Callable[[], None] | None = None) -> None:
    """Run `work` in a thread to its end, even if the awaiting task is cancelled.

    `on_start` is called in the loop when the thread is about to leave Python alone.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[BaseException | None] = loop.create_future()

    def job() -> None:
        error: BaseException | None = None
        try:
            if on_start is not None:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(on_start)
            work()
        except BaseException as raised:
            error = raised
        _deliver(loop, done, error)

    _workers.submit(job)
    # As a result, not as the future's exception, which must not be a StopIteration.
    error = await done
    if error is not None:
        raise error


def _deliver(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[BaseException | None],
    error: BaseException | None,
) -> None:
    def settle() -> None:
        if not done.done():
            done.set_result(error)
        elif error is not None:
            log_unheard(error)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the loop was closed, and with it the caller's task
        if error is not None:
            log_unheard(error)
