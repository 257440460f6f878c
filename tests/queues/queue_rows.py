"""What the rows of a queue say, as they are in the store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from odq_encodings import (
    ActiveMessages,
    BacklogEntry,
    BacklogKey,
    DoneMessage,
    DoneMessages,
    FailedMessages,
    Failure,
    FailureKey,
    QueueCounters,
    ScheduleEntry,
    ScheduleKey,
    SealedDoneKey,
    SealedFailedKey,
)
from opendata_queue.queues.lanes import lane_of
from tests.queues.queue_model import QueueModel, Waits


@dataclass(slots=True)
class QueueRows:
    """All rows of one queue, as they are in the store."""

    active: ActiveMessages | None = None
    counters: QueueCounters | None = None
    backlog: list[Waits] = field(default_factory=list)
    schedule: list[Waits] = field(default_factory=list)
    done: list[DoneMessage] = field(default_factory=list)
    sealed_done: dict[int, int] = field(default_factory=dict)
    failed: list[tuple[int, int, int]] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)
    failed_buckets: dict[int, int | None] = field(default_factory=dict)

    def add(self, key: Any, value: Any) -> None:
        match value:
            case ActiveMessages():
                self.active = value
            case QueueCounters():
                self.counters = value
            case BacklogEntry():
                assert isinstance(key, BacklogKey)
                self.backlog.append(
                    Waits(
                        key.priority,
                        key.message_id,
                        value.visible_at,
                        value.retention_deadline,
                        value.attempts,
                    )
                )
            case ScheduleEntry():
                assert isinstance(key, ScheduleKey)
                self.schedule.append(
                    Waits(
                        value.priority,
                        key.message_id,
                        key.visible_at,
                        value.retention_deadline,
                        value.attempts,
                    )
                )
            case DoneMessages():
                self.done += value.messages
                if isinstance(key, SealedDoneKey):
                    self.sealed_done[key.bucket] = len(value.messages)
            case FailedMessages():
                bucket = key.bucket if isinstance(key, SealedFailedKey) else None
                assert value.messages or bucket is None, "an empty bucket was left behind"
                for message in value.messages:
                    self.failed.append((message.message_id, message.failed_at, message.attempts))
                    self.failed_buckets[message.message_id] = bucket
            case Failure():
                assert isinstance(key, FailureKey)
                self.failures[key.message_id] = value

    def window(self) -> list[Waits]:
        assert self.active is not None
        return [
            Waits(m.priority, m.message_id, m.visible_at, m.retention_deadline, m.attempts)
            for m in self.active.available
        ]

    def check(self, queue: QueueModel, now: int) -> None:
        """Every message is where the model says, once, and the indexes and counters agree."""
        assert self.active is not None
        window, backlog, schedule = self.window(), sorted(self.backlog), self.schedule
        waiting = {m.message_id: m for m in (*window, *backlog, *schedule)}
        assert len(waiting) == len(window) + len(backlog) + len(schedule), "in two places"
        assert waiting.items() <= queue.waiting.items()
        missing = queue.waiting.keys() - waiting.keys()
        assert all(queue.waiting[one].is_over(now) for one in missing), "a message is lost"
        assert all(m.visible_at > now for m in schedule)
        assert all(m.visible_at <= now for m in (*window, *backlog))
        self._check_order(window, backlog)
        assert len(window) <= queue.options.window
        assert {(m.message_id, m.attempts, m.lease_deadline) for m in self.active.in_flight} == {
            (h.was.message_id, h.attempts, h.lease_deadline) for h in queue.held.values()
        }
        assert len(self.active.in_flight) == len(queue.held)
        assert sorted((m.message_id, m.attempts, m.done_at) for m in self.done) == sorted(
            (one, *done) for one, done in queue.done.items()
        )
        self._check_failed(queue)
        self._check_counters(queue)

    @staticmethod
    def _check_order(window: list[Waits], backlog: list[Waits]) -> None:
        """The order over the whole backlog: nothing in it comes before the window of its lane."""
        assert sorted(window) == window
        if window and backlog:
            assert window[-1].priority <= backlog[0].priority
        last = {(m.priority, lane_of(m.message_id)): m for m in window}
        for message in backlog:
            lane = message.priority, lane_of(message.message_id)
            assert lane not in last or last[lane] < message

    def _check_failed(self, queue: QueueModel) -> None:
        counters = self.counters
        assert counters is not None
        assert sorted(self.failed) == sorted(
            (one, f.failed_at, f.attempts) for one, f in queue.failed.items()
        )
        assert self.failures.keys() == queue.failed.keys()
        for message_id, failure in self.failures.items():
            bucket = self.failed_buckets[message_id]
            assert failure.bucket == (counters.failed_bucket if bucket is None else bucket)

    def _check_counters(self, queue: QueueModel) -> None:
        counters = self.counters
        assert counters is not None
        assert counters.scheduled == len(self.schedule)
        assert all(counters.scheduled_from <= m.visible_at for m in self.schedule)
        assert (counters.done, counters.failed) == (len(queue.done), len(queue.failed))
        # Retention drops the oldest ones, whole, but for the one at its boundary.
        floor = min(self.sealed_done, default=counters.done_bucket)
        assert sorted(self.sealed_done) == list(range(floor, counters.done_bucket))
        assert all(self.sealed_done.values())
        by_lane = Counter((m.priority, lane_of(m.message_id)) for m in self.backlog)
        starts = {(c.priority, lane_of(c.from_message_id)): c for c in counters.backlog}
        assert {lane: count.rows for lane, count in starts.items()} == by_lane
        for message in self.backlog:
            lane = message.priority, lane_of(message.message_id)
            assert starts[lane].from_message_id <= message.message_id
