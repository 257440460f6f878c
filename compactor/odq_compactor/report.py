"""What a pass has removed, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from opendata_queue.model.figures import Figure

Kind = Literal[
    "expired messages",
    "expired entries",
    "done entries",
    "failed entries",
    "blobs",
    "orphaned blobs",
    "finished messages",
    "bulk shards",
    "control files",
]

REASONS: Final[dict[Kind, str]] = {
    "expired messages": "received at + their retention is over",
    "expired entries": "they waited in a queue until their retention was over",
    "done entries": "done at + the queue's done retention is over",
    "failed entries": "failed at + the queue's failed retention is over",
    "blobs": "their messages are gone",
    "orphaned blobs": "they have no message",
    "finished messages": "all queues are done with them",
    "bulk shards": "all of their messages are gone, or they were never committed",
    "control files": "they are not needed any more",
}


@dataclass(kw_only=True, slots=True)
class RetentionReport:
    """One pass. ``removed`` counts by kind and queue; none for what belongs to no queue.

    ``requests`` are all that this process has made to the object store meanwhile.
    """

    now_ms: int
    dry_run: bool = False
    removed: Counter[tuple[Kind, str | None]] = field(default_factory=Counter)
    blob_bytes: int = 0
    """Bytes of blobs that were deleted."""

    row_bytes: int = 0
    """Bytes of rows that are past their time, an estimate. Compaction frees them."""

    aging_bytes: int = 0
    """Those of them that compaction frees only later, when their time-to-live is over."""

    bytes_before: int | None = None
    bytes_after: int | None = None
    """Of the whole root, as the bucket counts them, if that was asked for."""

    rewritten: list[str] = field(default_factory=list)
    """Databases that were compacted."""

    requests: int = 0
    duration_ms: int = 0

    def count(self, kind: Kind, number: int, queue: str | None = None) -> None:
        if number:
            self.removed[kind, queue] += number

    def total(self, kind: Kind) -> int:
        return sum(count for (one, _), count in self.removed.items() if one == kind)

    @property
    def is_empty(self) -> bool:
        return not self.removed

    def rows(self) -> list[tuple[str, str, int, str]]:
        """Kind, queue, number and reason, for a table."""
        return [
            (kind, queue or "", count, self._reason(kind))
            for (kind, queue), count in sorted(
                self.removed.items(), key=lambda one: (one[0][0], one[0][1] or "")
            )
        ]

    def _reason(self, kind: Kind) -> str:
        if kind == "expired messages" and self.aging_bytes:
            return f"{REASONS[kind]}; a pass in an hour frees the space"
        return REASONS[kind]

    def as_json(self) -> dict[str, Any]:
        return {
            "now_ms": self.now_ms,
            "dry_run": self.dry_run,
            "removed": [
                {"kind": kind, "queue": queue or None, "count": count, "reason": reason}
                for kind, queue, count, reason in self.rows()
            ],
            "blob_bytes": self.blob_bytes,
            "row_bytes": self.row_bytes,
            "aging_bytes": self.aging_bytes,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_freed": self.bytes_freed,
            "rewritten": self.rewritten,
            "requests": self.requests,
            "duration_ms": self.duration_ms,
        }

    @property
    def bytes_freed(self) -> int | None:
        """By how much the root has shrunk, if its size was measured."""
        if self.bytes_before is None or self.bytes_after is None:
            return None
        return self.bytes_before - self.bytes_after


@dataclass(kw_only=True, slots=True)
class RetentionTotals:
    """All passes of an owner since it started, for metrics."""

    removed: Counter[tuple[Kind, str | None]] = field(default_factory=Counter)
    blob_bytes: int = 0
    row_bytes: int = 0
    requests: int = 0
    passes: int = 0
    failures: int = 0
    seconds: float = 0
    last_pass_at_ms: int | None = None

    def add(self, report: RetentionReport, *, whole: bool = True) -> None:
        """One pass; not ``whole`` if it did not come to its end."""
        self.removed.update(report.removed)
        self.blob_bytes += report.blob_bytes
        self.row_bytes += report.row_bytes
        self.requests += report.requests
        self.seconds += report.duration_ms / 1000
        if whole:
            self.passes += 1
            self.last_pass_at_ms = report.now_ms

    def figures(self) -> Iterator[Figure]:
        """For Prometheus. Queues are counted together: there may be thousands."""
        for kind in REASONS:
            yield Figure(
                name="odq_retention_removed",
                help="What retention has removed.",
                kind="counter",
                labels=(("kind", kind.replace(" ", "_")),),
                value=sum(count for (one, _), count in self.removed.items() if one == kind),
            )
        counters: dict[str, tuple[str, float]] = {
            "passes": ("Passes of retention that came to their end.", self.passes),
            "failures": ("Passes of retention that failed.", self.failures),
            "seconds": ("How long passes of retention took.", self.seconds),
            "blob_bytes": ("Bytes of blobs that retention has deleted.", self.blob_bytes),
            "row_bytes": ("Bytes of rows past their time, an estimate.", self.row_bytes),
            "requests": ("Requests that passes of retention have made.", self.requests),
        }
        for name, (help, value) in counters.items():
            yield Figure(name=f"odq_retention_{name}", help=help, kind="counter", value=value)
        if self.last_pass_at_ms is not None:
            yield Figure(
                name="odq_retention_last_pass_timestamp_seconds",
                help="When the last pass of retention began.",
                kind="gauge",
                value=self.last_pass_at_ms / 1000,
            )
