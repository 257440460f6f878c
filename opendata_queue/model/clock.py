"""The only place that asks the machine what time it is."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from opendata_queue.model.errors import InvalidInputError

_NEEDED: Final = ("now_ms", "wait_until")
_SINCE_0_2: Final = ("elapsed_ns", "timeline")


class Clock(Protocol):
    """The clocks of a machine: one that people set, and one that counts what elapses (RFC 0012)."""

    @property
    def timeline(self) -> str | None:
        """Clocks with the same timeline count ``elapsed_ns`` from the same moment; none if it is
        shared with no other clock."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since the Unix epoch. It may be set, also back."""

    def elapsed_ns(self) -> int:
        """Nanoseconds since some moment. It never goes back, jumps or stands still."""

    async def wait_until(self, time_ms: int) -> None:
        """Wait for as long as it is to ``time_ms`` now; at once if that is over.

        A clock that is set meanwhile does not change how long it takes: compare again afterwards.
        """


monotonic_s: Final[Callable[[], float]] = time.monotonic
"""Seconds that only ever grow, also when the clock is set: for durations within a process."""


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


class WallClockOnly:
    """A clock of release 0.1, which knew the wall clock alone, with what a clock has since then.

    Its wall clock is all that is known of the time that passes: when that is set forward, so much
    has passed, and when it is set back, none until it has caught up, as in 0.1.
    """

    __slots__ = ("_clock", "_latest_ms", "now_ms", "wait_until")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest_ms = 0
        self.now_ms = clock.now_ms
        self.wait_until = clock.wait_until

    @property
    def timeline(self) -> str:
        """All such clocks of one machine count from the Unix epoch."""
        return f"wall-{_timeline() or os.getpid()}"

    def elapsed_ns(self) -> int:
        self._latest_ms = max(self._latest_ms, self.now_ms())
        return self._latest_ms * 1_000_000


def machine_clock(clock: Clock | None) -> Clock:
    """The clock that a caller has given, or that of this machine."""
    if clock is None:
        return SystemClock()
    missing = [name for name in _NEEDED if not callable(getattr(clock, name, None))]
    if missing:
        raise InvalidInputError(f"clock {clock!r} has no {' and no '.join(missing)}: see Clock")
    return clock if all(hasattr(clock, name) for name in _SINCE_0_2) else WallClockOnly(clock)
