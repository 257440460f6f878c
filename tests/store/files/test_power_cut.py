"""What is left after a loss of power: what was synced, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opendata_queue import CorruptStoreError, Engine, StoreSettings
from opendata_queue.store import Objects
from opendata_queue.store.slatedb_files.manifests import admin_of, sst_name, ssts_of
from tests.support.sync_watch import SyncWatch, needs_sync_watch

QUEUE = "all"
LARGE = b"x" * 10_000

# Commits that become files, and files that are merged: some are in use, others are not any more.
OWNER_WITHOUT_SYNC = """
import asyncio, os, sys
from opendata_queue import Engine, StoreSettings
from opendata_queue.store import Objects, Upkeep

async def main(url):
    settings = StoreSettings(fsync=False, memtable_bytes=200_000, compaction_poll_ms=20)
    system = await Engine.open(url, settings=settings)
    await system.create_queue("all")
    upkeep = Upkeep(Objects.open(url, settings), "messages/00000")
    for number in range(300):
        await system.publish(b"x" * 10_000, headers={"number": str(number)})
    while (await upkeep.file_counts())[1] == 0:
        await asyncio.sleep(0.01)
    os._exit(0)

asyncio.run(main(sys.argv[1]))
"""

OWNER_WITH_SYNC = """
import asyncio, os, sys
from opendata_queue import Engine

async def main(url, end):
    system = await Engine.open(url)
    for number in range(300, 320):
        await system.publish(b"x" * 10_000, headers={"number": str(number)})
    if end == "close":
        await system.close()
    os._exit(0)

asyncio.run(main(*sys.argv[1:]))
"""


@needs_sync_watch
@pytest.mark.parametrize("end", ["close", "kill"])
async def test_what_an_owner_before_has_not_synced_survives_once_the_root_was_opened(
    tmp_path: Path, end: str
) -> None:
    root = tmp_path / "root"
    watch = SyncWatch(tmp_path)
    run = [sys.executable, "-c"]
    subprocess.run([*run, OWNER_WITHOUT_SYNC, root.as_uri()], check=True)
    command = [*run, OWNER_WITH_SYNC, root.as_uri(), end]
    subprocess.run(command, check=True, env=watch.environment())

    lost = cut_power(root, watch.synced())

    assert lost, "everything was synced: then this proves nothing"
    async with await Engine.open(root.as_uri(), takeover=True) as system:
        assert await all_numbers(system) == {str(number) for number in range(320)}


# Files are synced before garbage is collected, which it never is here.
OWNER_BEFORE_THE_NEXT_SYNC = """
import asyncio, os, sys
from opendata_queue import Engine, StoreSettings
from opendata_queue.store import Objects, Upkeep
from opendata_queue.store.slatedb_files.manifests import admin_of

async def main(url, until, end):
    poll_ms = {"flushed": 600_000, "merged": 500, "in_use": 20}[until]
    settings = StoreSettings(memtable_bytes=200_000, compaction_poll_ms=poll_ms)
    system = await Engine.open(url, settings=settings)
    await system.create_queue("all")
    objects, path = Objects.open(url, settings), "messages/00000"
    upkeep, admin = Upkeep(objects, path), admin_of(objects, path)

    async def is_merged():  # and in no manifest yet
        found = await admin.read_compactions(None)
        return any(one.status.name == "COMPACTED" for one in found.recent_compactions)

    async def is_so():
        waiting, runs = await upkeep.file_counts()
        return {"flushed": waiting, "merged": await is_merged(), "in_use": runs}[until]

    for number in range(300):
        await system.publish(b"x" * 10_000, headers={"number": str(number)})
    while not await is_so():  # should it not be seen in time, there is a next one
        await system.publish(b"x" * 10_000, headers={"number": "0"})
    if end == "close":
        await system.close()
    os._exit(0)

