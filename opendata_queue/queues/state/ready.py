"""What is ready to be claimed: the window in memory, and the backlog behind it in rows.

Everything in the window comes before everything of its lane in the backlog. Of the backlog the
number of rows is known, where they begin, and often the first of them (the front), so that a
refill of the window needs no read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from odq_encodings import AvailableMessage, BacklogCount
from opendata_queue.model.ids import SEQUENCE_BITS
from opendata_queue.queues.lanes import Backlog, Past, in_turns, lane_end, lane_of
from opendata_queue.queues.state.records import BacklogChanges, Waiting

_encode_available = AvailableMessage.layout.struct.pack
_priority_of = itemgetter(0)
_entry_of = itemgetter(1)

_Entry = tuple[Waiting, bytes]
"""A message of the window, and its entry in the active record."""


class Ready:
    """Window, front and backlog of one queue, and the turns of its lanes."""

    __slots__ = (
        "_front",
        "_front_ends",
        "_lane",
        "_rows",
        "_size",
        "_window",
        "backlog",
        "front_size",
        "last_turn",
        "several_lanes",
    )

    def __init__(
        self,
        size: int,
        rows: BacklogChanges,
        *,
        available: Iterable[AvailableMessage] = (),
        counts: Iterable[BacklogCount] = (),
    ) -> None:
        self._rows = rows
        self._size = size
        self.front_size = _front_size(size)
        """How many messages of the backlog are kept in memory, besides the window."""
        self._window: list[_Entry] = sorted((_waiting(one), one.encode()) for one in available)
        self.backlog = Backlog(counts)
        # The first messages of the backlog, in order, as far as they are known: those that were
        # just routed need not be read again.
        self._front: list[Waiting] = []
        # With messages of several shards, lanes take turns (RFC 0008).
        self._lane: int | None = None
        self.several_lanes = False
        """Whether there are messages of several lanes, which take turns."""
        self.last_turn = -1
        """The lane that was the last one to have a message claimed."""
        self._front_ends: dict[tuple[int, int], int] = {}
        for lane in self.backlog.lanes() | {lane_of(one.message_id) for one, _ in self._window}:
            self._see(lane)

    def follow(self, size: int) -> None:
        """Have a window of another size; what does not fit any more leaves it."""
        self._size = size
        self.front_size = _front_size(size)
        while len(self._window) > size:
            self._to_backlog(self._window.pop()[0], first=True)
        del self._front[self.front_size :]

    # --- what it holds ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._window) + self.backlog.total

    @property
    def at_hand(self) -> int:
        """How many are in the window."""
        return len(self._window)

    @property
    def room(self) -> int:
        """How many messages a refill may bring."""
        return max(0, self._size - len(self._window))

    def window(self) -> list[Waiting]:
        return [waiting for waiting, _ in self._window]

    def entries(self) -> list[bytes]:
        """The window's part of the active record."""
        return list(map(_entry_of, self._window))

    def first_ids(self, count: int, now: int) -> list[int]:
        """The ids of the messages that a claim would hand out now, as far as they are at hand."""
        if self.several_lanes:
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

    def _in_turns(self, count: int, now: int) -> list[_Entry]:
        """The next messages of the window: the best priority first, its lanes in turns."""
        chosen: list[_Entry] = []
        for _, together in groupby(self._window, key=lambda one: one[0].priority):
            lanes: dict[int, list[_Entry]] = {}
            for one in together:
                if not one[0].expired(now):
                    lanes.setdefault(lane_of(one[0].message_id), []).append(one)
            chosen += in_turns(lanes, self.last_turn)
            if len(chosen) >= count:
                break
        return chosen[:count]

    # --- claims -----------------------------------------------------------------------------------

    def take(self, count: int, now: int) -> tuple[list[Waiting], int]:
        """Take the first messages out of the window; and how many had expired before them."""
        if self.several_lanes:
            self._put_in_turns(count, now)
        chosen, taken = self._first(count, now)
        del self._window[:taken]
        if self.several_lanes:
            self._window.sort()
        return chosen, taken - len(chosen)

    def _put_in_turns(self, count: int, now: int) -> None:
        """Bring those to the beginning of the window that are to be claimed next."""
        chosen = self._in_turns(count, now)
        ids = {one.message_id for one, _ in chosen}
        self._window = chosen + [one for one in self._window if one[0].message_id not in ids]
        if chosen:
            self.last_turn = lane_of(chosen[-1][0].message_id)

    # --- messages come in -------------------------------------------------------------------------

    def come_last(self, messages: Sequence[Waiting], now: int) -> bool:
        """Whether messages are due and in order, and come after all that waits: most often."""
        priority, first_id, *_ = messages[0]
        lane = lane_of(first_id)
        if self.several_lanes or lane != (lane if self._lane is None else self._lane):
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

    def admit_last(self, messages: Sequence[Waiting]) -> None:
        """``admit`` messages of one priority that come after all that waits, in order."""
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
        self._rows.put_backlog(messages)

    def admit(self, message: Waiting) -> None:
        """Put a message where it belongs; the last of a full window makes room for it."""
        window = self._window
        if not self.several_lanes and message.message_id >> SEQUENCE_BITS != self._lane:
            self._see(lane_of(message.message_id))
        if self.several_lanes:
            self._admit_to_lane(message)
        elif window and message < window[-1][0]:
            insort(window, (message, _available_bytes(message)))
            if len(window) > self._size:
                self._to_backlog(window.pop()[0])
        elif self.backlog.total or len(window) >= self._size:
            self._to_backlog(message)
        else:
            window.append((message, _available_bytes(message)))

    def _admit_to_lane(self, message: Waiting) -> None:
        """As ``admit``; but of other lanes nothing is overtaken within a priority."""
        window = self._window
        if self._comes_before_its_lane(message):
            insort(window, (message, _available_bytes(message)))
            if len(window) > self._size:
                self._to_backlog(window.pop()[0], first=True)
        elif self.backlog.total or len(window) >= self._size:
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

    def _see(self, lane: int) -> None:
        if self._lane is None:
            self._lane = lane
        elif lane != self._lane:
            self.several_lanes = True
            self._front = []  # it was made of one lane

    def _to_backlog(self, message: Waiting, *, first: bool = False) -> None:
        front = self._front
        if self.several_lanes:
            self._to_backlog_of_lanes(message, first)
        elif front and message < front[-1]:
            insort(front, message)
            if len(front) > self.front_size:
                front.pop()
        elif (
            len(front) == self.backlog.total < self.front_size
        ):  # there is nothing behind the front
            front.append(message)
        self.backlog.add(message.priority, message.message_id)
        self._rows.put_backlog([message])

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

    # --- the front, and refills -------------------------------------------------------------------

    @property
    def wants_refill(self) -> bool:
        return self.wants_refill_for(0)

    def wants_refill_for(self, count: int) -> bool:
        """Whether more should be at hand: half a window, or ``count`` messages if they fit."""
        wanted = max(1, self._size // 2, min(count, self._size))
        return bool(self.backlog.total) and len(self._window) < wanted

    @property
    def knows_front(self) -> bool:
        """Whether a refill needs no reading."""
        return bool(self._front)

    @property
    def front(self) -> Sequence[Waiting]:
        """The first messages of the backlog, in order, as far as they are known."""
        return self._front

    def learn_front(self, first: Sequence[Waiting]) -> None:
        """Take over what the backlog begins with, after it was read."""
        self._front = list(first)
        if self.several_lanes:
            self._front_ends = {(m.priority, lane_of(m.message_id)): m.message_id for m in first}

    @property
    def wants_longer_front(self) -> bool:
        """Whether what comes behind the front should be read before the front is used up.

        With several lanes it is not one beginning of one order, and is read anew.
        """
        return (
            not self.several_lanes
            and 0 < len(self._front) <= self.front_size // 4
            and len(self._front) < self.backlog.total
        )

    def lengthen_front(self, last: Waiting, behind: Sequence[Waiting]) -> bool:
        """Take over what comes behind ``last``, if the front still ends with it."""
        if self.several_lanes or not self._front or self._front[-1] != last:
            return False
        self._front += behind
        del self._front[self.front_size :]  # others may have joined it meanwhile
        return True

    def refill(self, now: int) -> tuple[list[Waiting], int]:
        """Move messages from the front into the window; and how many of them have expired.

        None are moved if there is no room, or if the front is not known.
        """
        moved = self._front[: self.room]
        del self._front[: len(moved)]
        self._take_first_of_backlog(moved)
        alive = [message for message in moved if not 0 < message.retention_deadline < now]
        self._window += _with_bytes(alive)
        if self.several_lanes:
            self._window.sort()
        return moved, len(moved) - len(alive)

    def _take_first_of_backlog(self, messages: Sequence[Waiting]) -> None:
        """Remove messages from the backlog that are the first of their priorities and lanes."""
        self._rows.delete_backlog(messages)
        if self.several_lanes:
            for message in messages:
                self.backlog.remove_first(message.priority, message.message_id)
            return
        for priority, alike in groupby(messages, _priority_of):
            run = list(alike)
            self.backlog.remove_first(priority, run[-1].message_id, len(run))

    # --- messages are dropped ---------------------------------------------------------------------

    def drop_past(self, past: Past) -> int:
        """Drop messages of the window that are in the past; returns how many they were."""
        return self._keep([one for one in self._window if one[0].message_id not in past])

    def drop_expired(self, now: int) -> int:
        """Drop messages of the window that have expired; returns how many they were."""
        return self._keep([one for one in self._window if not one[0].expired(now)])

    def _keep(self, kept: list[_Entry]) -> int:
        dropped = len(self._window) - len(kept)
        self._window = kept
        return dropped

    def drop_first_of_backlog(self, messages: Sequence[Waiting]) -> None:
        """Drop messages of the backlog, the first ones of their priorities."""
        self._front = []
        self._take_first_of_backlog(messages)

    def drop_from_backlog(self, messages: Iterable[Waiting]) -> int:
        """Drop messages of the backlog, wherever in it they are; returns how many they were."""
        gone = set(messages)
        self._front = [one for one in self._front if one not in gone]
        self._rows.delete_backlog(list(gone))
        for message in gone:
            self.backlog.remove(message.priority, message.message_id)
        return len(gone)


def _front_size(window: int) -> int:
    return min(4 * window, 4_096)


def _waiting(one: AvailableMessage) -> Waiting:
    return Waiting(
        one.priority, one.message_id, one.visible_at, one.retention_deadline, one.attempts
    )


def _place(one: _Entry) -> tuple[int, int]:
    return one[0].priority, one[0].message_id


def _with_bytes(messages: Sequence[Waiting]) -> Iterable[_Entry]:
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
