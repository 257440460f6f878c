"""A root with everything in it, whose owner is killed: run as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from opendata_queue import Engine, Ingest, NewMessage, PublishOptions, StoreSettings
from opendata_queue.log.bulk_writer import BulkShard
from opendata_queue.model.clock import SystemClock
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import Objects

SETTINGS = StoreSettings(memtable_bytes=4_096, outage_timeout_ms=3_000)
OPTIONS = PublishOptions(inline_bytes=400)
LARGE = b"blob " + b"x" * 70_000
OWNERS = "owners/queues"
EACH = 12
ACKED = 4


def expected() -> set[bytes]:
    """The payloads that were acknowledged and are still to be handed out."""
    kinds = [f"{kind} {n}" for kind in ("own", "ingest", "job-0", "job-1") for n in range(EACH)]
    blobs = {LARGE + kind.encode() for kind in ("own", "ingest", "job-0", "job-1")}
    acked = {f"own {n}" for n in range(ACKED)}
    return {one.encode() for one in kinds if one not in acked} | blobs | {b"last"}


def messages(kind: str) -> list[NewMessage]:
    small = [NewMessage(f"{kind} {n}".encode()) for n in range(EACH)]
    return [*small, NewMessage(LARGE + kind.encode())]


async def bulk_job(root: str, job: str) -> None:
    objects, clock = Objects.open(root, SETTINGS), SystemClock()
    files = ShardFiles(objects)
    reserved = await files.reserve_bulk(job=job, now_ms=clock.now_ms())
    shard = await BulkShard.create(objects, reserved.shard, clock)
    await shard.add(messages(job))
    result = await shard.finish()
    commit = Commit.new(job, [CommittedShard(**asdict(result))], now_ms=clock.now_ms())
    await CommitFiles(objects).create(commit)


async def fill(root: str) -> None:
    system = await Engine.open(root, settings=SETTINGS, options=OPTIONS, owner_lease_ms=300)
    ingest = await Ingest.open(root, settings=SETTINGS, options=OPTIONS)
    await system.create_queue("q")
    for start in (0, 7):
        await system.publish_many(messages("own")[start : start + 7])
        await system.stores.shards[0].database.flush_to_files()
    acked = await system.claim("q", ACKED)
    await system.ack("q", *acked)
    await ingest.publish_many(messages("ingest"))
    await bulk_job(root, "job-0")
    await system.all_is_routed()
    await system._following.bulk.finished()
    await system.stores.queues.database.flush_to_files()
    await bulk_job(root, "job-1")
    await system.create_queue("other")
    while not any(name.endswith(".alive.json") for name in await system._objects.names(OWNERS)):
        await asyncio.sleep(0.02)
    await system.publish(b"last")
    os.kill(os.getpid(), signal.SIGKILL)


def make(root: Path) -> None:
    """Fill a root, and have its owner killed."""
    ran = subprocess.run([sys.executable, "-m", __name__, f"file://{root}"], check=False)
    assert ran.returncode == -signal.SIGKILL


if __name__ == "__main__":
    asyncio.run(fill(sys.argv[1]))
