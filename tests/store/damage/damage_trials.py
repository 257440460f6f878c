"""Databases whose owner was killed, and every way to damage one of their files.

Run as a program, it is such an owner: it commits rows and prints each one when it is durable.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from opendata_queue import CorruptStoreError, OdqError, StoreSettings
from opendata_queue.store import Database, Objects, Rows, Upkeep

ROWS = 160
SAID = "durable"
PAUSE_EVERY = 40
VALUE_BYTES = 700


def settings(journal_ms: int, *, fsync: bool = True) -> StoreSettings:
    return StoreSettings(
        fsync=fsync,
        journal_ms=journal_ms,
        memtable_bytes=32 * 1024,
        outage_timeout_ms=30_000,
        garbage_age_ms=0,
        garbage_interval_ms=300,
        replaced_files_kept_ms=500,
        compaction_poll_ms=100,
    )


def row_of(number: int) -> tuple[bytes, bytes]:
    return b"k%05d" % number, b"%05d:" % number + b"v" * VALUE_BYTES


async def own(folder: Path, journal_ms: int, first: int, last: int) -> None:
    objects = Objects.open(folder.as_uri(), settings(journal_ms))
    database = await Database.open(objects, "db", journaled=True, acknowledged=said(folder))
    for number in range(first, last):
        rows = Rows()
        rows.put(*row_of(number))
        await database.commit(rows)
        (folder / SAID).write_text(str(database.durable_sequence()))
        print(number, flush=True)
        if number % PAUSE_EVERY == 0:
            await tidied(database, objects)
    await asyncio.Event().wait()


def said(folder: Path) -> int:
    """What the last owner has said in its heartbeats of how far the database is durable."""
    return int((folder / SAID).read_text()) if (folder / SAID).exists() else 0


async def tidied(database: Database, objects: Objects) -> None:
    """Have files merged, if there are any, and garbage collected; returns when that is done."""
    upkeep = Upkeep(objects, "db")
    if await database.compact():
        while await upkeep.is_compacting():
            await asyncio.sleep(0.005)  # SlateDB does not say when it has finished
    await database.collect_garbage()


def kill_an_owner(folder: Path, journal_ms: int, first: int, last: int) -> None:
    """Run an owner until it has committed its rows, and kill it."""
    command = [
        sys.executable,
        "-m",
        "tests.store.damage.damage_trials",
        str(folder),
        *map(str, (journal_ms, first, last)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == last - 1:
                process.kill()


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How a database came to be as it is."""

    name: str
    journal_ms: int
    owners: tuple[int, ...]
    """Up to which row each of them has committed before it was killed."""
    is_closed: bool = False


KINDS = (
    Kind(name="killed", journal_ms=60, owners=(ROWS,)),
    Kind(name="killed again", journal_ms=10, owners=(70, 74, ROWS)),
    Kind(name="closed", journal_ms=10, owners=(ROWS,), is_closed=True),
    Kind(name="without journal", journal_ms=0, owners=(100, ROWS)),
)


def made(folder: Path, kind: Kind) -> Path:
    first = 0
    for last in kind.owners:
        kill_an_owner(folder, kind.journal_ms, first, last)
        first = last
    if kind.is_closed:
        asyncio.run(_open_and_close(folder, kind))
    return folder


async def _open_and_close(folder: Path, kind: Kind) -> None:
    objects = Objects.open(folder.as_uri(), settings(kind.journal_ms))
    await (await Database.open(objects, "db", journaled=True)).close()


# --- ways to damage a file ------------------------------------------------------------------------


def _deleted(path: Path, _: random.Random) -> None:
    path.unlink()


def _emptied(path: Path, _: random.Random) -> None:
    os.truncate(path, 0)


def _cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(1, max(2, path.stat().st_size)))


def _cut_by_a_byte(path: Path, _: random.Random) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _zeroed(path: Path, _: random.Random) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def _appended(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.choice((1, 10, 4096))))


def _flipped(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        place = _a_place(file.fileno(), path.stat().st_size, chance)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes((byte ^ (1 << chance.randrange(8)),)))


def _a_place(descriptor: int, size: int, chance: random.Random) -> int:
    """A byte that something was written to: most of a journal is a hole."""
    spans = list(_data(descriptor, size))
    start, end = chance.choice(spans)
    return chance.randrange(start, end)


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < size:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(descriptor, at, os.SEEK_HOLE)
        yield at, end
        at = end


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "deleted": _deleted,
    "emptied": _emptied,
    "cut": _cut,
    "cut by a byte": _cut_by_a_byte,
    "zeroed": _zeroed,
    "appended to": _appended,
    "flipped": _flipped,
}


def files_of(folder: Path) -> list[Path]:
    """All files of a database, those of a kind in order."""
    found = [path for path in sorted((folder / "db").rglob("*")) if path.is_file()]
    return [path for path in found if path.parent.name != "torn" and path.stat().st_size]


def copied(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_copy_with_holes)


def _copy_with_holes(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        size = os.fstat(old.fileno()).st_size
        for start, end in _data(old.fileno(), size):
            os.pwrite(new.fileno(), os.pread(old.fileno(), end - start, start), start)
        os.truncate(target, size)


# --- what has to come of it -----------------------------------------------------------------------


async def outcome(folder: Path, kind: Kind, damaged: Path) -> str:
    """Opens and reads a database twice; raises ``AssertionError`` if damage is passed over."""
    for attempt in ("at first", "then"):
        try:
            found = await _rows(folder, kind)
        except CorruptStoreError as error:
            if "what may be lost: " not in str(error) or "odq " not in str(error):
                raise AssertionError(f"{attempt}: no advice in {error}") from error
            names = (damaged.name, "db/manifest/ has no manifest")
            if not any(name in str(error) for name in names):
                raise AssertionError(f"{attempt}: not named in {error}") from error
            if attempt == "at first":
                continue
            return "named"
        except OdqError as error:
            raise AssertionError(f"{attempt}: {error!r}") from error
        missing = [number for number in range(ROWS) if found.get(row_of(number)[0]) is None]
        if missing:
            # The newest record of a journal may just as well never have been finished.
            allowed = damaged.parent.name == "journal" and missing == [ROWS - 1]
            assert allowed, f"{attempt}: {len(missing)} rows are gone ({missing[:5]}…)"
        wrong = [n for n in range(ROWS) if n not in missing and found[row_of(n)[0]] != row_of(n)[1]]
        assert not wrong, f"{attempt}: rows are wrong: {wrong}"
    return "whole"


async def _rows(folder: Path, kind: Kind) -> dict[bytes, bytes]:
    objects = Objects.open(folder.as_uri(), settings(kind.journal_ms, fsync=False))
    database = await Database.open(objects, "db", journaled=True, acknowledged=said(folder))
    try:
        return dict([row async for chunk in database.scan(b"k", b"l") for row in chunk])
    finally:
        await database.close()


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    asyncio.run(own(Path(where), *map(int, numbers)))
