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
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from operator import itemgetter
from typing import Final, NamedTuple, Protocol

from odq_encodings import (
    ActiveMessages,
    AvailableMessage,
    DoneMessage,
    DoneMessages,
    FailedMessage,
    FailedMessages,
    Failure,
    InFlightMessage,
    QueueCounters,
)
from opendata_queue.lanes import Backlog, Past, in_turns, lane_end, lane_of

LEASE_OVER = "the lease ran out"

_encode_available = AvailableMessage.layout.struct.pack
_encode_in_flight = InFlightMessage.layout.struct.pack
_encode_done = DoneMessage.layout.struct.pack
_encode_failed = FailedMessage.layout.struct.pack

MAX_ATTEMPTS_COUNTED = 0xFFFF

new_tuple: Final = tuple.__new__
"""Makes a named tuple of a tuple in half the time; for those that are made for every message."""

_priority_of = itemgetter(0)
_entry_of = itemgetter(1)
_NOT_IN_FLIGHT: Final = (None, b"")


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

    def claim(self) -> Claim:
        return Claim(self.message_id, self.attempts, self.claimed_at)


def in_order(held: Iterable[Held]) -> list[Held]:
    """What was claimed at several moments, as if it had been at one.

    The best priority comes first, each lane is in the order of its ids, and lanes have the turns
    that they had.
    """
    by_priority = sorted(held, key=lambda one: one.priority)
    lanes: dict[tuple[int, int], list[Held]] = {}
    for one in by_priority:
        lanes.setdefault((one.priority, lane_of(one.message_id)), []).append(one)
    first = {lane: iter(sorted(those)) for lane, those in lanes.items()}  # ids come first in them
    return [next(first[one.priority, lane_of(one.message_id)]) for one in by_priority]


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

    def put_backlog(self, messages: Sequence[Waiting]) -> None: ...
    def delete_backlog(self, messages: Sequence[Waiting]) -> None: ...
    def put_schedule(self, message: Waiting) -> None: ...
    def delete_schedule(self, message: Waiting) -> None: ...
    def seal_done(self, bucket: int, value: bytes) -> None: ...
    def seal_failed(self, bucket: int, value: bytes) -> None: ...
    def put_failure(self, message_id: int, failure: Failure) -> None: ...
    def delete_failure(self, message_id: int) -> None: ...


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
        # Deadlines, each with the messages of one claim. Entries of messages that were finished
        # or extended stay until they are due, or until most of them are such.
        self._leases: list[tuple[int, list[int]]] = []
        self._leased = 0
        self._deadline_unknown: set[int] = set()
        self.claims_after = 0
        """Claims are made at this time or later: none may look like one that was given back. After
        a restart the clock sees to it, if its mark is not before this."""
        self._last_claim_at = 0
        self._done_open = [] if done is None else [m.encode() for m in done.messages]
        self._failed_open = (
            {} if failed is None else {m.message_id: m.encode() for m in failed.messages}
        )
        self.done_changed = False
        self.failed_changed = False
        self.backlog = Backlog(() if counters is None else counters.backlog)
        # The first messages of the backlog, in order, as far as they are known: those that were
        # just routed need not be read again.
        self._front: list[Waiting] = []
        # With messages of several shards, lanes take turns (RFC 0008).
        self._lane: int | None = None
        self._several = False
        self._last_turn = -1
        self._front_ends: dict[tuple[int, int], int] = {}
        self.scheduled = 0 if counters is None else counters.scheduled
        self.scheduled_from = 0 if counters is None else counters.scheduled_from
        self.done_bucket = 0 if counters is None else counters.done_bucket
        self.failed_bucket = 0 if counters is None else counters.failed_bucket
        self.done = 0 if counters is None else counters.done
        self.failed = 0 if counters is None else counters.failed
        self.expired = 0 if counters is None else counters.expired
        if active is not None:
            self._load(active)
        for lane in self.backlog.lanes() | {lane_of(one.message_id) for one, _ in self._window}:
            self._see(lane)

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
            self._lease(n.lease_deadline, [n.message_id])
            self._deadline_unknown.add(n.message_id)

    def follow(self, rules: QueueRules) -> None:
        """Go by other rules from now on; what does not fit the window any more leaves it."""
        self.rules = rules
        while len(self._window) > rules.window:
            self._to_backlog(self._window.pop()[0], first=True)
        del self._front[self.front_size :]

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
    def front_size(self) -> int:
        """How many messages of the backlog are kept in memory, besides the window."""
        return min(4 * self.rules.window, 4_096)

    @property
    def knows_front(self) -> bool:
        """Whether a refill needs no reading."""
        return bool(self._front)

    @property
    def wants_longer_front(self) -> bool:
        """Whether what comes behind the front should be read before the front is used up.

        With several lanes it is not one beginning of one order, and is read anew.
        """
        return (
            not self._several
            and 0 < len(self._front) <= self.front_size // 4
            and len(self._front) < self.backlog.total
        )

    def lengthen_front(self, last: Waiting, behind: Sequence[Waiting]) -> bool:
        """Be told what comes behind ``last``, if the front still ends with it."""
        if self._several or not self._front or self._front[-1] != last:
            return False
        self._front += behind
        del self._front[self.front_size :]  # others may have joined it meanwhile
        return True

    @property
    def front(self) -> Sequence[Waiting]:
        """The first messages of the backlog, in order, as far as they are known."""
        return self._front

    @property
    def room(self) -> int:
        """How many messages a refill may bring."""
        return max(0, self.rules.window - len(self._window))

    @property
    def next_lease_deadline(self) -> int | None:
        return self._leases[0][0] if self._leases else None

    def window(self) -> list[Waiting]:
        return [waiting for waiting, _ in self._window]

    def first_ids(self, count: int, now: int) -> list[int]:
        """The ids of the messages that a claim would hand out now, as far as they are at hand."""
        if self._several:
            return [one.message_id for one, _ in self._in_turns(count, now)]
        return [one[1] for one in self._first(count, now)[0]]

    def _first(self, count: int, now: int) -> tuple[list[Waiting], int]:
        """The first messages of the window that have not expired, and how many it begins with
        until the last of them is reached, those that have expired included."""
        window = self._window
        taken = min(count, len(window))
        first = [one for one, _ in window[:taken] if not 0 < one[3] < now]
        while len(first) < count and taken < len(window):
            one, _ = window[taken]
            taken += 1
            if not one.expired(now):
                first.append(one)
        return first, taken

    def held(self) -> list[Held]:
        return [held for held, _ in self._in_flight.values()]

    def holding(self, message_id: int) -> Held | None:
        """A message if it is in flight."""
        return self._in_flight.get(message_id, (None, b""))[0]

    def open_done(self) -> bytes:
        """The record of the done messages that are in no sealed bucket, the latest last."""
        return DoneMessages.join(self._done_open)

    # --- messages come in -------------------------------------------------------------------------

    def route(self, message: Waiting, now: int) -> None:
        """Take in a message that the tailer has found to match, or one that is replayed."""
        if message.expired(now):
            self.expired += 1
        elif message.visible_at > now:
            self._schedule(message)
        else:
            self._admit(message)

    def route_many(self, messages: Sequence[Waiting], now: int) -> None:
        """``route`` each of them, in their order."""
        if messages and self._come_last(messages, now):
            self._admit_last(messages)
        else:
            for message in messages:
                self.route(message, now)

    def _come_last(self, messages: Sequence[Waiting], now: int) -> bool:
        """Whether messages are due and in order, and come after all that waits: most often."""
        priority, first_id, *_ = messages[0]
        lane = lane_of(first_id)
        if self._several or lane != (lane if self._lane is None else self._lane):
            return False
        last_id = first_id - 1
        for its_priority, message_id, visible_at, deadline, _ in messages:
            if (
                its_priority != priority
                or message_id <= last_id
                or visible_at > now
                or 0 < deadline < now
            ):
                return False
            last_id = message_id
        window, front = self._window, self._front
        return (
            lane_of(last_id) == lane
            and not (window and messages[0] < window[-1][0])
            and not (front and messages[0] < front[-1])
        )

    def _admit_last(self, messages: Sequence[Waiting]) -> None:
        """``_admit`` messages of one priority that come after all that waits, in order."""
        priority, first_id, *_ = messages[0]
        self._see(lane_of(first_id))
        if not self.backlog.total:
            room = self.room
            self._window += _with_bytes(messages[:room])
            messages = messages[room:]
            if not messages:
                return
        front = self._front
        if len(front) == self.backlog.total:  # there is nothing behind the front
            front += messages[: max(0, self.front_size - len(front))]
        self.backlog.add(priority, messages[0].message_id, len(messages))
        self._changes.put_backlog(messages)

    def take_due(self, due: Iterable[Waiting], now: int) -> None:
        """Admit scheduled messages whose time has come."""
        for message in due:
            self._changes.delete_schedule(message)
            self.scheduled -= 1
            if message.expired(now):
                self.expired += 1
            else:
                self._admit(message)

    @property
    def several_lanes(self) -> bool:
        """Whether there are messages of several lanes, which take turns."""
        return self._several

    @property
    def last_turn(self) -> int:
        """The lane that was the last one to have a message claimed."""
        return self._last_turn

    def _see(self, lane: int) -> None:
        if self._lane is None:
            self._lane = lane
        elif lane != self._lane:
            self._several = True
            self._front = []  # it was made of one lane

    def _in_turns(self, count: int, now: int) -> list[tuple[Waiting, bytes]]:
        """The next messages of the window: the best priority first, its lanes in turns."""
        chosen: list[tuple[Waiting, bytes]] = []
        for _, together in groupby(self._window, key=lambda one: one[0].priority):
            lanes: dict[int, list[tuple[Waiting, bytes]]] = {}
            for one in together:
                if not one[0].expired(now):
                    lanes.setdefault(lane_of(one[0].message_id), []).append(one)
            chosen += in_turns(lanes, self._last_turn)
            if len(chosen) >= count:
                break
        return chosen[:count]

    def _put_in_turns(self, count: int, now: int) -> None:
        """Bring those to the beginning of the window that are to be claimed next."""
        chosen = self._in_turns(count, now)
        ids = {one.message_id for one, _ in chosen}
        self._window = chosen + [one for one in self._window if one[0].message_id not in ids]
        if chosen:
            self._last_turn = lane_of(chosen[-1][0].message_id)

    def learn_front(self, first: Sequence[Waiting]) -> None:
        """Be told what the backlog begins with, after it was read."""
        self._front = list(first)
        if self._several:
            self._front_ends = {(m.priority, lane_of(m.message_id)): m.message_id for m in first}

    def refill(self, now: int) -> list[Waiting]:
        """Move messages from the front of the backlog into the window; returns them.

        None are moved if there is no room, or if the front is not known.
        """
        moved = self._front[: self.room]
        del self._front[: len(moved)]
        self._take_first_of_backlog(moved)
        alive = [message for message in moved if not 0 < message.retention_deadline < now]
        self.expired += len(moved) - len(alive)
        self._window += _with_bytes(alive)
        if self._several:
            self._window.sort()
        return moved

    def _take_first_of_backlog(self, messages: Sequence[Waiting]) -> None:
        """Remove messages from the backlog that are the first of their priorities and lanes."""
        self._changes.delete_backlog(messages)
        if self._several:
            for message in messages:
                self.backlog.remove_first(message.priority, message.message_id)
            return
        for priority, alike in groupby(messages, _priority_of):
            run = list(alike)
            self.backlog.remove_first(priority, run[-1].message_id, len(run))

    def _admit(self, message: Waiting) -> None:
        """Everything in the window comes before everything of its lane in the backlog."""
        window = self._window
        if not self._several and message.message_id >> 32 != self._lane:
            self._see(lane_of(message.message_id))
        if self._several:
            self._admit_to_lane(message)
        elif window and message < window[-1][0]:
            insort(window, (message, _available_bytes(message)))
            if len(window) > self.rules.window:
                self._to_backlog(window.pop()[0])
        elif self.backlog.total or len(window) >= self.rules.window:
            self._to_backlog(message)
        else:
            window.append((message, _available_bytes(message)))

    def _admit_to_lane(self, message: Waiting) -> None:
        """As ``_admit``; but of other lanes nothing is overtaken within a priority."""
        window = self._window
        if self._comes_before_its_lane(message):
            insort(window, (message, _available_bytes(message)))
            if len(window) > self.rules.window:
                self._to_backlog(window.pop()[0], first=True)
        elif self.backlog.total or len(window) >= self.rules.window:
            self._to_backlog(message)
        else:
            insort(window, (message, _available_bytes(message)))

    def _comes_before_its_lane(self, message: Waiting) -> bool:
        """Whether it belongs before something in the window that it may overtake."""
        window = self._window
        if not window or message.priority > window[-1][0].priority:
            return False
        if message.priority < window[-1][0].priority:
            return True
        lane = lane_of(message.message_id)
        behind = bisect_left(window, (message.priority, lane_end(lane)), key=_place) - 1
        last = window[behind][0] if behind >= 0 else None
        return (
            last is not None
            and last.priority == message.priority
            and lane_of(last.message_id) == lane
            and message.message_id < last.message_id
        )

    def _to_backlog_of_lanes(self, message: Waiting, first: bool) -> None:
        """Keep the front a beginning of each lane, or forget it: then it is read again."""
        front = self._front
        lane = message.priority, lane_of(message.message_id)
        if first:  # it was in the window, and so comes before all of the backlog
            if front or not self.backlog.total:
                front.insert(0, message)
                self._front_ends.setdefault(lane, message.message_id)
                del front[self.front_size :]
        elif front and (
            message.priority < front[-1].priority
            or message.message_id < self._front_ends.get(lane, -1)
        ):
            front.clear()
        elif len(front) == self.backlog.total < self.front_size:
            front.append(message)
            self._front_ends[lane] = message.message_id
        elif not self.backlog.has(*lane):
            front.clear()  # a lane that has had nothing to wait for gets its turn soon

    def _to_backlog(self, message: Waiting, *, first: bool = False) -> None:
        front = self._front
        if self._several:
            self._to_backlog_of_lanes(message, first)
            self.backlog.add(message.priority, message.message_id)
            self._changes.put_backlog([message])
            return
        if front and message < front[-1]:
            insort(front, message)
            if len(front) > self.front_size:
                front.pop()
        elif (
            len(front) == self.backlog.total < self.front_size
        ):  # there is nothing behind the front
            front.append(message)
        self.backlog.add(message.priority, message.message_id)
        self._changes.put_backlog([message])

    def _schedule(self, message: Waiting) -> None:
        if 0 < message.retention_deadline < message.visible_at:
            # It will never be delivered: it is due when it has expired, and dropped then.
            message = message._replace(visible_at=message.retention_deadline + 1)
        if not self.scheduled or message.visible_at < self.scheduled_from:
            self.scheduled_from = message.visible_at
        self.scheduled += 1
        self._changes.put_schedule(message)

    # --- consumers --------------------------------------------------------------------------------

    def claim(self, count: int, *, lease_ms: int, consumer: str, now: int) -> list[Held]:
        """Hand out up to ``count`` messages of the window, the first in order first."""
        count = min(count, self.claimable)
        if self._several:
            self._put_in_turns(count, now)
        chosen, taken = self._first(count, now)
        del self._window[:taken]
        if self._several:
            self._window.sort()
        self.expired += taken - len(chosen)
        return self._hold(chosen, max(now, self.claims_after), now + lease_ms, consumer)

    def _hold(
        self, chosen: Sequence[Waiting], claimed_at: int, lease_deadline: int, consumer: str
    ) -> list[Held]:
        if not chosen:
            return []
        # Column by column: for each of them it took twice as long.
        priorities, ids, _, deadlines, tried = zip(*chosen, strict=True)
        attempts = [one + 1 if one < MAX_ATTEMPTS_COUNTED else one for one in tried]
        fixed = ids, priorities, repeat(claimed_at), repeat(lease_deadline), attempts
        fields = zip(*fixed, deadlines, repeat(consumer), strict=False)
        held = list(map(new_tuple, repeat(Held), fields))
        entries = zip(held, map(_encode_in_flight, *fixed), strict=True)
        self._in_flight.update(zip(ids, entries, strict=True))
        self._last_claim_at = claimed_at
        self._lease(lease_deadline, list(ids))
        return held

    def ack(self, claims: Iterable[Claim | Held], now: int) -> list[bool]:
        """Finish messages; false, and nothing has changed, for a claim that is not valid."""
        outcomes = []
        in_flight, done, bucket = self._in_flight, self._done_open, self.rules.bucket
        for claim in claims:
            message_id = claim.message_id
            held, _ = in_flight.get(message_id, _NOT_IN_FLIGHT)
            if held is claim:  # as it was handed out
                valid = now <= held.lease_deadline
            else:
                valid = self._valid(claim, now) is not None
            outcomes.append(valid)
            if not valid:
                continue
            del in_flight[message_id]
            done.append(_encode_done(message_id, now, claim.attempts))
            if len(done) >= bucket:
                self._changes.seal_done(self.done_bucket, DoneMessages.join(done))
                self.done_bucket += 1
                done = self._done_open = []
        if finished := sum(outcomes):
            self.done += finished
            self.done_changed = True
        return outcomes

    def drop_gone(self, claims: Iterable[Claim], now: int) -> int:
        """Drop claimed messages that the store does not have any more; how many they were.

        They count as expired: nobody will get them, and nobody was done with them.
        """
        gone = [claim for claim in claims if self._valid(claim, now) is not None]
        for claim in gone:
            del self._in_flight[claim.message_id]
        self.expired += len(gone)
        return len(gone)

    def nack(
        self, claim: Claim | Held, now: int, *, error: str, delay_ms: int | None, chance: float
    ) -> bool:
        """Give up a try; false, and nothing has changed, if the claim is not valid any more."""
        held = self._valid(claim, now)
        if held is None:
            return False
        self._give_back(held, now, error=error, delay_ms=delay_ms, chance=chance)
        return True

    def extend(self, claim: Claim | Held, now: int, *, lease_ms: int) -> int | None:
        """Let a lease run for so long from now; the new deadline, or none."""
        held = self._valid(claim, now)
        if held is None:
            return None
        deadline = now + lease_ms
        held = held._replace(lease_deadline=deadline)
        self._in_flight[held.message_id] = held, _in_flight_bytes(held)
        self._lease(deadline, [held.message_id])
        return deadline

    def release(self, claim: Claim | Held, now: int) -> bool:
        """Give a message back as if it had not been claimed."""
        held = self._valid(claim, now)
        if held is None:
            return False
        # Its next claim has the same number of attempts, so it must differ in its time.
        self.claims_after = self._last_claim_at + 1
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
        """Take back what is over its lease; looks at nothing that is not due."""
        taken: list[Held] = []
        while self._leases and self._leases[0][0] + grace_ms < now and len(taken) != at_most:
            deadline, message_ids = self._leases[0]
            message_id = message_ids.pop()
            self._leased -= 1
            if not message_ids:
                heapq.heappop(self._leases)
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

    def _lease(self, deadline: int, message_ids: list[int]) -> None:
        """Remember when messages in flight are to be taken back."""
        heapq.heappush(self._leases, (deadline, message_ids))
        self._leased += len(message_ids)
        if self._leased > 2 * len(self._in_flight) + 64:  # mostly of what is not in flight any more
            by_deadline: dict[int, list[int]] = {}
            for held, _ in self._in_flight.values():
                by_deadline.setdefault(held.lease_deadline, []).append(held.message_id)
            self._leases = sorted(by_deadline.items())
            self._leased = len(self._in_flight)

    def _valid(self, claim: Claim | Held, now: int) -> Held | None:
        held, _ = self._in_flight.get(claim.message_id, _NOT_IN_FLIGHT)
        if held is None or now > held.lease_deadline:
            return None
        if held is claim:  # as it was handed out
            return held
        same = held.attempts == claim.attempts and held.claimed_at == claim.claimed_at
        return held if same else None

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
        self.claims_after = self._last_claim_at + 1  # its attempts begin again
        self.route(Waiting(failure.priority, message_id, now, failure.retention_deadline, 0), now)
        return was_open

    # --- purging ----------------------------------------------------------------------------------

    def drop_window(self, past: Past) -> int:
        """Forget messages of the window that are in the past; returns how many they were."""
        kept = [one for one in self._window if one[0].message_id not in past]
        dropped = len(self._window) - len(kept)
        self._window = kept
        return dropped

    def drop_backlog(self, best: Iterable[Waiting]) -> None:
        """Forget messages of the backlog, the first ones of their priorities."""
        self._front = []
        self._take_first_of_backlog(list(best))

    def drop_scheduled(self, messages: Iterable[Waiting]) -> None:
        for message in messages:
            self._changes.delete_schedule(message)
            self.scheduled -= 1

    # --- retention (RFC 0010) ---------------------------------------------------------------------

    def expire_window(self, now: int) -> int:
        """Drop what has expired in the window; returns how many messages that were."""
        kept = [one for one in self._window if not one[0].expired(now)]
        dropped = len(self._window) - len(kept)
        if dropped:
            self._window = kept
            self.expired += dropped
        return dropped

    def expire_backlog(self, messages: Iterable[Waiting]) -> None:
        """Drop messages of the backlog that have expired, wherever in it they are."""
        gone = set(messages)
        self._front = [one for one in self._front if one not in gone]
        self._changes.delete_backlog(list(gone))
        for message in gone:
            self.backlog.remove(message.priority, message.message_id)
        self.expired += len(gone)

    def oldest_open(self) -> tuple[int | None, int | None]:
        """When the oldest entries of the open done and failed buckets were made."""
        failed = next(iter(self._failed_open.values()), None)
        return (
            DoneMessage.decode(self._done_open[0]).done_at if self._done_open else None,
            None if failed is None else FailedMessage.decode(failed).failed_at,
        )

    def trim_done(self, since: int) -> int:
        """Forget what was done before a time and is in the open bucket; returns how many."""
        kept = [one for one in self._done_open if DoneMessage.decode(one).done_at >= since]
        forgotten = len(self._done_open) - len(kept)
        if forgotten:
            self._done_open = kept
            self.forget_done(forgotten)
        return forgotten

    def forget_done(self, count: int) -> None:
        """So many entries of sealed buckets were dropped."""
        self.done -= count
        self.done_changed = True

    def trim_failed(self, since: int) -> int:
        """Forget what failed before a time and is in the open bucket; returns how many."""
        old = [
            message_id
            for message_id, one in self._failed_open.items()
            if FailedMessage.decode(one).failed_at < since
        ]
        for message_id in old:
            del self._failed_open[message_id]
        self.forget_failures(old)
        return len(old)

    def forget_failures(self, message_ids: Sequence[int]) -> None:
        """Failed messages whose entries were dropped go with all that is known of them."""
        for message_id in message_ids:
            self._changes.delete_failure(message_id)
        if message_ids:
            self.failed -= len(message_ids)
            self.failed_changed = True

    # --- version-1 records ------------------------------------------------------------------------

    def active_record(self) -> bytes:
        in_flight = self._in_flight.values()
        return ActiveMessages.join(
            list(map(_entry_of, self._window)), list(map(_entry_of, in_flight))
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
        return QueueCounters.join(
            self.done_bucket,
            self.failed_bucket,
            self.done,
            self.failed,
            self.expired,
            self.scheduled,
            self.scheduled_from,
            backlog=[(p, rows, start) for p, start, rows in self.backlog.ranges()],
        )


def _in_flight_bytes(held: Held) -> bytes:
    message_id, priority, claimed_at, lease_deadline, attempts, _, _ = held
    return _encode_in_flight(message_id, priority, claimed_at, lease_deadline, attempts)


def _place(one: tuple[Waiting, bytes]) -> tuple[int, int]:
    return one[0].priority, one[0].message_id


def _with_bytes(messages: Sequence[Waiting]) -> Iterable[tuple[Waiting, bytes]]:
    """Messages with their entries in the active record, made by column: at half of the cost."""
    if not messages:
        return ()
    priorities, ids, visible_at, deadlines, attempts = zip(*messages, strict=True)
    entries = map(_encode_available, ids, priorities, visible_at, deadlines, attempts)
    return zip(messages, entries, strict=True)


def _available_bytes(message: Waiting) -> bytes:
    return _encode_available(
        message.message_id,
        message.priority,
        message.visible_at,
        message.retention_deadline,
        message.attempts,
    )
