"""What is to be removed, given the time and what is there (RFC 0010). No I/O, no clock."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from odq_encodings import (
    BLOB_ID_BYTES,
    DoneMessage,
    Expiry,
    ExpiryKey,
    FailedMessage,
    Finished,
    RetentionPosition,
)
from opendata_queue.model.ids import SHARD_SEQUENCES

Entry = DoneMessage | FailedMessage

NO_BLOB: Final = bytes(BLOB_ID_BYTES)
WORTH_A_PART: Final = 3
"""A database is rewritten when one in so many of its bytes, or more, can be freed."""

_WORTH_BYTES: Final = 1024 * 1024
_SEQUENCES: Final = SHARD_SEQUENCES
_MADE_AT_BYTES: Final = 6


class Run(NamedTuple):
    """Messages with consecutive ids that expire together."""

    deadline: int
    first_id: int
    messages: int
    size_bytes: int

    @property
    def last_id(self) -> int:
        return self.first_id + self.messages - 1

    @classmethod
    def of(cls, key: ExpiryKey, value: Expiry) -> Run:
        return cls(key.deadline, key.message_id, value.messages, value.size_bytes)


def expired_runs(runs: Iterable[Run], *, now: int, routed_up_to: int) -> list[Run]:
    """Those whose time is over and whose messages were all routed."""
    return [
        run for run in runs if run.deadline < now and (run.last_id & _SEQUENCES - 1) < routed_up_to
    ]


def without(run: Run, gone: Container[int]) -> list[Run]:
    """What is left of a run without some of its messages; its bytes in proportion."""
    kept = [one for one in range(run.first_id, run.last_id + 1) if one not in gone]
    left: list[Run] = []
    for one in kept:
        if left and left[-1].last_id + 1 == one:
            left[-1] = left[-1]._replace(messages=left[-1].messages + 1)
        else:
            left.append(run._replace(first_id=one, messages=1))
    return [
        part._replace(size_bytes=run.size_bytes * part.messages // run.messages) for part in left
    ]


def parts(run: Run, messages: int) -> list[Run]:
    """A run in parts of so many messages at most, for callers that need its ids alone."""
    return [
        run._replace(first_id=first, messages=min(messages, run.last_id + 1 - first), size_bytes=0)
        for first in range(run.first_id, run.last_id + 1, messages)
    ]


def batches(runs: Sequence[Run], messages: int) -> list[list[Run]]:
    """Runs in batches of so many messages, or of one run that has more."""
    found: list[list[Run]] = []
    left = 0
    for run in runs:
        if not found or left < run.messages:
            found.append([])
            left = messages
        found[-1].append(run)
        left -= run.messages
    return found


class Ids:
    """The ids of some runs: which they are, and in which spans they lie."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._ranges = sorted((run.first_id, run.last_id) for run in runs)
        self._firsts = [first for first, _ in self._ranges]

    def __contains__(self, message_id: int) -> bool:
        place = bisect_right(self._firsts, message_id) - 1
        return place >= 0 and message_id <= self._ranges[place][1]

    def __iter__(self) -> Iterator[int]:
        for first, last in self._ranges:
            yield from range(first, last + 1)

    def spans(self, gap: int) -> list[tuple[int, int]]:
        """First and last ids of stretches that have no gap over ``gap``: one scan for each."""
        spans: list[tuple[int, int]] = []
        for first, last in self._ranges:
            if spans and first - spans[-1][1] <= gap + 1:
                spans[-1] = spans[-1][0], max(last, spans[-1][1])
            else:
                spans.append((first, last))
        return spans


@dataclass(frozen=True, kw_only=True, slots=True)
class PastBuckets:
    """What to do with sealed buckets of done or failed messages."""

    dropped: tuple[int, ...]
    """Numbers of buckets that go whole."""

    rewritten: tuple[int, tuple[Entry, ...]] | None
    """The bucket at the boundary, and the entries that stay."""

    forgotten: tuple[int, ...]
    """The messages whose entries go."""

    oldest_kept: int | None
    """When the oldest entry that stays was made, if one was met."""


def past_buckets(buckets: Sequence[tuple[int, Sequence[Entry]]], since: int) -> PastBuckets:
    """Sealed buckets, the oldest first, without what was finished before ``since``.

    Entries are in the order of time, so the first one that stays ends it.
    """
    dropped: list[int] = []
    forgotten: list[int] = []
    for number, entries in buckets:
        past = sum(1 for entry in entries if _finished_at(entry) < since)
        forgotten += [entry.message_id for entry in entries[:past]]
        if past < len(entries):
            kept = tuple(entries[past:])
            return PastBuckets(
                dropped=tuple(dropped),
                rewritten=(number, kept) if past else None,
                forgotten=tuple(forgotten),
                oldest_kept=_finished_at(kept[0]),
            )
        dropped.append(number)
    return PastBuckets(
        dropped=tuple(dropped), rewritten=None, forgotten=tuple(forgotten), oldest_kept=None
    )


