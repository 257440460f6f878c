"""For your own tests: a clock that you turn by hand."""

from __future__ import annotations


class ManualClock:
    """A clock that stands still until it is moved.

    clock = ManualClock()
    async with await System.open("memory:///", clock=clock) as system:
        ...
        clock.advance_ms(5_000)
    """

    __slots__ = ("_now_ms",)

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance_ms(self, milliseconds: int) -> None:
        """Move forward; clocks of this project never go back."""
        if milliseconds < 0:
            raise ValueError(f"a clock can't go back {-milliseconds} ms")
        self._now_ms += milliseconds
