"""Reading the rows of a database, the same for its writer, its readers and snapshots."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

import slatedb.uniffi as slatedb

from odq_encodings import EncodingError
from opendata_queue.model.allowance import RowBudget
from opendata_queue.model.errors import CorruptStoreError, OdqError, StoreUnavailableError
from opendata_queue.store.damage.whole_files import cut_file
from opendata_queue.store.errors import translated
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.problems import Problem
from opendata_queue.store.rows.scan import (
    Row,
    ScannedRows,
    first_rows,
    next_rows,
)
from opendata_queue.store.waiting import in_time

SCAN_ROWS: Final = 1_000
"""Rows that a scan hands over at a time."""
SCAN_BYTES: Final = 4 * 1024 * 1024
"""Bytes of rows with which a chunk is full: a log entry can have a megabyte of headers."""

_READS_AT_ONCE: Final = 32
_LARGE_READS_AT_ONCE: Final = 16
"""Of rows that may be large, and are counted when they are read."""
_FIND_CUT_TIMEOUT_MS: Final = 1_000
_DAMAGED_TIMEOUT_MS: Final = 1_000
# Rows this close together are read with one scan, as those of a queue that takes one message in ten
# are. The rows in between, of 64 KiB at most, are read faster than S3 answers another request.
_SCAN_GAP: Final = 16
_SCAN_LEAST: Final = 4
_SHORT_SCAN_ROWS: Final = 4 * SCAN_ROWS

T = TypeVar("T")


class ReadOptions:
    """How rows are read that are durable at a level of SlateDB's."""

    __slots__ = ("backwards", "get", "scan", "short_scan")

    def __init__(self, level: slatedb.DurabilityLevel) -> None:
        self.get = slatedb.ReadOptions(durability_filter=level, dirty=False, cache_blocks=True)
        # With SlateDB's own defaults a scan on S3 makes thousands of tiny requests.
        self.scan = slatedb.ScanOptions(
            durability_filter=level,
            dirty=False,
            read_ahead_bytes=4 * 1024 * 1024,
            cache_blocks=False,
            max_fetch_tasks=4,
        )
        # A few rows: reading 4 MiB ahead in every file would be most of the work, and the next
        # scan is likely to want the same blocks.
        self.short_scan = slatedb.ScanOptions(
            durability_filter=level,
            dirty=False,
            read_ahead_bytes=64 * 1024,
            cache_blocks=True,
            max_fetch_tasks=2,
        )
        self.backwards = slatedb.ScanOptions(
            durability_filter=level,
            dirty=False,
            read_ahead_bytes=64 * 1024,
            cache_blocks=True,
            max_fetch_tasks=2,
            order=slatedb.IterationOrder.DESCENDING,
        )


# Nothing is shown that could still be lost: what SlateDB has flushed or, where it is given only
# what is in a journal, everything that it has.
FLUSHED: Final = ReadOptions(slatedb.DurabilityLevel.REMOTE)
WRITTEN: Final = ReadOptions(slatedb.DurabilityLevel.MEMORY)


class _Readable(Protocol):
    async def get_with_options(self, key: bytes, options: slatedb.ReadOptions) -> bytes | None: ...
    async def scan_with_options(
        self, range: slatedb.KeyRange, options: slatedb.ScanOptions
    ) -> slatedb.DbIterator: ...


