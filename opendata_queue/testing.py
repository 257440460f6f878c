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

    Its wall clock can be set, like that of a machine, which moves nothing else. All manual clocks
    are of one machine, whose other clock counts from the Unix epoch on, unless they are given
    different ``timeline`` names: then nothing is known of one by the other.
    """

    __slots__ = ("_ahead_ms", "_elapsed_ms", "_lock", "_waiting", "timeline")

    def __init__(self, now_ms: int = 1_700_000_000_000, *, timeline: str | None = "manual") -> None:
        self._elapsed_ms = now_ms
        self._ahead_ms = 0
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], int] = {}
        self.timeline = timeline

    def now_ms(self) -> int:
        return self._elapsed_ms + self._ahead_ms

    def elapsed_ns(self) -> int:
        return self._elapsed_ms * 1_000_000

    async def wait_until(self, time_ms: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            left_ms = time_ms - self.now_ms()
            if left_ms <= 0:
                return
            self._waiting[turn] = self._elapsed_ms + left_ms
        try:
            await turn
        finally:
            with self._lock:
                self._waiting.pop(turn, None)

    @property
    def waits_ms(self) -> list[int]:
        """How long each of those that wait still has to wait; 0 if it is about to go on."""
        with self._lock:
            return [max(0, at_ms - self._elapsed_ms) for at_ms in self._waiting.values()]

    def advance_ms(self, milliseconds: int) -> None:
        """Let time pass, which never goes back."""
        if milliseconds < 0:
            raise ValueError(f"a clock can't go back {-milliseconds} ms")
        with self._lock:
            self._elapsed_ms += milliseconds
            due = [turn for turn, at_ms in self._waiting.items() if at_ms <= self._elapsed_ms]
        for turn in due:
            with contextlib.suppress(RuntimeError):  # its event loop is closed: nothing waits
                turn.get_loop().call_soon_threadsafe(_take_turn, turn)

    def set_wall_ms(self, now_ms: int) -> None:
        """Set the wall clock, forward or back, as an administrator or NTP does: no time passes."""
        with self._lock:
            self._ahead_ms = now_ms - self._elapsed_ms


def _take_turn(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
