"""The only place that asks the machine what time it is."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock time in milliseconds since the Unix epoch."""

    def now_ms(self) -> int: ...

    async def wait_until(self, time_ms: int) -> None:
        """Wait for as long as it is to ``time_ms`` now; at once if that is over.

        A clock that is set meanwhile does not change how long it takes: look again afterwards.
        """


def monotonic_s() -> float:
    """Seconds that only ever grow, whoever sets the clock: for durations within a process."""
    return time.monotonic()


class SystemClock:
    """The machine's clock, kept from going backwards within the process."""

    __slots__ = ("_latest_ms",)

    def __init__(self) -> None:
        self._latest_ms = 0

    def now_ms(self) -> int:
        now_ms = time.time_ns() // 1_000_000
        if now_ms > self._latest_ms:
            self._latest_ms = now_ms
        return self._latest_ms

    async def wait_until(self, time_ms: int) -> None:
        await asyncio.sleep(max(0, time_ms - self.now_ms()) / 1000)
