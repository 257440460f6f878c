"""A whole queue as one JSON object on S3, changed with compare-and-set: what many build first.

Operations that arrive while a request is under way are put together into the next one (group
commit). Each group reads the object, changes it, and puts it if nobody else was faster. One that is
kept is read again only then: right for a broker that has the object to itself.
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
from typing import Any

from benchmarks.compare.content import HEADERS
from benchmarks.compare.contract import Address, Client, Received, System
from benchmarks.compare.servers import lacking
from benchmarks.compare.systems.moto import BUCKET, s3_server

_POLL_S = 0.005

Change = Callable[[dict[str, Any]], Any]
"""Changes the document, and says what came of it."""


class Document:
    """The object, and the changes that wait for the next request."""

    def __init__(self, store: Any, path: str, *, keep: bool) -> None:
        self._obstore: Any = importlib.import_module("obstore")
        self._conflicts: Any = importlib.import_module("obstore.exceptions")
        self._store = store
        self._path = path
        self._keep = keep
        self._kept: dict[str, Any] | None = None
        self._version: Any = None
        self._waiting: list[tuple[Change, asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def change(self, change: Change) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return await done

    async def read(self) -> dict[str, Any]:
        """What is there now."""
        try:
            found = await self._obstore.get_async(self._store, self._path)
        except FileNotFoundError:
            return {"next": 0, "ready": [], "claimed": {}}
        self._version = {"e_tag": found.meta["e_tag"]}
        document: dict[str, Any] = json.loads(bytes(await found.bytes_async()))
        return document

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

    async def _replaced(self, document: dict[str, Any]) -> bool:
        text = json.dumps(document).encode()
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
        texts = [base64.b64encode(payload).decode() for payload in payloads]

        def add(document: dict[str, Any]) -> None:
            for text in texts:
                document["ready"].append([document["next"], HEADERS, text])
                document["next"] += 1

        await self._document.change(add)

    async def fill(self, payloads: Sequence[bytes]) -> None:
        await self.publish(payloads)

    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1e3

        def claim(document: dict[str, Any]) -> list[Any]:
            ready = document["ready"]
            taken, document["ready"] = ready[:count], ready[count:]
            document["claimed"].update({str(one[0]): one for one in taken})
            return list(taken)

        while not (found := await self._document.change(claim)):
            if loop.time() > deadline:
                return []
            await asyncio.sleep(_POLL_S)
        return [
            Received(number, base64.b64decode(text), headers) for number, headers, text in found
        ]

    async def ack(self, handles: Sequence[Any]) -> None:
        def forget(document: dict[str, Any]) -> None:
            for handle in handles:
                del document["claimed"][str(handle)]

        await self._document.change(forget)

    async def depth(self) -> int:
        return len((await self._document.read())["ready"])


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
        missing=lambda: lacking(modules=["obstore"]),
        version=lambda: "our own, with obstore",
        settings="one object; the consumers of a process share a group commit",
        grows=True,
        in_memory=True,
        deep_rounds=1,
        one_process=keep,  # it would not see what another one has published
    )
