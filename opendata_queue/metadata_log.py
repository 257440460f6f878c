"""The metadata log of one shard (RFC 0001, Metadata log entry)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from odq_encodings import (
    MessageMetadata,
    MetadataFields,
    encode_metadata_log_key,
    encode_metadata_log_keys,
    message_metadata_fields,
    metadata_fields_alike,
)
from opendata_queue.store import DatabaseReads

_LAST_SEQUENCE = (1 << 64) - 1


class Log(Protocol):
    """A log that can be scanned, wherever it is."""

    def scan(
        self, from_sequence: int = 0, *, limit: int | None = None
    ) -> AsyncIterator[list[MessageMetadata]]: ...


class MetadataLog:
    """Reads the log: in order from a sequence on, or by message id."""

    def __init__(self, database: DatabaseReads) -> None:
        self._database = database

    async def scan(
        self, from_sequence: int = 0, *, limit: int | None = None
    ) -> AsyncIterator[list[MessageMetadata]]:
        """The entries from ``from_sequence`` on, in chunks of up to 1,000."""
        start = encode_metadata_log_key(from_sequence)
        end = encode_metadata_log_key(_LAST_SEQUENCE)
        async for chunk in self._database.scan(start, end, limit=limit):
            yield [self._decode(key, value) for key, value in chunk]

    async def read_many(self, message_ids: Iterable[int]) -> dict[int, MessageMetadata]:
        """The metadata of those ids that have some."""
        values = await self._database.get_by_id(message_ids, _key_of, _keys_of)
        return {one: self._decode(_key_of(one), value) for one, value in values.items()}

    async def read_fields(self, message_ids: Iterable[int]) -> dict[int, MetadataFields]:
        """The fields of the metadata of those ids that have some, without an object for each."""
        values = await self._database.get_by_id(message_ids, _key_of, _keys_of)
        alike = metadata_fields_alike([*values.values()])
        if alike is not None:
            return dict(zip(values, alike, strict=True))
        decode = self._database.decode
        return {
            one: decode(message_metadata_fields, _key_of(one), value)
            for one, value in values.items()
        }

    def _decode(self, key: bytes, value: bytes) -> MessageMetadata:
        return self._database.decode(MessageMetadata.decode, key, value)


def _key_of(message_id: int) -> bytes:
    """Within a shard the log's sequence is the message's."""
    return encode_metadata_log_key(message_id & 0xFFFF_FFFF)


def _keys_of(message_ids: range) -> list[bytes]:
    """The keys of messages of one shard."""
    first = message_ids.start & 0xFFFF_FFFF
    return encode_metadata_log_keys(range(first, first + len(message_ids)))
