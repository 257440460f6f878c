"""RabbitMQ, a durable classic queue with publisher confirms, through pika."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
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

# Debian's program on the path wants to be the system's service.
_FOLDERS: Final = ("/usr/lib/rabbitmq/bin", "/usr/lib/rabbitmq/lib/*/sbin")
_QUIET_S: Final = 0.005
"""After so long a silence no more messages are on their way."""
_EPMD_FOLDERS: Final = ("/usr/lib/erlang/bin",)


class RabbitClient(Client):
    """Persistent messages; a consumer with a prefetch of its batch, acked with one frame."""

    def __init__(self, connection: Any, queue: str) -> None:
        pika: Any = importlib.import_module("pika")
        self._connection = connection
        self._queue = queue
        self._publishing: Any = None
        self._receiving: Any = None
        self._got: list[Received] = []
        self._properties = pika.BasicProperties(delivery_mode=2, headers=dict(HEADERS))

    async def publish(self, payloads: Sequence[bytes]) -> None:
        if self._publishing is None:
            self._publishing = self._connection.channel()
            self._publishing.confirm_delivery()
        for payload in payloads:
            self._publishing.basic_publish("", self._queue, payload, self._properties)

    async def fill(self, payloads: Sequence[bytes]) -> None:
        channel = self._connection.channel()
        for payload in payloads:
            channel.basic_publish("", self._queue, payload, self._properties)
        channel.close()

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        self._subscribe(count)
        self._wait(1, wait_ms / 1e3)
        return self._taken(count)

    async def receive_whole(self, count: int, *, wait_ms: int) -> list[Received]:
        """The server sends messages one by one: wait for all, as long as any come."""
        self._subscribe(count)
        self._wait(1, wait_ms / 1e3)
        before = 0
        while before < len(self._got) < count:
            before = len(self._got)
            self._wait(count, _QUIET_S)
        return self._taken(count)

    def _subscribe(self, count: int) -> None:
        if self._receiving is None:
            self._receiving = self._connection.channel()
            self._receiving.basic_qos(prefetch_count=count)
            self._receiving.basic_consume(self._queue, self._take)

    def _wait(self, count: int, seconds: float) -> None:
        """Until so many are here, or the time is over."""
        deadline = time.monotonic() + seconds
        while len(self._got) < count and (left := deadline - time.monotonic()) > 0:
            self._connection.process_data_events(time_limit=left)

    def _taken(self, count: int) -> list[Received]:
        got, self._got = self._got[:count], self._got[count:]
        return got

    def _take(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._got.append(Received(method.delivery_tag, body, properties.headers))

    async def ack(self, handles: Sequence[Any]) -> None:
        """One frame for all up to the last; the server does not confirm it."""
        self._receiving.basic_ack(max(handles), multiple=True)

    async def depth(self) -> int:
        with contextlib.closing(self._connection.channel()) as channel:
            if self._receiving is not None:  # what was only prefetched goes back
                self._receiving.close()
                self._receiving = None
            declared = channel.queue_declare(self._queue, passive=True)
            return int(declared.method.message_count)


@contextlib.asynccontextmanager
async def _connect(address: Address, queue: str, count: int) -> AsyncIterator[list[Client]]:
    pika: Any = importlib.import_module("pika")
    with contextlib.ExitStack() as stack:
        clients: list[Client] = []
        for _ in range(count):
            connection = pika.BlockingConnection(
                pika.ConnectionParameters(HOST, int(address["port"]), heartbeat=0)
            )
            stack.callback(connection.close)
            with contextlib.closing(connection.channel()) as channel:
                channel.queue_declare(queue, durable=True)
            clients.append(RabbitClient(connection, queue))
        yield clients


@contextlib.contextmanager
def _serve(folder: Path, relaxed: bool) -> Iterator[Address]:
    program = find_program("rabbitmq-server", *_FOLDERS)
    epmd = find_program("epmd", *_EPMD_FOLDERS)
    folder.mkdir(parents=True, exist_ok=True)
    port, names_port, cluster_port = free_port(), free_port(), free_port()
    plugins = folder / "enabled_plugins"
    plugins.write_text("[].\n")
    environment = {
        "HOME": str(folder),
        "ERL_EPMD_ADDRESS": HOST,
        "ERL_EPMD_PORT": str(names_port),
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_DIST_PORT": str(cluster_port),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": HOST,
        "RABBITMQ_NODE_PORT": str(port),
    }
    names = [str(epmd), "-port", str(names_port), "-address", HOST]
    with (
        server(names, folder=folder, ready=lambda: listens(names_port)),
        server(
            [str(program)], folder=folder, ready=lambda: _answers(port), environment=environment
        ),
    ):
        yield {"port": str(port)}


def _answers(port: int) -> bool:
    if not listens(port):
        return False
    pika: Any = importlib.import_module("pika")
    with contextlib.suppress(pika.exceptions.AMQPError):
        pika.BlockingConnection(pika.ConnectionParameters(HOST, port)).close()
        return True
    return False


def rabbitmq() -> System:
    program = find_program("rabbitmq-server", *_FOLDERS)
    control = find_program("rabbitmqctl", *_FOLDERS)
    return System(
        key="rabbitmq",
        name="RabbitMQ, durable, confirms",
        serve=_serve,
        connect=_connect,
        missing=lambda: lacking(
            modules=["pika"],
            programs={"rabbitmq-server": program, "epmd": find_program("epmd", *_EPMD_FOLDERS)},
        ),
        version=lambda: f"RabbitMQ {said_by(control, 'version')}; {release('pika')} (pure Python)",
        settings="classic queue, persistent, confirms; acks are not confirmed",
        loops=frozenset({"W2", "W2L"}),
        blocking=True,
    )
