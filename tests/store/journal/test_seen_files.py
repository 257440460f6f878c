"""Which files of a database the marks in its journal name."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from opendata_queue.store.journal.seen_files import FileNotes
from opendata_queue.store.slatedb_files.manifests import compactions_name, manifest_name

NAMES = {"manifest": manifest_name, "compactions": compactions_name}


def written(folder: Path, kind: str, number: int) -> Path:
    path = folder / kind / NAMES[kind](number)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"%d" % number)
    # Two changes within one tick of the system's clock would be seen as one.
    os.utime(path.parent, ns=(number, number))
    return path


@pytest.mark.parametrize("kind", NAMES)
def test_the_newest_file_is_noted_where_the_one_before_it_is_collected_already(
    tmp_path: Path, kind: str
) -> None:
    written(tmp_path, kind, 3)
    notes = FileNotes(tmp_path, None)

    written(tmp_path, kind, 5)  # and number 4 was never seen; number 3 is kept for a reader

    mark = notes.poll()
    assert (getattr(mark, kind), getattr(mark, f"{kind}_check")) == (5, zlib.crc32(b"5"))


@pytest.mark.parametrize("kind", NAMES)
def test_a_folder_is_listed_only_after_it_has_changed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 50):
        written(tmp_path, kind, number)
    notes = FileNotes(tmp_path, None)
    listed: list[str] = []
    real = os.listdir

    def listdir(path: Path) -> list[str]:
        listed.append(str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)

    for _ in range(10):
        notes.poll()

    assert listed == []
    written(tmp_path, kind, 52)
    for _ in range(10):
        notes.poll()
    assert len(listed) == 1
