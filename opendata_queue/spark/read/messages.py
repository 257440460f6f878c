"""The table of messages: ranges of logs, with payloads if they are wanted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from odq_encodings import (
    EncodingError,
    InlinePayload,
    MetadataFields,
    decode_payload,
    encode_metadata_log_key,
    encode_payload_key,
    inline_payload,
    message_metadata_fields,
)
from opendata_queue.log.metadata_log import MetadataLog
from opendata_queue.log.payloads import BlobPlace, is_user_uri, read_blob
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import CorruptStoreError, OdqError
from opendata_queue.model.ids import first_id_of, is_bulk
from opendata_queue.root.features import checked_features
from opendata_queue.spark.rows.arrow import Batches
from opendata_queue.spark.rows.columns import Batch
from opendata_queue.spark.visible import ShardRange, is_visible, root_now_ms, shard_reader
from opendata_queue.store import DatabaseReader, Objects

logger = logging.getLogger(__name__)

_BATCH_ROWS: Final = 10_000
_BATCH_BYTES: Final = 16 * 1024 * 1024
_BLOBS_AT_ONCE: Final = 8
_ID_OFFSET: Final = 2
# In the order of ``MetadataFields``.
_FIELDS: Final = (
    "message_id",
    "created_at",
    "received_at",
    "visible_at",
    "retention_seconds",
    "headers",
)


_Payload = tuple[bytes | None, str | None]
"""The bytes, or a user's URI."""


async def message_batches(
    objects: Objects,
    ranges: Sequence[ShardRange],
    batches: Batches,
    now_ms: int,
    machine: Clock | None = None,
) -> AsyncIterator[Batch]:
    """The messages of some ranges that have not expired at ``now_ms`` of the root's clock.

    Retention drops a bulk shard whole, also one that a task is about to read: all of it is past
    its time by then, and left out. So are messages that go while they are read.
    """
    await checked_features(objects)
    for one in ranges:
        try:
            async for batch in _batches_of(objects, one, batches, now_ms, machine):
                yield batch
        except OdqError as error:
            if not is_bulk(one.shard) or await is_visible(objects, one.shard):
                raise
            logger.info("shard %d was dropped while it was read: %s", one.shard, error)


async def _batches_of(
    objects: Objects,
    one: ShardRange,
    batches: Batches,
    now_ms: int,
    machine: Clock | None,
) -> AsyncIterator[Batch]:
    async with shard_reader(objects, one.shard) as reader:
        wants_payloads = "payload" in batches.names or "payload_uri" in batches.names
        payloads = _Payloads(reader, objects, one) if wants_payloads else None
        gathered: list[MetadataFields] = []
        columns: dict[str, list[Any]] = {"payload": [], "payload_uri": []}
        size_bytes = 0
        async for entries in _entries(reader, one, now_ms):
            if payloads is not None and entries:
                found = await payloads.of(entries)
                if None in found:
                    pairs = list(zip(entries, found, strict=True))
                    lost = [entry for entry, payload in pairs if payload is None]
                    await _check_gone(objects, one.shard, lost, machine)
                    entries = [entry for entry, payload in pairs if payload is not None]
                for payload, uri in filter(None, found):
                    columns["payload"].append(payload)
                    columns["payload_uri"].append(uri)
                    size_bytes += len(payload or b"")
            gathered += entries
            if len(gathered) >= _BATCH_ROWS or size_bytes >= _BATCH_BYTES:
                yield _batch(batches, gathered, columns)
                gathered, columns, size_bytes = [], {"payload": [], "payload_uri": []}, 0
        if gathered:
            yield _batch(batches, gathered, columns)


async def _entries(
    reader: DatabaseReader, one: ShardRange, now_ms: int
) -> AsyncIterator[list[MetadataFields]]:
    span = encode_metadata_log_key(one.first), encode_metadata_log_key(one.end)
    async for rows in reader.scan(*span):
        try:
            entries = [message_metadata_fields(value) for _, value in rows]
        except EncodingError:  # again, to say which row it is
            entries = [reader.decode(message_metadata_fields, key, value) for key, value in rows]
        yield _not_past(entries, now_ms)


