"""beanstalkd with its binlog, through greenstalk."""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.content import boxed, slices, unboxed
from benchmarks.compare.contract import Address, Client, Received, System
from benchmarks.compare.servers import (
    HOST,
    find_program,
    free_port,
    lacking,
    listens,
    release,
    said_by,
    server,
)

_LEASE_S = 3_600


class BeanstalkClient(Client):
    """There are no batches in its protocol."""

    def __init__(self, client: Any, tube: str, port: int) -> None:
        self._client = client
        self._tube = tube
        self._port = port

    async def publish(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            self._client.put(boxed(payload), ttr=_LEASE_S)

    async def fill(self, payloads: Sequence[bytes]) -> None:
        """Many puts are sent before the first answer is read."""
        with socket.create_connection((HOST, self._port)) as raw:
            answers = raw.makefile("rb")
            raw.sendall(f"use {self._tube}\r\n".encode())
            answers.readline()
            for first, count in slices(len(payloads), 200):
                bodies = [boxed(one) for one in payloads[first : first + count]]
                raw.sendall(
                    b"".join(
                        b"put 65536 0 %d %d\r\n%s\r\n" % (_LEASE_S, len(body), body)
                        for body in bodies
                    )
                )
                for _ in bodies:
                    assert answers.readline().startswith(b"INSERTED")

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        found: list[Received] = []
        timed_out: Any = importlib.import_module("greenstalk").TimedOutError
        # It waits in whole seconds, and only for the first one.
        timeout = 1 if wait_ms else 0
        with contextlib.suppress(timed_out):
            while len(found) < count:
                job = self._client.reserve(timeout=timeout)
                found.append(Received(job, *unboxed(job.body)))
                timeout = 0
        return found

    async def ack(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._client.delete(handle)

    async def depth(self) -> int:
        return int(self._client.stats_tube(self._tube)["current-jobs-ready"])


@contextlib.asynccontextmanager
async def _connect(address: Address, queue: str, count: int) -> AsyncIterator[list[Client]]:
    greenstalk: Any = importlib.import_module("greenstalk")
    port = int(address["port"])
    with contextlib.ExitStack() as stack:
        clients: list[Client] = []
        for _ in range(count):
            client = greenstalk.Client((HOST, port), encoding=None, use=queue, watch=queue)
            stack.callback(client.close)
            clients.append(BeanstalkClient(client, queue, port))
        yield clients


def beanstalkd() -> System:
    program = find_program("beanstalkd")

    @contextlib.contextmanager
    def serve(folder: Path, relaxed: bool) -> Iterator[Address]:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        command = [str(program), "-l", HOST, "-p", str(port), "-b", str(folder)]
        command += ["-F"] if relaxed else ["-f0"]
        with server(command, folder=folder, ready=lambda: listens(port)):
            yield {"port": str(port)}

    return System(
        key="beanstalkd",
        name="beanstalkd, binlog fsync",
        serve=serve,
        connect=_connect,
        missing=lambda: lacking(modules=["greenstalk"], programs={"beanstalkd": program}),
        version=lambda: f"{said_by(program, '-v')}; {release('greenstalk')} (pure Python)",
        settings="-f0",
        loops=frozenset({"W2", "W2L", "W4", "W6", "W7"}),
        blocking=True,
        relaxes=True,
    )
