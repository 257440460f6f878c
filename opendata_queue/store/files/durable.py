"""Making files survive a loss of power.

SlateDB's and obstore's local file stores write and rename, but never fsync: what they call
durable survives a crash of the process, not of the machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

_SUFFIXES: Final = {"manifest": ".manifest", "compactions": ".compactions", "wal": ".sst"}
_MOUNTS: Final = Path("/proc/self/mountinfo")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_NETWORK_KINDS: Final = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre"),
        *("ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs", "vboxsf", "virtiofs"),
    )
)
_SST_END: Final = struct.Struct(">QH")
_SST_VERSIONS: Final = (1, 2)


def sync_file(path: Path) -> None:
    """Flush one file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path, *, up_to: Path) -> None:
    """Flush the entries of ``folder`` and of those above it, as far as ``up_to``."""
    for place in (folder, *folder.parents):
        sync_file(place)
        if place == up_to:
            return


def make_folder(folder: Path, *, sync: bool, mode: int = 0o777) -> None:
    """Make ``folder`` and those above it, and with ``sync`` make that last.

    ``mode`` is for the folder itself; those above it are as the umask says.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    if sync:
        for place in missing:
            sync_file(place.parent)


def is_on_network(folder: Path, mounts: str | None = None) -> bool:
    """Whether ``folder`` is on a file system of another machine, as far as the system says so.

    ``mounts`` is what is in Linux's ``/proc/self/mountinfo``.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(errors="replace")
        except OSError:
            return False
    kinds = {}
    for line in mounts.splitlines():
        mount, _, rest = line.partition(" - ")
        # Spaces and the like are written in octal; the last one that is mounted on a place counts.
        place = _OCTAL.sub(lambda found: chr(int(found[1], 8)), mount.split()[4])
        kinds[Path(place)] = rest.split()[0]
    folder = folder.resolve()
    found = next((kinds[place] for place in (folder, *folder.parents) if place in kinds), "")
    return found.startswith("fuse") or found in _NETWORK_KINDS


def set_aside(database_folder: Path, kind: str, names: Iterable[str]) -> list[Path]:
    """Move files away from where SlateDB lists them; returns where they are now."""
    aside = []
    for name in names:
        if (database_folder / "torn").is_symlink():
            raise NotADirectoryError(f"{database_folder / 'torn'} is a link, not a folder")
        (database_folder / "torn").mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the owner before us collects garbage
            aside.append((database_folder / kind / name).rename(database_folder / "torn" / name))
    return aside


def names_in(database_folder: Path, kind: str) -> list[str]:
    """The names of all manifests (``manifest``), lists of compactions (``compactions``) or WAL
    files (``wal``)."""
    try:
        found = os.listdir(database_folder / kind)
    except FileNotFoundError:
        return []
    return [name for name in found if name.endswith(_SUFFIXES[kind])]


def is_cut(sst: Path) -> bool:
    """Whether the end of an SST is missing, or nothing but zeros.

    It ends with the place of its description and the version of its format. If one of them makes
    sense the file was whole once, and may have been acknowledged: it is damaged, and not for us to
    drop.
    """
    size = sst.stat().st_size
    if size == 0:
        return False
    with sst.open("rb") as file:
        file.seek(max(0, size - _SST_END.size))
        end = file.read()
    if len(end) < _SST_END.size:
        return True
    place, version = _SST_END.unpack(end)
    return version not in _SST_VERSIONS and not 0 < place < size


