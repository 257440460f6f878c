"""How long to rest between two polls for what other processes have written."""

from __future__ import annotations


class PollingPace:
    """Rests twice as long each time while nothing happens: a poll on S3 is a request to pay for.

    The caller counts what happens. If the count has changed, the next rest is the shortest again.
    """

    __slots__ = ("_happened", "_longest_ms", "_rest_ms", "shortest_ms")

    def __init__(self, shortest_ms: int, longest_ms: int) -> None:
        self.shortest_ms = shortest_ms
        self._longest_ms = longest_ms
        self._rest_ms = shortest_ms
        self._happened = 0

    def rest_ms(self, happened: int) -> int:
        """How long to rest after a poll, by a count of what has happened so far."""
        if happened != self._happened:
            self._happened = happened
            self._rest_ms = self.shortest_ms
        rest_ms = self._rest_ms
        self._rest_ms = min(2 * rest_ms, self._longest_ms)
        return rest_ms