class DatabaseReads:
    """Point reads and bounded scans, the same for a writer and for a reader."""

    def __init__(
        self, handle: _Readable, objects: Objects, path: str, options: ReadOptions = FLUSHED
    ) -> None:
        self._reads = handle
        self._options = options
        self._objects = objects
        self._path = path
        self._outage_timeout_ms = objects.settings.outage_timeout_ms
        self._cut: Problem | None = None
        """A file that is not whole, if one was found when a read got no answer."""
        self.name = objects.location.url_of(path)

    def decode(self, decoder: Callable[[bytes], T], key: bytes, value: bytes) -> T:
        """Decode the value of a row; one that can't be is a corrupt row of this database."""
        try:
            return decoder(value)
        except EncodingError as error:
            raise CorruptStoreError(f"{self.name}: {error}", key=key) from error

    async def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, if it has one that is durable."""
        doing = f"read {self.name}"
        return await self._answer(
            lambda: self._reads.get_with_options(key, self._options.get), doing, key
        )

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys``, in their order, a bounded number of reads at a time."""
        values: list[bytes | None] = []
        for start in range(0, len(keys), _READS_AT_ONCE):
            some = keys[start : start + _READS_AT_ONCE]
            values += await asyncio.gather(*(self.get(key) for key in some))
        return values

    async def get_by_id(
        self,
        ids: Iterable[int],
        key_of: Callable[[int], bytes],
        keys_of: Callable[[range], list[bytes]] | None = None,
        budget: RowBudget | None = None,
    ) -> dict[int, bytes]:
        """The values of rows that are keyed by ids, where they have one.

        Ids that lie close together are read with one scan, the others with a point read each.
        ``keys_of`` makes many keys for less than ``key_of`` does.
        """
        found: dict[int, bytes] = {}
        alone: list[int] = []
        ordered = sorted(set(ids))
        for run in _runs(ordered):
            if len(run) < _SCAN_LEAST:
                alone += run
                continue
            span = range(run[0], run[-1] + 1)
            if keys_of is not None and len(span) == len(run):
                keys = keys_of(span)
            else:
                keys = [key_of(one) for one in run]
            if budget is not None:
                found |= await self._run_within(run, keys, budget)
                continue
            rows: list[Row] = []
            async for chunk in self.scan(keys[0], keys[-1] + b"\x00", limit=len(span)):
                rows += chunk
            if [key for key, _ in rows] == keys:  # most often all are there, and no others
                found.update(zip(run, [value for _, value in rows], strict=True))
            else:
                wanted = dict(zip(keys, run, strict=True))
                found |= {wanted[key]: value for key, value in rows if key in wanted}
        if budget is not None:
            if len(ordered) == 1:
                budget = RowBudget(1, budget.unread)  # there must be progress
            return found | await self._get_within(alone, key_of, budget)
        values = await self.get_many([key_of(one) for one in alone])
        found |= {one: value for one, value in zip(alone, values, strict=True) if value is not None}
        return found

    async def _run_within(
        self, run: list[int], keys: list[bytes], budget: RowBudget
    ) -> dict[int, bytes]:
        """Rows with ids close to each other, as far as the budget goes."""
        found: dict[int, bytes] = {}
        wanted: dict[bytes, int] = {}
        place = 0
        while place < len(run):
            if not budget.left_bytes:
                budget.unread.update(run[place:])
                break
            start, end = keys[place], keys[-1] + b"\x00"
            limit = run[-1] + 1 - run[place]
            most_bytes, options = budget.left_bytes, self._options.short_scan
            reading = partial(first_rows, self._reads, start, end, options, limit, most_bytes)
            scanned = await self._answer(reading, f"scan {self.name}", start)
            rows = scanned.rows()
            if not place and [key for key, _ in rows] == keys:  # most often
                found = dict(zip(run, [value for _, value in rows], strict=True))
                budget.count(found.values())
                break
            wanted = wanted or dict(zip(keys, run, strict=True))
            # What lies between them was read as well, and goes.
            some = {wanted[key]: value for key, value in rows if key in wanted}
            budget.count(some.values())
            found |= some
            if scanned.rest is None:
                break
            place = bisect_right(keys, rows[-1][0])
        return found

    async def _get_within(
        self, ids: list[int], key_of: Callable[[int], bytes], budget: RowBudget
    ) -> dict[int, bytes]:
        """Rows with ids far from each other, as far as the budget goes."""
        found: dict[int, bytes] = {}
        for start in range(0, len(ids), _LARGE_READS_AT_ONCE):
            if not budget.left_bytes:
                budget.unread.update(ids[start:])
                break
            some = ids[start : start + _LARGE_READS_AT_ONCE]
            values = await self.get_many([key_of(one) for one in some])
            read = {one: row for one, row in zip(some, values, strict=True) if row is not None}
            budget.count(read.values())
            found |= read
        return found

    async def scan(
        self, start: bytes, end: bytes, *, limit: int | None = None
    ) -> AsyncIterator[list[Row]]:
        """The durable rows from ``start`` up to, not including, ``end``, in chunks.

        A chunk has at most 1,000 rows, and ends within a few of them when they have 4 MiB.
        ``limit`` bounds the rows in all. A scan sees the state of when it began.
        """
        if start >= end or limit == 0:  # SlateDB refuses to scan nothing
            return
        if limit is None or limit > _SHORT_SCAN_ROWS:
            async for chunk in self._chunks(await self._begin(start, end), limit, start):
                yield chunk.rows()
            return
        scanned = await self._first(start, end, limit)
        rows = scanned.rows()
        for place in range(0, len(rows), SCAN_ROWS):
            yield rows[place : place + SCAN_ROWS]
        if scanned.rest is not None:
            async for chunk in self._chunks(scanned.rest, limit - len(rows), start):
                yield chunk.rows()

    async def scan_packed(
        self, start: bytes, end: bytes, *, limit: int | None = None
    ) -> AsyncIterator[ScannedRows]:
        """``scan``, its chunks as they came: for a reader that takes them apart by column."""
        if start >= end or limit == 0:
            return
        if limit is None or limit > SCAN_ROWS:
            async for chunk in self._chunks(await self._begin(start, end), limit, start):
                yield chunk
            return
        scanned = await self._first(start, end, limit)
        if len(scanned):
            yield scanned
        if scanned.rest is not None:
            async for chunk in self._chunks(scanned.rest, limit - len(scanned), start):
                yield chunk

    async def _first(self, start: bytes, end: bytes, limit: int) -> ScannedRows:
        """The rows of a short scan, or the first of them if they are large."""
        options = self._options.short_scan
        reading = partial(first_rows, self._reads, start, end, options, limit, SCAN_BYTES)
        return await self._answer(reading, f"scan {self.name}", start)

    async def _begin(self, start: bytes, end: bytes) -> slatedb.DbIterator:
        span = slatedb.KeyRange(start=start, start_inclusive=True, end=end, end_inclusive=False)
        reading = partial(self._reads.scan_with_options, span, self._options.scan)
        return await self._answer(reading, f"scan {self.name}", start)

    async def _chunks(
        self, iterator: slatedb.DbIterator, limit: int | None, start: bytes
    ) -> AsyncIterator[ScannedRows]:
        """The rows of an iterator, ``limit`` at most; none of the chunks is empty."""
        doing = f"scan {self.name}"
        while limit is None or limit > 0:
            wanted = SCAN_ROWS if limit is None else min(SCAN_ROWS, limit)
            reading = partial(next_rows, iterator, wanted, SCAN_BYTES)
            chunk = await self._answer(reading, doing, start)
            count = len(chunk)
            if count:
                yield chunk
            if not chunk.has_more:  # asking again would only cost a call
                return
            if limit is not None:
                limit -= count

    async def last(self, start: bytes, end: bytes) -> Row | None:
        """The last durable row from ``start`` up to, not including, ``end``."""
        span = slatedb.KeyRange(start=start, start_inclusive=True, end=end, end_inclusive=False)
        doing = f"scan {self.name}"
        iterator = await self._answer(
            lambda: self._reads.scan_with_options(span, self._options.backwards), doing, end
        )
        found = await self._answer(lambda: next_rows(iterator, 1, SCAN_BYTES), doing, end)
        return found.rows()[0] if len(found) else None

    async def _answer(self, read: Callable[[], Awaitable[T]], doing: str, key: bytes) -> T:
        """What SlateDB answers; a file that is not whole is why it does not, if there is one."""
        timeout_ms = self._outage_timeout_ms
        if self._cut is not None:  # many reads may follow: none of them is worth a long wait
            timeout_ms = min(timeout_ms, _DAMAGED_TIMEOUT_MS)
        try:
            with translated(doing, key=key):
                return await in_time(self._read(read), timeout_ms, doing)
        except StoreUnavailableError as error:
            self._cut = await self._find_cut_file()
            if self._cut is None:
                raise
            raise CorruptStoreError(f"could not {doing}: {self._cut}", key=key) from error

    async def _read(self, read: Callable[[], Awaitable[T]]) -> T:
        return await read()

    async def _find_cut_file(self) -> Problem | None:
        reading = f"look at the files of {self.name}"
        with contextlib.suppress(OdqError), translated(reading):
            return await in_time(cut_file(self._objects, self._path), _FIND_CUT_TIMEOUT_MS, reading)
        return None


def _runs(ids: list[int]) -> list[list[int]]:
    """Ascending ids, cut where the gap to the next one is large."""
    if ids and ids[-1] - ids[0] == len(ids) - 1:
        return [ids]
    runs: list[list[int]] = []
    for one in ids:
        if runs and one - runs[-1][-1] <= _SCAN_GAP:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs
