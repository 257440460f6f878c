"""What is logged of clients that send nonsense: some of it, and how much was left out.

Anybody who reaches a broker can make it refuse something, as often as they like.
"""

from __future__ import annotations

import logging
from typing import Final

from opendata_queue.clock import Clock

logger = logging.getLogger(__name__)

_LINES: Final = 5
_PERIOD_MS: Final = 60_000


class BadRequests:
    """Logs up to five lines a minute; when a minute is over, one says how many are missing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_ms: int | None = None
        self._count = 0
        self.total = 0

    def note(self, line: str) -> None:
        self.sweep()
        if self._since_ms is None:
            self._since_ms = self._clock.now_ms()
        self.total += 1
        self._count += 1
        if self._count <= _LINES:
            logger.warning("%s", line)
        elif self._count == _LINES + 1:
            logger.warning("more bad requests come; they are counted, and not logged one by one")

    def sweep(self) -> None:
        """Say what was left out, when that is due."""
        since_ms = self._since_ms
        # A clock that was set back must not silence it.
        if since_ms is None or 0 <= self._clock.now_ms() - since_ms < _PERIOD_MS:
            return
        if self._count > _LINES:
            logger.warning("%d more bad requests were not logged", self._count - _LINES)
        self._since_ms, self._count = None, 0
