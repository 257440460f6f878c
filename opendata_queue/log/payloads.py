"""Payloads: inline in the database, or as objects of their own (RFC 0001, RFC 0004)."""

from __future__ import annotations

import asyncio
import re
import secrets
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from odq_encodings import (
    BLOB_ID_BYTES,
    InlinePayload,
    UriPayload,
    decode_payload,
    encode_payload_key,
    encode_payload_keys,
    inline_payload,
    inline_payloads,
)
from opendata_queue.model.allowance import Allowance, RowBudget
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.model.paths import blobs_path
from opendata_queue.store import DatabaseReads, Objects

_URI_WITH_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.")
_BLOBS_AT_ONCE: Final = 8
"""Of one call."""

UPLOADS_AT_ONCE: Final = 32
"""Of all calls together: each one has an open file, or a connection."""


_QUERY: Final = re.compile(r"size=(0|[1-9]\d{0,18})&crc32=([0-9a-f]{8})")
_LONG_BYTES: Final = 256 * 1024
"""What is longer is not checked on the event loop: that takes a millisecond for a megabyte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """A payload that has been stored as an object."""

    blob_id: bytes
    path: str
    reference: str
    """How the message refers to it: the path, with size and checksum if readers know of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobPlace:
    """Where a blob is, and what is known of its bytes: nothing if release 0.1 has written it."""

    path: str
    size_bytes: int | None = None
    crc32: int | None = None

    @classmethod
    def parse(cls, reference: str, message: str) -> BlobPlace:
        path, asks, query = reference.partition("?")
        if not asks:
            return cls(path=path)
        found = _QUERY.fullmatch(query)
        if found is None:
            raise CorruptStoreError(f"{message} refers to {reference!r}, which is no blob")
        return cls(path=path, size_bytes=int(found[1]), crc32=int(found[2], 16))

    async def check(self, data: bytes, url: str) -> None:
        """Refuse bytes that are not those that were stored."""
        if self.size_bytes is None:
            return
        if len(data) != self.size_bytes:
            raise CorruptStoreError(
                f"{url} is damaged: it has {len(data)} bytes, and had {self.size_bytes}"
            )
        if await crc32_of(data) != self.crc32:
            raise CorruptStoreError(f"{url} is damaged: its checksum does not fit")


async def crc32_of(data: bytes) -> int:
    if len(data) <= _LONG_BYTES:
        return zlib.crc32(data)
    return await asyncio.to_thread(zlib.crc32, data)


async def read_blob(
    objects: Objects, place: BlobPlace, *, fits: Callable[[int], Awaitable[bool]] | None = None
) -> bytes | None:
    """The bytes of a blob, none if it is gone; ``CorruptStoreError`` if they are not its own.

    ``fits`` is given its size before it is read; none if it says no.
    """
    data = await objects.read(place.path, fits=fits)
    if data is not None:
        await place.check(data, objects.location.url_of(place.path))
    return data


def is_user_uri(uri: str) -> bool:
    """Whether ``uri`` has a scheme; references to our own blobs have none."""
    return _URI_WITH_SCHEME.match(uri) is not None


class BlobFolder:
    """Where the payloads of one shard are that are too large to be inline."""

    def __init__(self, objects: Objects, shard: int, clock: Clock, *, checked: bool = True) -> None:
        """Without ``checked`` references are those of release 0.1, for a root that it may read."""
        self._checked = checked
        self._objects = objects
        self._folder = blobs_path(shard)
        self._clock = clock
        self._uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)

    async def store_blobs(self, payloads: Sequence[bytes]) -> list[Blob]:
        """Store each payload as an object; when this returns all of them are durable."""
        blobs: list[Blob] = []
        for start in range(0, len(payloads), _BLOBS_AT_ONCE):
            some = payloads[start : start + _BLOBS_AT_ONCE]
            blobs += await asyncio.gather(*(self._store_blob(payload) for payload in some))
        return blobs

    async def _store_blob(self, payload: bytes) -> Blob:
        async with self._uploads:
            made_at = self._clock.now_ms().to_bytes(6, "big")
            blob_id = made_at + secrets.token_bytes(BLOB_ID_BYTES - len(made_at))
            path = reference = f"{self._folder}/{blob_id.hex()}"
            if self._checked:
                reference += f"?size={len(payload)}&crc32={await crc32_of(payload):08x}"
            await self._objects.write(path, payload)
            return Blob(blob_id=blob_id, path=path, reference=reference)


