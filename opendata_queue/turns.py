"""Turns of background work on the event loop: each is short, and callers go first.

Routing, replaying and their like may have work for minutes, on the loop that serves every caller.
So they work in turns, one of them at a time, in the order in which they ask. A turn is bounded by
time and not by a number of messages: what a message costs depends on how many queues want it, and
on their filters. While callers call, turns are shorter, and each is followed by a rest that is as
long. So callers find the loop free at least half of the time, and background work goes on, however
busy they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from opendata_queue.clock import monotonic_s

TURN_S: Final = 0.005
SHORT_TURN_S: Final = 0.001
"""Of a turn, while callers call: what they wait for, now and then, at each step of a call."""
CALLED_LATELY_S: Final = 1.0
"""Turns are short for so long after a call: the next one may come at any moment."""
CALLING_S: Final = 0.02
"""Turns are followed by rests for so long after a call: whoever called is about to go on."""
SHORTEST_REST_S: Final = 0.001
"""Event loops do not wait for less."""


class Turn:
    """One turn, measured from ``begin``."""

    __slots__ = ("_began", "_end", "_now_s", "leaves_room", "length_s")

    def __init__(self, now_s: Callable[[], float], length_s: float, *, leaves_room: bool) -> None:
        self._now_s = now_s
        self.length_s = length_s
        self.leaves_room = leaves_room
        """Whether callers are about to join the next commit, which should stay small."""
        self._began = self._end = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin now, after something was waited for."""
        self._began = self._now_s()
        self._end = self._began + self.length_s

    @property
    def is_over(self) -> bool:
        """Whether it is time to let others go on. To be asked after each small piece of work."""
        return self._now_s() >= self._end

    @property
    def took_s(self) -> float:
        return self._now_s() - self._began


class Turns:
    """Who may work on the event loop of one owner besides its callers."""

    def __init__(
        self,
        now_s: Callable[[], float] = monotonic_s,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._now_s = now_s
        self._sleep = sleep
        self._calls = 0
        self._calls_seen = 0
        self._called_at = float("-inf")
        self._rest_until = float("-inf")
        self._one_at_a_time = asyncio.Lock()  # first come, first served

    def called(self) -> None:
        """Take note of a call. It comes with every one of them: keep it cheap."""
        self._calls += 1

    def of_a_caller(self) -> Turn:
        """For what callers wait for: it is as bounded, but waits and rests for nothing."""
        return Turn(self._now_s, TURN_S, leaves_room=False)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Wait for a turn, which ends with the block; stop in time if ``is_over`` says so."""
        async with self._one_at_a_time:
            await self._sleep(max(0.0, self._rest_until - self._now_s()))
            since_s = self._since_last_call()
            length_s = SHORT_TURN_S if since_s < CALLED_LATELY_S else TURN_S
            turn = Turn(self._now_s, length_s, leaves_room=since_s < CALLING_S)
            try:
                yield turn
            finally:
                if self._since_last_call() < CALLING_S:
                    self._rest_until = self._now_s() + max(turn.took_s, SHORTEST_REST_S)

    def _since_last_call(self) -> float:
        now = self._now_s()
        if self._calls != self._calls_seen:
            self._calls_seen = self._calls
            self._called_at = now
        return now - self._called_at
