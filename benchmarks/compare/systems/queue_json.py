"""A whole queue as one JSON object on S3, changed with compare-and-set: what many build first.

Operations that arrive while a request is under way are put together into the next one (group
commit). Each group reads the object, changes it, and puts it if no other writer was faster. One
that is kept is read again only then: right for a broker that has the object to itself.

Most begin with Python's own ``json``. If its cost matters, one takes msgspec, and leaves messages
that are not taken as the bytes that were read: that is a tenth of it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import importlib
import json
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
    """What the object holds; messages as the codec has them."""

    next: int = 0
    ready: list[Any] = []
    claimed: dict[int, Any] = {}


class PlainCodec:
    """Python's own: all messages are decoded and encoded each time."""

    @staticmethod
    def read(text: bytes) -> Queue:
        found = json.loads(text)
        claimed = {int(number): one for number, one in found["claimed"].items()}
        return Queue(found["next"], found["ready"], claimed)

    @staticmethod
    def written(queue: Queue) -> bytes:
        document = {"next": queue.next, "ready": queue.ready, "claimed": queue.claimed}
        return json.dumps(document).encode()

    @staticmethod
    def packed(message: Message) -> Any:
        return [message.number, message.headers, base64.b64encode(message.payload).decode()]

    @staticmethod
    def message(packed: Any) -> Message:
        number, headers, text = packed
        return Message(number, headers, base64.b64decode(text))


class RawQueue(Queue):
    ready: list[msgspec.Raw] = []
    claimed: dict[int, msgspec.Raw] = {}


class FastCodec:
    """msgspec: only messages that are taken are decoded."""

    read = staticmethod(msgspec.json.Decoder(RawQueue).decode)
    written = staticmethod(msgspec.json.Encoder().encode)
    message = staticmethod(msgspec.json.Decoder(Message).decode)

    @staticmethod
    def packed(message: Message) -> Any:
        return msgspec.Raw(msgspec.json.encode(message))


Codec = type[PlainCodec] | type[FastCodec]

Change = Callable[[Queue], Any]
"""Changes the document, and says what came of it."""


class Document:
    """The object, and the changes that wait for the next request."""

    def __init__(self, store: Any, path: str, codec: Codec, *, keep: bool) -> None:
        self._obstore: Any = importlib.import_module("obstore")
        self._conflicts: Any = importlib.import_module("obstore.exceptions")
        self._store = store
        self._path = path
        self.codec = codec
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
        return self.codec.read(bytes(await found.bytes_async()))

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
        text = self.codec.written(queue)
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
        self._codec = document.codec

    async def publish(self, payloads: Sequence[bytes]) -> None:
        def add(queue: Queue) -> None:
            for payload in payloads:
                message = Message(queue.next, HEADERS, payload)
                queue.ready.append(self._codec.packed(message))
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
            messages = [self._codec.message(one) for one in taken]
            queue.claimed.update(
                (message.number, one) for message, one in zip(messages, taken, strict=True)
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
    address: Address, queue: str, count: int, *, codec: Codec, keep: bool
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
    document = Document(bucket, f"{queue}.json", codec, keep=keep)
    yield [JsonClient(document) for _ in range(count)]


def queue_json(*, fast: bool = False, keep: bool = False) -> System:
    codec: Codec = FastCodec if fast else PlainCodec
    library = f"{release('msgspec')} (C)" if fast else "json"
    name = "queue.json, compare-and-set on moto S3, group commit"
    return System(
        key="queue-json" + "-fast" * fast + "-kept" * keep,
        name=name + ", messages left as bytes" * fast + ", kept in memory" * keep,
        serve=s3_server,
        connect=functools.partial(_connect, codec=codec, keep=keep),
        missing=no_moto,
        version=lambda: f"our own, {release('obstore')} (Rust), {library}",
        settings="one object; the consumers of a process share a group commit",
        grows=True,
        in_memory=True,
        deep_rounds=1,
        one_process=keep,  # it would not see what another one has published
    )
