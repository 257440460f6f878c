"""The queue store as a reader sees it: its owner is not disturbed, and nothing is written."""

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
    MessageMetadata,
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
from opendata_queue.filters import Filter, FilterIndex
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import InvalidInputError, QueueNotFoundError, StoreUnavailableError
from opendata_queue.model.options import QueueOptions, check_name
from opendata_queue.model.values import QueueStats
from opendata_queue.queues.attempts import consumers_of
from opendata_queue.queues.browse import MAX_HISTORY_QUEUES
from opendata_queue.queues.matching import matching_queues
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.rows.finished import failures_in
from opendata_queue.queues.store import read_cursor
from opendata_queue.store import DatabaseReader, Rows

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


class QueueSnapshot:
    """Some queues as they were in one moment, for a ``QueueBrowser``.

    What time alone does is not done: a lease that is over still counts, and what is due is still
    delayed, until the owner comes across it.
    """

    def __init__(self, database: DatabaseReader | None, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._queues: dict[str, StoredQueue] = {}
        self._names: set[str] = set()
        """Of all queues that are known to be there, whether or not they were read."""

    @property
    def clock(self) -> Clock:
        return self._clock

    async def load(self, *names: str) -> None:
        """Read queues; ``QueueNotFoundError`` if there is none of a name."""
        for name in names:
            _check_name(name)
            self._queues[name] = await self._read(name)
            self._names.add(name)

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
        return sorted(self._names)

    def queue(self, name: str) -> StoredQueue:
        return self._queues[name]

    def stats(self, name: str) -> QueueStats:
        return self._queues[name].stats()

    async def matching(self, about: MessageMetadata) -> list[str]:
        """The queues whose filters a message satisfies.

        They are read, and as many others as a browser goes through for one message.
        """
        index: FilterIndex[str] = FilterIndex()
        for name, filter in (await self.filters()).items():
            index.add(name, filter)
            self._names.add(name)
        matching = await matching_queues(index, about)
        asked = set(matching)
        for name in [*matching, *(one for one in self.names() if one not in asked)]:
            if len(self._queues) == MAX_HISTORY_QUEUES:
                break
            try:
                await self.load(name)
            except QueueNotFoundError:  # deleted since its filter was read
                self._names.discard(name)
        return [name for name in matching if name in self._names]

    async def consumers_of(self, message_id: int) -> tuple[str, ...]:
        return () if self._database is None else await consumers_of(self._database, message_id)

    async def cursor(self, shard: int) -> int | None:
        return None if self._database is None else await read_cursor(self._database, shard)

    async def catch_up_with_time(self, queue: StoredQueue) -> None:
        """That is for the owner."""

    async def all_durable(self) -> None:
        """All that can be read is."""

    async def failures(self, name: str, *, after_id: int, limit: int) -> list[tuple[int, Failure]]:
        queue = self._queues[name]
        since = queue.options.failed_since(self._clock.now_ms())
        return await queue.finished.failures(after_id, limit=limit, since=since)

    async def failures_in(
        self, queues: Sequence[StoredQueue], message_id: int
    ) -> list[Failure | None]:
        if self._database is None:
            return []
        return await failures_in(self._database, [one.queue_id for one in queues], message_id)


class _NoCommits:
    """Takes the place of a committer in queues that are only read."""

    durable_batch = 0
    batch = 0

    @property
    def rows(self) -> Rows:
        _refuse(None)


def _refuse(_: object) -> NoReturn:
    raise AssertionError("a queue of a snapshot was changed")


def _check_name(name: str) -> None:
    """What can't be the name of a queue is the name of none, as for the owner."""
    try:
        check_name(name)
    except InvalidInputError:
        if isinstance(name, str):
            raise _missing(name) from None
        raise


def _missing(name: str) -> QueueNotFoundError:
    return QueueNotFoundError(f"there is no queue {name!r}")
