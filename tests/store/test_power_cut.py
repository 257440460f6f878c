"""What is left after a loss of power: what was synced, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opendata_queue import Engine
from tests.sync_watch import SyncWatch, needs_sync_watch

QUEUE = "all"
LARGE = b"x" * 10_000

# Commits that become files, and files that are merged: some are in use, others are not any more.
OWNER_WITHOUT_SYNC = """
import asyncio, os, sys
from opendata_queue import Engine, NewMessage, StoreSettings

async def main(url):
    settings = StoreSettings(fsync=False, memtable_bytes=200_000, compaction_poll_ms=20)
    system = await Engine.open(url, settings=settings)
    await system.create_queue("all")
    database = system._shard.database
    for number in range(300):
        await system.publish(b"x" * 10_000, headers={"number": str(number)})
    while (await database._upkeep.file_counts())[1] == 0:
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
        found = set()
        while messages := await system.claim(QUEUE, 100, wait_ms=100):
            found |= {dict(message.headers)["number"] for message in messages}
            assert {message.payload for message in messages} == {LARGE}
            await system.ack(QUEUE, *messages)
    assert found == {str(number) for number in range(320)}


def cut_power(root: Path, synced: set[Path]) -> set[Path]:
    """Take away what was not synced; returns it."""
    lost = {path for path in root.rglob("*") if path.is_file() and path not in synced}
    for path in lost:
        path.unlink()
    return lost
