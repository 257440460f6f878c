"""A journal that is read while its owner still writes it: what can be seen then is no damage."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odq_encodings import JournalState, read_journal_records
from opendata_queue import CorruptStoreError, FencedError, StoreSettings, StoreUnavailableError
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.store.db import database as database_module
from opendata_queue.store.journal import layout
from opendata_queue.store.journal.contents import unflushed
from opendata_queue.store.journal.inspection import newest_mark
from opendata_queue.store.journal.journal import Journal, LeftJournals

# Nothing is flushed in these tests that they do not ask for.
SETTINGS = StoreSettings(journal_ms=24 * 3_600_000, fsync=False)


async def opened(folder: Path) -> Database:
    objects = Objects.open(folder.as_uri(), SETTINGS)
    return await Database.open(objects, "db", journaled=True)


def row(key: bytes, value: bytes) -> Rows:
    rows = Rows()
    rows.put(key, value)
    return rows


def journals(folder: Path) -> list[Path]:
    return sorted((folder / "db" / "journal").glob("*"))


def after_reads(
    monkeypatch: pytest.MonkeyPatch, path: Path, owner_goes_on: Callable[[int], None]
) -> None:
    """Have the owner do something after each read of ``path``; it is given their number."""
    open_it, numbers = Path.open, itertools.count(1)

    class Read(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            owner_goes_on(next(numbers))
            return data

    def open_watched(which: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if which == path and mode == "rb":
            return Read(io.FileIO(path), buffer_size=1)  # nothing is read before it is asked for
        return open_it(which, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", open_watched)


@pytest.mark.parametrize("reads", range(1, 4))
async def test_a_record_that_is_written_while_the_next_owner_reads_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    owner = await opened(tmp_path)
    await owner.commit(row(b"a", b"acknowledged"))
    loop, since, refused = asyncio.get_running_loop(), itertools.count(1), []

    def go_on(_: int) -> None:
        if len(journals(tmp_path)) == 2 and next(since) == reads:  # it is replaced, and finds out
            committing = owner.commit(row(b"b", b"refused"))
            waiting = asyncio.run_coroutine_threadsafe(committing, loop)
            refused.append(waiting.exception(60))

    with monkeypatch.context() as patched:
        after_reads(patched, journals(tmp_path)[0], go_on)
        successor = await opened(tmp_path)

    assert [type(one) for one in refused] == [FencedError]
    assert await successor.get(b"a") == b"acknowledged"
    await successor.close()
    await owner.close()


async def journal_of(folder: Path, *commits: bytes) -> tuple[Path, bytes, list[int]]:
    """A journal, its bytes, and where its records begin."""
    journal = Journal(folder, 1, sync=False, name="it")
    for rows in commits:
        await journal.append(rows)
    journal.close()
    whole, starts = journal.path.read_bytes(), [0]
    for record in read_journal_records(whole):
        starts.append(starts[-1] + record.size)
    return journal.path, whole, starts


@pytest.mark.parametrize("reads", range(1, 4))
@pytest.mark.parametrize("written_bytes", [0, 1, 40, 72, 75])
async def test_a_record_that_is_seen_half_written_is_read_again_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_bytes: int, reads: int
) -> None:
    """A read that began before record 2 was whole, and went on after record 3 was written."""
    monkeypatch.setattr(layout, "REGION_BYTES", 2_000)
    path, whole, starts = await journal_of(tmp_path, b"first", b"second", b"third")
    torn_at = starts[1] + written_bytes
    path.write_bytes(whole[:torn_at] + bytes(starts[2] - torn_at) + whole[starts[2] :])

    def complete(read: int) -> None:
        if read == reads:
            path.write_bytes(whole)

    after_reads(monkeypatch, path, complete)

    assert [one.rows for one in unflushed(path)] == [b"first", b"second", b"third"]


@pytest.mark.parametrize("reads", range(1, 4))
async def test_a_half_that_is_newer_than_the_other_one_that_was_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """The owner has gone on to the other half between the reads of the two."""
    monkeypatch.setattr(layout, "REGION_BYTES", 2_000)
    journal = Journal(tmp_path, 1, sync=False, name="it")
    await journal.append(b"first")
    before = journal.path.read_bytes()
    await journal.append(b"second")
    await journal.switch()
    await journal.append(b"third")
    journal.close()
    after = journal.path.read_bytes()
    journal.path.write_bytes(before)

    def go_on(read: int) -> None:
        if read == reads:
            journal.path.write_bytes(after)

    after_reads(monkeypatch, journal.path, go_on)

    found = [one.rows for one in unflushed(journal.path)]
    assert found in ([b"first"], [b"first", b"second", b"third"])


async def test_a_torn_record_that_stays_so_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 2_000)
    path, whole, starts = await journal_of(tmp_path, b"first", b"second", b"third")
    path.write_bytes(whole[: starts[1]] + bytes(starts[2] - starts[1]) + whole[starts[2] :])

    with pytest.raises(CorruptStoreError, match=rf"damaged at byte {starts[1]} \(record 2\)"):
        unflushed(path)


async def test_a_journal_that_changes_with_every_read_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 4_000)
    folder = tmp_path / layout.FOLDER
    folder.mkdir()
    commits = [b"%d" % number for number in range(40)]
    path, whole, starts = await journal_of(folder, *commits)
    seen = iter(starts[2:])

    def go_on(_: int) -> None:
        """Record 2 is never seen whole, and each read sees one more behind it."""
        end = next(seen)
        shown = whole[: starts[1]] + bytes(starts[2] - starts[1]) + whole[starts[2] : end]
        path.write_bytes(shown + bytes(len(whole) - len(shown)))

    after_reads(monkeypatch, path, go_on)
    go_on(0)
    go_on(0)

    with pytest.raises(StoreUnavailableError, match="is being written all the time"):
        unflushed(path)
    seen = iter(starts[3:])
    assert newest_mark(tmp_path) is not None


@pytest.mark.parametrize("reads", range(1, 4))
async def test_the_first_records_of_both_halves_may_be_seen_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 2_000)
    folder = tmp_path / layout.FOLDER
    folder.mkdir()
    path, whole, _ = await journal_of(folder, b"first")
    path.write_bytes(bytes(len(whole)))

    def complete(read: int) -> None:
        if read == reads:
            path.write_bytes(whole)

    after_reads(monkeypatch, path, complete)

    LeftJournals(tmp_path, JournalState(number=1, is_closed=False))


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_journal_that_is_made_empty_while_it_is_read_brings_no_old_rows_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    monkeypatch.setattr(layout, "MAX_RECORD_BYTES", 100)
    idle = await opened(tmp_path)
    await idle.commit(row(b"a", b"old"))
    await idle.commit(row(b"a", b"new" * 100))  # past the journal
    assert idle._journaled is not None
    journal = idle._journaled._journal

    def finish(_: int) -> None:
        if journal._descriptor >= 0 and len(journals(tmp_path)) == 1 + replaced:
            journal.finish()  # between the two regions, the owner before us is closed

    with monkeypatch.context() as patched:
        after_reads(patched, journals(tmp_path)[0], finish)
        second = await opened(tmp_path)

    assert journal._descriptor < 0
    assert await second.get(b"a") == b"new" * 100
    await second.close()
    await idle.close()


async def test_who_is_replaced_while_it_opens_does_not_take_what_its_successor_did_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor has brought in the journal, and removed it: the one that reads late misses it.

    Its own database says what it said when it was opened.
    """
    owner = await opened(tmp_path)
    await owner.commit(row(b"a", b"acknowledged"))
    loop = asyncio.get_running_loop()
    successors: list[Database] = []

    def left_journals(*arguments: Any) -> LeftJournals:
        with monkeypatch.context() as for_successor:
            for_successor.setattr(database_module, "LeftJournals", LeftJournals)
            opening = asyncio.run_coroutine_threadsafe(opened(tmp_path), loop)
            successors.append(opening.result(60))
        return LeftJournals(*arguments)

    monkeypatch.setattr(database_module, "LeftJournals", left_journals)
    with pytest.raises(FencedError, match="another process has taken over"):
        await opened(tmp_path)

    (successor,) = successors
    assert await successor.get(b"a") == b"acknowledged"
    await successor.commit(row(b"b", b"goes on"))
    await successor.close()
    await owner.close()
