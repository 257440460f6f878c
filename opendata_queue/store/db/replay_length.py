"""How much the next one who opens a database on S3 has to read first, and when that is too much.

Each commit is a WAL object. Who opens the database reads all those since the last flush of the
memtable, with two requests each and few at a time: 6 ms for each with 30 ms for a request. There
may be 4,096 of them, SlateDB's least limit. So the memtable is flushed after fewer. What is flushed
stays in the block cache, and is read as fast as before.
"""

from __future__ import annotations

from typing import Final

import slatedb.uniffi as slatedb

FLUSHED_AFTER: Final = 100
"""WAL objects. A flush takes two puts, and compactions of what it makes two more: 4 % more."""

_MANY_FILES: Final = 16
"""Where so many files wait for a compaction, they come too fast: they are made larger."""
_REQUESTS: Final = "slatedb.object_store.request_count"
_L0_FILES: Final = "slatedb.db.l0_sst_count"


class ReplayLength:
    """Counts the WAL objects since the last flush, those included that were there at open."""

    __slots__ = ("_count", "_metrics")

    def __init__(self, metrics: slatedb.DefaultMetricsRecorder) -> None:
        self._metrics = metrics
        self._count = _heads(metrics)

    def committed(self) -> bool:
        """Count a commit; true if it is time to flush."""
        self._count += 1
        return self._count >= FLUSHED_AFTER and self._count >= self._longest()

    def flushing(self) -> None:
        """What was committed up to now will not be replayed."""
        self._count = 0

    def _longest(self) -> int:
        files = sum(int(metric.value[0]) for metric in self._metrics.metrics_by_name(_L0_FILES))
        if files < _MANY_FILES:
            return FLUSHED_AFTER
        return (2 if files < 2 * _MANY_FILES else 4) * FLUSHED_AFTER


def _heads(metrics: slatedb.DefaultMetricsRecorder) -> int:
    """Requests for the size of an object: one for each that is replayed, and a few others."""
    return sum(
        int(metric.value[0])
        for metric in metrics.metrics_by_name(_REQUESTS)
        if any(label.value == "head" for label in metric.labels)
    )
