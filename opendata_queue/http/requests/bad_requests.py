"""What is logged of clients that send nonsense: some of it, and how much was left out.

Any client that reaches a broker can make it refuse something, as often as it likes.
"""

from __future__ import annotations

import logging
from typing import Final

from opendata_queue.model.clock import Clock

logger = logging.getLogger(__name__)

_BAD_LINES: Final = 5
_REFUSED_LINES: Final = 100
_PERIOD_MS: Final = 60_000


class BadRequests:
    """Lines of what is no request at all, and of requests that were refused without a token."""

    def __init__(self, clock: Clock) -> None:
        self._bad = _FewLines(clock, _BAD_LINES, "bad requests")
        self._refused = _FewLines(clock, _REFUSED_LINES, "refused requests")
        self.total = 0

    def note(self, line: str) -> None:
        self.total += 1
        if self._bad.admits():
            logger.warning("%s", line)

    def admits_refused(self) -> bool:
        """Whether another refused request of a client without a token may be logged."""
        return self._refused.admits()

    def sweep(self) -> None:
        self._bad.sweep()
        self._refused.sweep()


class _FewLines:
    """So many lines a minute; when a minute is over, one says how many are missing."""

    def __init__(self, clock: Clock, lines: int, what: str) -> None:
        self._clock = clock
        self._lines = lines
        self._what = what
        self._since_ms: int | None = None
        self._count = 0

    def admits(self) -> bool:
        """Whether another line may be logged; it counts."""
        self.sweep()
        if self._since_ms is None:
            self._since_ms = self._clock.now_ms()
        self._count += 1
        if self._count == self._lines + 1:
            logger.warning("more %s come; they are counted, and not logged one by one", self._what)
        return self._count <= self._lines

    def sweep(self) -> None:
        """Say what was left out, when that is due."""
        since_ms = self._since_ms
        # A clock that was set back must not silence it.
        if since_ms is None or 0 <= self._clock.now_ms() - since_ms < _PERIOD_MS:
            return
        if self._count > self._lines:
            logger.warning("%d more %s were not logged", self._count - self._lines, self._what)
        self._since_ms, self._count = None, 0