class PayloadStore(BlobFolder):
    """The payloads of one shard."""

    def __init__(
        self,
        database: DatabaseReads,
        objects: Objects,
        shard: int,
        clock: Clock,
        *,
        checked: bool = True,
    ) -> None:
        super().__init__(objects, shard, clock, checked=checked)
        self._database = database

    async def read_many(
        self,
        message_ids: Iterable[int],
        *,
        blobs: bool = True,
        allowance: Allowance | None = None,
        budget: RowBudget | None = None,
    ) -> dict[int, bytes | UriPayload]:
        """The payloads of those ids that have one; a user's URI is returned as it is.

        Without ``blobs`` only what is inline: objects can be large. ``allowance`` is asked about
        each object.
        """
        rows = await self._database.get_by_id(
            message_ids, encode_payload_key, encode_payload_keys, budget
        )
        all_inline = inline_payloads([*rows.values()])
        if all_inline is not None:
            return dict(zip(rows, all_inline, strict=True))
        found: dict[int, bytes | UriPayload] = {}
        places = {}
        for message_id, value in rows.items():
            inline = inline_payload(value)
            if inline is not None:
                found[message_id] = inline
                continue
            key = encode_payload_key(message_id)
            payload = self._database.decode(decode_payload, key, value)
            if isinstance(payload, InlinePayload):
                found[message_id] = payload.data
            elif is_user_uri(payload.uri):
                found[message_id] = payload
            else:
                places[message_id] = BlobPlace.parse(payload.uri, f"message {message_id}")
        if blobs:
            found |= await self._read_blobs(places, allowance)
        return found

    async def _read_blobs(
        self, places: dict[int, BlobPlace], allowance: Allowance | None
    ) -> dict[int, bytes]:
        blobs: dict[int, bytes] = {}
        ids = list(places)
        for start in range(0, len(ids), _BLOBS_AT_ONCE):
            some = ids[start : start + _BLOBS_AT_ONCE]
            if allowance is not None and allowance.left:
                break  # what is behind one that did not fit is not given out
            read = await self._read_objects(some, places, allowance)
            for message_id, data in zip(some, read, strict=True):
                if data is not None:
                    blobs[message_id] = data
                elif allowance is not None and message_id in allowance.left:
                    continue
                elif await self._is_there(message_id):
                    raise CorruptStoreError(
                        f"the payload of message {message_id} is missing: "
                        f"{self._objects.location.url_of(places[message_id].path)}",
                        key=encode_payload_key(message_id),
                    )
        return blobs

    async def _read_objects(
        self, message_ids: list[int], places: dict[int, BlobPlace], allowance: Allowance | None
    ) -> list[bytes | None]:
        """Objects, read side by side. Whether each one fits is asked in their order."""
        if allowance is None:
            return await asyncio.gather(
                *(read_blob(self._objects, places[one]) for one in message_ids)
            )
        turns = [asyncio.Event() for _ in range(len(message_ids) + 1)]
        turns[0].set()

        async def read(index: int, message_id: int) -> bytes | None:
            async def fits(size_bytes: int) -> bool:
                await turns[index].wait()
                admitted = allowance.admit(message_id, size_bytes)
                turns[index + 1].set()
                return admitted

            try:
                return await read_blob(self._objects, places[message_id], fits=fits)
            finally:
                turns[index + 1].set()

        return await asyncio.gather(*(read(*one) for one in enumerate(message_ids)))

    async def _is_there(self, message_id: int) -> bool:
        """Whether a message still leads to its payload: the rows go before the object does."""
        return await self._database.get(encode_payload_key(message_id)) is not None
