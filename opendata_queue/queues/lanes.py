"""Lanes: what keeps a busy shard from starving others (RFC 0008, Order).

Messages of equal priority are claimed in the order of their ids, and ids begin with the shard. So
each live shard is a lane of its own, and lanes take turns. All bulk shards are one lane: their
numbers grow with time, so their order is fair already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Final, TypeVar

from odq_encodings import BacklogCount
from opendata_queue.model.ids import FIRST_BULK_SHARD, SEQUENCE_BITS, message_id_of

BULK_LANE: Final = FIRST_BULK_SHARD
LAST_ID: Final = (1 << 64) - 1

T = TypeVar("T")


def lane_of(message_id: int) -> int:
    return min(message_id >> SEQUENCE_BITS, BULK_LANE)


def lane_end(lane: int) -> int:
    """An id behind all of a lane."""
    return (lane + 1) << SEQUENCE_BITS if lane < BULK_LANE else LAST_ID


def in_turns(lanes: Mapping[int, Sequence[T]], last: int) -> list[T]:
    """One of each lane after the other, beginning behind the lane that was the last."""
    order = sorted(lanes, key=lambda lane: (lane <= last, lane))
    missing = object()
    rounds = zip_longest(*(lanes[lane] for lane in order), fillvalue=missing)
    return [one for one in chain.from_iterable(rounds) if one is not missing]  # type: ignore[misc]


class Past:
    """Which messages are in the past, given up to where the logs of live shards are routed."""

    def __init__(self, cursors: Mapping[int, int]) -> None:
        self._ends = {shard: message_id_of(shard, sequence) for shard, sequence in cursors.items()}
        self._ends[BULK_LANE] = LAST_ID  # nothing is routed to it meanwhile

    def end_of(self, lane: int) -> int:
        """The first id of a lane that is not in the past."""
        return self._ends.get(lane, lane << SEQUENCE_BITS)

    def __contains__(self, message_id: int) -> bool:
        return message_id < self.end_of(lane_of(message_id))


class Backlog:
    """How many messages of each priority and lane are behind the window, and where they begin."""

    __slots__ = ("_from", "_rows", "total")

    def __init__(self, counts: Iterable[BacklogCount] = ()) -> None:
        self._rows: dict[tuple[int, int], int] = {}
        self._from: dict[tuple[int, int], int] = {}
        for count in counts:
            key = count.priority, lane_of(count.from_message_id)
            self._rows[key] = count.rows
            self._from[key] = count.from_message_id
        self.total = sum(self._rows.values())

    def add(self, priority: int, message_id: int, count: int = 1) -> None:
        """Add messages of a priority and lane, this one being that with the smallest id."""
        key = priority, min(message_id >> SEQUENCE_BITS, BULK_LANE)
        rows = self._rows.get(key, 0)
        self._rows[key] = rows + count
        if not rows or message_id < self._from[key]:
            self._from[key] = message_id
        self.total += count

    def remove_first(self, priority: int, message_id: int, count: int = 1) -> None:
        """Remove the messages with the smallest ids of a priority and lane, up to this one."""
        key = priority, min(message_id >> SEQUENCE_BITS, BULK_LANE)
        self._from[key] = message_id + 1
        self._remove(key, count)

    def remove(self, priority: int, message_id: int) -> None:
        """Remove a message, wherever it is."""
        key = priority, min(message_id >> SEQUENCE_BITS, BULK_LANE)
        if self._from[key] == message_id:
            self._from[key] = message_id + 1
        self._remove(key, 1)

    def _remove(self, key: tuple[int, int], count: int) -> None:
        self.total -= count
        self._rows[key] -= count
        if not self._rows[key]:
            del self._rows[key], self._from[key]

    def has(self, priority: int, lane: int) -> bool:
        return (priority, lane) in self._rows

    def lanes(self) -> set[int]:
        return {lane for _, lane in self._rows}

    def ranges(self) -> list[tuple[int, int, int]]:
        """Priority, first possible id, and number of rows, in the order of claiming.

        There may be several of a priority, one for each lane.
        """
        return [(key[0], self._from[key], self._rows[key]) for key in sorted(self._rows)]

    def counts(self) -> tuple[BacklogCount, ...]:
        return tuple(
            BacklogCount(priority=p, rows=rows, from_message_id=start)
            for p, start, rows in self.ranges()
        )
