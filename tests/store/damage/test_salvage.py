"""What is left of a damaged SST takes its place: the rows of all blocks that are whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from opendata_queue.store import (
    Database,
    DatabaseReader,
    Objects,
    Rows,
    StoreSettings,
    check_database,
    salvage_ssts,
)

ROWS = 2_000
VALUE = random.Random(1).randbytes(100)


async def filled(root: Path) -> tuple[Objects, Path]:
    objects = Objects.open(f"file://{root}", StoreSettings())
    database = await Database.open(objects, "db")
    rows = Rows()
    for n in range(ROWS):
        rows.put(b"%06d" % n, VALUE)
    await database.commit(rows)
    await database.flush_to_files()
    await database.close()
    (sst,) = (root / "db/compacted").iterdir()
    return objects, sst


async def keys(objects: Objects) -> list[bytes]:
    reader = await DatabaseReader.open(objects, "db")
    try:
        found = [key async for rows in reader.scan(b"0", b"9") for key, _ in rows]
        # Point reads ask the filter, too.
        got = await reader.get_many([b"%06d" % n for n in range(0, ROWS, 97)])
        assert [n for n, value in zip(range(0, ROWS, 97), got, strict=True) if value] == [
            int(key) for key in found if int(key) % 97 == 0
        ]
        return found
    finally:
        await reader.close()


@pytest.mark.parametrize("how", ["missing", "cut", "block", "first block", "index", "filter"])
async def test_the_rows_of_blocks_that_are_whole_can_be_read(tmp_path: Path, how: str) -> None:
    objects, sst = await filled(tmp_path)
    data = bytearray(sst.read_bytes())
    (problem_free,) = [await check_database(objects, "db", deep=True)]
    assert problem_free == []
    place = {"block": 50_000, "first block": 10, "index": len(data) - 2_500, "filter": 0}.get(how)
    if how == "missing":
        sst.unlink()
    elif how == "cut":
        sst.write_bytes(data[:100_000])
    else:
        assert place is not None
        place = place or data.rindex(b"_bf") if how == "filter" else place
        data[place] ^= 1
        sst.write_bytes(data)
    assert await check_database(objects, "db", deep=True) != []

    assert await salvage_ssts(objects, "db", [sst.name]) == [f"db/compacted/{sst.name}"]

    assert await check_database(objects, "db", deep=True) == []
    left = await keys(objects)
    assert left == sorted(set(left))
    if how in ("block", "first block"):
        assert ROWS - 60 < len(left) < ROWS
        assert (tmp_path / "db/torn" / sst.name).read_bytes() == data
    elif how != "filter":
        assert left == []
    else:
        assert len(left) == ROWS
    database = await Database.open(objects, "db")
    more = Rows()
    more.put(b"000000", b"again")
    await database.commit(more)
    await database.flush_to_files()
    assert await database.get(b"000000") == b"again"
    await database.close()
