"""Turns of background work on the event loop: each is short, and callers go first.

Routing, replaying and their like may have work for minutes, on the loop that serves every caller.
So they work in turns, one of them at a time, in the order in which they ask. A turn is bounded by
time and not by a number of messages: what a message costs depends on how many queues want it, and
on their filters. While callers call, turns are shorter, and each is followed by a rest that is
several times as long: a call takes some six steps on the loop, and each of them may meet a turn. So
callers find the loop free most of the time, and background work goes on, however busy they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Self

from opendata_queue.model.clock import monotonic_s

TURN_S: Final = 0.005
SHORT_TURN_S: Final = 0.000_5
"""The length of a turn while callers call: each step of a call may have to wait for one."""
CALLED_LATELY_S: Final = 1.0
"""Turns are short for so long after a call: the next one may come at any moment."""
CALLING_S: Final = 0.25
"""Turns are followed by rests for so long after a call: its caller still waits, where commits are
requests to S3, or is about to go on. Who calls less often, as idle consumers do that wait for a
second each time, does not slow background work for good."""
REST_TIMES: Final = 7
"""How much longer than a turn the rest behind it is: background work has an eighth of the loop."""
SHORTEST_REST_S: Final = 0.001
"""Event loops do not wait for less."""
LONGEST_REST_S: Final = 0.05
"""Behind a turn that a garbage collection, or a busy machine, has held up."""


ASK_AFTER_US: Final = 1_000
"""The clock is asked when work may have taken so long: asking costs more than a small filter."""


class Turn:
    """One turn, measured from ``begin``."""

    __slots__ = ("_began", "_end", "_now_s", "_unasked_us", "has_ended", "leaves_room", "length_s")

    def __init__(self, now_s: Callable[[], float], length_s: float, *, leaves_room: bool) -> None:
        self._now_s = now_s
        self.length_s = length_s
        self.leaves_room = leaves_room
        """Whether callers are about to join the next commit, which should stay small."""
        self._began = self._end = 0.0
        self._unasked_us = 0
        self.has_ended = False
        """Whether it was over when ``spent`` has asked the clock."""
        self.begin()

    @classmethod
    def of_a_caller(cls) -> Self:
        """For what a caller waits for: it is as bounded, but waits and rests for nothing."""
        return cls(monotonic_s, TURN_S, leaves_room=False)

    def begin(self) -> None:
        """Begin now, after something was waited for."""
        self._began = self._now_s()
        self._end = self._began + self.length_s
        self._unasked_us = 0
        self.has_ended = False

    @property
    def is_over(self) -> bool:
        """Whether it is time to let others go on. To be asked after each small piece of work."""
        return self._now_s() >= self._end

    @property
    def took_s(self) -> float:
        return self._now_s() - self._began

    def spent(self, worst_us: int) -> bool:
        """``is_over`` after work that has taken so long at worst, and most often far less."""
        self._unasked_us += worst_us
        if self._unasked_us >= ASK_AFTER_US:
            self._unasked_us = 0
            self.has_ended = self.is_over
        return self.has_ended

    async def pause(self) -> None:
        """Let others run if it is time to, and go on with a new turn. For work in small steps."""
        if self.is_over:
            await asyncio.sleep(0)
            self.begin()


class Turns:
    """When background work may use the event loop of one owner."""

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
        """A turn for what a caller waits for."""
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
                    rest_s = max(REST_TIMES * turn.took_s, SHORTEST_REST_S)
                    self._rest_until = self._now_s() + min(rest_s, LONGEST_REST_S)

    def _since_last_call(self) -> float:
        now = self._now_s()
        if self._calls != self._calls_seen:
            self._calls_seen = self._calls
            self._called_at = now
        return now - self._called_at
