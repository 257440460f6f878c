"""One moment of a database, while its writer is at work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import slatedb.uniffi as slatedb

from opendata_queue.spark.read.moment import in_one_moment
from opendata_queue.spark.visible import moment_of
from opendata_queue.store import Database, Objects, Rows, StoreSettings

PARTS = [(bytes([part]), bytes([part + 1])) for part in (2, 3, 4)]


async def write_all_parts_at_once(database: Database, over: asyncio.Event) -> None:
    """Commit after commit, each of which puts the same number into every part."""
    number = 0
    while not over.is_set():
        rows = Rows()
        for start, _ in PARTS:
            rows.put(start + b"key", b"%d" % number)
        await database.commit(rows)
        number += 1


async def test_scans_of_several_parts_see_the_same_commits(tmp_path: Path) -> None:
    objects = Objects.open(f"file://{tmp_path}", StoreSettings(fsync=False))
    database = await Database.open(objects, "database")
    over = asyncio.Event()
    writing = asyncio.create_task(write_all_parts_at_once(database, over))
    seen: list[list[bytes]] = []
    while len(seen) < 20:
        async with moment_of(objects, "database") as reader:
            assert reader is not None
            scans = await in_one_moment(reader, PARTS)
            values = [value for scan in scans async for ((_, value),) in scan]
        if values:  # else nothing was written yet
            seen.append(values)
    over.set()
    await writing
    await database.close()

    assert [values for values in seen if values != 3 * values[:1]] == []
    assert len({values[0] for values in seen}) > 10, "the writer was not at work"


async def test_a_reader_that_is_killed_keeps_no_files_for_over_ten_minutes(tmp_path: Path) -> None:
    objects = Objects.open(f"file://{tmp_path}", StoreSettings(fsync=False))
    database = await Database.open(objects, "database")
    admin = slatedb.AdminBuilder(objects.location.join("database"), objects.slatedb_store).build()
    async with moment_of(objects, "database"):
        held = await admin.list_checkpoints(None)
    left = await admin.list_checkpoints(None)
    await database.close()

    (one,) = held
    assert one.expire_time_secs is not None
    assert one.expire_time_secs - one.create_time_secs <= 600
    assert left == []
