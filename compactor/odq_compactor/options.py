"""How the compactor is configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from opendata_queue.model.errors import InvalidInputError
from opendata_queue.root.shard_files import COMMITTED_WITHIN_MS

DAY_MS: Final = 24 * 3_600_000
_LEAST_BULK_KEPT_MS: Final = COMMITTED_WITHIN_MS + DAY_MS


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactorOptions:
    """The defaults are those of an owner that serves consumers meanwhile."""

    interval_ms: int = 60_000
    """How long to rest between two passes."""

    erase: bool = False
    """Delete the rows of expired messages at their deadline, one by one.

    Otherwise SlateDB drops them by itself, an hour later, at no cost.
    """

    batch_messages: int = 2_000
    """How many messages one commit takes away: callers wait for no more than that."""

    work_share: float = 0.2
    """Which part of the time it may work, so that consumers are not kept waiting; up to 1."""

    orphan_age_ms: int = DAY_MS
    """How old a blob without a message must be. Its message may be on its way."""

    sweep_interval_ms: int = 3_600_000
    """How often to search for orphans, and for finished messages even if there are few."""

    bulk_kept_ms: int = 7 * DAY_MS
    """How long commits of bulk jobs are kept, and shards that no job has committed (RFC 0009).

    Seven days at least: younger shards may still be committed.
    """

    bulk_commits_kept: int = 900
    """How many commits are kept at most, of jobs that are registered: those of one list."""

    bulk_shards_read: int = 100
    """Of how many bulk shards at most one pass reads the log, if no commit says when they end."""

    space: bool = True
    """Whether SlateDB is asked to rewrite a database of which a third or more can be freed."""

    rewrite: bool = False
    """Have every database rewritten, whatever can be freed: that costs what the history does."""

    def __post_init__(self) -> None:
        for name in (
            "interval_ms",
            "batch_messages",
            "orphan_age_ms",
            "sweep_interval_ms",
            "bulk_kept_ms",
            "bulk_commits_kept",
            "bulk_shards_read",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InvalidInputError(f"{name} is {value!r}, not a number of 0 or more")
        if not self.interval_ms or not self.batch_messages:
            raise InvalidInputError("interval_ms and batch_messages must be over 0")
        if self.bulk_kept_ms < _LEAST_BULK_KEPT_MS:
            raise InvalidInputError(
                f"bulk_kept_ms is {self.bulk_kept_ms}, not {_LEAST_BULK_KEPT_MS} or more: younger "
                "shards may still be committed"
            )
        if not 0 < self.work_share <= 1:
            raise InvalidInputError(f"work_share is {self.work_share}, not over 0 and up to 1")
