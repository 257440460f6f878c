"""The log of a shard that another process writes, or wrote."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

from odq_encodings import MessageMetadata
from opendata_queue.log.metadata_log import Log, LogChunk, Names
from opendata_queue.log.readers import ShardReaders, is_not_there
from opendata_queue.model.errors import OdqError, StoreUnavailableError

T = TypeVar("T")


class FollowedLog:
    """Scans through whatever reader is open; one that fails is opened again for the next scan."""

    def __init__(self, readers: ShardReaders, shard: int) -> None:
        self._readers = readers
        self._shard = shard

    async def scan(
        self, from_sequence: int = 0, *, limit: int | None = None
    ) -> AsyncIterator[list[MessageMetadata]]:
        """The entries from ``from_sequence`` on; none while the shard has no database."""
        async for chunk in self._scan(lambda log: log.scan(from_sequence, limit=limit)):
            yield chunk

    def chunks(
        self, names: Names, from_sequence: int = 0, *, limit: int | None = None
    ) -> AsyncGenerator[LogChunk]:
        """The same by column; a caller that needs no more closes it, so that the reader is free."""
        return self._scan(lambda log: log.chunks(names, from_sequence, limit=limit))

    async def _scan(self, begin: Callable[[Log], AsyncIterator[T]]) -> AsyncGenerator[T]:
        try:
            async with self._readers.using(self._shard) as reader:
                try:
                    async for chunk in begin(reader.log):
                        yield chunk
                except OdqError:
                    self._readers.renew(self._shard, reader)
                    raise
        except OdqError as error:
            if not is_not_there(error):
                # Whatever it is, the shards of others must not stop this process.
                raise StoreUnavailableError(
                    f"could not read the log of shard {self._shard}: {error}"
                ) from error
