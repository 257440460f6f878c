"""Several parts of one database as they were in one moment, while its writer goes on.

SlateDB's readers follow their database: they poll it right after they were opened, and then from
time to time. A checkpoint would stand still, but it shows only what has left the WAL, which may be
minutes old. A scan that is open, however, stands still for as long as it lasts. So all scans that
belong together are opened together, and again if the reader moved on meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.store import DatabaseReader

Rows = AsyncIterator[list[tuple[bytes, bytes]]]

_TRIES: Final = 16
_NO_KEY: Final = b"\x00"


async def in_one_moment(reader: DatabaseReader, spans: Sequence[tuple[bytes, bytes]]) -> list[Rows]:
    """A scan of each span, from its first key up to the one behind it, all of the same state."""
    for _ in range(_TRIES):
        before = await _settled(reader)
        scans = [_Scan(reader, *span) for span in spans]
        for scan in scans:
            await scan.begin()
        if await _settled(reader) == before:
            return [scan.rows() for scan in scans]
        for scan in scans:
            await scan.close()
    raise StoreUnavailableError(
        f"could not read {reader.name}: it did not stand still for a moment"
    )


async def _settled(reader: DatabaseReader) -> int | None:
    """Where the reader is, asked after a read: it moves and reports its position in two steps."""
    await reader.get(_NO_KEY)
    return reader.position


class _Scan:
    """A scan that has begun, and from then on sees one state."""

    def __init__(self, reader: DatabaseReader, start: bytes, end: bytes) -> None:
        self._chunks = reader.scan(start, end)
        self._first: list[tuple[bytes, bytes]] | None = None

    async def begin(self) -> None:
        self._first = await anext(self._chunks, None)

    async def rows(self) -> Rows:
        if self._first is not None:
            yield self._first
            self._first = None
            async for chunk in self._chunks:
                yield chunk

    async def close(self) -> None:
        assert isinstance(self._chunks, AsyncGenerator)
        await self._chunks.aclose()
