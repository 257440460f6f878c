"""The state of one queue and how it changes (RFC 0006). No I/O, no clock: time comes in.

Every transition takes ``now``, changes the state in memory, and tells ``changes`` which rows
behind the version-1 records must change with it. Whoever stores the queue writes both in one
batch.

    route ──▶ available ──claim──▶ in flight ──ack──▶ done
       │       ▲   ▲  ▲                │ │ │
       ▼       │   │  └──release───────┘ │ └──(no attempts left)──▶ failed ──replay──▶ available
    scheduled ─┘   └───────(delay 0)─────┤
       ▲                                 │
       └──────────nack, lease over───────┘
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from odq_encodings import (
    ActiveMessages,
    AvailableMessage,
    BacklogCount,
    DoneMessage,
    DoneMessages,
    FailedMessage,
    FailedMessages,
    Failure,
    InFlightMessage,
    QueueCounters,
)

LEASE_OVER = "the lease ran out"

_encode_available = AvailableMessage.layout.struct.pack
_encode_in_flight = InFlightMessage.layout.struct.pack
_encode_done = DoneMessage.layout.struct.pack
_encode_failed = FailedMessage.layout.struct.pack

MAX_ATTEMPTS_COUNTED = 0xFFFF


class Waiting(NamedTuple):
    """A message that can be claimed, now or later. Compares in the order of claiming."""

    priority: int
    message_id: int
    visible_at: int
    retention_deadline: int
    attempts: int

    def expired(self, now: int) -> bool:
        return 0 < self.retention_deadline < now


class Held(NamedTuple):
    """A message under a lease.

    ``retention_deadline`` is none when the process that claimed it is gone: the version-1 entry
    has no room for it, and it has to be looked up before the message can go back.
    """

    message_id: int
    priority: int
    claimed_at: int
    lease_deadline: int
    attempts: int
    retention_deadline: int | None
    consumer: str


class Claim(NamedTuple):
    """What identifies one claim of one message."""

    message_id: int
    attempts: int
    claimed_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueRules:
    """The options of a queue that its transitions depend on."""

    max_attempts: int = 0
    """0: no limit."""
    window: int = 256
    max_in_flight: int = 10_000
    bucket: int = 128
    backoff_ms: int = 1_000
    max_backoff_ms: int = 3_600_000
    backoff_factor: float = 2.0
    backoff_jitter: float = 0.2
    paused: bool = False

    def backoff(self, attempts: int, chance: float) -> int:
        """The delay after so many attempts; ``chance`` in [0, 1) spreads it by the jitter."""
        # The exponent is capped before it is used: 2.0 ** 65_535 is no number.
        exponent = min(max(0, attempts - 1), 64)
        delay = min(self.backoff_ms * self.backoff_factor**exponent, self.max_backoff_ms)
        return int(delay * (1 - self.backoff_jitter * chance))


class Changes(Protocol):
    """Takes note of the rows behind the version-1 records that a transition changes."""

    def put_backlog(self, message: Waiting) -> None: ...
    def delete_backlog(self, message: Waiting) -> None: ...
    def put_schedule(self, message: Waiting) -> None: ...
    def delete_schedule(self, message: Waiting) -> None: ...
    def seal_done(self, bucket: int, value: bytes) -> None: ...
    def seal_failed(self, bucket: int, value: bytes) -> None: ...
    def put_failure(self, message_id: int, failure: Failure) -> None: ...
    def delete_failure(self, message_id: int) -> None: ...


class Backlog:
    """How many messages of each priority are behind the window, and where they begin."""

    __slots__ = ("_from", "_rows", "total")

    def __init__(self, counts: Iterable[BacklogCount] = ()) -> None:
        self._rows = {count.priority: count.rows for count in counts}
        self._from = {count.priority: count.from_message_id for count in counts}
        self.total = sum(self._rows.values())

    def add(self, message: Waiting) -> None:
        priority, message_id = message.priority, message.message_id
        self._rows[priority] = self._rows.get(priority, 0) + 1
        self._from[priority] = min(self._from.get(priority, message_id), message_id)
        self.total += 1

    def remove_first(self, message: Waiting) -> None:
        """Remove a message that has the smallest id of its priority."""
        priority = message.priority
        self.total -= 1
        self._rows[priority] -= 1
        self._from[priority] = message.message_id + 1
        if not self._rows[priority]:
            del self._rows[priority], self._from[priority]

    def ranges(self) -> list[tuple[int, int, int]]:
        """Priority, first possible id, and number of rows, best priority first."""
        return [(p, self._from[p], self._rows[p]) for p in sorted(self._rows)]

    def counts(self) -> tuple[BacklogCount, ...]:
        return tuple(
            BacklogCount(priority=p, rows=rows, from_message_id=start)
            for p, start, rows in self.ranges()
        )


class QueueState:
    """Where every message of one queue is."""

    def __init__(
        self,
        rules: QueueRules,
        changes: Changes,
        *,
        active: ActiveMessages | None = None,
        done: DoneMessages | None = None,
        failed: FailedMessages | None = None,
        counters: QueueCounters | None = None,
    ) -> None:
        self.rules = rules
        self._changes = changes
        self._window: list[tuple[Waiting, bytes]] = []
        self._in_flight: dict[int, tuple[Held, bytes]] = {}
        self._leases: list[tuple[int, int]] = []
        self._deadline_unknown: set[int] = set()
        self._claims_after = 0
        self._last_claim_at = 0
        self._done_open = [] if done is None else [m.encode() for m in done.messages]
        self._failed_open = (
            {} if failed is None else {m.message_id: m.encode() for m in failed.messages}
        )
        self.done_changed = False
        self.failed_changed = False
        self.backlog = Backlog(() if counters is None else counters.backlog)
        self.scheduled = 0 if counters is None else counters.scheduled
        self.scheduled_from = 0 if counters is None else counters.scheduled_from
        self.done_bucket = 0 if counters is None else counters.done_bucket
        self.failed_bucket = 0 if counters is None else counters.failed_bucket
        self.done = 0 if counters is None else counters.done
        self.failed = 0 if counters is None else counters.failed
        self.expired = 0 if counters is None else counters.expired
        if active is not None:
            self._load(active)

    def _load(self, active: ActiveMessages) -> None:
        for m in active.available:
            waiting = Waiting(
                m.priority, m.message_id, m.visible_at, m.retention_deadline, m.attempts
            )
            self._window.append((waiting, m.encode()))
        self._window.sort()
        for n in active.in_flight:
            held = Held(
                n.message_id, n.priority, n.claimed_at, n.lease_deadline, n.attempts, None, ""
            )
            self._in_flight[n.message_id] = held, n.encode()
            self._last_claim_at = max(self._last_claim_at, n.claimed_at)
            heapq.heappush(self._leases, (n.lease_deadline, n.message_id))
            self._deadline_unknown.add(n.message_id)

    # --- what it holds ----------------------------------------------------------------------------

    @property
    def available(self) -> int:
        return len(self._window) + self.backlog.total

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def claimable(self) -> int:
        """How many could be claimed right now without reading anything."""
        if self.rules.paused:
            return 0
        return max(0, min(len(self._window), self.rules.max_in_flight - len(self._in_flight)))

    @property
    def promised(self) -> int:
        """How many could be claimed, those included that a refill has to bring first."""
        if self.rules.paused:
            return 0
        return max(0, min(self.available, self.rules.max_in_flight - len(self._in_flight)))

    @property
    def wants_refill(self) -> bool:
        return self.wants_refill_for(0)

    def wants_refill_for(self, count: int) -> bool:
        """Whether more should be at hand: half a window, or ``count`` messages if they fit."""
        wanted = max(1, self.rules.window // 2, min(count, self.rules.window))
        return bool(self.backlog.total) and len(self._window) < wanted

    @property
    def room(self) -> int:
        """How many messages a refill may bring."""
        return max(0, self.rules.window - len(self._window))

    @property
    def next_lease_deadline(self) -> int | None:
        return self._leases[0][0] if self._leases else None

    def window(self) -> list[Waiting]:
        return [waiting for waiting, _ in self._window]

    def first(self, count: int) -> list[Waiting]:
        """The next messages to be claimed, as far as they are at hand."""
        return [waiting for waiting, _ in self._window[:count]]

    def held(self) -> list[Held]:
        return [held for held, _ in self._in_flight.values()]

    # --- messages come in -------------------------------------------------------------------------

    def route(self, message: Waiting, now: int) -> None:
        """Take in a message that the tailer has found to match, or one that is replayed."""
        if message.expired(now):
            self.expired += 1
        elif message.visible_at > now:
            self._schedule(message)
        else:
            self._admit(message)

    def take_due(self, due: Iterable[Waiting], now: int) -> None:
        """Admit scheduled messages whose time has come."""
        for message in due:
            self._changes.delete_schedule(message)
            self.scheduled -= 1
            if message.expired(now):
                self.expired += 1
            else:
                self._admit(message)

    def refill(self, best: Sequence[Waiting], now: int) -> None:
        """Move the first messages of the backlog into the window, as far as there is room."""
        for message in best:
            if not self.room:
                return
            self._changes.delete_backlog(message)
            self.backlog.remove_first(message)
            if message.expired(now):
                self.expired += 1
            else:
                self._window.append((message, _available_bytes(message)))

    def _admit(self, message: Waiting) -> None:
        """Everything in the window comes before everything in the backlog."""
        window = self._window
        in_front = bool(window) and message < window[-1][0]
        if in_front or (not self.backlog.total and len(window) < self.rules.window):
            insort(window, (message, _available_bytes(message)))
            if len(window) > self.rules.window:
                self._to_backlog(window.pop()[0])
        else:
            self._to_backlog(message)

    def _to_backlog(self, message: Waiting) -> None:
        self.backlog.add(message)
        self._changes.put_backlog(message)

    def _schedule(self, message: Waiting) -> None:
        if not self.scheduled or message.visible_at < self.scheduled_from:
            self.scheduled_from = message.visible_at
        self.scheduled += 1
        self._changes.put_schedule(message)

    # --- consumers --------------------------------------------------------------------------------

    def claim(self, count: int, *, lease_ms: int, consumer: str, now: int) -> list[Held]:
        """Hand out up to ``count`` messages of the window, the first in order first."""
        claimed: list[Held] = []
        taken = 0
        count = min(count, self.claimable)
        for message, _ in self._window:
            if len(claimed) == count:
                break
            taken += 1
            if message.expired(now):
                self.expired += 1
                continue
            claimed.append(self._hold(message, now, lease_ms, consumer))
        del self._window[:taken]
        return claimed

    def ack(self, claim: Claim, now: int) -> bool:
        """Finish a message; false, and nothing has changed, if the claim is not valid any more."""
        held = self._valid(claim, now)
        if held is None:
            return False
        del self._in_flight[held.message_id]
        self.done += 1
        self.done_changed = True
        self._done_open.append(_encode_done(held.message_id, now, held.attempts))
        if len(self._done_open) >= self.rules.bucket:
            self._changes.seal_done(self.done_bucket, DoneMessages.join(self._done_open))
            self.done_bucket += 1
            self._done_open = []
        return True

    def nack(
        self, claim: Claim, now: int, *, error: str, delay_ms: int | None, chance: float
    ) -> bool:
        """Give up a try; false, and nothing has changed, if the claim is not valid any more."""
        held = self._valid(claim, now)
        if held is None:
            return False
        self._give_back(held, now, error=error, delay_ms=delay_ms, chance=chance)
        return True

    def extend(self, claim: Claim, now: int, *, lease_ms: int) -> int | None:
        """Let a lease run for so long from now; the new deadline, or none."""
        held = self._valid(claim, now)
        if held is None:
            return None
        deadline = now + lease_ms
        self._put_in_flight(held._replace(lease_deadline=deadline))
        return deadline

    def release(self, claim: Claim, now: int) -> bool:
        """Give a message back as if it had not been claimed."""
        held = self._valid(claim, now)
        if held is None:
            return False
        # Its next claim has the same number of attempts, so it must differ in its time.
        self._claims_after = self._last_claim_at + 1
        self._return(held, visible_at=now, attempts=held.attempts - 1, now=now)
        return True

    def expire_leases(self, now: int, *, grace_ms: int, chance: Callable[[], float]) -> list[Held]:
        """Take back what is over its lease; looks at nothing that is not due."""
        taken = []
        while self._leases and self._leases[0][0] + grace_ms < now:
            deadline, message_id = heapq.heappop(self._leases)
            held, _ = self._in_flight.get(message_id, (None, b""))
            if held is None or held.lease_deadline != deadline:
                continue  # acknowledged, or extended: then there is a later entry
            self._give_back(held, now, error=LEASE_OVER, delay_ms=None, chance=chance())
            taken.append(held)
        return taken

    @property
    def lacks_deadline(self) -> set[int]:
        """Messages in flight whose retention must be looked up before they can be given back.

        Only those that were in flight when the queue was loaded.
        """
        return self._deadline_unknown

    def learn_deadline(self, message_id: int, retention_deadline: int) -> None:
        """Fill in what the version-1 entry could not hold."""
        self._deadline_unknown.discard(message_id)
        if message_id in self._in_flight:
            held, encoded = self._in_flight[message_id]
            self._in_flight[message_id] = (
                held._replace(retention_deadline=retention_deadline),
                encoded,
            )

    def _hold(self, message: Waiting, now: int, lease_ms: int, consumer: str) -> Held:
        self._last_claim_at = max(now, self._claims_after)
        held = Held(
            message.message_id,
            message.priority,
            self._last_claim_at,
            now + lease_ms,
            min(message.attempts + 1, MAX_ATTEMPTS_COUNTED),
            message.retention_deadline,
            consumer,
        )
        self._put_in_flight(held)
        return held

    def _put_in_flight(self, held: Held) -> None:
        encoded = _encode_in_flight(
            held.message_id, held.priority, held.claimed_at, held.lease_deadline, held.attempts
        )
        self._in_flight[held.message_id] = held, encoded
        heapq.heappush(self._leases, (held.lease_deadline, held.message_id))
        if len(self._leases) > 2 * len(self._in_flight) + 64:  # mostly left over from extensions
            self._leases = [(h.lease_deadline, i) for i, (h, _) in self._in_flight.items()]
            heapq.heapify(self._leases)

    def _valid(self, claim: Claim, now: int) -> Held | None:
        held, _ = self._in_flight.get(claim.message_id, (None, b""))
        if (
            held is None
            or held.attempts != claim.attempts
            or held.claimed_at != claim.claimed_at
            or now > held.lease_deadline
        ):
            return None
        return held

    def _give_back(
        self, held: Held, now: int, *, error: str, delay_ms: int | None, chance: float
    ) -> None:
        limit = self.rules.max_attempts
        if limit and held.attempts >= limit:
            self._fail(held, now, error)
            return
        delay = self.rules.backoff(held.attempts, chance) if delay_ms is None else delay_ms
        self._return(held, visible_at=now + delay, attempts=held.attempts, now=now)

    def _return(self, held: Held, *, visible_at: int, attempts: int, now: int) -> None:
        del self._in_flight[held.message_id]
        assert held.retention_deadline is not None, "looked up before it is given back"
        self.route(
            Waiting(held.priority, held.message_id, visible_at, held.retention_deadline, attempts),
            now,
        )

    # --- failed messages --------------------------------------------------------------------------

    def _fail(self, held: Held, now: int, error: str) -> None:
        del self._in_flight[held.message_id]
        assert held.retention_deadline is not None, "looked up before it is given back"
        if 0 < held.retention_deadline < now:
            self.expired += 1
            return
        self.failed += 1
        self.failed_changed = True
        self._failed_open[held.message_id] = _encode_failed(held.message_id, now, held.attempts)
        self._changes.put_failure(
            held.message_id,
            Failure(
                bucket=self.failed_bucket,
                failed_at=now,
                attempts=held.attempts,
                priority=held.priority,
                retention_deadline=held.retention_deadline,
                consumer=held.consumer,
                error=error,
            ),
        )
        if len(self._failed_open) >= self.rules.bucket:
            value = FailedMessages.join(self._failed_open.values())
            self._changes.seal_failed(self.failed_bucket, value)
            self.failed_bucket += 1
            self._failed_open = {}

    def forget_failed(self, message_id: int, failure: Failure) -> bool:
        """Drop a failed message; true if its entry was in the open bucket.

        If it is false, the entry is in the sealed bucket that ``failure`` names, which the caller
        must rewrite.
        """
        self.failed -= 1
        self.failed_changed = True
        self._changes.delete_failure(message_id)
        return self._failed_open.pop(message_id, None) is not None

    def failed_open(self, message_id: int) -> bool:
        """Whether a failed message's entry is in the open bucket."""
        return message_id in self._failed_open

    def replay(self, message_id: int, failure: Failure, now: int) -> bool:
        """Make a failed message available again, with all its attempts; as ``forget_failed``."""
        was_open = self.forget_failed(message_id, failure)
        self._claims_after = self._last_claim_at + 1  # its attempts begin again
        self.route(Waiting(failure.priority, message_id, now, failure.retention_deadline, 0), now)
        return was_open

    # --- purging ----------------------------------------------------------------------------------

    def drop_window(self) -> int:
        """Forget what is in the window; returns how many messages that were."""
        dropped = len(self._window)
        self._window = []
        return dropped

    def drop_backlog(self, best: Iterable[Waiting]) -> None:
        """Forget the first messages of the backlog."""
        for message in best:
            self._changes.delete_backlog(message)
            self.backlog.remove_first(message)

    def drop_scheduled(self, messages: Iterable[Waiting]) -> None:
        for message in messages:
            self._changes.delete_schedule(message)
            self.scheduled -= 1

    # --- version-1 records ------------------------------------------------------------------------

    def active_record(self) -> bytes:
        return ActiveMessages.join(
            [encoded for _, encoded in self._window],
            [encoded for _, encoded in self._in_flight.values()],
        )

    def done_record(self) -> bytes:
        """The open bucket; changed since the last call if ``done_changed``."""
        self.done_changed = False
        return DoneMessages.join(self._done_open)

    def failed_record(self) -> bytes:
        """The open bucket; changed since the last call if ``failed_changed``."""
        self.failed_changed = False
        return FailedMessages.join(self._failed_open.values())

    def counters_record(self) -> bytes:
        return QueueCounters(
            done_bucket=self.done_bucket,
            failed_bucket=self.failed_bucket,
            done=self.done,
            failed=self.failed,
            expired=self.expired,
            scheduled=self.scheduled,
            scheduled_from=self.scheduled_from,
            backlog=self.backlog.counts(),
        ).encode()


def _available_bytes(message: Waiting) -> bytes:
    return _encode_available(
        message.message_id,
        message.priority,
        message.visible_at,
        message.retention_deadline,
        message.attempts,
    )
