"""OpenData Queue, embedded on a folder or on S3, and through a broker."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.content import HEADERS
from benchmarks.compare.contract import Address, Client, Received, System, no_server
from benchmarks.compare.servers import HOST, free_port, lacking, listens, release, server
from benchmarks.compare.systems.moto import BUCKET, no_moto, s3_server
from opendata_queue import (
    AsyncSystem,
    NewMessage,
    QueueExistsError,
    QueueNotFoundError,
    QueueOptions,
    StoreSettings,
    __version__,
    open_async,
)
from opendata_queue.store.rows.writer import active_tier

REPOSITORY = Path(__file__).parents[3]
QUEUE = "bench"
# Nothing may come back in the middle of a measurement.
OPTIONS = QueueOptions(lease_ms=3_600_000)


@dataclass
class Published:
    """What the clients of a process have published last."""

    message_id: int | None = None


class OurClient(Client):
    """Clients of one process share the system, as tasks of one service do."""

    def __init__(self, system: AsyncSystem, queue: str, last: Published) -> None:
        self._system = system
        self._queue = queue
        self._last = last

    async def publish(self, payloads: Sequence[bytes]) -> None:
        ids = await self._system.publish_many(
            [NewMessage(payload, headers=HEADERS) for payload in payloads]
        )
        self._last.message_id = max(ids[-1], self._last.message_id or 0)

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        return [
            Received(message, message.payload or b"", dict(message.headers))
            for message in await self._system.claim(self._queue, count, wait_ms=wait_ms)
        ]

    async def ack(self, handles: Sequence[Any]) -> None:
        outcomes = await self._system.ack(self._queue, *handles)
        assert set(outcomes) == {"ok"}, outcomes

    async def depth(self) -> int:
        if self._last.message_id is not None:
            # Returns when that one is in its queue, and so are all before it.
            await self._system.history(self._last.message_id)
        return (await self._system.stats(self._queue)).available


async def _only_queue(system: AsyncSystem, name: str) -> None:
    """Make the queue, and drop those of earlier cells: every message would go into them, too."""
    names = await system.list_queues()
    if name not in names:
        # Another client of the same cell may be doing this, too.
        with contextlib.suppress(QueueNotFoundError, QueueExistsError):
            for other in names:
                await system.delete_queue(other)
        with contextlib.suppress(QueueExistsError):
            await system.create_queue(name, options=OPTIONS)


@contextlib.asynccontextmanager
async def _embedded(url: str, settings: StoreSettings, count: int) -> AsyncIterator[list[Client]]:
    async with await open_async(url, settings=settings) as system:
        await _only_queue(system, QUEUE)
        last = Published()
        yield [OurClient(system, QUEUE, last) for _ in range(count)]


def _version() -> str:
    return f"opendata-queue {__version__}, {release('slatedb')}, batch writer: {active_tier()}"


def on_files(*, fsync: bool) -> System:
    def connect(
        address: Address, queue: str, count: int
    ) -> contextlib.AbstractAsyncContextManager[list[Client]]:
        settings = StoreSettings(fsync=fsync and not address["relaxed"])
        return _embedded(f"file://{address['folder']}/{queue}", settings, count)

    return System(
        key="odq" if fsync else "odq-nosync",
        name="OpenData Queue, file" if fsync else "OpenData Queue, file, no fsync",
        serve=no_server,
        connect=connect,
        version=_version,
        settings="embedded, file:///, fsync" if fsync else "embedded, file:///, fsync=False",
        durable=fsync,
        one_process=True,
        ours=True,
    )


def on_s3() -> System:
    def connect(
        address: Address, queue: str, count: int
    ) -> contextlib.AbstractAsyncContextManager[list[Client]]:
        os.environ.update(address)
        return _embedded(f"s3://{BUCKET}/{queue}", StoreSettings(), count)

    return System(
        key="odq-s3",
        name="OpenData Queue, moto S3",
        serve=s3_server,
        connect=connect,
        missing=no_moto,
        version=_version,
        settings="embedded, s3:// on moto (in memory, on this machine)",
        one_process=True,
        in_memory=True,
        ours=True,
    )


@contextlib.contextmanager
def _broker(folder: Path, relaxed: bool) -> Iterator[Address]:
    """One broker with one root."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    paths = (REPOSITORY, REPOSITORY / "encodings", REPOSITORY / "compactor")
    command = [
        *(sys.executable, "-c", "from opendata_queue.cli import main; main()", "serve"),
        *("--store", f"file://{folder}/root", "--port", str(port)),
    ]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    with server(command, folder=folder, ready=lambda: listens(port), environment=environment):
        yield {"url": f"http://{HOST}:{port}"}


@contextlib.asynccontextmanager
async def _remote(address: Address, queue: str, count: int) -> AsyncIterator[list[Client]]:
    async with contextlib.AsyncExitStack() as stack:
        systems = [
            await stack.enter_async_context(await open_async(address["url"])) for _ in range(count)
        ]
        await _only_queue(systems[0], queue)
        last = Published()
        yield [OurClient(system, queue, last) for system in systems]


def _client() -> str:
    parser: Any = importlib.import_module("aiohttp.http_parser").HttpResponseParser
    compiled = "C" if parser.__module__ == "aiohttp._http_parser" else "pure Python"
    return f"{release('aiohttp')} ({compiled}), {release('msgspec')} (C)"


def over_http(clients: int) -> System:
    few = clients == 1
    return System(
        key=f"odq-http-{clients}",
        name=f"OpenData Queue, HTTP, {clients} client{'' if few else 's'}",
        serve=_broker,
        connect=_remote,
        missing=lambda: lacking(modules=["aiohttp", "fastapi", "msgspec", "uvicorn"]),
        version=lambda: f"{_version()}; {_client()}",
        settings="odq serve on file:///, fsync; the Python client, msgpack"
        + ("" if few else f"; {clients} clients in 4 processes in W1 to W4"),
        clients=clients,
        processes=1 if few else 4,
        workloads=frozenset(
            {"W1", "W2", "W2L", "W3", "W4", "W5", "W6", "W7"}
            if few
            else {"W1", "W2", "W2L", "W3", "W4"}
        ),
        ours=True,
    )
