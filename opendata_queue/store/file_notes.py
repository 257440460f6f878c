"""Which files of a database its owner has seen, for the marks in its journal (RFC 0013)."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from pathlib import Path

from odq_encodings import JournalMark
from opendata_queue.store.durable_files import WalSync, names_in
from opendata_queue.store.manifests import compactions_name, manifest_name, wal_name


class FileNotes:
    """Looks for new files by their next numbers: nothing is listed, however many there are.

    SlateDB writes a manifest and a list of compactions now and then, in the background, each under
    the number after the last one. They have no checksum of their own.
    """

    def __init__(self, database_folder: Path, wal_sync: WalSync | None) -> None:
        self._folder = database_folder
        self._wal_sync = wal_sync
        self._newest_wal = _newest(database_folder, "wal")
        self._manifest = _newest(database_folder, "manifest")
        self._compactions = _newest(database_folder, "compactions")
        self.mark = self._noted(JournalMark())

    def has_flushed(self) -> JournalMark:
        """What is to be noted after rows were made durable in the WAL."""
        self.mark = replace(self.mark, wal=self._last_wal())
        return self.look()

    def look(self) -> JournalMark:
        """What is to be noted now."""
        manifest, compactions = self._manifest, self._compactions
        while self._is_there("manifest", manifest_name(self._manifest + 1)):
            self._manifest += 1
        while self._is_there("compactions", compactions_name(self._compactions + 1)):
            self._compactions += 1
        if (manifest, compactions) != (self._manifest, self._compactions):
            self.mark = self._noted(self.mark)
        return self.mark

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
