"""The state of one queue and how it changes (RFC 0006). No I/O, no clock: time comes in.

    route ──▶ available ──claim──▶ in flight ──ack──▶ done
       │       ▲   ▲  ▲                │ │ │
       ▼       │   │  └──release───────┘ │ └──(no attempts left)──▶ failed ──replay──▶ available
    scheduled ─┘   └───────(delay 0)─────┤
       ▲                                 │
       └──────────nack, lease over───────┘

Each part has one owner: ``Ready`` what is available, ``Schedule`` what is delayed, ``InFlight``
what is under leases, ``Finished`` what is done and failed. They answer questions; messages are
moved by ``QueueState`` alone, and ``TRANSITIONS`` has all the ways there are. A transition that
depends on time takes ``now``. It changes the state in memory, and says to ``Changes`` which rows
behind the version-1 records must change with it. The owner of the rows writes both in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final

from odq_encodings import (
    ActiveMessages,
    DoneMessages,
    FailedMessages,
    Failure,
    QueueCounters,
)
from opendata_queue.model.options import QueueRules
from opendata_queue.queues.lanes import Past
from opendata_queue.queues.state.finished import Finished
from opendata_queue.queues.state.in_flight import InFlight
from opendata_queue.queues.state.ready import Ready
from opendata_queue.queues.state.records import Changes, Claim, Held, Waiting
from opendata_queue.queues.state.schedule import Schedule

LEASE_OVER = "the lease ran out"


class Where(Enum):
    """Where a message is in a queue."""

    NOWHERE = "nowhere"
    """It has not come yet, or it has gone: dropped, forgotten, or expired."""
    WINDOW = "window"
    """Available, in memory and in the active record."""
    BACKLOG = "backlog"
    """Available, in a row."""
    SCHEDULE = "schedule"
    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


_NOWHERE, _WINDOW, _BACKLOG, _SCHEDULE, _IN_FLIGHT, _DONE, _FAILED = Where

_Rows = tuple[str, ...]
_ADMITTED: Final[Mapping[Where, _Rows]] = {
    _WINDOW: (),
    _BACKLOG: ("put_backlog",),
    _NOWHERE: (),  # it has expired
}
_ROUTED: Final[Mapping[Where, _Rows]] = {**_ADMITTED, _SCHEDULE: ("put_schedule",)}
_MAKES_ROOM: Final[Mapping[Where, _Rows]] = {_BACKLOG: ("put_backlog",)}
"""The last message of a full window, when another one comes before it."""
_GIVEN_BACK: Final[Mapping[Where, _Rows]] = {**_ROUTED, _FAILED: ("put_failure",)}

# What happens -> where a message was -> where it may be then -> what happens to its own rows.
# Buckets that are full are sealed besides. What is not here does not happen: it is tested.
TRANSITIONS: Final[Mapping[str, Mapping[Where, Mapping[Where, _Rows]]]] = {
    "route": {_NOWHERE: _ROUTED, _WINDOW: _MAKES_ROOM},
    "take_due": {
        _SCHEDULE: {where: ("delete_schedule", *rows) for where, rows in _ADMITTED.items()},
        _WINDOW: _MAKES_ROOM,
    },
    "refill": {_BACKLOG: {_WINDOW: ("delete_backlog",), _NOWHERE: ("delete_backlog",)}},
    "claim": {_WINDOW: {_IN_FLIGHT: (), _NOWHERE: ()}},
    "extend": {},
    "ack": {_IN_FLIGHT: {_DONE: ()}},
    "nack": {_IN_FLIGHT: _GIVEN_BACK, _WINDOW: _MAKES_ROOM},
    "release": {_IN_FLIGHT: _ADMITTED, _WINDOW: _MAKES_ROOM},
    "expire_leases": {_IN_FLIGHT: _GIVEN_BACK, _WINDOW: _MAKES_ROOM},
    "drop_gone": {_IN_FLIGHT: {_NOWHERE: ()}},
    "replay": {
        _FAILED: {where: ("delete_failure", *rows) for where, rows in _ADMITTED.items()},
        _WINDOW: _MAKES_ROOM,
    },
    "forget_failed": {_FAILED: {_NOWHERE: ("delete_failure",)}},
    "follow": {_WINDOW: _MAKES_ROOM},
    "drop_window": {_WINDOW: {_NOWHERE: ()}},
    "drop_backlog": {_BACKLOG: {_NOWHERE: ("delete_backlog",)}},
    "drop_scheduled": {_SCHEDULE: {_NOWHERE: ("delete_schedule",)}},
    "expire_window": {_WINDOW: {_NOWHERE: ()}},
    "expire_backlog": {_BACKLOG: {_NOWHERE: ("delete_backlog",)}},
    "trim_done": {_DONE: {_NOWHERE: ()}},
    "trim_failed": {_FAILED: {_NOWHERE: ("delete_failure",)}},
    "forget_failures": {_FAILED: {_NOWHERE: ("delete_failure",)}},
}


class QueueState:
    """Where every message of one queue is."""

    __slots__ = (
        "expired",
        "finished",
        "in_flight",
        "ready",
        "rules",
        "schedule",
    )

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
        self.ready = Ready(
            rules.window,
            changes.backlog,
            available=() if active is None else active.available,
            counts=() if counters is None else counters.backlog,
        )
        self.schedule = Schedule(
            changes.schedule,
            0 if counters is None else counters.scheduled,
            0 if counters is None else counters.scheduled_from,
        )
        self.in_flight = InFlight(() if active is None else active.in_flight)
        self.finished = Finished(
            rules.bucket, changes.finished, done=done, failed=failed, counters=counters
        )
        self.expired = 0 if counters is None else counters.expired
        """How many messages expired before they were finished."""

    def follow(self, rules: QueueRules) -> None:
        """Go by other rules from now on; what does not fit the window any more leaves it."""
        self.rules = rules
        self.ready.follow(rules.window)
        self.finished.follow(rules.bucket)

    @property
    def claimable(self) -> int:
        """How many could be claimed right now without reading anything."""
        if self.rules.paused:
            return 0
        return max(0, min(self.ready.at_hand, self.rules.max_in_flight - len(self.in_flight)))

    @property
    def promised(self) -> int:
        """How many could be claimed, those included that a refill has to bring first."""
        if self.rules.paused:
            return 0
        return max(0, min(len(self.ready), self.rules.max_in_flight - len(self.in_flight)))

    # --- messages come in -------------------------------------------------------------------------

    def route(self, message: Waiting, now: int) -> None:
        """Take in a message that the tailer has found to match, or one that is replayed."""
        if message.expired(now):
            self.expired += 1
        elif message.visible_at > now:
            self.schedule.add(message)
        else:
            self.ready.admit(message)

    def route_many(self, messages: Sequence[Waiting], now: int) -> None:
        """``route`` each of them, in their order."""
        if messages and self.ready.come_last(messages, now):
            self.ready.admit_last(messages)
        else:
            for message in messages:
                self.route(message, now)

    def take_due(self, due: Sequence[Waiting], now: int, *, next_due: int) -> None:
        """Admit scheduled messages whose time has come; none of the others is due before."""
        self.schedule.remove(due)
        self.schedule.due_from = next_due
        for message in due:
            if message.expired(now):
                self.expired += 1
            else:
                self.ready.admit(message)

    def refill(self, now: int) -> list[Waiting]:
        """Move messages from the front of the backlog into the window; returns them.

        None are moved if there is no room, or if the front is not known.
        """
        moved, expired = self.ready.refill(now)
        self.expired += expired
        return moved

    # --- consumers --------------------------------------------------------------------------------

    def claim(self, count: int, *, lease_ms: int, consumer: str, now: int) -> list[Held]:
        """Hand out up to ``count`` messages of the window, the first in order first."""
        chosen, expired = self.ready.take(min(count, self.claimable), now)
        self.expired += expired
        return self.in_flight.hold(chosen, now, lease_ms=lease_ms, consumer=consumer)

    def extend(self, claim: Claim | Held, now: int, *, lease_ms: int) -> int | None:
        """Let a lease run for so long from now; the new deadline, or none."""
        return self.in_flight.extend(claim, now, lease_ms=lease_ms)

    def ack(self, claims: Iterable[Claim | Held], now: int) -> list[bool]:
        """Finish messages; false, and nothing has changed, for a claim that is not valid."""
        outcomes, taken = self.in_flight.take_many(claims, now)
        self.finished.add_done(taken, now)
        return outcomes

    def drop_gone(self, claims: Iterable[Claim], now: int) -> int:
        """Drop claimed messages that the store does not have any more; how many they were.

        They count as expired: no consumer will get them, and none was done with them.
        """
        _, gone = self.in_flight.take_many(claims, now)
        self.expired += len(gone)
        return len(gone)

    def nack(
        self, claim: Claim | Held, now: int, *, error: str, delay_ms: int | None, chance: float
    ) -> bool:
        """Give up a try; false, and nothing has changed, if the claim is not valid any more."""
        held = self.in_flight.take(claim, now)
        if held is None:
            return False
        self._give_back(held, now, error=error, delay_ms=delay_ms, chance=chance)
        return True

    def release(self, claim: Claim | Held, now: int) -> bool:
        """Give a message back as if it had not been claimed."""
        held = self.in_flight.take(claim, now, unused=True)
        if held is None:
            return False
        self._return(held, visible_at=now, attempts=held.attempts - 1, now=now)
        return True

    def expire_leases(
        self,
        now: int,
        *,
        grace_ms: int,
        chance: Callable[[], float],
        at_most: int | None = None,
    ) -> list[Held]:
        """Take back what is over its lease; reads only what is due."""
        taken = self.in_flight.take_over(now, grace_ms=grace_ms, at_most=at_most)
        for held in taken:
            self._give_back(held, now, error=LEASE_OVER, delay_ms=None, chance=chance())
        return taken

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
        assert held.retention_deadline is not None, "looked up before it is given back"
        self.route(
            Waiting(held.priority, held.message_id, visible_at, held.retention_deadline, attempts),
            now,
        )

    # --- failed messages --------------------------------------------------------------------------

    def _fail(self, held: Held, now: int, error: str) -> None:
        assert held.retention_deadline is not None, "looked up before it is given back"
        if 0 < held.retention_deadline < now:
            self.expired += 1
        else:
            self.finished.add_failed(held, held.retention_deadline, now, error)

    def forget_failed(self, message_id: int) -> bool:
        """Drop a failed message; true if its entry was in the open bucket.

        If it is false, the entry is in the sealed bucket that its failure names, which the caller
        must rewrite.
        """
        return self.finished.forget_failed(message_id)

    def replay(self, message_id: int, failure: Failure, now: int) -> bool:
        """Make a failed message available again, with all its attempts; as ``forget_failed``."""
        was_open = self.finished.forget_failed(message_id)
        self.in_flight.let_claims_differ()  # its attempts begin again
        self.route(Waiting(failure.priority, message_id, now, failure.retention_deadline, 0), now)
        return was_open

    # --- purging, and retention (RFC 0010) --------------------------------------------------------

    def drop_window(self, past: Past) -> int:
        """Forget messages of the window that are in the past; returns how many they were."""
        return self.ready.drop_past(past)

    def drop_backlog(self, best: Sequence[Waiting]) -> None:
        """Forget messages of the backlog, the first ones of their priorities."""
        self.ready.drop_first_of_backlog(best)

    def drop_scheduled(self, messages: Sequence[Waiting]) -> None:
        self.schedule.remove(messages)

    def expire_window(self, now: int) -> int:
        """Drop what has expired in the window; returns how many messages that were."""
        dropped = self.ready.drop_expired(now)
        self.expired += dropped
        return dropped

    def expire_backlog(self, messages: Iterable[Waiting]) -> None:
        """Drop messages of the backlog that have expired, wherever in it they are."""
        self.expired += self.ready.drop_from_backlog(messages)

    def trim_done(self, since: int) -> int:
        """Forget what was done before a time and is in the open bucket; returns how many."""
        return self.finished.trim_done(since)

    def forget_done(self, count: int) -> None:
        """So many entries of sealed buckets were dropped."""
        self.finished.forget_done(count)

    def trim_failed(self, since: int) -> int:
        """Forget what failed before a time and is in the open bucket; returns how many."""
        return self.finished.trim_failed(since)

    def forget_failures(self, message_ids: Sequence[int]) -> None:
        """Failed messages whose entries were dropped go with all that is known of them."""
        self.finished.forget_failures(message_ids)

    # --- version-1 records ------------------------------------------------------------------------

    def active_record(self) -> bytes:
        return ActiveMessages.join(self.ready.entries(), self.in_flight.entries())

    def counters_record(self) -> bytes:
        finished = self.finished
        return QueueCounters.join(
            finished.done_bucket,
            finished.failed_bucket,
            finished.done,
            finished.failed,
            self.expired,
            self.schedule.count,
            self.schedule.due_from,
            backlog=[(p, rows, start) for p, start, rows in self.ready.backlog.ranges()],
        )
