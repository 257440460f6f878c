"""Which process this is, and whether another one on the same machine still lives."""

from __future__ import annotations

import functools
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

_MULTICAST_BIT = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process. ``machine`` and ``start`` are as in RFC 0007; none where they are not known."""

    machine: str | None
    pid: int
    start: str | None

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        pid = os.getpid()
        return cls(machine=_machine(), pid=pid, start=_start_of(pid)[0])

    def lives(self) -> bool | None:
        """Whether it runs; none if that can't be known from here."""
        if self.machine is None or self.machine != _machine() or os.name != "posix":
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's: it is there
        except (OverflowError, OSError):
            return None
        start, ended = _start_of(self.pid)
        if start is None or self.start is None:
            return None
        return start == self.start and not ended


@functools.cache
def _machine() -> str | None:
    """Equal only for processes that see each other under the same ids."""
    if sys.platform == "linux":
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            # Containers of one machine have the same boot id, and process ids of their own.
            namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
        except OSError:
            return None
        return f"{boot}-{namespace}"
    node = uuid.getnode()
    if node & _MULTICAST_BIT:  # made up for this process: there is no network card to ask
        return None
    return f"node-{node:012x}"


def _start_of(pid: int) -> tuple[str | None, bool]:
    """When a process was started, none if not known, and whether it has ended since."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None, False
    # The name of the command, in parentheses, may have spaces and parentheses in it.
    fields = stat.rpartition(b")")[2].split()
    if len(fields) < 20:
        return None, False
    return fields[19].decode(), fields[0] in (b"Z", b"X")
