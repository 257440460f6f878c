"""Working only a part of the time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class Pace:
    """Rests after each piece of work, for as long as its share asks for.

    The rest has no limit of its own: what bounds it is that each piece has a bounded size. A piece
    may have others within it, which have rested for themselves already.
    """

    __slots__ = ("_rest_for_work", "_seen_to")

    def __init__(self, work_share: float) -> None:
        self._rest_for_work = 1 / work_share - 1
        self._seen_to = 0.0
        """How many seconds were worked and rested for, or rested."""

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Do a piece of work, then rest; others get their turn in any case."""
        loop = asyncio.get_running_loop()
        started, seen_to = loop.time(), self._seen_to
        yield
        worked = loop.time() - started - (self._seen_to - seen_to)
        await asyncio.sleep(worked * self._rest_for_work)
        self._seen_to = seen_to + loop.time() - started

    async def each(self, source: AsyncIterator[T]) -> AsyncIterator[T]:
        """The items of an iterator: getting each one is a piece of work, with its rest."""
        while True:
            async with self.work():
                try:
                    one = await anext(source)
                except StopAsyncIteration:
                    return
            yield one
