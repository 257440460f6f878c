"""Servers of our own, in temporary folders on loopback: started, waited for, and stopped."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.compare.processes import last_lines

HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 20.0
# Where distributions put servers that are not on the path of plain users.
_FOLDERS: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin", "/opt/homebrew/bin")


class NotHere(Exception):
    """A system can't be measured in this place, for a reason that is no fault of its own."""


def find_program(name: str, *more_folders: str) -> str | None:
    """A program on the path, or where distributions hide it; of several versions the newest."""
    folders = [str(found) for pattern in more_folders for found in sorted(_glob(pattern))[::-1]]
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), *_FOLDERS])
    return shutil.which(name, path=path)


def _glob(pattern: str) -> list[Path]:
    return list(Path("/").glob(pattern.lstrip("/")))


def lacking(*, modules: Sequence[str] = (), programs: Mapping[str, str | None] = {}) -> str | None:
    """What a system can't be measured without, and is not here."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            return f"the Python library {name} is not installed"
    for name, found in programs.items():
        if found is None:
            return f"{name} is not on this machine"
    return None


def said_by(*command: str | None) -> str:
    """What a program says of its version, in one line."""
    if command[0] is None:
        return ""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def release(package: str) -> str:
    """The name and the version of a Python library."""
    return f"{package} {importlib.metadata.version(package)}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def plain_user(*preferred: str) -> str | None:
    """The user for a server that refuses to run as root; none if we are not root."""
    if os.geteuid() != 0:
        return None
    for name in (*preferred, "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


def give_to(user: str | None, folder: Path) -> None:
    """Let a user have a folder of ours. Those above may belong to others: they stay as they are."""
    if user is None:
        return
    known = pwd.getpwnam(user)
    os.chown(folder, known.pw_uid, known.pw_gid)
    if subprocess.run(["test", "-x", str(folder)], user=user).returncode:
        raise NotHere(
            f"it does not run as root, and the user {user} can't come to its folder: choose"
            " another --root"
        )


@contextlib.contextmanager
def server(
    command: Sequence[str],
    *,
    folder: Path,
    ready: Callable[[], bool],
    environment: Mapping[str, str] = {},
    user: str | None = None,
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the block. What it says goes to a file in its folder.

    It has a session of its own: a Ctrl-C is for us, and we stop it in our own order.
    """
    log = folder / "server.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            user=user,
        )
    try:
        _wait_until(ready, process, Path(command[0]).name, log)
        yield process
    finally:
        _end(process, stop)


def _wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], name: str, log: Path
) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            said = last_lines(log.read_text(errors="replace"))
            raise RuntimeError(f"{name} does not answer; it said: {said}")
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes], stop: signal.Signals) -> None:
    """Ask the server, then make it and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