class TreeSync:
    """Syncs the files of one database that are written in the background: SSTs and manifests.

    It runs before every collection of garbage. So what replaces a WAL or an SST file is on the
    disk before the old file goes. An open needs only what is in use: what others
    have replaced waits for the next collection of garbage, and most of it is gone by then.

    A file is synced after those that it names: a manifest that survives a power cut must not name
    an SST that does not.
    """

    __slots__ = ("_folders", "_synced")

    def __init__(self, database_folder: Path, *, with_wal: bool = False) -> None:
        names = ["compacted", *(["wal"] if with_wal else []), "compactions", "manifest"]
        self._folders = [database_folder / name for name in names]
        self._synced: set[Path] = set()

    def sync_new_files(self) -> None:
        # What names others is listed first: then all that it names is there to be listed.
        listed = [_files_in(folder) for folder in reversed(self._folders)]
        for folder, present in zip(self._folders, reversed(listed), strict=True):
            self._sync(folder, present)
        self._synced = set().union(*listed)

    def sync_in_use(self, names: Mapping[str, Iterable[str]]) -> None:
        """Sync files of which it is known that they are in use, given by their folders."""
        for folder in self._folders:
            files = {folder / name for name in names.get(folder.name, ())}
            self._sync(folder, files)
            self._synced |= files

    def _sync(self, folder: Path, files: set[Path]) -> None:
        new = files - self._synced
        for path in sorted(new):
            with contextlib.suppress(FileNotFoundError):  # a temporary file that was renamed
                sync_file(path)
        if new:
            sync_folders(folder, up_to=folder.parent)


def _files_in(folder: Path) -> set[Path]:
    return set(folder.iterdir()) if folder.is_dir() else set()


class WalSync:
    """Syncs the WAL files of one database as they appear.

    SlateDB numbers new WAL files without gaps, and writes them in order. So the files that a
    flush has made are those from the first unsynced number on, for as long as they exist: no
    folder is listed, and the cost of a commit does not grow with the number of files. Among older
    files there may be gaps: those that a reader still needs are kept while others go.

    The compiled batch writer does the same without coming back to Python; then it is given these
    attributes, and moves ``next_number`` on.

    Those that are there already are synced first: their writer may not have done it. What they hold
    up to the number ``replayed_after`` is in SSTs, too, which are synced by others.
    """

    __slots__ = ("_closed", "_users", "descriptor", "folder", "next_number")

    def __init__(self, database_folder: Path, *, replayed_after: int = 0) -> None:
        self._users, self._closed = 0, False
        self.folder = os.fspath(database_folder / "wal")
        present = sorted(self._numbers())
        for number in present[bisect_right(present, replayed_after) :]:
            with contextlib.suppress(FileNotFoundError):  # the owner before us collects garbage
                sync_file(Path(self._path(number)))
        self.next_number = present[-1] + 1 if present else 1
        self.descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    def __call__(self) -> None:
        """Sync the WAL files that a commit has made, then the folder; there is at least one."""
        self.sync_since(self.next_number)

    def sync_since(self, first: int) -> None:
        """The same for a commit whose files begin with a number, and may be synced in part."""
        while True:
            try:
                descriptor = os.open(self._path(self.next_number), os.O_RDONLY)
            except FileNotFoundError:
                break
            try:
                getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has none
            finally:
                os.close(descriptor)
            self.next_number += 1
        if self.next_number == first:
            raise self.no_file()
        os.fsync(self.descriptor)

    def no_file(self) -> OSError:
        """What to raise when a commit has made nothing to sync."""
        return OSError(f"a commit has made no WAL file {self._path(self.next_number)}")

    def _path(self, number: int) -> str:
        return f"{self.folder}/{number:020}.sst"

    def hold(self) -> None:
        """Keep the descriptor open for a job that uses it, however soon this is closed."""
        self._users += 1

    def let_go(self) -> None:
        """That job is done."""
        self._users -= 1
        if self._closed and not self._users:
            os.close(self.descriptor)

    def close(self) -> None:
        """Close it as soon as no job uses it: its number may soon be that of another file."""
        if not self._closed and not self._users:
            os.close(self.descriptor)
        self._closed = True

    def _numbers(self) -> Iterable[int]:
        return (int(Path(name).stem) for name in os.listdir(self.folder) if name.endswith(".sst"))
