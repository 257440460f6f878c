"""Queues in SQLite files, from PyPI."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import pickle
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.compare.content import boxed, unboxed
from benchmarks.compare.contract import Address, Client, Received, System, no_server, polled
from benchmarks.compare.servers import lacking, release

_BATCHED: Final = frozenset({"W2", "W2L", "W4", "W6", "W7"})


class PollingClient(Client):
    """None of them can wait for a message of another process, so they poll."""

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        return polled(lambda: self.receive_now(count), wait_ms)

    def receive_now(self, count: int) -> list[Received]:
        found: list[Received] = []
        while len(found) < count and (one := self.receive_one()) is not None:
            found.append(one)
        return found

    def receive_one(self) -> Received | None:
        raise NotImplementedError


class LiteClient(PollingClient):
    """litequeue: text only, so that bytes are passed as Latin-1."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    async def publish(self, payloads: Sequence[bytes]) -> None:
        if len(payloads) == 1:
            self._queue.put(boxed(payloads[0]).decode("latin-1"))
            return
        with self._queue.transaction():
            for payload in payloads:
                self._queue.put(boxed(payload).decode("latin-1"))

    async def fill(self, payloads: Sequence[bytes]) -> None:
        await self.publish(payloads)

    def receive_one(self) -> Received | None:
        message = self._queue.pop()
        if message is None:
            return None
        return Received(message.message_id, *unboxed(message.data.encode("latin-1")))

    async def ack(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._queue.done(handle)

    async def depth(self) -> int:
        # Its qsize() also counts what is locked.
        counting = f"SELECT COUNT(*) FROM {self._queue.table} WHERE status = 0"
        (found,) = self._queue.conn.execute(counting).fetchone()
        return int(found)


def _lite(address: Address, queue: str, *, full: bool) -> Client:
    litequeue: Any = importlib.import_module("litequeue")
    made = litequeue.LiteQueue(f"{address['folder']}/{queue}.sqlite", timeout=60)
    if full:
        made.conn.execute("PRAGMA synchronous = FULL")
    return LiteClient(made)


def litequeue(*, full: bool) -> System:
    return System(
        key="litequeue" if full else "litequeue-normal",
        name=f"litequeue ({'WAL, FULL' if full else 'default, NORMAL'})",
        serve=no_server,
        connect=_connecting(lambda address, queue: _lite(address, queue, full=full)),
        missing=lambda: lacking(modules=["litequeue"]),
        version=lambda: _version("litequeue"),
        settings=f"synchronous={'FULL' if full else 'NORMAL'}; batches are transactions",
        durable=full,
        loops=_BATCHED - {"W2", "W2L"},
        blocking=True,
    )


class PersistClient(PollingClient):
    """persist-queue's SQLiteAckQueue, which threads of a process share."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    async def publish(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            self._queue.put(boxed(payload))

    async def fill(self, payloads: Sequence[bytes]) -> None:
        rows = [(pickle.dumps(boxed(payload), protocol=4), time.time()) for payload in payloads]
        with self._queue._putter as connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.executemany(self._queue._sql_insert, rows)

    def receive_one(self) -> Received | None:
        empty: Any = importlib.import_module("persistqueue").Empty
        try:
            found = self._queue.get(block=False, raw=True)
        except empty:
            return None
        return Received(found["pqid"], *unboxed(found["data"]))

    async def ack(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._queue.ack(id=handle)

    async def depth(self) -> int:
        return int(self._queue._count())


_shared: dict[str, Any] = {}
_sharing = threading.Lock()


def _persist(address: Address, queue: str) -> Client:
    persistqueue: Any = importlib.import_module("persistqueue")
    path = f"{address['folder']}/{queue}"
    with _sharing:
        if path not in _shared:
            _shared[path] = persistqueue.SQLiteAckQueue(path, multithreading=True, timeout=60)
    return PersistClient(_shared[path])


def persist_queue() -> System:
    return System(
        key="persist-queue",
        name="persist-queue (SQLite)",
        serve=no_server,
        connect=_connecting(_persist),
        missing=lambda: lacking(modules=["persistqueue"]),
        version=lambda: _version("persist-queue"),
        settings="SQLiteAckQueue, WAL, SQLite's default of synchronous=FULL",
        loops=_BATCHED,
        blocking=True,
    )


class HueyClient(PollingClient):
    """huey's storage: what is taken is gone, there are no acknowledgements."""

    def __init__(self, storage: Any, path: Path) -> None:
        self._storage = storage
        self._path = path

    async def publish(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            self._storage.enqueue(boxed(payload))

    async def fill(self, payloads: Sequence[bytes]) -> None:
        rows = [(self._storage.name, boxed(payload), 0) for payload in payloads]
        with contextlib.closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.executemany(
                "insert into task (queue, data, priority) values (?, ?, ?)", rows
            )

    def receive_one(self) -> Received | None:
        found = self._storage.dequeue()
        return None if found is None else Received(None, *unboxed(found))

    async def ack(self, handles: Sequence[Any]) -> None:
        """There is nothing to acknowledge."""

    async def depth(self) -> int:
        return int(self._storage.queue_size())


def _huey(address: Address, queue: str) -> Client:
    storage: Any = importlib.import_module("huey.storage")
    path = Path(address["folder"], f"{queue}.sqlite")
    made = storage.SqliteStorage(queue, str(path), fsync=True, strict_fifo=True, timeout=60)
    return HueyClient(made, path)


def huey() -> System:
    return System(
        key="huey",
        name="huey SqliteStorage (no ack)",
        serve=no_server,
        connect=_connecting(_huey),
        missing=lambda: lacking(modules=["huey"]),
        version=lambda: _version("huey"),
        settings="fsync=True, strict_fifo=True; a message that is taken is gone",
        loops=_BATCHED,
        blocking=True,
    )


def _connecting(
    make: Callable[[Address, str], Client],
) -> Callable[[Address, str, int], contextlib.AbstractAsyncContextManager[list[Client]]]:
    @contextlib.asynccontextmanager
    async def connect(address: Address, queue: str, count: int) -> AsyncIterator[list[Client]]:
        with _alone(address):
            clients = [make(address, queue) for _ in range(count)]
        yield clients

    return connect


@contextlib.contextmanager
def _alone(address: Address) -> Iterator[None]:
    """One at a time, of all processes: to turn WAL on, SQLite does not wait for a lock."""
    with Path(address["folder"], "connecting.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # closing it gives it back
        yield


def _version(package: str) -> str:
    return f"{release(package)} (pure Python), SQLite {sqlite3.sqlite_version}"
