"""Processes of our own modules: each gets a spec as JSON, and prints what it has found as JSON."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).parents[2]
_LAST_LINES: Final = 20


class ProcessFailed(Exception):
    """A process has not done what it was started for."""


@contextlib.contextmanager
def process(module: str, spec: Mapping[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block, at the latest."""
    started = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(spec)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


def expect_ready(worker: subprocess.Popen[str], *, timeout_s: float) -> None:
    """Wait for its first line, which says that it is ready."""
    assert worker.stdout is not None
    if not select.select([worker.stdout], [], [], timeout_s)[0]:
        raise ProcessFailed(f"a process was not ready after {timeout_s:g} s")
    if worker.stdout.readline() != "ready\n":
        raise ProcessFailed(f"a process has failed: {_last_words(worker, timeout_s)}")


def result(worker: subprocess.Popen[str], *, timeout_s: float) -> Any:
    """What it has found, when it has ended."""
    try:
        said, complaints = worker.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"a process was not done after {timeout_s:g} s") from None
    if worker.returncode:
        raise ProcessFailed(f"a process has failed: {last_lines(complaints)}")
    return json.loads(said)


def _last_words(worker: subprocess.Popen[str], timeout_s: float) -> str:
    try:
        return last_lines(worker.communicate(timeout=timeout_s)[1])
    except subprocess.TimeoutExpired:
        return "it does not end"


def last_lines(text: str) -> str:
    """The end of what a program has said, in whole lines."""
    return "\n".join(text.strip().splitlines()[-_LAST_LINES:])


def reason_of(error: BaseException) -> str:
    """An error in one line: the last one, which tells what it was. Those before tell where."""
    lines = (line.strip(" \t|+-") for line in reversed(str(error).splitlines()))
    return next(filter(None, lines), repr(error))
