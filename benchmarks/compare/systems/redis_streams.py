"""Redis Streams with a consumer group."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

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

_GROUP = "bench"


class RedisClient(Client):
    """XADD in a pipeline, XREADGROUP and XACK."""

    def __init__(self, client: Any, stream: str, consumer: str) -> None:
        self._client = client
        self._stream = stream
        self._consumer = consumer

    async def publish(self, payloads: Sequence[bytes]) -> None:
        if len(payloads) == 1:
            self._client.xadd(self._stream, {"payload": payloads[0], **HEADERS})
            return
        pipeline = self._client.pipeline(transaction=False)
        for payload in payloads:
            pipeline.xadd(self._stream, {"payload": payload, **HEADERS})
        pipeline.execute()

    async def fill(self, payloads: Sequence[bytes]) -> None:
        before = self._client.config_get("appendfsync")["appendfsync"]
        self._client.config_set("appendfsync", "no")
        await super().fill(payloads)
        self._client.config_set("appendfsync", before)

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        # Without BLOCK first: it is what a busy consumer does.
        found = self._read(count, None) or self._read(count, wait_ms)
        return [] if not found else [_received(entry_id, entry) for entry_id, entry in found[0][1]]

    def _read(self, count: int, block_ms: int | None) -> Any:
        return self._client.xreadgroup(
            _GROUP, self._consumer, {self._stream: ">"}, count=count, block=block_ms
        )

    async def ack(self, handles: Sequence[Any]) -> None:
        assert self._client.xack(self._stream, _GROUP, *handles) == len(handles)

    async def depth(self) -> int:
        (group,) = self._client.xinfo_groups(self._stream)
        if group["lag"] is not None:
            return int(group["lag"])
        # Now and then Redis does not know: then what comes behind the last one is counted.
        last = group["last-delivered-id"].decode()
        return len(self._client.xrange(self._stream, min=f"({last}"))


def _received(entry_id: Any, entry: dict[bytes, bytes]) -> Received:
    payload = entry.pop(b"payload")
    return Received(entry_id, payload, {k.decode(): v.decode() for k, v in entry.items()})


@contextlib.asynccontextmanager
async def _connect(address: Address, queue: str, count: int) -> AsyncIterator[list[Client]]:
    redis: Any = importlib.import_module("redis")
    with contextlib.closing(redis.Redis(host=HOST, port=int(address["port"]))) as client:
        with contextlib.suppress(redis.ResponseError):  # it is there already
            client.xgroup_create(queue, _GROUP, id="0", mkstream=True)
        yield [RedisClient(client, queue, f"c{id(client)}-{n}") for n in range(count)]


def _server(program: str | None) -> str:
    return said_by(program, "--version").partition("v=")[2].split()[0]


def _client() -> str:
    """The library, and who parses for it: Python takes several times as long as hiredis."""
    parser: Any = importlib.import_module("redis.connection").DefaultParser
    parsing = release("hiredis") if "hiredis" in parser.__module__ else "its Python parser"
    return f"redis-py {importlib.metadata.version('redis')} with {parsing}"


def redis_streams(appendfsync: str) -> System:
    program = find_program("redis-server")

    @contextlib.contextmanager
    def serve(folder: Path, relaxed: bool) -> Iterator[Address]:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        options = {
            "port": port, "bind": HOST, "dir": folder, "save": "", "daemonize": "no",
            "appendonly": "yes", "appendfsync": appendfsync,
        }  # fmt: skip
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]

        def ready() -> bool:
            if not listens(port):
                return False
            redis: Any = importlib.import_module("redis")
            with contextlib.closing(redis.Redis(host=HOST, port=port)) as client:
                try:
                    return bool(client.ping())
                except redis.RedisError:  # it loads its file
                    return False

        with server([str(program), *arguments], folder=folder, ready=ready):
            yield {"port": str(port)}

    return System(
        key=f"redis-{appendfsync}",
        name=f"Redis Streams, appendfsync {appendfsync}",
        serve=serve,
        connect=_connect,
        missing=lambda: lacking(modules=["redis"], programs={"redis-server": program}),
        version=lambda: f"Redis {_server(program)}; {_client()}",
        settings=f"appendonly yes, appendfsync {appendfsync}; pipelines; entries stay",
        durable=appendfsync == "always",
        blocking=True,
    )
