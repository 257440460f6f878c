"""Build hook: compiles the C helper into one shared library, if a C compiler is there.

Without one the package is whole all the same; it then writes through a slower tier. So nothing in
here may fail a build: it says in one line what was done, and why not.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = "opendata_queue/store/native"
FLAGS = ["-O2", "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
TIMEOUT_S = 120


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        library = _library_name()
        if library is None:
            _say(f"not compiled on {sys.platform}")
            return
        folder = Path(self.root, SOURCES)
        target = folder / library
        problem = _compile(sorted(folder.glob("*.c")), target)
        if problem is not None:
            _say(f"not compiled, a slower tier will be used: {problem}")
            return
        _say(f"compiled {library}")
        relative = target.relative_to(self.root).as_posix()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"
        build_data["artifacts"].append(relative)


def _say(what: str) -> None:
    print(f"opendata-queue batch writer: {what}", file=sys.stderr)


def _library_name() -> str | None:
    if sys.platform == "win32":  # the helper waits with pthreads
        return None
    return "_batch_writer.dylib" if sys.platform == "darwin" else "_batch_writer.so"


def _platform_tag() -> str:
    # Any Python 3 can load it: it has no Python headers, and only the platform matters.
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _compile(sources: list[Path], target: Path) -> str | None:
    """Compile into `target`; what went wrong, or None."""
    # One left by an earlier build must not pass for this one, should this one fail.
    target.unlink(missing_ok=True)
    compiler = _compiler()
    if compiler is None:
        return "no C compiler found (CC, cc, gcc, clang)"
    # Renamed into place, so that a process that has the old one loaded keeps it whole.
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    command = [*compiler, *FLAGS, "-o", str(partial), *map(str, sources)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            return f"{compiler[0]} failed: {_first_line(done.stderr)}"
        partial.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler[0]} failed: {error}"
    finally:
        partial.unlink(missing_ok=True)
    return None


def _compiler() -> list[str] | None:
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return None


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"
