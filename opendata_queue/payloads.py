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
)
from opendata_queue.clock import Clock
from opendata_queue.errors import CorruptStoreError
from opendata_queue.store import DatabaseReads, Objects

_URI_WITH_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.")
_BLOBS_AT_ONCE: Final = 8
# Ids this close together are read with one scan; further apart, with a point read each.
_SCAN_GAP: Final = 8
_SCAN_LEAST: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """A payload that has been stored as an object."""

    blob_id: bytes
    path: str


def is_user_uri(uri: str) -> bool:
    """Whether ``uri`` has a scheme; references to our own blobs have none."""
    return _URI_WITH_SCHEME.match(uri) is not None


class PayloadStore:
    """The payloads of one shard."""

    def __init__(
        self, database: DatabaseReads, objects: Objects, shard: int, clock: Clock, cache_bytes: int
    ) -> None:
        self._database = database
        self._objects = objects
        self._folder = f"blobs/{shard:05}"
        self._clock = clock
        self.recent = RecentPayloads(cache_bytes)

    async def store_blobs(self, payloads: Sequence[bytes]) -> list[Blob]:
        """Store each payload as an object; when this returns all of them are durable."""
        blobs: list[Blob] = []
        for start in range(0, len(payloads), _BLOBS_AT_ONCE):
            some = payloads[start : start + _BLOBS_AT_ONCE]
            blobs += await asyncio.gather(*(self._store_blob(payload) for payload in some))
        return blobs

    async def _store_blob(self, payload: bytes) -> Blob:
        made_at = self._clock.now_ms().to_bytes(6, "big")
        blob_id = made_at + secrets.token_bytes(BLOB_ID_BYTES - len(made_at))
        blob = Blob(blob_id=blob_id, path=f"{self._folder}/{blob_id.hex()}")
        await self._objects.write(blob.path, payload)
        return blob

    async def read_many(self, message_ids: Iterable[int]) -> dict[int, bytes | UriPayload]:
        """The payloads of those ids that have one; a user's URI is returned as it is."""
        found: dict[int, bytes | UriPayload] = {}
        wanted = []
        for message_id in sorted(set(message_ids)):
            recent = self.recent.get(message_id)
            if recent is None:
                wanted.append(message_id)
            else:
                found[message_id] = recent
        rows = await self._rows(wanted)
        blobs = {}
        for message_id, value in rows.items():
            key = encode_payload_key(message_id)
            payload = self._database.decode(decode_payload, key, value)
            if isinstance(payload, InlinePayload):
                found[message_id] = payload.data
            elif is_user_uri(payload.uri):
                found[message_id] = payload
            else:
                blobs[message_id] = payload.uri
        return found | await self._read_blobs(blobs)

    async def _rows(self, message_ids: list[int]) -> dict[int, bytes]:
        """The encoded payloads, read in runs where ids lie close together."""
        rows: dict[int, bytes] = {}
        alone: list[int] = []
        for run in _runs(message_ids):
            if len(run) < _SCAN_LEAST:
                alone += run
                continue
            wanted = {encode_payload_key(message_id): message_id for message_id in run}
            start, end = encode_payload_key(run[0]), encode_payload_key(run[-1]) + b"\x00"
            async for chunk in self._database.scan(start, end):
                rows |= {wanted[key]: value for key, value in chunk if key in wanted}
        values = await self._database.get_many([encode_payload_key(one) for one in alone])
        rows |= {one: value for one, value in zip(alone, values, strict=True) if value is not None}
        return rows

    async def _read_blobs(self, paths: dict[int, str]) -> dict[int, bytes]:
        blobs: dict[int, bytes] = {}
        ids = list(paths)
        for start in range(0, len(ids), _BLOBS_AT_ONCE):
            some = ids[start : start + _BLOBS_AT_ONCE]
            read = await asyncio.gather(*(self._objects.read(paths[one]) for one in some))
            for message_id, data in zip(some, read, strict=True):
                if data is None:
                    raise CorruptStoreError(
                        f"the payload of message {message_id} is missing: "
                        f"{self._objects.location}/{paths[message_id]}",
                        key=encode_payload_key(message_id),
                    )
                blobs[message_id] = data
        return blobs


class RecentPayloads:
    """Payloads that were published a moment ago, the oldest dropped first, bounded in bytes."""

    __slots__ = ("_by_id", "_limit_bytes", "_size_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._by_id: dict[int, bytes] = {}

    def get(self, message_id: int) -> bytes | None:
        return self._by_id.get(message_id)

    def add_many(self, payloads: dict[int, bytes]) -> None:
        """Add payloads under ids that were never added before."""
        self._by_id |= payloads
        self._size_bytes += sum(map(len, payloads.values()))
        while self._size_bytes > self._limit_bytes:
            oldest = next(iter(self._by_id))
            self._size_bytes -= len(self._by_id.pop(oldest))


def _runs(message_ids: list[int]) -> list[list[int]]:
    """Ascending ids, cut where the gap to the next one is large."""
    runs: list[list[int]] = []
    for message_id in message_ids:
        if runs and message_id - runs[-1][-1] <= _SCAN_GAP:
            runs[-1].append(message_id)
        else:
            runs.append([message_id])
    return runs
