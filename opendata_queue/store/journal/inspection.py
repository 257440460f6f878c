"""The journals of a database, seen by those who do not write them: readers, checks, repairs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Final, NamedTuple

from odq_encodings import (
    JournalMark,
    JournalRecord,
    JournalState,
    encode_journal_head,
    journal_records_in,
    read_journal_records,
)
from opendata_queue.model.errors import CorruptStoreError, StoreUnavailableError
from opendata_queue.store.files.durable import make_folder, sync_file
from opendata_queue.store.journal import layout
from opendata_queue.store.journal.contents import (
    all_records,
    check_begun,
    damage_of,
    is_finished,
    unflushed,
)
from opendata_queue.store.journal.layout import FOLDER, numbers_in, path_of
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.problems import Problem

logger = logging.getLogger(__name__)

_POLL_MS: Final = 2
_PATIENCE_MS: Final = 250
"""How long a reader waits for an owner that may be gone."""
_LONGEST_PATIENCE_MS: Final = 3_000


def has_journal(objects: Objects, path: str) -> bool:
    """Whether an owner of the database ``path`` is at work, or has left commits in its journal."""
    location = objects.location
    if location.kind is not StoreKind.FILE:
        return False
    folder = location.folder / path / FOLDER
    return any(not is_finished(path_of(folder, number)) for number in numbers_in(folder))


async def until_flushed(objects: Objects, path: str) -> None:
    """Wait until readers of the database ``path`` see what was durable when this was called.

    An owner that is gone flushes nothing any more. Then they see it when the database is opened
    for writing again.
    """
    location = objects.location
    if location.kind is not StoreKind.FILE:
        return
    folder = location.folder / path
    loop = asyncio.get_running_loop()
    waiting = await asyncio.to_thread(_unseen, folder)
    patience_ms = min(max(_PATIENCE_MS, 3 * objects.settings.journal_ms), _LONGEST_PATIENCE_MS)
    enough = loop.time() + patience_ms / 1000
    while waiting and loop.time() < enough:
        await asyncio.sleep(_POLL_MS / 1000)
        now = await asyncio.to_thread(_unseen, folder)
        waiting = {
            number: before
            for number, before in waiting.items()
            if number in now and now[number].flushed < before.last
        }
    if waiting:
        logger.warning(
            "the last commits of %s are in its journal, for the next one who opens it to write",
            location.url_of(path),
        )


class _Unseen(NamedTuple):
    """What readers do not see of a journal: the sequences behind ``flushed``, up to ``last``."""

    flushed: int
    last: int


def _unseen(database_folder: Path) -> dict[int, _Unseen]:
    """The journals with commits that are not known to be flushed, by their numbers."""
    folder = database_folder / FOLDER
    found = {}
    for number in numbers_in(folder):
        records = {one.sequence: one for one in all_records(path_of(folder, number))}
        if records:
            last = records[max(records)]
            if any(one > last.flushed and record.rows for one, record in records.items()):
                found[number] = _Unseen(last.flushed, last.sequence)
    return found


def newest_mark(database_folder: Path) -> JournalMark | None:
    """What the newest record of all journals says of the files of its database, if any does.

    ``CorruptStoreError`` if a journal is damaged; not, if it is being written at the same time.
    """
    folder = database_folder / FOLDER
    mark: JournalMark | None = None
    for number in sorted(numbers_in(folder)):
        path = path_of(folder, number)
        with contextlib.suppress(StoreUnavailableError):
            unflushed(path)
        found = max(all_records(path), key=lambda one: one.sequence, default=None)
        if found is not None and found.mark is not None:
            mark = found.mark
    return mark


def check_journals(database_folder: Path, state: JournalState | None) -> list[Problem]:
    """What is wrong with the journals of a database that says ``state`` of them."""
    folder = database_folder / FOLDER
    problems = []
    closed = state.number if state is not None and state.is_closed else 0
    for number in sorted({*numbers_in(folder), *([state.number] if state else [])}):
        path = path_of(folder, number)
        try:
            if number > closed:
                unflushed(path)
                if state is not None and number == state.number:
                    check_begun(path)
        except StoreUnavailableError:  # its owner is at work
            continue
        except CorruptStoreError:
            wrong = "is damaged" if path.exists() else "is missing"
            problems.append(damage_of(path, wrong))
    return problems


def set_journal_aside(database_folder: Path, name: str) -> None:
    """Move a damaged journal to the folder ``torn``, and leave one with all that is whole in it.

    For repairs alone: commits that were acknowledged may not be among them.
    """
    path = database_folder / FOLDER / name
    rows = _whole_rows(path) if path.exists() else []
    torn = database_folder / "torn"
    torn.mkdir(exist_ok=True)
    if path.exists():
        path.rename(torn / name)
    make_folder(path.parent, sync=True)
    mark, salt = JournalMark(), secrets.randbits(32)
    with path.open("xb") as file:
        file.truncate(2 * layout.REGION_BYTES)
        at, region = 0, 0
        for sequence, one in enumerate([b"", *rows], 1):
            head = encode_journal_head(salt, sequence, 0, mark.encode(), one)
            if at + len(head) + len(one) > layout.REGION_BYTES:
                at, region = 0, region + 1
            file.seek(region * layout.REGION_BYTES + at)
            file.write(head + one)
            at += len(head) + len(one)
        file.flush()
        os.fsync(file.fileno())
    sync_file(path.parent)


def _whole_rows(path: Path) -> list[bytes]:
    """The rows of all records that are whole and not known to be flushed, wherever they are."""
    records: dict[int, JournalRecord] = {}
    data = path.read_bytes()
    halves = (data[: layout.REGION_BYTES], data[layout.REGION_BYTES : 2 * layout.REGION_BYTES])
    begun = {one.sequence: one for half in halves for one in read_journal_records(half)}
    if begun:
        salt = begun[max(begun)].salt
        for half in halves:
            records |= {one.sequence: one for one in journal_records_in(half, salt)}
    flushed = max((one.flushed for one in records.values()), default=0)
    found = [one for sequence, one in sorted(records.items()) if sequence > flushed]
    return [one.rows for one in found if one.rows]
