"""Which files of a database its owner has seen, for the marks in its journal (RFC 0013)."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from odq_encodings import JournalMark
from opendata_queue.store.files.durable import WalSync, names_in
from opendata_queue.store.slatedb_files.manifests import compactions_name, manifest_name, wal_name


class FileNotes:
    """Finds new files by their next numbers: a folder is listed only after it has changed.

    SlateDB writes a manifest and a list of compactions now and then, in the background, each under
    the number after the last one. They have no checksum of their own. The next number may be gone
    already while the newest is there: what a reader has a checkpoint of is kept, and what came
    after it is collected.
    """

    def __init__(self, database_folder: Path, wal_sync: WalSync | None) -> None:
        self._folder = database_folder
        self._wal_sync = wal_sync
        self._changed_at = {kind: self._change_of(kind) for kind in ("manifest", "compactions")}
        """When the folders had last changed before they were listed."""
        self._newest_wal = _newest(database_folder, "wal")
        self._manifest = _newest(database_folder, "manifest")
        self._compactions = _newest(database_folder, "compactions")
        self.mark = self._noted(JournalMark())

    def has_flushed(self) -> JournalMark:
        """What is to be noted after rows were made durable in the WAL."""
        self.mark = replace(self.mark, wal=self._last_wal())
        return self.poll()

    def poll(self) -> JournalMark:
        """What is to be noted now."""
        before = self._manifest, self._compactions
        self._manifest = self._newest_after("manifest", self._manifest, manifest_name)
        self._compactions = self._newest_after("compactions", self._compactions, compactions_name)
        if before != (self._manifest, self._compactions):
            self.mark = self._noted(self.mark)
        return self.mark

    def _newest_after(self, kind: str, number: int, name: Callable[[int], str]) -> int:
        while self._is_there(kind, name(number + 1)):
            number += 1
        changed_at = self._change_of(kind)
        if changed_at != self._changed_at[kind]:
            self._changed_at[kind] = changed_at
            number = max(number, _newest(self._folder, kind))
        return number

    def _change_of(self, kind: str) -> int:
        try:
            return os.stat(f"{self._folder}/{kind}").st_mtime_ns
        except FileNotFoundError:
            return 0

    def _noted(self, mark: JournalMark) -> JournalMark:
        manifest = self._check("manifest", manifest_name(self._manifest))
        if manifest is not None:
            mark = replace(mark, manifest=self._manifest, manifest_check=manifest)
        compactions = self._check("compactions", compactions_name(self._compactions))
        if compactions is not None:
            mark = replace(mark, compactions=self._compactions, compactions_check=compactions)
        return mark

    def _last_wal(self) -> int:
        """The newest WAL file with rows: behind it may be an empty one, of a successor of ours."""
        if self._wal_sync is not None:
            self._newest_wal = self._wal_sync.next_number - 1
        else:
            while self._is_there("wal", wal_name(self._newest_wal + 1)):
                self._newest_wal += 1
        number = self._newest_wal
        while number > self.mark.wal and not self._size("wal", wal_name(number)):
            number -= 1
        return max(number, self.mark.wal)

    def _is_there(self, kind: str, name: str) -> bool:
        return os.path.exists(f"{self._folder}/{kind}/{name}")

    def _size(self, kind: str, name: str) -> int:
        try:
            return os.stat(f"{self._folder}/{kind}/{name}").st_size
        except FileNotFoundError:
            return 0

    def _check(self, kind: str, name: str) -> int | None:
        return check_of(self._folder / kind / name)


def check_of(path: Path) -> int | None:
    """The CRC-32 of a file, as marks have it; none if there is none."""
    try:
        return zlib.crc32(path.read_bytes())
    except FileNotFoundError:  # collected, since there is a newer one
        return None


def _newest(database_folder: Path, kind: str) -> int:
    return max((int(Path(name).stem) for name in names_in(database_folder, kind)), default=0)
