"""What is on the disk, and in which order it gets there."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from opendata_queue import CorruptStoreError, StoreSettings
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.store.files import durable as durable_files
from opendata_queue.store.files.durable import TreeSync, WalSync
from opendata_queue.store.rows.writer import Tier, active_tier

FOLDERS = ("compacted", "compactions", "manifest")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What has been synced, in its order."""
    paths: list[Path] = []
    real = durable_files.sync_file

    def noted(path: Path) -> None:
        paths.append(path)
        real(path)

    monkeypatch.setattr(durable_files, "sync_file", noted)
    return paths


def write_files(database: Path, number: int) -> None:
    """An SST, and then what names it."""
    for name in FOLDERS:
        (database / name).mkdir(exist_ok=True)
        (database / name / f"{number:020}").write_bytes(b"x")


def test_files_are_synced_after_those_that_they_name(tmp_path: Path, synced: list[Path]) -> None:
    for number in range(9):
        write_files(tmp_path, number)

    TreeSync(tmp_path).sync_new_files()

    expected: list[Path] = []
    for name in FOLDERS:
        expected += [tmp_path / name / f"{number:020}" for number in range(9)]
        expected += [tmp_path / name, tmp_path]
    assert synced == expected


def test_only_new_files_are_synced(tmp_path: Path, synced: list[Path]) -> None:
    write_files(tmp_path, 1)
    sync = TreeSync(tmp_path)
    sync.sync_new_files()
    synced.clear()
    (tmp_path / "compacted" / "new").write_bytes(b"x")

    sync.sync_new_files()
    sync.sync_new_files()

    assert synced == [tmp_path / "compacted" / "new", tmp_path / "compacted", tmp_path]


def test_a_file_that_appears_meanwhile_is_not_synced_before_what_it_names(
    tmp_path: Path, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, 1)
    listed: Callable[[Path], set[Path]] = durable_files._files_in

    def list_and_write(folder: Path) -> set[Path]:
        found = listed(folder)
        write_files(tmp_path, 2)
        return found

    monkeypatch.setattr(durable_files, "_files_in", list_and_write)
    sync = TreeSync(tmp_path)

    sync.sync_new_files()
    assert tmp_path / "manifest" / f"{2:020}" not in synced

    sync.sync_new_files()
    names = [path.parent.name for path in synced if path.name == f"{2:020}"]
    assert names == list(FOLDERS)


def test_a_descriptor_is_closed_when_the_last_job_that_uses_it_is_done(tmp_path: Path) -> None:
    (tmp_path / "wal").mkdir()
    sync = WalSync(tmp_path)
    sync.hold()
    sync.hold()

    sync.close()
    sync.let_go()
    os.fstat(sync.descriptor)
    sync.let_go()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sync.descriptor)
    sync.close()  # once more does nothing


@pytest.mark.skipif(active_tier() is not Tier.compiled, reason="only the C helper is given it")
async def test_a_commit_under_way_keeps_its_descriptor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = await Database.open(Objects.open(f"file://{tmp_path}", StoreSettings()), "db")
    sync = database._wal_sync
    assert sync is not None
    rows = Rows()
    rows.put_many([(b"k%05d" % number, VALUE) for number in range(500)])
    under_way = asyncio.Event()
    committing = asyncio.create_task(database.commit(rows, on_start=under_way.set))
    await under_way.wait()

    sync.close()
    os.fstat(sync.descriptor)
    await committing

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sync.descriptor)
    await database.close()
    assert "after its caller had gone" not in caplog.text


# --- WAL files that a power cut has torn ---------------------------------------------------------

SST_END_BYTES = 10
VALUE = bytes(range(256)) * 40


async def commit_and_crash(folder: Path) -> tuple[Objects, Path]:
    """A root whose one database was copied away under its writer, and its newest WAL file."""
    database = await Database.open(Objects.open(f"file://{folder}/live", StoreSettings()), "db")
    rows = Rows()
    rows.put(b"acknowledged", VALUE)
    await database.commit(rows)
    shutil.copytree(folder / "live", folder / "crashed")
    await database.close()
    objects = Objects.open(f"file://{folder}/crashed", StoreSettings())
    return objects, max((folder / "crashed" / "db" / "wal").glob("*.sst"))


def following(wal: Path) -> Path:
    return wal.with_name(f"{int(wal.stem) + 1:020}.sst")


@pytest.mark.parametrize("size", [1, SST_END_BYTES - 1, 4_096, 8_192])
@pytest.mark.parametrize("behind", [b"", bytes(4_096)])
async def test_a_newest_wal_file_that_is_not_whole_is_set_aside(
    tmp_path: Path, size: int, behind: bytes
) -> None:
    objects, newest = await commit_and_crash(tmp_path)
    torn = following(newest)
    torn.write_bytes(newest.read_bytes()[:size] + behind)

    database = await Database.open(objects, "db")

    assert await database.get(b"acknowledged") == VALUE
    assert (tmp_path / "crashed" / "db" / "torn" / torn.name).exists()
    await database.close()


async def test_a_wal_file_that_others_follow_is_not_dropped(tmp_path: Path) -> None:
    objects, newest = await commit_and_crash(tmp_path)
    shutil.copy(newest, following(newest))
    os.truncate(newest, 5_000)

    with pytest.raises(CorruptStoreError):
        await Database.open(objects, "db")

    assert newest.exists()


@pytest.mark.parametrize("place", [1, 2, 3, SST_END_BYTES])
async def test_a_newest_wal_file_that_is_damaged_is_not_dropped(tmp_path: Path, place: int) -> None:
    objects, newest = await commit_and_crash(tmp_path)
    content = bytearray(newest.read_bytes())
    content[-place] ^= 0xFF
    newest.write_bytes(content)

    with pytest.raises(CorruptStoreError):
        await Database.open(objects, "db")

    assert newest.exists()
