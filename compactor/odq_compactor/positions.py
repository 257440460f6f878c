"""How far the compactor has come in each database, in memory and in the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

from odq_compactor.options import DAY_MS
from odq_compactor.plan import NEW_POSITION, Freeable
from odq_encodings import RetentionPosition, RetentionPositionKey
from opendata_queue.store import Database, DatabaseReads, Rows

_KEY: Final = RetentionPositionKey().encode()
_LAGGING_MS: Final = DAY_MS
"""By how much the clock of one owner may be behind that of the one before it."""
_LATE_MS: Final = 600_000
"""How long after it was received a message may become durable, and its expiry row with it."""


class Written(Protocol):
    """A database with a writer that commits for others too."""

    @property
    def database(self) -> Database: ...
    async def commit(self, rows: Rows) -> None: ...


async def read_position(database: DatabaseReads) -> RetentionPosition:
    value = await database.get(_KEY)
    if value is None:
        return NEW_POSITION
    return database.decode(RetentionPosition.decode, _KEY, value)


class Position:
    """The position of one database."""

    def __init__(self, store: Written, record: RetentionPosition) -> None:
        self.store = store
        self.record = record
        self.freeable = Freeable(record)
        self.due_from = record.passed_at - _LAGGING_MS
        """No expiry row has an earlier deadline. What is gone leaves tombstones, and a pass need
        not read them again."""

    @classmethod
    async def load(cls, store: Written) -> Position:
        return cls(store, await read_position(store.database))

    def passed(self, deadline: int, *, published_until: int) -> None:
        """Note that all messages with an earlier deadline, published until a time, are gone."""
        self.due_from = max(self.due_from, min(deadline, published_until - _LATE_MS))

    def put(self, rows: Rows, *, blob_id: bytes | None = None) -> None:
        """The row that says how far it has come."""
        changes = {} if blob_id is None else {"blob_id": blob_id}
        passed_at = max(self.due_from, self.record.passed_at)
        self.record = self.freeable.into(replace(self.record, passed_at=passed_at, **changes))  # type: ignore[arg-type]
        rows.put(_KEY, self.record.encode())

    async def write(self, *, blob_id: bytes | None = None) -> None:
        rows = Rows()
        self.put(rows, blob_id=blob_id)
        await self.store.commit(rows)
