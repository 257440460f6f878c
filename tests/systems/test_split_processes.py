"""Two publishing processes and a tailer, killed and started again in any order."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from opendata_queue import AsyncSystem, NewMessage, connect_async, open_async
from tests.conftest import NewRoot
from tests.support.broker import BrokerProcess
from tests.support.s3_server import S3Server

PATIENCE_MS = 60_000
# Who is killed is seen to be gone; nobody else may take a process that is slow for silent.
LEASE = ("--owner-lease-ms", "60000")


class Processes:
    """The processes of one root, by name: two that publish, and the tailer."""

    def __init__(self, root: str, stack: ExitStack, environment: Mapping[str, str]) -> None:
        self._root = root
        self._stack = stack
        self._environment = environment
        self._running: dict[str, BrokerProcess] = {}

    def start(self, name: str) -> None:
        tailer = name == "tailer"
        arguments = LEASE if tailer else (*LEASE, "--role", "ingest")
        process = BrokerProcess(
            self._root,
            *arguments,
            environment=self._environment,
            command="tailer" if tailer else "serve",
        )
        self._running[name] = self._stack.enter_context(process)

    def kill(self, name: str) -> None:
        self._running.pop(name).kill()

    def stop(self, name: str) -> None:
        assert self._running.pop(name).stop() == 0

    def url(self, name: str) -> str:
        return self._running[name].url


async def connect(processes: Processes, name: str) -> AsyncSystem:
    return await open_async(processes.url(name))


async def publish(processes: Processes, name: str, first: int, behind: int) -> set[int]:
    """Publish numbers; returns those that were acknowledged."""
    acknowledged = set()
    async with await connect(processes, name) as system:
        for start in range(first, behind, 10):
            some = range(start, min(start + 10, behind))
            await system.publish_many([NewMessage(payload=str(one).encode()) for one in some])
            acknowledged |= set(some)
    return acknowledged


async def drain(processes: Processes, wanted: int) -> list[int]:
    found: list[int] = []
    async with await connect(processes, "tailer") as system:
        while len(found) < wanted:
            claimed = await system.claim("all", 100, wait_ms=PATIENCE_MS)
            if not claimed:
                break
            await system.ack("all", *(one.receipt for one in claimed))
            found += [int(one.payload or b"") for one in claimed]
        stats = await system.stats("all")
        assert (stats.available, stats.in_flight) == (0, 0)
    return sorted(found)


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    if request.param == "file":
        return f"file://{tmp_path}/root", {}
    new_root: NewRoot = request.getfixturevalue("new_s3_root")
    server: S3Server = request.getfixturevalue("s3_server")
    return new_root(), server.environment()


async def test_every_message_is_routed_once_whoever_is_killed_and_started_again(
    place: tuple[str, dict[str, str]],
) -> None:
    root, environment = place
    with ExitStack() as stack:
        processes = Processes(root, stack, environment)
        for name in ("tailer", "one", "two"):
            processes.start(name)
        async with await connect(processes, "tailer") as system:
            await system.create_queue("all")

        await asyncio.gather(publish(processes, "one", 0, 50), publish(processes, "two", 50, 100))
        processes.kill("tailer")  # perhaps in the middle of routing
        await publish(processes, "one", 100, 150)
        processes.kill("one")
        processes.start("one")
        await publish(processes, "one", 150, 200)
        processes.start("tailer")
        await publish(processes, "two", 200, 250)
        processes.stop("two")
        processes.kill("tailer")
        processes.start("two")
        processes.start("tailer")
        await publish(processes, "two", 250, 300)

        assert await drain(processes, 300) == list(range(300))


async def test_publishing_goes_on_when_one_of_two_publishers_is_killed(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    with ExitStack() as stack:
        processes = Processes(root, stack, {})
        for name in ("one", "two"):
            processes.start(name)
        processes.kill("one")

        # None of them names the one that is left: the store says where it is, or the tailer.
        async with await connect_async(root) as system:
            await system.publish(b"7")
        processes.start("tailer")
        async with await connect_async(root) as system:
            await system.publish(b"7")
        async with await connect(processes, "tailer") as system:
            await system.publish(b"7")


async def test_each_process_does_its_part_and_says_who_does_the_other(tmp_path: Path) -> None:
    with ExitStack() as stack:
        processes = Processes(f"file://{tmp_path}/root", stack, {})
        for name in ("one", "tailer"):
            processes.start(name)

        # Whoever is asked for what the other one does says where that is, and clients go there.
        async with await connect(processes, "one") as system:
            await system.create_queue("all")
        async with await connect(processes, "tailer") as system:
            await system.publish(b"7")
        assert await drain(processes, 1) == [7]
        for name in ("one", "tailer"):
            for path in ("/healthz", "/readyz", "/metrics"):
                with urllib.request.urlopen(processes.url(name) + path) as answer:
                    assert answer.status == 200
            processes.stop(name)
