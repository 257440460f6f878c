"""Messages as the state of a queue sees them, and what it says of the rows behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from odq_encodings import Failure
from opendata_queue.queues.lanes import lane_of

new_tuple: Final = tuple.__new__
"""Makes a named tuple of a tuple in half the time; for those that are made for every message."""


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


class Claim(NamedTuple):
    """What identifies one claim of one message."""

    message_id: int
    attempts: int
    claimed_at: int


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


class BacklogChanges(Protocol):
    """Takes note of the rows of the backlog that a transition changes."""

    def put_backlog(self, messages: Sequence[Waiting]) -> None: ...
    def delete_backlog(self, messages: Sequence[Waiting]) -> None: ...


class ScheduleChanges(Protocol):
    """The same for the schedule."""

    def put_schedule(self, message: Waiting) -> None: ...
    def delete_schedule(self, message: Waiting) -> None: ...


class FinishedChanges(Protocol):
    """The same for sealed buckets, and for what is known of failed messages."""

    def seal_done(self, bucket: int, value: bytes) -> None: ...
    def seal_failed(self, bucket: int, value: bytes) -> None: ...
    def put_failure(self, message_id: int, failure: Failure) -> None: ...
    def delete_failure(self, message_id: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Who takes note of the rows behind the version-1 records that a transition changes."""

    backlog: BacklogChanges
    schedule: ScheduleChanges
    finished: FinishedChanges
