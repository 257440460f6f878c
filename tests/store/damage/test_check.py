"""What a check of one database finds, and what a repair does about it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from opendata_queue import CorruptStoreError, StoreSettings
from opendata_queue.store import (
    Database,
    Objects,
    Problem,
    Rows,
    check_database,
    repair_database,
)
from opendata_queue.store.damage import check
from opendata_queue.store.slatedb_files.manifests import admin_of, manifest_name, wal_name

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
    database = await Database.open(objects_in(tmp_path / "root"), "db")
    for number in range(80):
        await database.commit(rows_of(number))
    await database.flush_to_files()
    for number in range(80, 90):
        await database.commit(rows_of(number))
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    await database.close()
    return tmp_path / "copy"


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


async def test_a_missing_manifest_is_named_where_wal_files_were_collected_that_an_older_one_needs(
    root: Path,
) -> None:
    manifest = await admin_of(objects_in(root), "db").read_manifest(None)
    assert manifest is not None
    for number in range(1, int(manifest.replay_after_wal_id) + 1):
        (root / "db" / "wal" / wal_name(number)).unlink()
    assert await check_database(objects_in(root), "db", deep=True) == []
    newest(root, "manifest").unlink()
    older = await admin_of(objects_in(root), "db").read_manifest(None)
    assert older is not None
    assert older.replay_after_wal_id < manifest.replay_after_wal_id

    first, *_ = await check_database(objects_in(root), "db", deep=False)

    assert manifest_name(int(manifest.id)) in first.wrong
    with pytest.raises(CorruptStoreError, match=manifest_name(int(manifest.id))):
        await rows_in(root)


async def rows_in(root: Path, settings: StoreSettings = SETTINGS) -> set[int]:
    objects = Objects.open(root.as_uri(), settings)
    database = await Database.open(objects, "db", journaled=True)
    found = {int(key[1:]) async for chunk in database.scan(b"k", b"l") for key, _ in chunk}
    await database.close()
    return found


@pytest.mark.parametrize("damage", [Path.unlink, cut, flipped])
async def test_a_repair_opens_a_database_without_a_wal_file_and_says_so(
    root: Path, damage: Callable[[Path], None]
) -> None:
    path = sorted((root / "db" / "wal").iterdir())[-3]
    file = path.name
    damage(path)
    with pytest.raises(CorruptStoreError, match=file):
        await rows_in(root)

    problems = await repair_database(objects_in(root), "db")

    assert [one.file for one in problems] == [f"db/wal/{file}"]
    assert await check_database(objects_in(root), "db", deep=True) == []
    assert await rows_in(root) == {*range(90)} - {87}
    assert await rows_in(root) == {*range(90)} - {87}
    assert await repair_database(objects_in(root), "db") == []


# The last three files hold the commits 87, 88 and 89.
@pytest.mark.parametrize(
    ("replaced", "by", "lost"),
    [
        pytest.param(-2, -3, {88}, id="by the one before"),
        pytest.param(-2, -1, {88}, id="by the one after"),
        pytest.param(-1, -3, {89}, id="the newest"),
        pytest.param(-1, 1, {89}, id="by one that is not replayed"),
        pytest.param(-10, 1, {80}, id="the first one, by one that is not replayed"),
        pytest.param(-10, -1, {80}, id="the first one, by the newest"),
    ],
)
async def test_a_wal_file_with_the_bytes_of_another_one_is_named_and_repaired(
    root: Path, replaced: int, by: int, lost: set[int]
) -> None:
    files = sorted((root / "db" / "wal").iterdir())
    shutil.copy(files[by], files[replaced])
    name = files[replaced].name

    with pytest.raises(CorruptStoreError, match=f"wal/{name} holds commits of another file"):
        await rows_in(root)
    for deep in (False, True):
        problems = await check_database(objects_in(root), "db", deep=deep)
        assert [one.file for one in problems] == [f"db/wal/{name}"]
    problems = await repair_database(objects_in(root), "db")

    assert [one.file for one in problems] == [f"db/wal/{name}"]
    assert await check_database(objects_in(root), "db", deep=True) == []
    assert await rows_in(root) == {*range(90)} - lost


async def test_a_repair_leaves_manifests_where_they_are_if_setting_them_aside_mends_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that can't be read for a reason that no file shows."""

    async def unreadable(*_: object) -> None:
        raise CorruptStoreError("it can't be read")

    manifests = sorted((root / "db" / "manifest").iterdir())
    monkeypatch.setattr(check, "read_journal_state", unreadable)
    problems = await repair_database(objects_in(root), "db")
    monkeypatch.undo()

    assert {one.file for one in problems} >= {f"db/manifest/{manifests[-1].name}"}
    assert sorted((root / "db" / "manifest").iterdir()) == manifests
    assert await rows_in(root) == {*range(90)}


JOURNALED = StoreSettings(fsync=False, journal_ms=24 * 3_600_000)


# Half of a journal is one of its regions, and the last commits are in the other.
@pytest.mark.parametrize(
    ("damage", "left"),
    [(Path.unlink, {0}), (cut, {0}), (flipped, {0, 1, 3, 4})],
)
async def test_a_repair_opens_a_database_with_what_is_whole_in_its_journal(
    tmp_path: Path, damage: Callable[[Path], None], left: set[int]
) -> None:
    objects = Objects.open((tmp_path / "root").as_uri(), JOURNALED)
    database = await Database.open(objects, "db", journaled=True)
    await database.commit(rows_of(0))
    await database.show_others()
    for number in range(1, 5):
        await database.commit(rows_of(number))
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    await database.close()
    copy = objects_in(tmp_path / "copy")
    (file,) = (tmp_path / "copy" / "db" / "journal").iterdir()
    if damage is flipped:
        data = bytearray(file.read_bytes())
        data[data.find(b"k002") + 200] ^= 1
        file.write_bytes(data)
    else:
        damage(file)

    with pytest.raises(CorruptStoreError, match=file.name):
        await rows_in(tmp_path / "copy", JOURNALED)
    problems = await repair_database(copy, "db")

    assert [one.file for one in problems] == [f"db/journal/{file.name}"]
    assert await rows_in(tmp_path / "copy", JOURNALED) == left
    assert await repair_database(copy, "db") == []


async def test_a_check_copes_with_whatever_a_manifest_holds(root: Path) -> None:
    """Some flipped bits make SlateDB panic: what it can't read is a problem, and no crash."""
    manifest = newest(root, "manifest")
    content = manifest.read_bytes()
    found = 0
    for place in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        manifest.write_bytes(damaged)
        problems = await check_database(objects_in(root), "db", deep=False)
        found += any(manifest.name in problem.file for problem in problems)

    assert found > 0
