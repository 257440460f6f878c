"""Reading one journal, though its owner may be writing it at the same time."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

from odq_encodings import (
    JOURNAL_HEAD_BYTES,
    JournalRecord,
    find_journal_record,
    read_journal_records,
)
from opendata_queue.model.errors import CorruptStoreError, StoreUnavailableError
from opendata_queue.store.journal import layout
from opendata_queue.store.problems import REPAIR, Problem

_READ_BYTES: Final = 2 * (layout.MAX_RECORD_BYTES + JOURNAL_HEAD_BYTES)
_NOT_CLOSED: Final = "and its owner has not closed it"
_READS_AT_MOST: Final = 5
"""An owner that was replaced writes one record more at most."""


def unflushed(path: Path) -> list[JournalRecord]:
    """The records of a journal that are not known to be flushed, in order.

    ``CorruptStoreError`` if one of them is damaged. Only of the newest one it can't be known: it
    may just as well never have been finished, and then it was not acknowledged.

    ``StoreUnavailableError`` if it can't be judged, because its owner writes it all the time.
    """
    return _judged(path).unflushed


def check_begun(path: Path) -> None:
    """An owner that was at work has left a record: it writes one before anything else."""
    if not all_records(path):
        _judged(path, has_begun=True)


def damage_of(path: Path, wrong: str) -> Problem:
    return Problem(
        file=str(path),
        wrong=wrong,
        lost="the last commits of the database, which no other file has",
        advice=REPAIR,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contents:
    """What one read of a whole journal has found."""

    unflushed: list[JournalRecord] = field(default_factory=list)
    wrong: str | None = None
    """Why it is damaged, unless it was written while it was read."""
    check: int = 0
    """CRC-32 of all its bytes, if it seems to be damaged."""


def _judged(path: Path, *, has_begun: bool = False) -> _Contents:
    """Read a journal; ``CorruptStoreError`` only if its owner can't have been writing meanwhile.

    A read takes some milliseconds. Of an owner that is at work it may get the beginning of a
    journal before a record was written, and the rest after the next ones were: then one seems to be
    missing or torn, with newer ones behind it. But all records before the newest that was seen were
    whole by the end of that read. So a second read has them whole, or has newer ones in their
    place. If it has the same bytes, it is no owner that has written them like this.
    """
    contents = _read(path, has_begun=has_begun)
    for _ in range(_READS_AT_MOST):
        if contents.wrong is None:
            return contents
        before, contents = contents, _read(path, has_begun=has_begun)
        if contents.wrong is not None and contents.check == before.check:
            raise CorruptStoreError(str(damage_of(path, contents.wrong)))
    raise StoreUnavailableError(f"{path} is being written all the time")


def _read(path: Path, *, has_begun: bool) -> _Contents:
    """Read all of a journal once; with ``has_begun`` it must have a record that is whole."""
    try:
        with path.open("rb") as file:
            halves = file.read(layout.REGION_BYTES), file.read(layout.REGION_BYTES)
            size = os.fstat(file.fileno()).st_size
            # Maybe its owner was closed while we read: then all is flushed, and what we have may be
            # older than what says so.
            if not size:
                halves = b"", b""
            elif _was_closed(file):
                return _Contents()
    except FileNotFoundError:
        missing = f"is missing, {_NOT_CLOSED}"
        return _Contents(wrong=missing if has_begun else None)  # else it was brought in just now
    contents = _contents(halves, size, has_begun=has_begun)
    if contents.wrong is None:
        return contents
    return replace(contents, check=zlib.crc32(halves[1], zlib.crc32(halves[0])))


def _contents(halves: tuple[bytes, bytes], size: int, *, has_begun: bool) -> _Contents:
    regions = [list(read_journal_records(half)) for half in halves]
    records = {one.sequence: one for region in regions for one in region}
    if not records:
        return _Contents(wrong=f"has no record that is whole, {_NOT_CLOSED}" if has_begun else None)
    last = records[max(records)]
    salts = {one.salt for one in records.values()}
    for start, half, region in zip((0, layout.REGION_BYTES), halves, regions, strict=True):
        if region and region[-1].sequence < last.sequence:
            continue  # the other half is newer: what is behind these was flushed before
        at = sum(one.size for one in region)
        if any(find_journal_record(half[at:], salt, last.sequence) for salt in salts):
            lost = region[-1].sequence + 1 if region else 1
            return _Contents(wrong=f"is damaged at byte {start + at:,} (record {lost})")
    if last.mark is not None and not last.mark.is_closed and size != 2 * layout.REGION_BYTES:
        return _Contents(wrong=f"has {size:,} bytes instead of {2 * layout.REGION_BYTES:,}")
    wanted = range(last.flushed + 1, last.sequence + 1)
    missing = next((sequence for sequence in wanted if sequence not in records), None)
    if missing is not None:
        return _Contents(wrong=f"is damaged: it has record {last.sequence}, and not {missing}")
    return _Contents(unflushed=[records[sequence] for sequence in wanted])


def all_records(path: Path) -> list[JournalRecord]:
    """The records of both halves; what is behind them is not read."""
    try:
        with path.open("rb") as file:
            found = [*_region(file, 0), *_region(file, layout.REGION_BYTES)]
            if _was_closed(file):
                # Its owner was closed while we read: all is flushed. What we have may be the older
                # half, and not what says so.
                return _region(file, 0)[:1]
    except FileNotFoundError:  # the next owner has brought it in just now
        return []
    return found


def _was_closed(file: BinaryIO) -> bool:
    size = os.fstat(file.fileno()).st_size
    if not size:
        return True
    file.seek(0)
    first = next(read_journal_records(file.read(JOURNAL_HEAD_BYTES)), None)
    return first is not None and first.mark is not None and first.mark.is_closed


def is_finished(path: Path) -> bool:
    """Whether nothing in it matters any more: it was closed, or was never begun."""
    last = max(all_records(path), key=lambda one: one.sequence, default=None)
    return last is None or (last.mark is not None and last.mark.is_closed)


def _region(file: BinaryIO, start: int) -> list[JournalRecord]:
    """The records of a region; what is behind them is not read."""
    records: list[JournalRecord] = []
    at = start
    while True:
        file.seek(at)
        size = min(_READ_BYTES, start + layout.REGION_BYTES - at)
        data = file.read(size)
        before = records[-1] if records else None
        found = list(read_journal_records(data, before))
        if not found:
            return records
        records += found
        at += sum(one.size for one in found)
