"""A process that makes a pass, and asks before everything that it writes.

It prints a line and waits for one, so whoever kills it does so at a certain write, or in the middle
of it, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from odq_compactor import (
    CompactorOptions,
    IngestRetention,
    RetentionCompactor,
    alone,
    compact_root,
)
from opendata_queue import Engine, PublishOptions, StoreSettings
from opendata_queue.store import Database, DatabaseReader, Objects
from opendata_queue.systems.ingest import Ingest
from opendata_queue.testing import ManualClock

SETTINGS = StoreSettings(fsync=False)
PUBLISHING = PublishOptions(inline_bytes=64)
COMPACTOR = CompactorOptions(work_share=1.0, erase=True, space=False, batch_messages=10)
_REPOSITORY = Path(__file__).parents[2]


def kill_after(url: str, writes: int, *, now_ms: int, who: str = "owner") -> bool:
    """Let a process make a pass, and kill it in a write; whether it was still at it."""
    path = os.pathsep.join(str(_REPOSITORY / part) for part in (".", "encodings", "compactor"))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.retention.pass_process", who, url, str(now_ms)],
        cwd=_REPOSITORY,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "open\n", "the root did not open by itself"
        for _ in range(writes):
            if process.stdout.readline() != "write\n":
                return False
            process.stdin.write("go\n")
            process.stdin.flush()
        process.send_signal(signal.SIGKILL)
        return "end\n" not in process.stdout.readlines()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _ask() -> None:
    print("write", flush=True)
    sys.stdin.readline()


def _asking(write: Any) -> Any:
    async def asked(*given: Any, **more: Any) -> Any:
        _ask()
        return await write(*given, **more)

    return asked


def _begin() -> None:
    """From now on everything that is written is asked for."""
    seen = DatabaseReader.at_one_instant

    @contextlib.asynccontextmanager
    async def asked(objects: Objects, path: str) -> AsyncIterator[DatabaseReader]:
        _ask()
        async with seen(objects, path) as reader:
            _ask()
            yield reader

    Database.commit = _asking(Database.commit)  # type: ignore[method-assign]
    Objects.delete = _asking(Objects.delete)  # type: ignore[method-assign]
    Objects.delete_under = _asking(Objects.delete_under)  # type: ignore[method-assign]
    DatabaseReader.at_one_instant = asked  # type: ignore[method-assign]
    print("open", flush=True)


async def _owner(url: str, clock: ManualClock) -> None:
    async with await Engine.open(url, settings=SETTINGS, options=PUBLISHING, clock=clock) as engine:
        _begin()
        await RetentionCompactor(engine, COMPACTOR).run_once(thorough=True)


async def _ingest(url: str, clock: ManualClock) -> None:
    async with await Ingest.open(url, settings=SETTINGS, options=PUBLISHING, clock=clock) as ingest:
        _begin()
        await IngestRetention(ingest, COMPACTOR).run_once(thorough=True)


async def _root(url: str, clock: ManualClock) -> None:
    """As ``odq compact`` does it."""
    run_once = RetentionCompactor.run_once

    async def told(self: RetentionCompactor, **more: Any) -> Any:
        _begin()
        return await run_once(self, **more)

    RetentionCompactor.run_once = told  # type: ignore[method-assign,assignment]
    alone._KEPT_MS = 1  # type: ignore[misc]  # there is nothing to collect
    await compact_root(url, options=COMPACTOR, settings=SETTINGS, clock=clock)


async def main(who: str, url: str, now_ms: int) -> None:
    passes = {"owner": _owner, "ingest": _ingest, "root": _root}
    await passes[who](url, ManualClock(now_ms))
    print("end", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
