"""Consumers that wait for messages of a queue."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable


class Waiters:
    """The line of those who wait, by their tickets. ``promised`` says for how many there is work.

    Those who were woken in vain come before all others.
    """

    __slots__ = (
        "_promised",
        "_tickets",
        "_waiters",
        "_waiting_again",
        "_woken_up_to",
    )

    def __init__(self, promised: Callable[[], int]) -> None:
        self._promised = promised
        self._waiters: OrderedDict[int, asyncio.Future[None]] = OrderedDict()
        self._waiting_again: dict[int, asyncio.Future[None]] = {}
        self._tickets = itertools.count()
        self._woken_up_to = -1

    def __len__(self) -> int:
        return len(self._waiters) + len(self._waiting_again)

    def draw_ticket(self) -> int:
        """A place in the line of those who wait."""
        return next(self._tickets)

    async def wait(self, patience: asyncio.Future[None], ticket: int) -> None:
        """Wait until there may be something to claim, or ``patience`` is over.

        First come, first served: a consumer that finds nothing and waits again keeps its place.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._waiters if ticket > self._woken_up_to else self._waiting_again
        line[ticket] = turn
        try:
            await asyncio.wait((turn, patience), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if turn.done():  # it was our turn: let the next one have it
                self.wake()
            raise
        finally:
            line.pop(ticket, None)

    def wake(self) -> None:
        """Wake as many of those who wait as there are messages for."""
        if self._waiters or self._waiting_again:
            self._wake(self._promised())

    def wake_all(self) -> None:
        self._wake(len(self))

    def _wake(self, count: int) -> None:
        for _ in range(count):
            if self._waiting_again:
                turn = self._waiting_again.pop(min(self._waiting_again))
            elif self._waiters:
                self._woken_up_to, turn = self._waiters.popitem(last=False)
            else:
                return
            if not turn.done():
                turn.set_result(None)
