"""Clocks of machines that disagree: real time, and so far off."""

from __future__ import annotations

import asyncio

from opendata_queue import SystemClock
from opendata_queue.testing import ManualClock


class ShiftedClock:
    """The real time of a machine whose wall clock is wrong, and which shares no other clock."""

    def __init__(self, ahead_ms: int, timeline: str | None = None) -> None:
        self._machine = SystemClock()
        self._ahead_ms = ahead_ms
        self._passed_ms = 0
        self.timeline = timeline

    def now_ms(self) -> int:
        return self._machine.now_ms() + self._passed_ms + self._ahead_ms

    def elapsed_ns(self) -> int:
        return self._machine.elapsed_ns() + self._passed_ms * 1_000_000

    def pass_ms(self, milliseconds: int) -> None:
        """Let so much time pass at once. What waits already does not notice."""
        self._passed_ms += milliseconds

    async def wait_until(self, time_ms: int) -> None:
        await asyncio.sleep(max(0, time_ms - self.now_ms()) / 1000)


def set_apart(clock: ManualClock, ahead_ms: int) -> ManualClock:
    """The clock of another process of the same machine, after its wall clock was set."""
    other = ManualClock(clock.elapsed_ns() // 1_000_000)
    other.set_wall_ms(clock.now_ms() + ahead_ms)
    return other
