"""Who has claimed a message, over all queues (RFC 0001, Attempts)."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from odq_encodings import Attempts, AttemptsKey, encode_attempts_key
from opendata_queue.model.ids import first_id_of, shard_of
from opendata_queue.store import DatabaseReads, Rows

_KEPT: Final = 100_000
_MOST_CLAIMS: Final = 65_535
_IDS_AT_ONCE: Final = 4_096
"""How many ids one scan asks about: most messages were never claimed, and then it finds nothing."""
_ROWS_AT_ONCE: Final = 1_000
_ROWS_FOR_FEW: Final = 32
"""Costs hardly more than a read of one row, and who claims one by one claims the next ones soon."""
_SCAN_LEAST: Final = 4
_RANGES_KEPT: Final = 256


class _Meanwhile:
    """What has happened during a read; bounded by what can happen in that time."""

    __slots__ = ("claimed", "forgotten")

    def __init__(self) -> None:
        self.claimed: set[int] = set()
        self.forgotten: set[int] = set()


class AttemptsLedger:
    """Knows the claims of recent messages without reading, and reads those of older ones.

    A message's record is shared by all queues that hold it, and rewritten by every claim. Of some
    ranges of ids all claims are known here: of those that came into being under this process, and
    of those that were read. What is not in them has to be read before it is claimed.
    """

    def __init__(self, database: DatabaseReads) -> None:
        self._database = database
        # A plain dictionary gets slow when its first key is removed over and over.
        self._claims: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        # Where the known ranges begin, ascending, and behind where each one ends.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._readings: list[_Meanwhile] = []

    def starts_at(self, message_id: int) -> None:
        """From this id on, no message of its shard has been claimed yet."""
        self._know(message_id, first_id_of(shard_of(message_id) + 1))

    def unknown(self, message_ids: Sequence[int]) -> list[int]:
        """Those of the messages whose claims have to be read before they can be claimed.

        Claim them without awaiting anything after this.
        """
        self._forget_the_oldest()
        if not message_ids:
            return []
        place = self._range_of(message_ids[0])
        if place is not None:  # most often all are in the same one
            start, end = self._starts[place], self._ends[place]
            if start <= min(message_ids) and max(message_ids) < end:
                return []
        return [
            one for one in message_ids if one not in self._claims and self._range_of(one) is None
        ]

    async def learn(self, message_ids: Sequence[int]) -> None:
        """Read the records of messages whose claims are not known.

        Afterwards they are, but for those that were claimed and forgotten meanwhile.
        """
        wanted = sorted(set(self.unknown(message_ids)))
        found: dict[int, tuple[str, ...]] = {}
        alone: list[int] = []
        left = wanted
        with self._reading() as meanwhile:
            while left:
                near = left[: bisect_right(left, left[0] + _IDS_AT_ONCE - 1)]
                rows = _ROWS_AT_ONCE if len(near) >= _SCAN_LEAST else _ROWS_FOR_FEW
                behind = await self._read_range(near[0], found, meanwhile, rows)
                covered = bisect_right(left, behind - 1)
                left = left[covered:]
                if covered < min(_SCAN_LEAST, len(near)):
                    # Many others were claimed, which are not wanted: a read for each costs less.
                    alone += left
                    break
            values = await self._database.get_by_id(alone, encode_attempts_key)
            for one, value in values.items():
                found[one] = self._consumers(one, value)
            for one in wanted:
                # Of what was claimed meanwhile, what was read may be too little. The wanted ones
                # are kept last: other rows of the range must not push them out.
                if one not in meanwhile.claimed or one in self._claims:
                    self._keep(one, found.get(one, ()))

    async def _read_range(
        self,
        first_id: int,
        found: dict[int, tuple[str, ...]],
        meanwhile: _Meanwhile,
        limit: int,
    ) -> int:
        """Read all claims from an id on; returns the id behind the last one that was read."""
        behind = first_id + _IDS_AT_ONCE
        start, end = encode_attempts_key(first_id), encode_attempts_key(behind)
        rows = 0
        async for chunk in self._database.scan(start, end, limit=limit):
            for key, value in chunk:
                one = int.from_bytes(key[-8:], "big")
                found[one] = self._consumers(one, value)
                if one not in meanwhile.claimed or one in self._claims:
                    self._keep(one, found[one])
            rows += len(chunk)
            if rows == limit:
                behind = int.from_bytes(chunk[-1][0][-8:], "big") + 1
        known_from = max((one + 1 for one in meanwhile.forgotten if one < behind), default=0)
        if known_from < behind:
            self._know(max(first_id, known_from), behind)
        return behind

    @contextlib.contextmanager
    def _reading(self) -> Iterator[_Meanwhile]:
        """Gives what happens while it lasts."""
        meanwhile = _Meanwhile()
        self._readings.append(meanwhile)
        try:
            yield meanwhile
        finally:
            self._readings.remove(meanwhile)

    def _consumers(self, message_id: int, value: bytes) -> tuple[str, ...]:
        key = encode_attempts_key(message_id)
        return self._database.decode(Attempts.decode, key, value).consumer_ids

    def _keep(self, message_id: int, claims: tuple[str, ...]) -> None:
        """Remember what was read, for longer than what is remembered already."""
        # A claim that was made during the read is newer than what was read.
        self._claims.setdefault(message_id, claims)
        self._claims.move_to_end(message_id)
        self._forget_the_oldest()

    def claim(
        self, message_ids: Sequence[int], consumer: str, rows: Rows, *, ttl_ms: int | None = None
    ) -> None:
        """Add claims, and the rows that say so; they go with their messages after ``ttl_ms``."""
        first_claims, first_value = _first_claim(consumer)
        kept = self._claims
        first_ids = message_ids
        if not kept.keys().isdisjoint(message_ids):
            first_ids = []
            for message_id in message_ids:
                claims = kept.pop(message_id, ())
                if claims:
                    claims = (*claims, consumer)[:_MOST_CLAIMS]
                    value = Attempts(consumer_ids=claims).encode()
                    rows.put(encode_attempts_key(message_id), value, ttl_ms=ttl_ms)
                    kept[message_id] = claims
                else:
                    first_ids.append(message_id)
        for message_id in first_ids:
            kept[message_id] = first_claims
        rows.put_columns(
            len(first_ids), AttemptsKey.columns(first_ids), [first_value], ttl_ms=ttl_ms
        )
        # Nothing is forgotten here: it could be what is claimed next, together with this.
        for reading in self._readings:
            reading.claimed.update(message_ids)

    def _forget_the_oldest(self) -> None:
        while len(self._claims) > _KEPT:
            forgotten, _ = self._claims.popitem(last=False)
            for reading in self._readings:
                reading.forgotten.add(forgotten)
            place = self._range_of(forgotten)
            if place is not None:  # what is left of it begins behind
                self._starts[place] = forgotten + 1

    def _range_of(self, message_id: int) -> int | None:
        """The place of the known range that a message is in."""
        place = bisect_right(self._starts, message_id) - 1
        return place if place >= 0 and message_id < self._ends[place] else None

    def _know(self, start: int, end: int) -> None:
        """All claims of these ids are known from now on."""
        place = bisect_right(self._starts, start)
        if place and self._ends[place - 1] >= start:  # it goes on where another one ends
            place -= 1
            self._ends[place] = max(end, self._ends[place])
        else:
            self._starts.insert(place, start)
            self._ends.insert(place, end)
        while place + 1 < len(self._starts) and self._starts[place + 1] <= self._ends[place]:
            self._ends[place] = max(self._ends[place], self._ends.pop(place + 1))
            del self._starts[place + 1]
        if len(self._starts) > _RANGES_KEPT:
            del self._starts[0], self._ends[0]


@lru_cache(maxsize=1024)
def _first_claim(consumer: str) -> tuple[tuple[str, ...], bytes]:
    """The claims, and their record; most messages are claimed once, by one of a few consumers."""
    return (consumer,), Attempts(consumer_ids=(consumer,)).encode()


async def consumers_of(database: DatabaseReads, message_id: int) -> tuple[str, ...]:
    """Who has claimed a message, in all queues."""
    key = AttemptsKey(message_id=message_id).encode()
    value = await database.get(key)
    if value is None:
        return ()
    return database.decode(Attempts.decode, key, value).consumer_ids
