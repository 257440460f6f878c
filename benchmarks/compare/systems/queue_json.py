"""A whole queue as one JSON object on S3, changed with compare-and-set: what many build first.

Operations that arrive while a request is under way are put together into the next one (group
commit). Each group reads the object, changes it, and puts it if nobody else was faster. One that is
kept is read again only then: right for a broker that has the object to itself.

msgspec reads and writes it. A message that is not taken stays as the bytes that were read, as Raw:
that takes a fifth of the time that decoding and encoding all of them would.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from benchmarks.compare.content import HEADERS
from benchmarks.compare.contract import Address, Client, Received, System
from benchmarks.compare.servers import release
from benchmarks.compare.systems.moto import BUCKET, no_moto, s3_server

_POLL_S = 0.005


class Message(NamedTuple):
    number: int
    headers: dict[str, str]
    payload: bytes


class Queue(msgspec.Struct):
    """What the object holds."""

    next: int = 0
    ready: list[msgspec.Raw] = []
    claimed: dict[int, msgspec.Raw] = {}


_encode = msgspec.json.Encoder().encode
_queue_of = msgspec.json.Decoder(Queue).decode
_message_of = msgspec.json.Decoder(Message).decode

Change = Callable[[Queue], Any]
"""Changes the document, and says what came of it."""


class Document:
    """The object, and the changes that wait for the next request."""

    def __init__(self, store: Any, path: str, *, keep: bool) -> None:
        self._obstore: Any = importlib.import_module("obstore")
        self._conflicts: Any = importlib.import_module("obstore.exceptions")
        self._store = store
        self._path = path
        self._keep = keep
        self._kept: Queue | None = None
        self._version: Any = None
        self._waiting: list[tuple[Change, asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def change(self, change: Change) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return await done

    async def read(self) -> Queue:
        """What is there now."""
        try:
            found = await self._obstore.get_async(self._store, self._path)
        except FileNotFoundError:
            return Queue()
        self._version = {"e_tag": found.meta["e_tag"]}
        return _queue_of(bytes(await found.bytes_async()))

    async def _write(self) -> None:
        while self._waiting:
            changes, self._waiting = self._waiting, []
            try:
                results = await self._apply([change for change, _ in changes])
            except BaseException as error:
                for _, done in changes:
                    done.set_exception(error)
                raise
            for (_, done), result in zip(changes, results, strict=True):
                done.set_result(result)

    async def _apply(self, changes: list[Change]) -> list[Any]:
        while True:
            known = self._kept or await self.read()
            self._kept = None
            results = [change(known) for change in changes]
            # Nothing was found and nothing was added: there is nothing to write.
            if all(result == [] for result in results) or await self._replaced(known):
                if self._keep:
                    self._kept = known
                return results

    async def _replaced(self, queue: Queue) -> bool:
        text = _encode(queue)
        mode = "create" if self._version is None else self._version
        try:
            put = await self._obstore.put_async(self._store, self._path, text, mode=mode)
        except (self._conflicts.PreconditionError, self._conflicts.AlreadyExistsError):
            return False
        self._version = {"e_tag": put["e_tag"]}
        return True


class JsonClient(Client):
    def __init__(self, document: Document) -> None:
        self._document = document

    async def publish(self, payloads: Sequence[bytes]) -> None:
        def add(queue: Queue) -> None:
            for payload in payloads:
                message = Message(queue.next, HEADERS, payload)
                queue.ready.append(msgspec.Raw(_encode(message)))
                queue.next += 1

        await self._document.change(add)

    async def fill(self, payloads: Sequence[bytes]) -> None:
        await self.publish(payloads)

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1e3

        def claim(queue: Queue) -> list[Message]:
            taken = queue.ready[:count]
            del queue.ready[:count]
            messages = [_message_of(raw) for raw in taken]
            queue.claimed.update(
                (message.number, raw) for message, raw in zip(messages, taken, strict=True)
            )
            return messages

        while not (found := await self._document.change(claim)):
            if loop.time() > deadline:
                return []
            await asyncio.sleep(_POLL_S)
        return [Received(one.number, one.payload, one.headers) for one in found]

    async def ack(self, handles: Sequence[Any]) -> None:
        def forget(queue: Queue) -> None:
            for handle in handles:
                del queue.claimed[handle]

        await self._document.change(forget)

    async def depth(self) -> int:
        return len((await self._document.read()).ready)


@contextlib.asynccontextmanager
async def _connect(
    address: Address, queue: str, count: int, *, keep: bool
) -> AsyncIterator[list[Client]]:
    os.environ.update(address)
    store: Any = importlib.import_module("obstore.store")
    bucket = store.S3Store(
        BUCKET,
        endpoint=address["AWS_ENDPOINT"],
        access_key_id=address["AWS_ACCESS_KEY_ID"],
        secret_access_key=address["AWS_SECRET_ACCESS_KEY"],
        region=address["AWS_REGION"],
        client_options={"allow_http": True, "timeout": "60s"},
    )
    document = Document(bucket, f"{queue}.json", keep=keep)
    yield [JsonClient(document) for _ in range(count)]


def queue_json(*, keep: bool) -> System:
    kept = ", kept in memory" if keep else ""
    return System(
        key="queue-json-kept" if keep else "queue-json",
        name=f"queue.json, compare-and-set on moto S3, group commit{kept}",
        serve=s3_server,
        connect=functools.partial(_connect, keep=keep),
        missing=no_moto,
        version=lambda: f"our own, {release('obstore')} (Rust), {release('msgspec')} (C)",
        settings="one object; the consumers of a process share a group commit",
        grows=True,
        in_memory=True,
        deep_rounds=1,
        one_process=keep,  # it would not see what another one has published
    )
