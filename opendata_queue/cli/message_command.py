"""A command that is run for each message."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO, Final

from opendata_queue.model.errors import OdqError
from opendata_queue.model.messages import ClaimedMessage

_TAIL_BYTES: Final = 1_000
_OUTPUT_SECONDS: Final = 1.0
_STEP_SECONDS: Final = 0.05
# What a shell says of a command that it can't find or can't run.
_NO_COMMAND: Final = {126: "it can't be run", 127: "it is not found"}


class CommandError(OdqError):
    """The command itself is wrong, not what it did with a message: fix it. No attempt counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a command ended; ``error`` is what to remember of it if it failed."""

    exit_code: int
    error: str


class Command:
    """Runs a line of shell: payload on its standard input, the rest in its environment."""

    def __init__(self, line: str, *, output_to_stderr: bool) -> None:
        self._line = line
        self._stdout = sys.stderr.fileno() if output_to_stderr and _has_number(sys.stderr) else None
        self._process: subprocess.Popen[bytes] | None = None
        self._times_ended = 0

    def run(self, message: ClaimedMessage) -> Result:
        """Run it and wait for it; ``KeyboardInterrupt`` if it was ended meanwhile."""
        try:
            process = subprocess.Popen(
                self._line,
                shell=True,
                stdin=subprocess.PIPE,
                stdout=self._stdout,
                stderr=subprocess.PIPE,
                env=os.environ | _environment(message),
                # A Ctrl-C is for us: we decide what becomes of the command.
                process_group=0 if os.name == "posix" else None,
            )
        except OSError as error:  # too many headers, or no memory
            return Result(exit_code=-1, error=f"the command could not be started: {error.strerror}")
        self._process = process
        if self._times_ended:  # before there was a process to end
            self._signal()
        tail = _Tail(process.stderr)
        _feed(process.stdin, message.payload or b"")
        code = _exit_code(process)
        self._process = None
        if self._times_ended:
            raise KeyboardInterrupt
        return self._result(code, tail.text())

    def end(self) -> None:
        """End the command that runs; called again, by force. Made for signal handlers."""
        self._times_ended += 1
        self._signal()

    def _signal(self) -> None:
        process = self._process
        if process is None:
            return
        if os.name != "posix":
            process.terminate()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM if self._times_ended == 1 else signal.SIGKILL)

    def _result(self, code: int, said: str) -> Result:
        if code in _NO_COMMAND:
            raise CommandError(f"could not run {self._line!r}: {_NO_COMMAND[code]}")
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Result(exit_code=code, error=f"{how}: {said}" if said else how)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process, in steps.

    Of two signals that come at once, the system may give one to another thread. Python handles it
    when this one runs again, and not while it waits.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_STEP_SECONDS)


def _environment(message: ClaimedMessage) -> dict[str, str]:
    variables = {
        "ODQ_QUEUE": message.queue,
        "ODQ_MESSAGE_ID": str(message.message_id),
        "ODQ_ATTEMPTS": str(message.attempts),
        "ODQ_PRIORITY": str(message.priority),
        "ODQ_PAYLOAD_URI": message.payload_uri or "",
        "ODQ_HEADERS": json.dumps(dict(message.headers)),
    }
    for name, value in message.headers:
        variables["ODQ_HEADER_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper()] = value
    # No variable can hold a NUL; ODQ_HEADERS has it escaped.
    return {name: value for name, value in variables.items() if "\0" not in value}


class _Tail:
    """Passes a command's complaints on, and remembers the last of them."""

    def __init__(self, source: IO[bytes] | None) -> None:
        assert source is not None
        self._source = source
        self._last = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._source as source:
            while chunk := os.read(source.fileno(), 65_536):
                self._last = (self._last + chunk)[-_TAIL_BYTES:]
                sys.stderr.write(chunk.decode(errors="replace"))
                sys.stderr.flush()

    def text(self) -> str:
        # Not for ever: what the command has left running may hold it open.
        self._thread.join(_OUTPUT_SECONDS)
        return self._last.decode(errors="replace").strip()


def _feed(target: IO[bytes] | None, payload: bytes) -> None:
    """Write the payload in the background: a command need not read it."""
    assert target is not None
    sink = target

    def write() -> None:
        try:
            with sink:
                sink.write(payload)
        except OSError:
            return

    threading.Thread(target=write, daemon=True).start()


def _has_number(stream: IO[str]) -> bool:
    try:
        return stream.fileno() >= 0
    except OSError:
        return False
