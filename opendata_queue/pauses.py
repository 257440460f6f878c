"""Letting others run while something long is done."""

from __future__ import annotations

import asyncio
from typing import Final

TURN_SECONDS: Final = 0.005


class Pauses:
    """For work in small steps: after each one ``pause`` lets others run, if it is time to.

    How long a step takes depends on the messages and filters of callers, so that time is measured
    and not steps counted.
    """

    __slots__ = ("_loop", "_until")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + TURN_SECONDS

    async def pause(self) -> None:
        if self._loop.time() >= self._until:
            await asyncio.sleep(0)
            self._until = self._loop.time() + TURN_SECONDS
