"""Space: what is past its time or deleted leaves the store when SlateDB is asked for it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import slatedb.uniffi as slatedb

from opendata_queue import FencedError, InvalidInputError, StoreSettings
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.store.db.upkeep import Upkeep
from tests.conftest import NewRoot

SETTINGS = StoreSettings(compaction_poll_ms=50, replaced_files_kept_ms=100)
# SlateDB compacts nothing by itself, which would keep manifests for a while.
ALL_AT_ONCE = replace(SETTINGS, garbage_age_ms=0, compaction_poll_ms=600_000)
ROW_BYTES = 10_000


async def test_a_compaction_frees_what_was_deleted_or_is_past_its_time(root: str) -> None:
    objects = Objects.open(root, SETTINGS)
    database = await Database.open(objects, "db")
    rows = Rows()
    for number in range(60):
        ttl_ms = 1 if number % 3 == 0 else None
        rows.put(b"%02d" % number, os.urandom(ROW_BYTES), ttl_ms=ttl_ms)
    await database.commit(rows)
    await database.flush_to_files()
    deleted = Rows()
    for number in range(1, 60, 3):
        deleted.delete(b"%02d" % number)
    await database.commit(deleted)
    assert await database.size_bytes() > 39 * ROW_BYTES
    mark = Rows()
    mark.put(b"mark", b"later than all others")
    await database.commit(mark)
    await database.flush_to_files()

    assert await database.compact()

    assert 20 * ROW_BYTES < await database.size_bytes() < 22 * ROW_BYTES
    assert database.requests > 0
    await database.close()
    again = await Database.open(objects, "db")
    left = [key async for chunk in again.scan(b"0", b"9") for key, _ in chunk]
    assert left == [b"%02d" % number for number in range(2, 60, 3)]
    await again.close()


async def test_files_that_wait_for_a_compaction_are_counted(new_s3_root: NewRoot) -> None:
    objects = Objects.open(new_s3_root(), ALL_AT_ONCE)
    upkeep = Upkeep(objects, "db")
    assert await upkeep.file_counts() == (0, 0)  # there is no database

    database = await Database.open(objects, "db")
    waiting = []
    for number in range(3):
        rows = Rows()
        rows.put(b"%02d" % number, b"v")
        await database.commit(rows)
        await database.flush_to_files()
        waiting.append((await upkeep.file_counts())[0])

    assert waiting == [1, 2, 3]
    await database.close()


async def test_a_clock_that_was_set_back_puts_a_compaction_off_and_is_no_error(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What SlateDB says then; a test can't set the clock of the machine.
    behind = "Invalid error: invalid clock tick, must be monotonic. last_tick=`2`, next_tick=`1`"
    said = [slatedb.Error.Invalid(behind), slatedb.Error.Invalid("Invalid error: no such source")]
    submit = slatedb.Admin.submit_compaction

    async def refused(self: slatedb.Admin, spec: slatedb.CompactionSpec) -> slatedb.Compaction:
        if said:
            raise said.pop(0)
        return await submit(self, spec)

    monkeypatch.setattr(slatedb.Admin, "submit_compaction", refused)
    database = await Database.open(Objects.open(new_memory_root(), SETTINGS), "db")
    rows = Rows()
    rows.put(b"key", b"value")
    await database.commit(rows)
    await database.flush_to_files()

    assert not await database.compact()
    with pytest.raises(InvalidInputError, match="no such source"):
        await database.compact()
    assert await database.compact()
    await database.close()


async def test_a_compaction_makes_no_file_larger_than_the_rows_kept_in_memory(
    tmp_path: Path,
) -> None:
    # Three files: SlateDB begins to merge them by itself when there are four.
    size_bytes, count, batch = 1024 * 1024, 300, 25
    settings = replace(SETTINGS, memtable_bytes=size_bytes)
    database = await Database.open(Objects.open(f"file://{tmp_path}", settings), "db")
    for first in range(0, count, batch):
        rows = Rows()
        for number in range(first, first + batch):
            rows.put(b"%03d" % number, os.urandom(ROW_BYTES))
        await database.commit(rows)
    await database.flush_to_files()

    assert await database.compact()

    await database.close()
    written = [path.stat().st_size for path in tmp_path.glob("db/compacted/*.sst")]
    assert sum(written) > count * ROW_BYTES
    assert max(written) < size_bytes + 2 * batch * ROW_BYTES


async def test_there_is_nothing_to_compact_in_an_empty_database(new_memory_root: NewRoot) -> None:
    database = await Database.open(Objects.open(new_memory_root(), SETTINGS), "db")

    assert not await database.compact()

    await database.close()


async def test_manifests_leave_files_each_time_that_garbage_is_collected(tmp_path: Path) -> None:
    objects = Objects.open(f"file://{tmp_path}", ALL_AT_ONCE)
    database = await Database.open(objects, "db")
    for number in range(3):
        for _ in range(5):
            await flush_a_row(database, b"%d" % number)

        await database.collect_garbage()

        assert len(await objects.names("db/manifest")) == 1
    await database.close()
    again = await Database.open(objects, "db")
    assert await again.get_many([b"0", b"1", b"2"]) == [b"x"] * 3
    await again.close()


async def test_manifests_in_files_are_kept_for_their_age_even_if_other_files_are_not(
    tmp_path: Path,
) -> None:
    settings = replace(ALL_AT_ONCE, garbage_age_ms=600_000)
    objects = Objects.open(f"file://{tmp_path}", settings)
    database = await Database.open(objects, "db")
    for _ in range(5):
        await flush_a_row(database, b"a")
    before = await objects.names("db/manifest")

    await database.collect_garbage(min_age_ms=0)

    assert set(before) <= set(await objects.names("db/manifest"))
    await database.close()


async def test_a_writer_that_was_replaced_is_refused_after_garbage_was_collected(
    root: str,
) -> None:
    objects = Objects.open(root, ALL_AT_ONCE)
    replaced = await Database.open(objects, "db")
    await flush_a_row(replaced, b"before")
    database = await Database.open(objects, "db")
    for _ in range(5):
        await flush_a_row(database, b"after")
    await database.collect_garbage()

    with pytest.raises(FencedError):
        await flush_a_row(replaced, b"late")

    assert await database.get_many([b"before", b"after", b"late"]) == [b"x", b"x", None]
    await database.close()
    with contextlib.suppress(FencedError):
        await replaced.close()


async def flush_a_row(database: Database, key: bytes) -> None:
    rows = Rows()
    rows.put(key, b"x")
    await database.commit(rows)
    await database.flush_to_files()


async def test_of_files_that_are_deleted_no_empty_folder_is_left(tmp_path: Path) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    for path in ("some/a/b/1", "some/a/2", "some/3", "other/4"):
        await objects.write(path, b"x")
    (tmp_path / "some/empty/too").mkdir(parents=True)
    being_written = tmp_path / "some/a/5#1"
    being_written.write_bytes(b"x")

    assert await objects.delete_under("some") == 3

    # What is no object yet is left alone, and the folders that lead to it.
    assert [str(one.relative_to(tmp_path)) for one in sorted(tmp_path.rglob("*"))] == [
        "other",
        "other/4",
        "some",
        "some/a",
        "some/a/5#1",
    ]
    being_written.unlink()
    assert await objects.delete_under("some") == 0
    assert not (tmp_path / "some").exists()
    assert await objects.delete_under("some") == 0


async def test_a_snapshot_stays_as_it_was(new_memory_root: NewRoot) -> None:
    database = await Database.open(Objects.open(new_memory_root(), SETTINGS), "db")
    rows = Rows()
    rows.put(b"a", b"1")
    await database.commit(rows)

    snapshot = await database.snapshot()
    rows = Rows()
    rows.delete(b"a")
    rows.put(b"b", b"2")
    await database.commit(rows)

    assert [key async for chunk in snapshot.scan(b"a", b"z") for key, _ in chunk] == [b"a"]
    assert await snapshot.get(b"a") == b"1"
    await database.close()


async def test_objects_are_listed_behind_a_name_and_weighed(root: str) -> None:
    objects = Objects.open(root, SETTINGS)
    for number in range(5):
        await objects.write(f"some/{number}", bytes(number))

    assert await objects.list_from("some", "", 2) == [("0", 0), ("1", 1)]
    assert await objects.list_from("some", "2", 10) == [("3", 3), ("4", 4)]
    assert await objects.list_from("none", "", 10) == []
    assert await objects.size_bytes("some") == 10
    await objects.write("somewhere", b"else")
    await objects.delete_under("some")
    assert await objects.list_from("some", "", 10) == []
    assert await objects.read("somewhere") == b"else"
