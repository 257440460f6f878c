"""The time of a root: one clock for all that is measured and compared in it (RFC 0012)."""

from __future__ import annotations

from typing import Final

from opendata_queue.model.clock import Clock

_NS_PER_MS: Final = 1_000_000
_SLOWER_NS_PER_MS: Final = 1_020_000
"""A clock that is ahead of the machine's shows 50 seconds while 51 pass."""
_FASTER_NS_PER_MS: Final = 999_000
"""One that is behind shows 1,000 seconds while 999 pass: so much too early is hardly noticed."""
_SLOWER_FOR_NS: Final = 51 * _NS_PER_MS
_FASTER_FOR_NS: Final = 999 * _NS_PER_MS
"""How long it takes at that rate to make up for a millisecond."""
_COMPARED_EVERY_NS: Final = 1_000 * _NS_PER_MS
_AGREES_MS: Final = 2
SAME_MS: Final = 1_000
"""Clocks that differ by no more than this count as equal for instants that callers give."""
_LONGEST_WAIT_MS: Final = 60_000


class RootClock:
    """Goes on by the time that elapses, whatever the machine's clock is set to.

    It never stands still, jumps or goes back. Where it differs from the machine's clock, it runs a
    little slower or faster until they agree.
    """

    __slots__ = (
        "_base_ms",
        "_base_ns",
        "_compared_ns",
        "_correction_ms",
        "_elapsed_ns",
        "_ns_per_ms",
        "_other_rate_ns",
        "machine",
    )

    def __init__(self, machine: Clock, now_ms: int | None = None) -> None:
        self.machine = machine
        self._elapsed_ns = machine.elapsed_ns
        self._correction_ms = 0
        self.start(machine.now_ms() if now_ms is None else now_ms)

    @classmethod
    def of(cls, clock: Clock) -> RootClock:
        """A root clock as it is; of any other clock a new one, which shows that clock's time."""
        return clock if isinstance(clock, RootClock) else cls(clock)

    def now_ms(self) -> int:
        # It is called with everything that is done: one clock, one division.
        since_ns = self._elapsed_ns() - self._base_ns
        if since_ns >= self._compared_ns:
            return self._compare(since_ns)
        return self._base_ms + since_ns // self._ns_per_ms

    async def wait_until(self, time_ms: int) -> None:
        """Wait for a time of this clock; at once if that is over.

        It waits a minute at a time at most: this clock goes on while a machine is suspended, and
        the wait does not.
        """
        while (left_ms := time_ms - self.now_ms()) > 0:
            machine = self.machine
            await machine.wait_until(machine.now_ms() + min(left_ms, _LONGEST_WAIT_MS))

    def elapsed_ns(self) -> int:
        return self._elapsed_ns()

    @property
    def timeline(self) -> str | None:
        return self.machine.timeline

    def start(self, now_ms: int) -> None:
        """Show this time now: for the process that opens a root, before anything goes by it."""
        self._base_ns = self._elapsed_ns()
        self._base_ms = now_ms
        self._choose_rate()

    def start_no_earlier(self, time_ms: int) -> None:
        """Do not show less than that; also for the process that opens a root."""
        if self.now_ms() < time_ms:
            self.start(time_ms)

    def follow(self, correction_ms: int) -> None:
        """Come to agree with a clock that is so far ahead of the machine's."""
        self._correction_ms = correction_ms
        self._compare(self._elapsed_ns() - self._base_ns)

    @property
    def ahead_ms(self) -> int:
        """By how much it is ahead of the machine's clock."""
        return self.now_ms() - self.machine.now_ms()

    def ahead_for_callers_ms(self) -> int:
        """What to add to an instant by the machine's clock, to have it by this one.

        Nothing while they are about the same: then it stays as the caller has given it.
        """
        ahead_ms = self.ahead_ms
        return ahead_ms if abs(ahead_ms) > SAME_MS else 0

    def _compare(self, since_ns: int) -> int:
        """Compare with the machine's clock, and choose the rate anew; returns the time."""
        otherwise_ns = min(since_ns, self._other_rate_ns)
        passed_ms, rest_ns = divmod(otherwise_ns, self._ns_per_ms)
        more_ms, rest_ns = divmod(since_ns - otherwise_ns + rest_ns, _NS_PER_MS)
        self._base_ms += passed_ms + more_ms
        self._base_ns += since_ns - rest_ns
        self._choose_rate()
        return self._base_ms

    def _choose_rate(self) -> None:
        ahead_ms = self._base_ms - self.machine.now_ms() - self._correction_ms
        if abs(ahead_ms) <= _AGREES_MS:
            self._ns_per_ms, self._other_rate_ns = _NS_PER_MS, 0
        elif ahead_ms > 0:
            self._ns_per_ms, self._other_rate_ns = _SLOWER_NS_PER_MS, ahead_ms * _SLOWER_FOR_NS
        else:
            self._ns_per_ms, self._other_rate_ns = _FASTER_NS_PER_MS, -ahead_ms * _FASTER_FOR_NS
        # Not past the moment at which they agree.
        self._compared_ns = min(_COMPARED_EVERY_NS, self._other_rate_ns or _COMPARED_EVERY_NS)
