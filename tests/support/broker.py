"""Real brokers, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120
"""Longer than anything takes; whoever waits so long has found an error."""


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which nobody listens but a broker that is told to: the system gives it to nobody.

    One that was merely free a moment ago can be anybody's by the time it is used.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))  # and no more: who connects is refused
        yield kept.getsockname()[1]


class BrokerProcess:
    """``odq serve``, or another command, on a free port; ``url`` is where it listens."""

    def __init__(
        self,
        store: str,
        *arguments: str,
        environment: Mapping[str, str] = {},
        command: str = "serve",
    ) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from opendata_queue.cli import main; main()", command),
                *("--store", store, "--port", "0", *arguments),
            ],
            cwd=ROOT,
            env={
                "PYTHONPATH": f"{ROOT}:{ROOT}/encodings:{ROOT}/compactor",
                "PATH": os.environ["PATH"],
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        assert self._process.stderr is not None
        assert self._process.stdout is not None
        self._listener = threading.Thread(target=self._listen, args=[self._process.stderr])
        self._listener.start()
        self.url = ""
        if "--standby" not in arguments:
            self.wait_until_it_listens()

    def wait_until_it_stands_by(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("standing by ")

    def wait_until_it_listens(self) -> None:
        """Until ``url`` is known; a standby only listens when it has taken over."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.startswith("standing by "):
            line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            self.kill()
            raise AssertionError(f"the broker said {line!r}, and {self.complaints}")
        self.url = line.removeprefix("listening on ").strip()

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self.said.append(line)

    @property
    def complaints(self) -> str:
        """What it wrote to its standard error, until it ended."""
        self._listener.join(PATIENCE_SECONDS)
        return "".join(self.said)

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        code = self._process.wait(timeout=PATIENCE_SECONDS)
        self._listener.join(PATIENCE_SECONDS)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        return code

    def stop(self) -> int:
        self.terminate()
        return self.wait()

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        else:
            self.wait()