asyncio.run(main(*sys.argv[1:]))
"""


def gone(sst: Path) -> None:
    sst.unlink()


def empty(sst: Path) -> None:
    sst.write_bytes(b"")


def cut(sst: Path) -> None:
    os.truncate(sst, sst.stat().st_size // 2)


def zeros(sst: Path) -> None:
    sst.write_bytes(bytes(sst.stat().st_size))


@needs_sync_watch
@pytest.mark.parametrize("until", ["flushed", "merged", "in_use"])
@pytest.mark.parametrize("torn", [gone, empty, cut, zeros])
async def test_what_was_on_the_disk_before_files_that_it_names_is_set_aside(
    tmp_path: Path, torn: Callable[[Path], None], until: str
) -> None:
    root, watch = owner_before_the_next_sync(tmp_path, until, "kill")
    for sst in unsynced_ssts(root, watch):
        torn(sst)

    async with await Engine.open(root.as_uri(), takeover=True) as system:
        assert await all_numbers(system) == {str(number) for number in range(300)}

    aside = {path.suffix for path in (root / "messages" / "00000" / "torn").iterdir()}
    assert aside >= ({".manifest", ".compactions"} if until == "merged" else {".manifest"})


@needs_sync_watch
@pytest.mark.parametrize("kind", ["manifest", "compactions"])
@pytest.mark.parametrize("torn", [gone, empty, cut, zeros])
async def test_a_newest_manifest_or_list_that_is_not_whole_is_set_aside(
    tmp_path: Path, torn: Callable[[Path], None], kind: str
) -> None:
    root, watch = owner_before_the_next_sync(tmp_path, "in_use", "kill")
    newest = max((root / "messages" / "00000" / kind).iterdir())
    assert newest not in watch.synced()
    torn(newest)

    async with await Engine.open(root.as_uri(), takeover=True) as system:
        assert await all_numbers(system) == {str(number) for number in range(300)}

    aside = {path.name for path in root.rglob("torn/*")}
    assert aside == (set() if torn is gone else {newest.name})


@needs_sync_watch
async def test_a_list_of_compactions_goes_by_itself(tmp_path: Path) -> None:
    root, _ = owner_before_the_next_sync(tmp_path, "merged", "kill")
    database = root / "messages" / "00000"
    manifest = max((database / "manifest").iterdir())
    named = await ssts_in(root)
    for sst in (database / "compacted").iterdir():
        if sst.name not in named:
            sst.unlink()

    async with await Engine.open(root.as_uri(), takeover=True) as system:
        assert await all_numbers(system) == {str(number) for number in range(300)}

    assert {path.suffix for path in (database / "torn").iterdir()} == {".compactions"}
    assert manifest.exists()


@needs_sync_watch
@pytest.mark.parametrize("until", ["flushed", "merged", "in_use"])
async def test_what_compactions_have_made_is_synced_when_a_root_is_closed(
    tmp_path: Path, until: str
) -> None:
    root, watch = owner_before_the_next_sync(tmp_path, until, "close")

    cut_power(root, watch.synced())

    async with await Engine.open(root.as_uri()) as system:
        assert await all_numbers(system) == {str(number) for number in range(300)}
    assert not list(root.rglob("torn"))


@needs_sync_watch
async def test_an_sst_that_is_missing_together_with_its_wal_is_no_power_cut(tmp_path: Path) -> None:
    root, watch = owner_before_the_next_sync(tmp_path, "flushed", "kill")
    for sst in unsynced_ssts(root, watch):
        sst.unlink()
    database = root / "messages" / "00000"
    (database / "wal" / f"{2:020}.sst").unlink()
    before = {path: path.read_bytes() for path in database.glob("manifest/*")}

    with pytest.raises(CorruptStoreError):
        await Engine.open(root.as_uri(), takeover=True)

    assert before.items() <= {path: path.read_bytes() for path in database.glob("*/*")}.items()


@needs_sync_watch
@pytest.mark.parametrize("until", ["flushed", "merged", "in_use"])
async def test_nothing_is_set_aside_after_a_kill(tmp_path: Path, until: str) -> None:
    root, _ = owner_before_the_next_sync(tmp_path, until, "kill")

    async with await Engine.open(root.as_uri(), takeover=True) as system:
        assert await all_numbers(system) == {str(number) for number in range(300)}

    assert not list(root.rglob("torn"))


def owner_before_the_next_sync(folder: Path, until: str, end: str) -> tuple[Path, SyncWatch]:
    """A root whose messages are in SSTs, or merged ones that no manifest names, or one does."""
    root, watch = folder / "root", SyncWatch(folder)
    subprocess.run(
        [sys.executable, "-c", OWNER_BEFORE_THE_NEXT_SYNC, root.as_uri(), until, end],
        check=True,
        env=watch.environment(),
    )
    return root, watch


def unsynced_ssts(root: Path, watch: SyncWatch) -> list[Path]:
    synced = watch.synced()
    ssts = [one for one in root.glob("messages/00000/compacted/*") if one not in synced]
    assert ssts, "everything was synced: then this proves nothing"
    return ssts


async def ssts_in(root: Path) -> set[str]:
    """The files that the manifest of the messages names."""
    objects = Objects.open(root.as_uri(), StoreSettings())
    return set(
        map(sst_name, ssts_of(await admin_of(objects, "messages/00000").read_manifest(None)))
    )


async def all_numbers(system: Engine) -> set[str]:
    """What messages say that they are; each has its payload."""
    found = set()
    while messages := await system.claim(QUEUE, 100, wait_ms=100):
        found |= {dict(message.headers)["number"] for message in messages}
        assert {message.payload for message in messages} == {LARGE}
        await system.ack(QUEUE, *messages)
    return found


def cut_power(root: Path, synced: set[Path]) -> set[Path]:
    """Take away what was not synced; returns it."""
    lost = {path for path in root.rglob("*") if path.is_file() and path not in synced}
    for path in lost:
        path.unlink()
    return lost
