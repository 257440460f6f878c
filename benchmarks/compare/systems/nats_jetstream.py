"""NATS JetStream, file storage, a pull consumer with explicit acknowledgements."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.compare.content import HEADERS
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

_SYNCS_FROM: Final = (2, 10)
"""Since when the server can sync before it acknowledges."""


class NatsClient(Client):
    """Publishes are sent together and awaited; acknowledgements are confirmed by the server."""

    def __init__(self, stream: Any, subscription: Any, name: str) -> None:
        self._stream = stream
        self._subscription = subscription
        self._name = name

    async def publish(self, payloads: Sequence[bytes]) -> None:
        if len(payloads) == 1:
            await self._stream.publish(self._name, payloads[0], headers=HEADERS)
            return
        publishing = (self._stream.publish(self._name, one, headers=HEADERS) for one in payloads)
        await asyncio.gather(*publishing)

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        nats_timeout: Any = importlib.import_module("nats.errors").TimeoutError
        try:
            found = await self._subscription.fetch(count, timeout=wait_ms / 1e3)
        except (nats_timeout, TimeoutError):
            return []
        return [Received(one, one.data, one.headers) for one in found]

    async def ack(self, handles: Sequence[Any]) -> None:
        await asyncio.gather(*(one.ack_sync(timeout=30) for one in handles))

    async def depth(self) -> int:
        return int((await self._subscription.consumer_info()).num_pending)


@contextlib.asynccontextmanager
async def _connect(address: Address, queue: str, count: int) -> AsyncIterator[list[Client]]:
    nats: Any = importlib.import_module("nats")
    api: Any = importlib.import_module("nats.js.api")
    async with contextlib.AsyncExitStack() as stack:
        clients: list[Client] = []
        for _ in range(count):
            connection = await nats.connect(address["url"])
            stack.push_async_callback(connection.close)
            stream = connection.jetstream(timeout=30)
            await stream.add_stream(name=queue, subjects=[queue], storage=api.StorageType.FILE)
            config = api.ConsumerConfig(
                ack_policy=api.AckPolicy.EXPLICIT, ack_wait=3_600, max_ack_pending=100_000
            )
            subscription = await stream.pull_subscribe(queue, durable="bench", config=config)
            clients.append(NatsClient(stream, subscription, queue))
        yield clients


def nats_jetstream() -> System:
    program = find_program("nats-server")
    said = said_by(program, "--version")
    number = re.search(r"(\d+)\.(\d+)", said)
    syncs = number is not None and (int(number[1]), int(number[2])) >= _SYNCS_FROM

    @contextlib.contextmanager
    def serve(folder: Path, relaxed: bool) -> Iterator[Address]:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        config = folder / "nats.conf"
        always = "sync_interval: always" if syncs else ""
        config.write_text(
            f'host: "{HOST}"\nport: {port}\njetstream {{ store_dir: "{folder}/data"\n {always} }}\n'
        )
        with server([str(program), "-c", str(config)], folder=folder, ready=lambda: listens(port)):
            yield {"url": f"nats://{HOST}:{port}"}

    return System(
        key="nats",
        name="NATS JetStream, file",
        serve=serve,
        connect=_connect,
        missing=lambda: lacking(modules=["nats"], programs={"nats-server": program}),
        version=lambda: f"{said}; {release('nats-py')} (pure Python)",
        settings="sync_interval always" if syncs else "before 2.10 it can't sync before it answers",
        durable=syncs,
    )
