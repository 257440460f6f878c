"""The table of messages: ranges of logs, with payloads if they are wanted."""

from __future__ import annotations

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
from opendata_queue.clock import SystemClock
from opendata_queue.errors import OdqError
from opendata_queue.payloads import PayloadStore, is_user_uri
from opendata_queue.shard_files import is_bulk
from opendata_queue.spark.arrow_rows import Batches
from opendata_queue.spark.columns import Batch
from opendata_queue.spark.visible import ShardRange, is_visible, shard_reader
from opendata_queue.store import DatabaseReader, Objects

logger = logging.getLogger(__name__)

_BATCH_ROWS: Final = 10_000
_BATCH_BYTES: Final = 16 * 1024 * 1024
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


async def message_batches(
    objects: Objects, ranges: Sequence[ShardRange], batches: Batches, now_ms: int
) -> AsyncIterator[Batch]:
    """The messages of some ranges that have not expired at ``now_ms``.

    Retention drops a bulk shard whole, also one that somebody is about to read: all of it is past
    its time by then, and left out.
    """
    for one in ranges:
        try:
            async for batch in _batches_of(objects, one, batches, now_ms):
                yield batch
        except OdqError as error:
            if not is_bulk(one.shard) or await is_visible(objects, one.shard):
                raise
            logger.info("shard %d was dropped while it was read: %s", one.shard, error)


async def _batches_of(
    objects: Objects, one: ShardRange, batches: Batches, now_ms: int
) -> AsyncIterator[Batch]:
    async with shard_reader(objects, one.shard) as reader:
        wants_payloads = "payload" in batches.names or "payload_uri" in batches.names
        payloads = _Payloads(reader, objects, one) if wants_payloads else None
        gathered: list[MetadataFields] = []
        columns: dict[str, list[Any]] = {"payload": [], "payload_uri": []}
        size_bytes = 0
        async for entries in _entries(reader, one, now_ms):
            gathered += entries
            if payloads is not None and entries:
                for payload, uri in await payloads.of(entries):
                    columns["payload"].append(payload)
                    columns["payload_uri"].append(uri)
                    size_bytes += len(payload or b"")
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
        yield [
            entry
            for entry in entries
            for _, _, received_at, _, retention_seconds, _ in (entry,)
            if not retention_seconds or now_ms <= received_at + retention_seconds * 1000
        ]


class _Payloads:
    """The payloads of one range, read beside its log: both are in the order of ids."""

    def __init__(self, reader: DatabaseReader, objects: Objects, one: ShardRange) -> None:
        base = one.shard << 32
        self._reader = reader
        self._rows = reader.scan(encode_payload_key(base + one.first), _end_key(base + one.end))
        self._blobs = PayloadStore(reader, objects, one.shard, SystemClock())
        self._at_hand: dict[int, bytes] = {}
        self._read_up_to = -1

    async def of(self, entries: Sequence[MetadataFields]) -> list[tuple[bytes | None, str | None]]:
        last = entries[-1][0]
        while self._read_up_to < last:
            rows = await anext(self._rows, None)
            if rows is None:
                break
            for key, value in rows:
                self._at_hand[int.from_bytes(key[_ID_OFFSET:], "big")] = value
            self._read_up_to = int.from_bytes(rows[-1][0][_ID_OFFSET:], "big")
        found: list[tuple[bytes | None, str | None]] = []
        large: dict[int, int] = {}
        for message_id, *_ in entries:
            stored = self._at_hand.get(message_id)
            if stored is None:  # freed since: its retention is over
                found.append((None, None))
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
                large[message_id] = len(found)
                found.append((None, None))
        if large:
            blobs = await self._blobs.read_many(large)
            for message_id, place in large.items():
                blob = blobs.get(message_id)
                found[place] = (blob if isinstance(blob, bytes) else None, None)
        self._at_hand = {one: row for one, row in self._at_hand.items() if one > last}
        return found


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
