"""The queue store as somebody sees it who only reads: no owner is disturbed, nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NoReturn

from odq_encodings import (
    BEING_DELETED,
    ActiveMessagesKey,
    DoneMessagesKey,
    FailedMessagesKey,
    Failure,
    QueueConfig,
    QueueConfigKey,
    QueueCountersKey,
    QueueOptionsKey,
    QueueOptionsRecord,
    RecordType,
    Replay,
    ReplayKey,
    decode_any,
)
from odq_encodings.record import QueueKey
from opendata_queue.clock import Clock
from opendata_queue.errors import QueueNotFoundError, StoreUnavailableError
from opendata_queue.filters import Filter
from opendata_queue.queue_options import QueueOptions, check_name
from opendata_queue.store import DatabaseReader, Rows
from opendata_queue.stored_queue import StoredQueue, failures_in

_RECORDS: Final[dict[RecordType, type[QueueKey]]] = {
    RecordType.QUEUE_CONFIG: QueueConfigKey,
    RecordType.QUEUE_OPTIONS: QueueOptionsKey,
    RecordType.QUEUE_COUNTERS: QueueCountersKey,
    RecordType.ACTIVE_MESSAGES: ActiveMessagesKey,
    RecordType.DONE_MESSAGES: DoneMessagesKey,
    RecordType.FAILED_MESSAGES: FailedMessagesKey,
}
_TRIES: Final = 10
_MOST_SHARDS: Final = 1_000


class QueueLook:
    """Some queues as they were in one moment, for a ``QueueBrowser``.

    What time alone does is not done: a lease that is over still counts, and what is due is still
    delayed, until the owner comes across it.
    """

    def __init__(self, database: DatabaseReader | None, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._queues: dict[str, StoredQueue] = {}

    @property
    def clock(self) -> Clock:
        return self._clock

    async def load(self, *names: str) -> None:
        """Read queues; ``QueueNotFoundError`` if there is none of a name."""
        for name in names:
            check_name(name)
            self._queues[name] = await self._read(name)

    async def _read(self, name: str) -> StoredQueue:
        database = self._database
        if database is None:
            raise _missing(name)
        # The reader follows its writer, and its records belong together.
        for _ in range(_TRIES):
            before = database.position
            queue = await self._read_once(database, name)
            if database.position == before:
                return queue
        raise StoreUnavailableError(f"queue {name!r} changes faster than it can be read")

    async def _read_once(self, database: DatabaseReader, name: str) -> StoredQueue:
        queue_id = name.encode()
        keys = [key(queue_id=queue_id).encode() for key in _RECORDS.values()]
        read = dict(zip(_RECORDS, await database.get_many(keys), strict=True))
        values = {kind: value for kind, value in read.items() if value is not None}
        if RecordType.QUEUE_CONFIG not in values or RecordType.QUEUE_OPTIONS not in values:
            raise _missing(name)
        config = database.decode(QueueConfig.decode, keys[0], values[RecordType.QUEUE_CONFIG])
        options = database.decode(
            QueueOptionsRecord.decode, keys[1], values[RecordType.QUEUE_OPTIONS]
        )
        if options.flags & BEING_DELETED:
            raise _missing(name)
        queue = StoredQueue(
            name,
            Filter.parse(config.filter),
            QueueOptions.from_records(config, options),
            options.created_at,
            database,
            _NoCommits(),
            _refuse,
        )
        queue.load(values)
        prefix = ReplayKey.prefix(queue_id)
        async for chunk in database.scan(prefix, prefix + b"\xff" * 9, limit=_MOST_SHARDS):
            for key, value in chunk:
                where = database.decode(ReplayKey.decode, key, key)
                queue.replays[where.shard] = database.decode(Replay.decode, key, value)
        return queue

    async def filters(self) -> dict[str, Filter]:
        """The filters of all queues, by their names."""
        if self._database is None:
            return {}
        texts: dict[str, str] = {}
        kept: set[str] = set()
        for kind in (RecordType.QUEUE_CONFIG, RecordType.QUEUE_OPTIONS):
            start, end = kind.prefix, kind.prefix + b"\xff" * 64
            async for chunk in self._database.scan(start, end):
                for key, value in chunk:
                    row = self._database.decode(partial(decode_any, key), key, value)
                    name = row.key.queue_id.decode()  # type: ignore[attr-defined]
                    if isinstance(row.value, QueueConfig):
                        texts[name] = row.value.filter
                    elif isinstance(row.value, QueueOptionsRecord) and not (
                        row.value.flags & BEING_DELETED
                    ):
                        kept.add(name)
        return {name: Filter.parse(texts[name]) for name in sorted(kept & texts.keys())}

    # --- what a browser asks for ------------------------------------------------------------------

    def names(self) -> list[str]:
        return sorted(self._queues)

    def queue(self, name: str) -> StoredQueue:
        return self._queues[name]

    async def catch_up_with_time(self, queue: StoredQueue) -> None:
        """That is for the owner."""

    async def all_durable(self) -> None:
        """All that can be read is."""

    async def failures(self, name: str, *, after_id: int, limit: int) -> list[tuple[int, Failure]]:
        queue = self._queues[name]
        since = queue.options.failed_since(self._clock.now_ms())
        return await queue.failures(after_id, limit=limit, since=since)

    async def failures_in(
        self, queues: Sequence[StoredQueue], message_id: int
    ) -> list[Failure | None]:
        if self._database is None:
            return []
        return await failures_in(self._database, queues, message_id)


class _NoCommits:
    """What a queue has instead of a committer that it never asks for anything."""

    durable_batch = 0
    batch = 0

    @property
    def rows(self) -> Rows:
        _refuse(None)


def _refuse(_: object) -> NoReturn:
    raise AssertionError("a queue that is only looked at was changed")


def _missing(name: str) -> QueueNotFoundError:
    return QueueNotFoundError(f"there is no queue {name!r}")
