"""What queues must do, said as simply as possible: the model of the state machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hypothesis import strategies as st

from opendata_queue import ClaimedMessage, NewMessage, QueueOptions
from opendata_queue.queues.lanes import lane_of

LEASE_MS: Final = 1_000
BACKOFF_MS: Final = 50
NO_PRIORITY: Final = 128
LEASE_OVER: Final = "the lease ran out"

Headers = dict[str, str]


def _header_priority(headers: Headers) -> int:
    return int(headers.get("priority", NO_PRIORITY))


# What a filter says, and what it must mean: the priority of a message that it matches.
FILTERS: Final[dict[str, Callable[[Headers], int | None]]] = {
    "": _header_priority,
    "kind = 'a'": lambda h: _header_priority(h) if h.get("kind") == "a" else None,
    "kind = 'b' PRIORITY 5": lambda h: 5 if h.get("kind") == "b" else None,
    "kind = 'a' PRIORITY 1; TRUE": lambda h: 1 if h.get("kind") == "a" else _header_priority(h),
}

new_messages = st.builds(
    lambda kind, priority, delay, retention: NewMessage(
        headers={name: value for name, value in (("kind", kind), ("priority", priority)) if value},
        delay_ms=delay,
        retention_seconds=retention,
    ),
    kind=st.sampled_from(["a", "b", ""]),
    priority=st.sampled_from(["", "", "0", "4", "5", "200"]),
    delay=st.sampled_from([None, None, None, 0, 1, 60, 1_500]),
    retention=st.sampled_from([0, 0, 0, 0, 1, 2]),
)
batches = st.lists(new_messages, min_size=1, max_size=8)
filters = st.sampled_from(sorted(FILTERS))
_windows = st.integers(2, 4)
_buckets = st.integers(2, 3)
_attempts = st.integers(0, 3)
_in_flight = st.integers(2, 7)
_retentions = st.sampled_from([0, 0, 1, 2])
queue_options = st.builds(
    QueueOptions,
    window=_windows,
    bucket=_buckets,
    max_attempts=_attempts,
    max_in_flight=_in_flight,
    relaxed_claims=st.booleans(),
    done_retention_seconds=_retentions,
    failed_retention_seconds=_retentions,
    lease_ms=st.just(LEASE_MS),
    backoff_ms=st.just(BACKOFF_MS),
    backoff_jitter=st.just(0),
)
option_changes = st.fixed_dictionaries(
    {},
    optional={
        "window": _windows,
        "bucket": _buckets,
        "max_attempts": _attempts,
        "max_in_flight": _in_flight,
        "relaxed_claims": st.booleans(),
        "done_retention_seconds": _retentions,
        "failed_retention_seconds": _retentions,
    },
)


class Waits(NamedTuple):
    """Compares in the order of claiming."""

    priority: int
    message_id: int
    visible_at: int
    deadline: int
    attempts: int

    def is_over(self, now: int) -> bool:
        """Past its retention: the deadline itself still counts."""
        return self.deadline != 0 and now > self.deadline

    def within_its_life(self) -> Waits:
        """A delay does not outlive its message, which is due, and dropped, when it is over."""
        if not 0 < self.deadline < self.visible_at:
            return self
        return self._replace(visible_at=self.deadline + 1)


@dataclass(slots=True)
class InFlight:
    was: Waits
    attempts: int
    lease_deadline: int
    receipt: str
    consumer: str


class HasFailed(NamedTuple):
    was: Waits
    attempts: int
    failed_at: int
    error: str


class IsDone(NamedTuple):
    attempts: int
    done_at: int


@dataclass(slots=True)
class QueueModel:
    """Where each message of a queue must be.

    Messages whose retention is over stay in ``waiting``: when they are dropped is not told. Those
    that had been dropped by the time of a purge are only counted, in ``expired``. Done and failed
    ones that are past the retention of their queue stay until a pass of the compactor, and nobody
    is shown them.
    """

    name: str
    filter: str
    options: QueueOptions
    created_at: int
    paused: bool = False
    expired: int = 0
    waiting: dict[int, Waits] = field(default_factory=dict)
    held: dict[int, InFlight] = field(default_factory=dict)
    done: dict[int, IsDone] = field(default_factory=dict)
    failed: dict[int, HasFailed] = field(default_factory=dict)
    receipts: list[str] = field(default_factory=list)

    def takes_in(self, message: NewMessage, message_id: int, received: int) -> None:
        """It waits here if the filter says so."""
        life = message.retention_seconds * 1_000
        priority = FILTERS[self.filter](dict(message.headers))
        if priority is not None:
            self.waiting[message_id] = Waits(
                priority,
                message_id,
                received + (message.delay_ms or 0),
                received + life if life else 0,
                0,
            ).within_its_life()

    def needs(self, message_id: int) -> bool:
        """Whether it is not finished with a message."""
        return message_id in self.waiting or message_id in self.held or message_id in self.failed

    def claimable(self, now: int) -> list[Waits]:
        """What is there for consumers, in order, if they could hold all of it."""
        if self.paused:
            return []
        return sorted(
            m for m in self.waiting.values() if m.visible_at <= now and not m.is_over(now)
        )

    @property
    def room_in_flight(self) -> int:
        return max(0, self.options.max_in_flight - len(self.held))

    def claimed(self, message: ClaimedMessage, consumer: str) -> None:
        was = self.waiting.pop(message.message_id)
        self.held[was.message_id] = InFlight(
            was, was.attempts + 1, message.lease_deadline_ms, message.receipt, consumer
        )
        self.receipts.append(message.receipt)

    def holder_of(self, receipt: str, now: int) -> InFlight | None:
        for held in self.held.values():
            if held.receipt == receipt and now <= held.lease_deadline:
                return held
        return None

    def take_back_leases(self, now: int) -> None:
        for held in [h for h in self.held.values() if now > h.lease_deadline]:
            self.give_back(held, now, error=LEASE_OVER, delay_ms=None)

    def give_back(self, held: InFlight, now: int, *, error: str, delay_ms: int | None) -> None:
        message_id, limit = held.was.message_id, self.options.max_attempts
        del self.held[message_id]
        if limit and held.attempts >= limit and not held.was.is_over(now):
            self.failed[message_id] = HasFailed(held.was, held.attempts, now, error)
            return
        pause = BACKOFF_MS * 2 ** (held.attempts - 1) if delay_ms is None else delay_ms
        self.waits_again(held.was, now + pause, held.attempts)

    def waits_again(self, was: Waits, visible_at: int, attempts: int) -> None:
        again = was._replace(visible_at=visible_at, attempts=attempts)
        self.waiting[was.message_id] = again.within_its_life()

    def shown_done(self, now: int) -> dict[int, IsDone]:
        since = self.options.done_since(now)
        return {one: done for one, done in self.done.items() if done.done_at >= since}

    def shown_failed(self, now: int) -> dict[int, HasFailed]:
        since = self.options.failed_since(now)
        return {one: failed for one, failed in self.failed.items() if failed.failed_at >= since}

    def forget_finished(self, now: int) -> None:
        """A pass of the compactor."""
        self.done, self.failed = self.shown_done(now), self.shown_failed(now)


def are_the_first(claimed: Sequence[int], there: Iterable[Waits]) -> bool:
    """Whether these are the first messages of what is there, in a right order.

    The best priority comes first, and of a priority the oldest of each lane; lanes take turns, and
    which one comes first is not told.
    """
    lanes: dict[tuple[int, int], list[int]] = {}
    for one in sorted(there, reverse=True):
        lanes.setdefault((one.priority, lane_of(one.message_id)), []).append(one.message_id)
    for message_id in claimed:
        best = min(priority for priority, _ in lanes)
        key = best, lane_of(message_id)
        if key not in lanes or lanes[key].pop() != message_id:
            return False
        if not lanes[key]:
            del lanes[key]
    return True


def outcomes(holders: list[InFlight | None]) -> list[str]:
    return ["lease_lost" if held is None else "ok" for held in holders]
