"""Payloads: inline in the database, or as objects of their own (RFC 0001, RFC 0004)."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Sequence
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
from opendata_queue.allowance import Allowance
from opendata_queue.clock import Clock
from opendata_queue.errors import CorruptStoreError
from opendata_queue.store import DatabaseReads, Objects

_URI_WITH_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.")
_BLOBS_AT_ONCE: Final = 8
"""Of one call."""

UPLOADS_AT_ONCE: Final = 32
"""Of all calls together: each one has an open file, or a connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """A payload that has been stored as an object."""

    blob_id: bytes
    path: str


def is_user_uri(uri: str) -> bool:
    """Whether ``uri`` has a scheme; references to our own blobs have none."""
    return _URI_WITH_SCHEME.match(uri) is not None


class BlobFolder:
    """Where the payloads of one shard are that are too large to be inline."""

    def __init__(self, objects: Objects, shard: int, clock: Clock) -> None:
        self._objects = objects
        self._folder = f"blobs/{shard:05}"
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
            blob = Blob(blob_id=blob_id, path=f"{self._folder}/{blob_id.hex()}")
            await self._objects.write(blob.path, payload)
            return blob


class PayloadStore(BlobFolder):
    """The payloads of one shard."""

    def __init__(self, database: DatabaseReads, objects: Objects, shard: int, clock: Clock) -> None:
        super().__init__(objects, shard, clock)
        self._database = database

    async def read_many(
        self,
        message_ids: Iterable[int],
        *,
        blobs: bool = True,
        allowance: Allowance | None = None,
    ) -> dict[int, bytes | UriPayload]:
        """The payloads of those ids that have one; a user's URI is returned as it is.

        Without ``blobs`` only what is inline: objects can be large. ``allowance`` is asked about
        each object.
        """
        rows = await self._database.get_by_id(message_ids, encode_payload_key, encode_payload_keys)
        all_inline = inline_payloads([*rows.values()])
        if all_inline is not None:
            return dict(zip(rows, all_inline, strict=True))
        found: dict[int, bytes | UriPayload] = {}
        paths = {}
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
                paths[message_id] = payload.uri
        if blobs:
            found |= await self._read_blobs(paths, allowance)
        return found

    async def _read_blobs(
        self, paths: dict[int, str], allowance: Allowance | None
    ) -> dict[int, bytes]:
        blobs: dict[int, bytes] = {}
        ids = list(paths)
        for start in range(0, len(ids), _BLOBS_AT_ONCE):
            some = ids[start : start + _BLOBS_AT_ONCE]
            if allowance is not None and allowance.left:
                break  # what is behind one that did not fit is not given out
            read = await self._read_objects(some, paths, allowance)
            for message_id, data in zip(some, read, strict=True):
                if data is not None:
                    blobs[message_id] = data
                elif allowance is not None and message_id in allowance.left:
                    continue
                elif await self._is_there(message_id):
                    raise CorruptStoreError(
                        f"the payload of message {message_id} is missing: "
                        f"{self._objects.location}/{paths[message_id]}",
                        key=encode_payload_key(message_id),
                    )
        return blobs

    async def _read_objects(
        self, message_ids: list[int], paths: dict[int, str], allowance: Allowance | None
    ) -> list[bytes | None]:
        """Objects, read side by side. Whether each one fits is asked in their order."""
        if allowance is None:
            return await asyncio.gather(*(self._objects.read(paths[one]) for one in message_ids))
        turns = [asyncio.Event() for _ in range(len(message_ids) + 1)]
        turns[0].set()

        async def read(index: int, message_id: int) -> bytes | None:
            async def fits(size_bytes: int) -> bool:
                await turns[index].wait()
                admitted = allowance.admit(message_id, size_bytes)
                turns[index + 1].set()
                return admitted

            try:
                return await self._objects.read(paths[message_id], fits=fits)
            finally:
                turns[index + 1].set()

        return await asyncio.gather(*(read(*one) for one in enumerate(message_ids)))

    async def _is_there(self, message_id: int) -> bool:
        """Whether a message still leads to its payload: the rows go before the object does."""
        return await self._database.get(encode_payload_key(message_id)) is not None
