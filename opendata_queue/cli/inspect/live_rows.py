"""Rows of a root that may be in use, read without disturbing its owner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from odq_encodings import (
    JOURNAL_STATE_KEY,
    ActiveMessagesKey,
    AttemptsKey,
    BacklogKey,
    DoneMessagesKey,
    FailedMessagesKey,
    FailureKey,
    MetadataLogKey,
    PayloadKey,
    QueueConfigKey,
    QueueCountersKey,
    QueueOptionsKey,
    RecordType,
    ReplayKey,
    ScheduleKey,
    SealedDoneKey,
    SealedFailedKey,
)
from odq_encodings.record import QueueKey
from opendata_queue.cli.common import check_root, objects_at
from opendata_queue.model.errors import QueueNotFoundError
from opendata_queue.model.ids import sequence_of, shard_of
from opendata_queue.model.paths import QUEUES_PATH, messages_path
from opendata_queue.store import DatabaseReader, Objects

QUEUES: Final = QUEUES_PATH
MAX_QUEUES: Final = 256
_FIRST_ROW: Final = JOURNAL_STATE_KEY + b"\x00"
"""Behind the row that a database has for its journal (RFC 0013), which is no record."""
_ONE_OF_EACH: Final[tuple[type[QueueKey], ...]] = (
    QueueConfigKey,
    QueueOptionsKey,
    QueueCountersKey,
    ActiveMessagesKey,
    DoneMessagesKey,
    FailedMessagesKey,
)
_MANY_OF_EACH: Final[tuple[type[QueueKey], ...]] = (
    BacklogKey,
    ScheduleKey,
    FailureKey,
    ReplayKey,
    SealedDoneKey,
    SealedFailedKey,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRow:
    database: str
    key: bytes
    value: bytes


class LiveRoot:
    """The databases of a root, opened for reading when they are asked for."""

    def __init__(self, objects: Objects, stack: AsyncExitStack) -> None:
        self.objects = objects
        self._stack = stack
        self._open: dict[str, DatabaseReader | None] = {}

    async def database(self, path: str) -> DatabaseReader | None:
        """None if it is not there: it was not written to yet."""
        if path not in self._open:
            self._open[path] = await self._opened(path)
        return self._open[path]

    async def _opened(self, path: str) -> DatabaseReader | None:
        reader = await DatabaseReader.look(self.objects, path)
        if reader is not None:
            self._stack.push_async_callback(reader.close)
        return reader

    async def get(self, path: str, keys: Sequence[bytes]) -> list[LiveRow]:
        """Those of the rows that are there."""
        database = await self.database(path)
        if database is None:
            return []
        values = await database.get_many(keys)
        return [
            LiveRow(database=path, key=key, value=value)
            for key, value in zip(keys, values, strict=True)
            if value is not None
        ]

    async def scan(self, path: str, prefix: bytes, limit: int) -> list[LiveRow]:
        """The first rows whose keys begin with ``prefix``."""
        database = await self.database(path)
        if database is None:
            return []
        # Behind all keys with this prefix: no key of ours has so many of these bytes.
        end = prefix + b"\xff" * 64
        return [
            LiveRow(database=path, key=key, value=value)
            async for chunk in database.scan(prefix or _FIRST_ROW, end, limit=limit)
            for key, value in chunk
        ]

    async def queue_ids(self) -> list[bytes]:
        rows = await self.scan(QUEUES, RecordType.QUEUE_CONFIG.prefix, MAX_QUEUES)
        return [QueueConfigKey.decode(row.key).queue_id for row in rows]


@asynccontextmanager
async def live_root(url: str) -> AsyncIterator[LiveRoot]:
    await check_root(url)
    async with AsyncExitStack() as stack:
        yield LiveRoot(objects_at(url), stack)


async def rows_of_queue(root: LiveRoot, name: str, limit: int) -> list[LiveRow]:
    """All that is stored of a queue, but of each kind of row only the first ``limit``."""
    queue_id = name.encode()
    keys = [kind(queue_id=queue_id).encode() for kind in _ONE_OF_EACH]
    rows = await root.get(QUEUES, keys)
    if not rows:
        raise QueueNotFoundError(f"there is no queue {name!r}")
    for kind in _MANY_OF_EACH:
        rows += await root.scan(QUEUES, kind.prefix(queue_id), limit)
    return rows


async def rows_of_message(root: LiveRoot, message_id: int) -> list[LiveRow]:
    """What is stored of a message alone. Most of what queues know of it is in their own rows."""
    path = messages_path(shard_of(message_id))
    keys = [
        MetadataLogKey(sequence=sequence_of(message_id)).encode(),
        PayloadKey(message_id=message_id).encode(),
    ]
    failures = [
        FailureKey(queue_id=queue_id, message_id=message_id).encode()
        for queue_id in await root.queue_ids()
    ]
    attempts = AttemptsKey(message_id=message_id).encode()
    return await root.get(path, keys) + await root.get(QUEUES, [attempts, *failures])
