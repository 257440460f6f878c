"""When it is worth collecting garbage: by what was committed, not by time alone."""

from __future__ import annotations

from typing import Final

WORTH_COMMITS: Final = 16
"""A collection costs about as much on S3 as eight commits do."""
LONGEST_PAUSE: Final = 16
"""In intervals. What few commits leave behind is little, and can wait for so long."""


class GarbagePace:
    """Counts intervals and commits; its database asks once in an interval.

    A busy database collects in each interval. One with few commits collects less and less
    often, and an idle one not at all, once all that its last commit has left behind is old enough
    to go: ``last_interval`` says when that is.
    """

    __slots__ = (
        "_commits",
        "_is_clean",
        "_last_interval",
        "_pause",
        "_since_commit",
        "_since_look",
    )

    def __init__(self, last_interval: int) -> None:
        self._last_interval = last_interval
        self._commits = 0
        self._since_commit = 0
        self._since_look = 0
        self._pause = 1
        self._is_clean = False

    def committed(self) -> None:
        self._commits += 1
        self._since_commit = 0
        self._is_clean = False

    def is_due(self) -> bool:
        """Whether to collect at the end of this interval."""
        self._since_commit += 1
        self._since_look += 1
        if self._is_clean:
            return False
        return self._commits >= WORTH_COMMITS or self._since_look >= self._pause

    def collected(self) -> None:
        """Note that what could go is gone."""
        if self._commits >= WORTH_COMMITS:
            self._pause = min(self._since_look, LONGEST_PAUSE)
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._is_clean = self._since_commit >= self._last_interval
        self._commits = self._since_look = 0
