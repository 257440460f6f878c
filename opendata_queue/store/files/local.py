"""The files of a root on a disk that are ours: written for their owner alone, never through links.

obstore's store of files makes them as the umask says, most often for everybody to read, and follows
links when it lists: what is listed under a folder, and then deleted, may be anywhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from opendata_queue.model.errors import StoreAccessError

_DESCRIPTOR: Final = "system.json"
_OWNERS_ALONE: Final = 0o600
# As stores of files name what is not finished: they list none of it.
_UNFINISHED: Final = re.compile(r".*#\d+")
_FOLDERS_ABOVE: Final = 4


def file_mode(folder: Path) -> int:
    """With what permissions a new file of the root around ``folder`` is made.

    They are those of its ``system.json``, which a new root has for its owner alone. So a root that
    release 0.1 made, or that an administrator has opened to a group, stays as it is.
    """
    for place in (folder, *folder.parents[:_FOLDERS_ABOVE]):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (place / _DESCRIPTOR).stat().st_mode & 0o666 | _OWNERS_ALONE
    return _OWNERS_ALONE


def put_file(root: Path, path: str, data: bytes, *, create: bool, sync: bool) -> bool:
    """Write a file, all of it or nothing; false if ``create`` finds one there.

    With ``sync`` its bytes are on the disk before its name is: after a power cut it is not empty.
    """
    place = _place(root, path)
    partial = place.with_name(f"{place.name}#{secrets.randbits(63)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    mode = file_mode(root)
    try:
        descriptor = os.open(partial, flags, mode)
    except FileNotFoundError:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, flags, mode)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            if sync:
                os.fsync(descriptor)
        if not create:
            partial.replace(place)
            return True
        os.link(partial, place)
    except FileExistsError:
        partial.unlink()
        return False
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.unlink()
    return True


def delete_file(root: Path, path: str) -> None:
    """Delete a file, or a link itself; nothing happens if there is none."""
    place = _place(root, path)
    _refuse_links(root, place.parent)
    place.unlink(missing_ok=True)


def delete_under(root: Path, folder: str) -> int:
    """Delete all files under a folder, and the folders; returns how many bytes they had.

    A link goes, and what it leads to stays. ``rmdir`` refuses a folder that is not empty, so what
    others write meanwhile stays, too.
    """
    top = _place(root, folder) if folder else root
    _refuse_links(root, top)
    size_bytes = 0
    for folders, files, descriptor in _walk(top, topdown=False):
        for name in (*files, *folders):
            with contextlib.suppress(FileNotFoundError):
                about = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISDIR(about.st_mode):
                    with contextlib.suppress(OSError):
                        os.rmdir(name, dir_fd=descriptor)
                    continue
                if _UNFINISHED.fullmatch(name):
                    continue  # no object yet
                os.unlink(name, dir_fd=descriptor)
                size_bytes += about.st_size if stat.S_ISREG(about.st_mode) else 0
    if folder:
        with contextlib.suppress(OSError):
            top.rmdir()
    return size_bytes


def files_under(folder: Path) -> Iterator[tuple[str, int]]:
    """The names and sizes of all files under a folder; no link is followed."""
    for _, names, descriptor in _walk(folder, topdown=True):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                about = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(about.st_mode) and not _UNFINISHED.fullmatch(name):
                    yield name, about.st_size


def files_in(folder: Path) -> Iterator[tuple[str, int]]:
    """The names and sizes of the files right in a folder; what a link leads to is one of them."""
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file() and not _UNFINISHED.fullmatch(entry.name):
                    yield entry.name, entry.stat().st_size


def folders_in(folder: Path) -> Iterator[str]:
    """The names of the folders right in a folder."""
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        yield from (entry.name for entry in entries if entry.is_dir())


def readable_by(root: Path, *, below: Path = Path("/")) -> str:
    """Who else can read a root's folder, or nothing: those who can enter all folders above it.

    Of the latter only those under ``below`` are considered.
    """
    root = root.resolve()
    above = [place for place in root.parents if place != below and below in place.parents]
    modes = [place.stat().st_mode for place in above]
    mode = root.stat().st_mode
    if mode & stat.S_IROTH and all(one & stat.S_IXOTH for one in modes):
        return "everybody on this machine"
    if mode & stat.S_IRGRP and all(one & (stat.S_IXGRP | stat.S_IXOTH) for one in modes):
        return "its group"
    return ""


def _walk(top: Path, *, topdown: bool) -> Iterator[tuple[list[str], list[str], int]]:
    """The folders and files in each folder from ``top`` on, and its descriptor; none if it is gone.

    With descriptors, one that becomes a link meanwhile is not followed, either.
    """
    try:
        for _, folders, files, descriptor in os.fwalk(top, topdown=topdown):
            yield folders, files, descriptor
    except FileNotFoundError:
        if top.exists():
            raise


def _place(root: Path, path: str) -> Path:
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise StoreAccessError(f"{path!r} is no path in a root")
    return root / path


def _refuse_links(root: Path, folder: Path) -> None:
    """The root itself may be a link: its administrator has named it."""
    for place in (folder, *folder.parents):
        if place == root:
            return
        if place.is_symlink():
            raise StoreAccessError(
                f"{place} is a link, and nothing is deleted through one: it may lead anywhere; "
                "mount the other folder there instead"
            )
