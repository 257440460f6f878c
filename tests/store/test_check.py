"""What a check of one database finds, and what a repair does about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from opendata_queue import StoreSettings
from opendata_queue.store import (
    Database,
    Objects,
    Problem,
    Rows,
    check_database,
)

SETTINGS = StoreSettings(fsync=False, memtable_bytes=64 * 1024, journal_ms=0)


def objects_in(folder: Path) -> Objects:
    return Objects.open(folder.as_uri(), SETTINGS)


def rows_of(number: int) -> Rows:
    rows = Rows()
    rows.put(b"k%03d" % number, b"v" * 1_000)
    return rows


@pytest.fixture
async def root(tmp_path: Path) -> Path:
    """A database with SSTs and a WAL, whose owner is gone."""
    database = await Database.open(objects_in(tmp_path), "db")
    for number in range(80):
        await database.commit(rows_of(number))
    await database.flush_to_files()
    for number in range(80, 90):
        await database.commit(rows_of(number))
    await database._give_up()
    assert database._wal_sync is None
    return tmp_path


def newest(root: Path, folder: str) -> Path:
    return max((root / "db" / folder).iterdir())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("deep", [False, True])
async def test_a_database_that_is_well_has_no_problems(root: Path, deep: bool) -> None:
    assert await check_database(objects_in(root), "db", deep=deep) == []
    assert await check_database(objects_in(root), "other", deep=deep) == []


@pytest.mark.parametrize(
    ("folder", "damage", "deep"),
    [
        ("compacted", Path.unlink, False),
        ("compacted", cut, False),
        ("compacted", flipped, True),
        ("manifest", cut, False),
    ],
)
async def test_a_file_that_is_missing_or_damaged_is_named(
    root: Path, folder: str, damage: Callable[[Path], None], deep: bool
) -> None:
    file = newest(root, folder)
    damage(file)

    problems = await check_database(objects_in(root), "db", deep=deep)

    assert [one.file for one in problems] == [f"db/{folder}/{file.name}"]
    assert isinstance(problems[0], Problem)
    assert "odq repair" in str(problems[0])
