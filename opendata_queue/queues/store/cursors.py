"""Up to where the logs of shards are routed."""

from __future__ import annotations

from functools import lru_cache

from odq_encodings import Cursor, CursorKey
from opendata_queue.model.ids import FIRST_BULK_SHARD, OWNERS_SHARD
from opendata_queue.store import DatabaseReads, Rows


async def read_cursor(database: DatabaseReads, shard: int) -> int | None:
    """Up to where the log of a shard is routed; none if the queue store does not know it."""
    key = _cursor_key(shard)
    value = await database.get(key)
    return None if value is None else database.decode(Cursor.decode, key, value).next_sequence


async def read_live_shards(database: DatabaseReads) -> list[int]:
    """The live shards that were routed before, but for that of the owner."""
    span = _cursor_key(OWNERS_SHARD + 1), _cursor_key(FIRST_BULK_SHARD)
    return [
        database.decode(CursorKey.decode, key, key).shard
        async for rows in database.scan(*span)
        for key, _ in rows
    ]


def put_cursor(rows: Rows, shard: int, next_sequence: int) -> None:
    rows.put(_cursor_key(shard), Cursor.layout.pack_trusted("Cursor", next_sequence))


@lru_cache(maxsize=1024)
def _cursor_key(shard: int) -> bytes:
    return CursorKey(shard=shard).encode()
