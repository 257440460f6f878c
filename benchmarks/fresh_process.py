"""What a fresh process needs to open a root: time until the first message is in hand, and memory.

    python benchmarks/fresh_process.py URL [--queue NAME] [--consume 2000] [--no-fsync]

Prints one line of JSON. ``benchmarks/lifecycle.py`` runs it for its figures.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from opendata_queue import Engine, StoreSettings

BATCH = 100


def resident_mib() -> float:
    """Memory in use now; where the system does not tell, the most that was ever used."""
    told = _told_mib("VmRSS")
    return peak_mib() if told is None else told


def peak_mib() -> float:
    """The most memory that was ever used.

    What ``getrusage`` says is at least what the process had that has started this one.
    """
    told = _told_mib("VmHWM")
    if told is not None:
        return told
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def _told_mib(name: str) -> float | None:
    """A figure of Linux's about this process."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = status.read_text().splitlines()
    return next((int(one.split()[1]) / 1024 for one in lines if one.startswith(f"{name}:")), None)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"payloads": []}
    start = time.perf_counter()
    settings = StoreSettings(fsync=not arguments.no_fsync)
    async with await Engine.open(arguments.url, settings=settings) as system:
        if arguments.queue:
            (first,) = await system.claim(arguments.queue, 1)
            found["open_seconds"] = time.perf_counter() - start
            found["payloads"].append((first.payload or b"").hex())
            assert await system.ack(arguments.queue, first) == ["ok"]
        gc.collect()
        found["resident_mib"] = resident_mib()
        start = time.perf_counter()
        while arguments.queue and len(found["payloads"]) <= arguments.consume:
            messages = await system.claim(arguments.queue, BATCH)
            assert messages, "there are fewer than are to be consumed"
            await system.ack(arguments.queue, *messages)
            found["payloads"] += [(one.payload or b"").hex() for one in messages]
        found["consume_seconds"] = time.perf_counter() - start
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--queue", help="claim from this one")
    parser.add_argument("--consume", type=int, default=0, help=f"messages, in batches of {BATCH}")
    parser.add_argument("--no-fsync", action="store_true")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