def _finished_at(entry: Entry) -> int:
    return entry.done_at if isinstance(entry, DoneMessage) else entry.failed_at


def old_blobs(
    listed: Iterable[tuple[str, int]], *, now: int, age_ms: int
) -> tuple[list[tuple[bytes, int]], bool]:
    """Of a list in its order, ids and sizes of blobs that are old enough to be judged.

    Also whether one was met that is too young: then so are all behind it, for ids begin with the
    time. What else lies in the folder is not ours, and left alone.
    """
    old: list[tuple[bytes, int]] = []
    for name, size_bytes in listed:
        blob_id = _blob_id(name)
        if blob_id is None:
            continue
        if int.from_bytes(blob_id[:_MADE_AT_BYTES], "big") >= now - age_ms:
            return old, True
        old.append((blob_id, size_bytes))
    return old, False


def _blob_id(name: str) -> bytes | None:
    """The blob that a name stands for; none if we never give such a name."""
    try:
        blob_id = bytes.fromhex(name)
    except ValueError:
        return None
    return blob_id if len(blob_id) == BLOB_ID_BYTES and blob_id.hex() == name else None


def sweep_is_due(
    before: Finished | None, *, routed_up_to: int, live: int, now: int, every_ms: int
) -> bool:
    """Whether to search for finished messages: if as many may be finished as would be left."""
    if before is None:
        return routed_up_to > 0
    there = before.messages_left + routed_up_to - before.next_sequence
    return there - live > live or now - before.swept_at >= every_ms


_MINUTE_MS: Final = 60_000

NEW_POSITION: Final = RetentionPosition(
    passed_at=0, freed_bytes=0, aging_bytes=0, aged_at=0, blob_id=NO_BLOB
)


class Freeable:
    """How many bytes of a database a compaction would free, now and later: an estimate.

    Times are rounded up to minutes, so that there are few of them.
    """

    __slots__ = ("_aging", "_aging_bytes", "_freed", "_loaded_at")

    def __init__(self, position: RetentionPosition) -> None:
        self._freed = position.freed_bytes
        self._aging: deque[tuple[int, int]] = deque()
        self._aging_bytes = 0
        self._loaded_at: int | None = None
        if position.aging_bytes:
            self.add(position.aging_bytes, aged_at=position.aged_at)
            self._loaded_at = self._aging[0][0]

    def add(self, size_bytes: int, *, aged_at: int = 0) -> None:
        """Bytes that can be freed, from a time on."""
        if not aged_at:
            self._freed += size_bytes
            return
        self._aging_bytes += size_bytes
        minute = -(-aged_at // _MINUTE_MS) * _MINUTE_MS
        if self._aging and minute <= self._aging[-1][0]:
            minute, before = self._aging.pop()
            size_bytes += before
        self._aging.append((minute, size_bytes))

    def at(self, now: int) -> int:
        while self._aging and self._aging[0][0] <= now:
            _, size_bytes = self._aging.popleft()
            self._aging_bytes -= size_bytes
            self._freed += size_bytes
        return self._freed

    def is_worth_it(self, database_bytes: int, now: int) -> bool:
        freed = self.at(now)
        return freed >= _WORTH_BYTES and freed * WORTH_A_PART >= database_bytes

    def were_freed(self, now: int) -> None:
        self.at(now)
        self._freed = 0

    def into(self, position: RetentionPosition) -> RetentionPosition:
        return replace(
            position,
            freed_bytes=self._freed,
            aging_bytes=self._aging_bytes,
            aged_at=self._aged_at(),
        )

    def _aged_at(self) -> int:
        """When what is aging is aged: the last of it, or the mean with what was loaded.

        With the last of it, passes that follow each other quickly, each in a process of its own,
        would put off for ever what there was before them.
        """
        if not self._aging:
            return 0
        last = self._aging[-1][0]
        before, size_bytes = self._aging[0]
        if before != self._loaded_at:
            return last
        return last - (last - before) * size_bytes // self._aging_bytes


class LiveIds:
    """Which sequences of a shard are still wanted: a bit for each, in pages."""

    __slots__ = ("_pages", "count")

    _PAGE_BITS: Final = 16

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self.count = 0

    def add(self, sequence: int) -> None:
        page, bit = sequence >> self._PAGE_BITS, sequence & 0xFFFF
        bits = self._pages.get(page)
        if bits is None:
            bits = self._pages[page] = bytearray(1 << self._PAGE_BITS - 3)
        if not bits[bit >> 3] >> (bit & 7) & 1:
            bits[bit >> 3] |= 1 << (bit & 7)
            self.count += 1

    def __contains__(self, sequence: int) -> bool:
        bits = self._pages.get(sequence >> self._PAGE_BITS)
        bit = sequence & 0xFFFF
        return bits is not None and bool(bits[bit >> 3] >> (bit & 7) & 1)
