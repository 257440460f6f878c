"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_NEW_FILES: Final = 100


def describe(root: Path) -> dict[str, str]:
    """The machine, as far as it matters to a queue. No name of it, and no path."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processors": f"{os.cpu_count()} × {_processor()}",
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "file system": _file_system(root),
        "a new file": f"{new_file_us(root):.0f} µs",
        "python": f"{platform.python_implementation()} {sys.version.split()[0]}",
        "event loop": _event_loop(),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def new_file_us(root: Path) -> float:
    """How long it takes to make a file: a commit of SlateDB is one.

    An ext4 without a journal goes through every file that was deleted in the last minutes first,
    which may take longer than all else that a commit does.
    """
    folder = root / "new-files"
    folder.mkdir(exist_ok=True)
    times = []
    for number in range(_NEW_FILES):
        started = time.perf_counter()
        (folder / f"{number}").touch()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _event_loop() -> str:
    """What those run on whose clients are asynchronous."""
    try:
        return f"uvloop {importlib.metadata.version('uvloop')}"
    except importlib.metadata.PackageNotFoundError:
        return "asyncio"


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{size / 2**30:.0f} GiB"


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on: that with the longest prefix of it."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    found = ("", "unknown")
    for line in mounts.read_text().splitlines():
        _, where, kind, *_ = line.split()
        if folder.resolve().is_relative_to(where) and len(where) >= len(found[0]):
            found = (where, kind)
    return found[1]
