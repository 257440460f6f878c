"""Watches what a process syncs, be it Python, SlateDB or the compiled batch writer that does it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Stands before the C library, whose calls Python and the compiled batch writer share.
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static int watched(const char *name, int descriptor) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    int result = real(descriptor);
    if (result == 0 && size > 0) {
        path[size++] = '\n';
        int log = open(getenv("SYNC_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (write(log, path, size) != size) abort();
        close(log);
    }
    return result;
}
int fsync(int descriptor) { return watched("fsync", descriptor); }
int fdatasync(int descriptor) { return watched("fdatasync", descriptor); }
"""

needs_sync_watch = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None,
    reason="preloads a library, which needs Linux and a C compiler",
)


class SyncWatch:
    """A library that is loaded before all others, and notes each file or folder that is synced."""

    def __init__(self, folder: Path) -> None:
        self._library, self._log = folder / "watch.so", folder / "synced"
        source = folder / "watch.c"
        source.write_text(_SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", self._library, source, "-ldl"], check=True)

    def environment(self) -> dict[str, str]:
        """For a process that is to be watched."""
        return os.environ | {
            "LD_PRELOAD": str(self._library),
            "SYNC_LOG": str(self._log),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    def synced(self) -> set[Path]:
        """What has been synced by now."""
        return {Path(line) for line in self._log.read_text().splitlines()}
