"""The metadata log of one shard (RFC 0001, Metadata log entry)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable
from typing import Protocol

from odq_encodings import (
    EncodingError,
    MessageMetadata,
    MetadataColumns,
    MetadataFields,
    encode_metadata_log_key,
    encode_metadata_log_keys,
    message_metadata_fields,
    metadata_fields_alike,
)
from opendata_queue.model.allowance import RowBudget
from opendata_queue.model.ids import SEQUENCE_MASK
from opendata_queue.store import DatabaseReads, ScannedRows, read_log

_LAST_SEQUENCE = (1 << 64) - 1


Names = Callable[[], Collection[str] | None]
"""Which headers are wanted at the moment; none for all of them."""


class LogChunk:
    """Some entries of a log, in order, by column."""

    __slots__ = ("_columns", "_names", "_rows")

    def __init__(self, rows: ScannedRows, names: Collection[str] | None) -> None:
        self._rows = rows
        self._names = names
        self._columns = read_log(rows, names)

    def columns(self, names: Collection[str] | None) -> MetadataColumns:
        """The columns of the entries, with these headers only."""
        if names != self._names:
            self._names, self._columns = names, read_log(self._rows, names)
        return self._columns


class Log(Protocol):
    """A log that can be scanned, wherever it is."""

    def chunks(
        self, names: Names, from_sequence: int = 0, *, limit: int | None = None
    ) -> AsyncGenerator[LogChunk]: ...

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
        """The entries from ``from_sequence`` on, in chunks of up to 1,000, fewer of large ones."""
        start = encode_metadata_log_key(from_sequence)
        end = encode_metadata_log_key(_LAST_SEQUENCE)
        async for chunk in self._database.scan(start, end, limit=limit):
            yield [self._decode(key, value) for key, value in chunk]

    async def chunks(
        self, names: Names, from_sequence: int = 0, *, limit: int | None = None
    ) -> AsyncGenerator[LogChunk]:
        """``scan`` by column, without an object for any entry."""
        start = encode_metadata_log_key(from_sequence)
        end = encode_metadata_log_key(_LAST_SEQUENCE)
        async for rows in self._database.scan_packed(start, end, limit=limit):
            if not len(rows):
                continue
            try:
                chunk = LogChunk(rows, names())
            except EncodingError:
                for key, value in rows.rows():
                    self._decode(key, value)  # says which row it is
                raise
            yield chunk

    async def read_many(
        self, message_ids: Iterable[int], budget: RowBudget | None = None
    ) -> dict[int, MessageMetadata]:
        """The metadata of those ids that have some."""
        values = await self._database.get_by_id(message_ids, _key_of, _keys_of, budget)
        return {one: self._decode(_key_of(one), value) for one, value in values.items()}

    async def read_fields(
        self, message_ids: Iterable[int], budget: RowBudget | None = None
    ) -> dict[int, MetadataFields]:
        """The fields of the metadata of those ids that have some, without an object for each."""
        values = await self._database.get_by_id(message_ids, _key_of, _keys_of, budget)
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
    return encode_metadata_log_key(message_id & SEQUENCE_MASK)


def _keys_of(message_ids: range) -> list[bytes]:
    """The keys of messages of one shard."""
    first = message_ids.start & SEQUENCE_MASK
    return encode_metadata_log_keys(range(first, first + len(message_ids)))
