"""For your own tests: a clock that you turn by hand."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class ManualClock:
    """A clock that stands still until it is moved.

    clock = ManualClock()
    async with await Engine.open("memory:///", clock=clock) as system:
        ...
        clock.advance_ms(5_000)

    Whatever waits for a time, a long poll or a lease that runs out, goes on when the clock is
    moved there. It may be moved from any thread.
    """

    __slots__ = ("_lock", "_now_ms", "_waiting")

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], int] = {}

    def now_ms(self) -> int:
        return self._now_ms

    async def wait_until(self, time_ms: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if time_ms <= self._now_ms:
                return
            self._waiting[turn] = time_ms
        try:
            await turn
        finally:
            with self._lock:
                self._waiting.pop(turn, None)

    def advance_ms(self, milliseconds: int) -> None:
        """Move forward; clocks of this project never go back."""
        if milliseconds < 0:
            raise ValueError(f"a clock can't go back {-milliseconds} ms")
        with self._lock:
            self._now_ms += milliseconds
            due = [turn for turn, time_ms in self._waiting.items() if time_ms <= self._now_ms]
        for turn in due:
            with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody waits
                turn.get_loop().call_soon_threadsafe(_take_turn, turn)


def _take_turn(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
