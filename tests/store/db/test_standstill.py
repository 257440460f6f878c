"""Readers of files that stood still while the manifests that they did not see were collected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from opendata_queue import Engine, Ingest
from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.store import Database, DatabaseReader, Objects, Rows, StoreSettings
from opendata_queue.store.db.reads import DatabaseReads
from opendata_queue.store.db.upkeep import Upkeep

SETTINGS = StoreSettings(garbage_age_ms=1, fsync=False, journal_ms=0)


async def put(database: Database, value: int) -> None:
    rows = Rows()
    rows.put(b"key", b"%d" % value)
    await database.commit(rows)


async def collected_unseen(objects: Objects, database: Database, reader: DatabaseReader) -> int:
    """Flush and collect, faster than the reader polls, until it can't move on; the last value."""
    value = 0
    while True:
        for _ in range(5):
            value += 1
            await put(database, value)
            await database.flush_to_files()
        await Upkeep(objects, "db").collect_garbage(min_age_ms=0)
        try:
            # It waits for the next polls: what it returns is new, or it says that it stands still.
            assert await reader.get(b"key") == b"%d" % value
        except StoreUnavailableError:
            return value


@pytest.mark.parametrize("leave_no_trace", [True, False], ids=["no trace", "checkpoint"])
async def test_a_reader_that_stood_still_says_so_and_a_new_one_reads_on(
    tmp_path: Path, leave_no_trace: bool
) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    database = await Database.open(objects, "db")
    await put(database, 0)
    await database.flush_to_files()
    stuck = await DatabaseReader.open(
        objects, "db", leave_no_trace=leave_no_trace, poll_interval_ms=200
    )
    value = await collected_unseen(objects, database, stuck)

    with pytest.raises(StoreUnavailableError, match="stood still"):
        await stuck.get(b"key")
    with pytest.raises(StoreUnavailableError, match="stood still"):
        await stuck.last(b"a", b"z")
    assert stuck.position is None

    new = await DatabaseReader.open(objects, "db", leave_no_trace=leave_no_trace)
    assert await new.get(b"key") == b"%d" % value
    for reader in (stuck, new):
        await reader.close()
    await database.close()


async def test_a_reader_that_moves_on_is_never_taken_for_one_that_stands_still(
    tmp_path: Path,
) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    database = await Database.open(objects, "db")
    await put(database, 0)
    reader = await DatabaseReader.open(objects, "db", leave_no_trace=True, poll_interval_ms=50)

    for value in range(20):
        await put(database, value)
        await database.flush_to_files()
        # The check has the reader come to what is in files: nothing older is read.
        assert await reader.get(b"key") == b"%d" % value

    await reader.close()
    await database.close()


async def test_an_engine_opens_a_reader_of_anothers_shard_again_that_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reads find out nothing here: where nothing new is seen there are none.
    monkeypatch.setattr(DatabaseReader, "_answer", DatabaseReads._answer)
    url = f"file://{tmp_path}/root"
    async with await Ingest.open(url) as ingest, await Engine.open(url) as engine:
        await engine.create_queue("q")
        await ingest.publish(b"before")
        await engine.all_is_routed()
        await ingest.shard._database.flush_to_files()
        readers, shard = engine._readers, ingest.shard._first_id >> 32
        async with readers.using(shard) as reader:
            standstill = reader.database._standstill
            assert standstill is not None
            # As after a minute in which it did not move on.
            standstill._position = lambda: 0
            standstill._checked_ns = 0
        async with asyncio.timeout(10):
            while readers.is_current(shard, reader):
                await asyncio.sleep(0.02)
        await ingest.publish(b"after")
        await engine.all_is_routed()
        assert [one.payload for one in await engine.claim("q", 2)] == [b"before", b"after"]
