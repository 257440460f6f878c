"""The rows of the tables about queues, out of one moment of the queue store (RFC 0006)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

from odq_encodings import (
    BEING_DELETED,
    ActiveMessages,
    ActiveMessagesKey,
    Attempts,
    AttemptsKey,
    BacklogEntry,
    BacklogKey,
    DoneMessages,
    DoneMessagesKey,
    Failure,
    FailureKey,
    QueueConfig,
    QueueConfigKey,
    QueueCounters,
    QueueCountersKey,
    QueueOptionsKey,
    QueueOptionsRecord,
    RecordType,
    ScheduleEntry,
    ScheduleKey,
    SealedDoneKey,
)
from opendata_queue.model.options import QueueOptions
from opendata_queue.spark.read.moment import Rows, in_one_moment
from opendata_queue.store import DatabaseReader

Record = dict[str, Any]
_SEALED: Final = 2
_OPTIONS: Final = (1, RecordType.QUEUE_OPTIONS)
_CONFIGS: Final = (1, RecordType.QUEUE_CONFIG)
_COUNTS: Final = ("available", "delayed", "in_flight", "done", "failed", "expired")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Queue:
    """What must be known of a queue to read its rows. One that is being deleted is left out."""

    name: str
    config: QueueConfig
    options: QueueOptionsRecord

    def keeps_done(self, done_at: int, now_ms: int) -> bool:
        retention = self.config.done_retention_seconds
        return not retention or now_ms <= done_at + retention * 1000

    def keeps_failed(self, failed_at: int, now_ms: int) -> bool:
        retention = self.options.failed_retention_seconds
        return not retention or now_ms <= failed_at + retention * 1000


_Queues = dict[bytes, _Queue]
_Kind = tuple[int, RecordType]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """Of which records a table is made, by key version and type, and how."""

    kinds: tuple[_Kind, ...]
    records: Callable[[DatabaseReader, list[Rows], _Queues, int], AsyncIterator[list[Record]]]


async def queue_table(
    reader: DatabaseReader, table: str, now_ms: int
) -> AsyncIterator[list[Record]]:
    """The rows of a table, in lists, all of one moment; times are milliseconds.

    Entries that are past their retention are not listed, whether or not they are removed yet.
    """
    wanted = _TABLES[table]
    options, configs, *scans = await in_one_moment(
        reader, [_span(kind) for kind in (_OPTIONS, _CONFIGS, *wanted.kinds)]
    )
    queues = await _known_queues(reader, options, configs)
    async for records in wanted.records(reader, scans, queues, now_ms):
        yield records


def _span(kind: _Kind) -> tuple[bytes, bytes]:
    version, type_ = kind
    return bytes([version, type_]), bytes([version, type_ + 1])


async def _known_queues(reader: DatabaseReader, options_rows: Rows, config_rows: Rows) -> _Queues:
    stored = {}
    async for rows in options_rows:
        for key, value in rows:
            queue = reader.decode(QueueOptionsKey.decode, key, key).queue_id
            stored[queue] = reader.decode(QueueOptionsRecord.decode, key, value)
    queues = {}
    async for rows in config_rows:
        for key, value in rows:
            queue = reader.decode(QueueConfigKey.decode, key, key).queue_id
            config = reader.decode(QueueConfig.decode, key, value)
            options = stored.get(queue)
            if options is not None and not options.flags & BEING_DELETED:
                queues[queue] = _Queue(name=queue.decode(), config=config, options=options)
    return queues


async def _queues(
    reader: DatabaseReader, scans: list[Rows], queues: _Queues, _: int
) -> AsyncIterator[list[Record]]:
    counts = {queue: dict.fromkeys(_COUNTS, 0) for queue in queues}
    counter_rows, active_rows = scans
    async for rows in counter_rows:
        for key, value in rows:
            found = counts.get(reader.decode(QueueCountersKey.decode, key, key).queue_id)
            if found is not None:
                counters = reader.decode(QueueCounters.decode, key, value)
                found["available"] = sum(one.rows for one in counters.backlog)
                found["delayed"] = counters.scheduled
                found |= {name: getattr(counters, name) for name in ("done", "failed", "expired")}
    async for rows in active_rows:
        for key, value in rows:
            found = counts.get(reader.decode(ActiveMessagesKey.decode, key, key).queue_id)
            if found is not None:
                active = reader.decode(ActiveMessages.decode, key, value)
                found["available"] += len(active.available)
                found["in_flight"] = len(active.in_flight)
    for queue_id, queue in queues.items():
        configured = QueueOptions.from_records(queue.config, queue.options)
        record = {name: getattr(configured, name) for name in QueueOptions.__slots__}
        record |= {
            "queue": queue.name,
            "filter": queue.config.filter,
            "created_at": queue.options.created_at,
        }
        yield [record | counts[queue_id]]


async def _active(
    reader: DatabaseReader, scans: list[Rows], queues: _Queues, now_ms: int
) -> AsyncIterator[list[Record]]:
    async for rows in scans[0]:
        for key, value in rows:
            queue = queues.get(reader.decode(ActiveMessagesKey.decode, key, key).queue_id)
            if queue is None:
                continue
            active = reader.decode(ActiveMessages.decode, key, value)
            yield [
                {
                    "queue": queue.name,
                    "message_id": one.message_id,
                    "state": "available",
                    "priority": one.priority,
                    "attempts": one.attempts,
                    "visible_at": one.visible_at,
                    "expires_at": one.retention_deadline or None,
                }
                for one in active.available
            ] + [
                {
                    "queue": queue.name,
                    "message_id": held.message_id,
                    "state": "in_flight",
                    "priority": held.priority,
                    "attempts": held.attempts,
                    "claimed_at": held.claimed_at,
                    "lease_deadline": held.lease_deadline,
                }
                for held in active.in_flight
            ]


async def _backlog(
    reader: DatabaseReader, scans: list[Rows], queues: _Queues, now_ms: int
) -> AsyncIterator[list[Record]]:
    async for rows in scans[0]:
        records = []
        for raw, value in rows:
            key = reader.decode(BacklogKey.decode, raw, raw)
            queue = queues.get(key.queue_id)
            if queue is None:
                continue
            entry = reader.decode(BacklogEntry.decode, raw, value)
            records.append(
                {
                    "queue": queue.name,
                    "message_id": key.message_id,
                    "priority": key.priority,
                    "attempts": entry.attempts,
                    "visible_at": entry.visible_at,
                    "expires_at": entry.retention_deadline or None,
                }
            )
        yield records


async def _scheduled(
    reader: DatabaseReader, scans: list[Rows], queues: _Queues, now_ms: int
) -> AsyncIterator[list[Record]]:
    async for rows in scans[0]:
        records = []
        for raw, value in rows:
            key = reader.decode(ScheduleKey.decode, raw, raw)
            queue = queues.get(key.queue_id)
            if queue is None:
                continue
            entry = reader.decode(ScheduleEntry.decode, raw, value)
            records.append(
                {
                    "queue": queue.name,
                    "message_id": key.message_id,
                    "priority": entry.priority,
                    "attempts": entry.attempts,
                    "visible_at": key.visible_at,
                    "expires_at": entry.retention_deadline or None,
                }
            )
        yield records


async def _done(
    reader: DatabaseReader, scans: list[Rows], queues: _Queues, now_ms: int
) -> AsyncIterator[list[Record]]:
    for found, decode in zip(scans, (SealedDoneKey.decode, DoneMessagesKey.decode), strict=True):
        async for rows in found:
            for key, value in rows:
                queue = queues.get(reader.decode(decode, key, key).queue_id)
                if queue is None:
                    continue
                yield [
                    {
                        "queue": queue.name,
                        "message_id": one.message_id,
                        "done_at": one.done_at,
                        "attempts": one.attempts,
                    }
                    for one in reader.decode(DoneMessages.decode, key, value).messages
                    if queue.keeps_done(one.done_at, now_ms)
                ]


async def _failed(
    reader: DatabaseReader, scans: list[Rows], queues: _Queues, now_ms: int
) -> AsyncIterator[list[Record]]:
    async for rows in scans[0]:
        records = []
        for raw, value in rows:
            key = reader.decode(FailureKey.decode, raw, raw)
            failure = reader.decode(Failure.decode, raw, value)
            queue = queues.get(key.queue_id)
            if queue is None or not queue.keeps_failed(failure.failed_at, now_ms):
                continue
            records.append(
                {
                    "queue": queue.name,
                    "message_id": key.message_id,
                    "failed_at": failure.failed_at,
                    "attempts": failure.attempts,
                    "priority": failure.priority,
                    "consumer": failure.consumer or None,
                    "error": failure.error,
                    "expires_at": failure.retention_deadline or None,
                }
            )
        yield records


async def _attempts(
    reader: DatabaseReader, scans: list[Rows], _: _Queues, __: int
) -> AsyncIterator[list[Record]]:
    async for rows in scans[0]:
        yield [
            {
                "message_id": reader.decode(AttemptsKey.decode, key, key).message_id,
                "consumers": list(reader.decode(Attempts.decode, key, value).consumer_ids),
            }
            for key, value in rows
        ]


_TABLES: Final[dict[str, _Table]] = {
    "queues": _Table(
        kinds=((1, RecordType.QUEUE_COUNTERS), (1, RecordType.ACTIVE_MESSAGES)), records=_queues
    ),
    "active": _Table(kinds=((1, RecordType.ACTIVE_MESSAGES),), records=_active),
    "scheduled": _Table(kinds=((1, RecordType.SCHEDULE),), records=_scheduled),
    "backlog": _Table(kinds=((1, RecordType.BACKLOG),), records=_backlog),
    "done": _Table(
        kinds=((_SEALED, RecordType.DONE_MESSAGES), (1, RecordType.DONE_MESSAGES)), records=_done
    ),
    "failed": _Table(kinds=((1, RecordType.FAILURE),), records=_failed),
    "attempts": _Table(kinds=((1, RecordType.ATTEMPTS),), records=_attempts),
}
