"""The only place that asks the machine what time it is."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """The clocks of a machine: what people set, and what counts on whatever they set (RFC 0012)."""

    @property
    def timeline(self) -> str | None:
        """Clocks that name the same one count ``elapsed_ns`` from the same moment; none: only this
        one does."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since the Unix epoch. It may be set, also back."""

    def elapsed_ns(self) -> int:
        """Nanoseconds since some moment. It never goes back, jumps or stands still."""

    async def wait_until(self, time_ms: int) -> None:
        """Wait for as long as it is to ``time_ms`` now; at once if that is over.

        A clock that is set meanwhile does not change how long it takes: look again afterwards.
        """


def _elapsed_ns() -> Callable[[], int]:
    """What counts the time that a machine is suspended, where there is such a clock."""
    if sys.platform == "linux":
        return functools.partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
    return time.monotonic_ns


@functools.cache
def _timeline() -> str | None:
    """Equal for processes of one machine, and in containers, until it is started again."""
    if sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    try:
        namespace = os.readlink("/proc/self/ns/time").strip("time:[]")
    except OSError:  # a kernel that has one for all
        namespace = "0"
    return f"{boot}-{namespace}"


def monotonic_s() -> float:
    """Seconds that only ever grow, whoever sets the clock: for durations within a process."""
    return time.monotonic()


class SystemClock:
    """The clocks of this machine."""

    __slots__ = ()

    elapsed_ns = staticmethod(_elapsed_ns())

    @property
    def timeline(self) -> str | None:
        return _timeline()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def wait_until(self, time_ms: int) -> None:
        await asyncio.sleep(max(0, time_ms - self.now_ms()) / 1000)
