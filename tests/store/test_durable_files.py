"""What is on the disk, and in which order it gets there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from opendata_queue.store import durable_files
from opendata_queue.store.durable_files import TreeSync

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