def _not_past(entries: Sequence[MetadataFields], now_ms: int) -> list[MetadataFields]:
    return [
        entry
        for entry in entries
        for _, _, received_at, _, retention_seconds, _ in (entry,)
        if not retention_seconds or now_ms <= received_at + retention_seconds * 1000
    ]


async def _check_gone(
    objects: Objects, shard: int, lost: Sequence[MetadataFields], machine: Clock | None
) -> None:
    """Messages without a payload must be past their time, or must have been deleted meanwhile."""
    ids = [message_id for message_id, *_ in _not_past(lost, await root_now_ms(objects, machine))]
    if not ids:
        return
    # A message's rows go together, and before its blob: a second read sees neither.
    async with shard_reader(objects, shard) as later:
        left = await MetadataLog(later).read_fields(ids)
        if left:
            first = min(left)
            raise CorruptStoreError(
                f"the payload of message {first} is missing: {later.name}",
                key=encode_payload_key(first),
            )


class _Payloads:
    """The payloads of one range, read along with its log: both are in the order of ids."""

    def __init__(self, reader: DatabaseReader, objects: Objects, one: ShardRange) -> None:
        base = first_id_of(one.shard)
        self._reader = reader
        self._objects = objects
        self._rows = reader.scan(encode_payload_key(base + one.first), _end_key(base + one.end))
        self._at_hand: dict[int, bytes] = {}
        self._read_up_to = -1

    async def of(self, entries: Sequence[MetadataFields]) -> list[_Payload | None]:
        """The payload of each; none where there is none any more."""
        last = entries[-1][0]
        while self._read_up_to < last:
            rows = await anext(self._rows, None)
            if rows is None:
                break
            for key, value in rows:
                self._at_hand[int.from_bytes(key[_ID_OFFSET:], "big")] = value
            self._read_up_to = int.from_bytes(rows[-1][0][_ID_OFFSET:], "big")
        found: list[_Payload | None] = []
        large: dict[int, BlobPlace] = {}
        for message_id, *_ in entries:
            stored = self._at_hand.get(message_id)
            if stored is None:
                found.append(None)
                continue
            data = inline_payload(stored)
            if data is not None:
                found.append((data, None))
                continue
            key = encode_payload_key(message_id)
            payload = self._reader.decode(decode_payload, key, stored)
            if isinstance(payload, InlinePayload):
                found.append((payload.data, None))
            elif is_user_uri(payload.uri):
                found.append((None, payload.uri))
            else:
                large[len(found)] = BlobPlace.parse(payload.uri, f"message {message_id}")
                found.append(None)
        for place, blob in (await self._read_blobs(large)).items():
            found[place] = (blob, None)
        self._at_hand = {one: row for one, row in self._at_hand.items() if one > last}
        return found

    async def _read_blobs(self, blobs_at: dict[int, BlobPlace]) -> dict[int, bytes]:
        """The objects that are there, by the places of their messages."""
        blobs: dict[int, bytes] = {}
        places = list(blobs_at)
        for start in range(0, len(places), _BLOBS_AT_ONCE):
            some = places[start : start + _BLOBS_AT_ONCE]
            read = await asyncio.gather(*(read_blob(self._objects, blobs_at[one]) for one in some))
            blobs |= {one: data for one, data in zip(some, read, strict=True) if data is not None}
        return blobs


def _end_key(message_id: int) -> bytes:
    """The key behind the payloads of smaller ids; the last shard has no id behind it."""
    return encode_payload_key(message_id - 1) + b"\x00"


def _batch(
    batches: Batches, entries: Sequence[MetadataFields], payloads: dict[str, list[Any]]
) -> Batch:
    columns: dict[str, Sequence[Any]] = dict(zip(_FIELDS, zip(*entries, strict=True), strict=True))
    if payloads["payload"]:
        columns |= payloads
    return batches.of_columns(columns, len(entries))
