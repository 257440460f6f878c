"""One queue in the store: its state in memory, and the rows behind it (RFC 0006)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    BacklogEntry,
    BacklogKey,
    DoneMessages,
    DoneMessagesKey,
    FailedMessages,
    FailedMessagesKey,
    Failure,
    FailureKey,
    QueueConfig,
    QueueConfigKey,
    QueueCounters,
    QueueCountersKey,
    QueueOptionsKey,
    RecordType,
    ScheduleEntry,
    ScheduleKey,
    SealedDoneKey,
    SealedFailedKey,
    encode_due,
)
from opendata_queue.committer import GroupCommitter
from opendata_queue.filters import Filter
from opendata_queue.queue_options import QueueOptions
from opendata_queue.queue_state import QueueState, Waiting
from opendata_queue.store import Database, Rows

LAST_ID: Final = (1 << 64) - 1
LAST_TIME_MS: Final = (1 << 63) - 1
DUE_AT_ONCE: Final = 500

_pack_backlog_suffix = BacklogKey.suffix.struct.pack
_pack_backlog = BacklogEntry.layout.struct.pack
_pack_schedule = ScheduleEntry.layout.struct.pack

Key = TypeVar("Key")
T = TypeVar("T")


class Overlay(Generic[Key]):
    """Changes to index rows that a scan may not see yet.

    A scan sees what was durable when it began. Whatever was changed in a batch that was not
    durable by then is kept here, to be laid over what the scan returns.
    """

    __slots__ = ("_changes", "_floor")

    def __init__(self) -> None:
        self._changes: dict[Key, tuple[Waiting | None, int]] = {}
        self._floor: int | None = None

    def __len__(self) -> int:
        return len(self._changes)

    def note(self, key: Key, message: Waiting | None, batch: int) -> None:
        self._changes.pop(key, None)  # so that the order of the dictionary is that of batches
        self._changes[key] = message, batch

    def hold(self, durable_batch: int) -> None:
        """A scan begins: keep what was not durable yet, however long the scan takes."""
        self._floor = durable_batch

    def let_go(self) -> None:
        self._floor = None

    def prune(self, durable_batch: int) -> None:
        """Drop what every later scan will see."""
        limit = durable_batch if self._floor is None else min(durable_batch, self._floor)
        while self._changes:
            key = next(iter(self._changes))
            if self._changes[key][1] > limit:
                return
            del self._changes[key]

    def over(self, scanned: dict[Key, Waiting]) -> list[Waiting]:
        """What the rows are, given what a scan said they were."""
        merged = dict(scanned)
        for key, (message, _) in self._changes.items():
            if message is None:
                merged.pop(key, None)
            else:
                merged[key] = message
        return list(merged.values())


class StoredQueue:
    """The state of a queue, and the writing and reading of all its rows."""

    def __init__(
        self,
        name: str,
        filter: Filter,
        options: QueueOptions,
        created_at_ms: int,
        database: Database,
        committer: GroupCommitter,
        mark_changed: Callable[[StoredQueue], None],
    ) -> None:
        self.name = name
        self.queue_id = name.encode()
        self.filter = filter
        self.options = options
        self.created_at_ms = created_at_ms
        self._database = database
        self._committer = committer
        self._mark_changed = mark_changed
        self._backlog_prefix = BacklogKey.prefix(self.queue_id)
        self._schedule_prefix = ScheduleKey.prefix(self.queue_id)
        self._active_key = ActiveMessagesKey(queue_id=self.queue_id).encode()
        self._done_key = DoneMessagesKey(queue_id=self.queue_id).encode()
        self._failed_key = FailedMessagesKey(queue_id=self.queue_id).encode()
        self._counters_key = QueueCountersKey(queue_id=self.queue_id).encode()
        self._backlog_overlay: Overlay[tuple[int, int]] = Overlay()
        self._schedule_overlay: Overlay[tuple[int, int]] = Overlay()
        self._waiters: dict[asyncio.Future[None], None] = {}
        self.reading = asyncio.Lock()
        """Held by whoever moves messages out of the indexes."""
        self.state = QueueState(options.rules(), self)

    def load(self, values: dict[RecordType, bytes]) -> None:
        """Take over the state that the store holds, given its records by their type."""

        def decoded(kind: RecordType, decode: Callable[[bytes], T]) -> T | None:
            value = values.get(kind)
            return None if value is None else self._database.decode(decode, kind.prefix, value)

        self.state = QueueState(
            self.options.rules(),
            self,
            active=decoded(RecordType.ACTIVE_MESSAGES, ActiveMessages.decode),
            done=decoded(RecordType.DONE_MESSAGES, DoneMessages.decode),
            failed=decoded(RecordType.FAILED_MESSAGES, FailedMessages.decode),
            counters=decoded(RecordType.QUEUE_COUNTERS, QueueCounters.decode),
        )

    # --- writing ----------------------------------------------------------------------------------

    def put_settings(self, rows: Rows) -> None:
        """The rows of the filter and the options."""
        config = QueueConfig(
            filter=self.filter.text,
            max_attempts=self.options.max_attempts,
            done_retention_seconds=self.options.done_retention_seconds,
        )
        rows.put(QueueConfigKey(queue_id=self.queue_id).encode(), config.encode())
        rows.put(
            QueueOptionsKey(queue_id=self.queue_id).encode(),
            self.options.encode(self.created_at_ms),
        )

    def put_state(self, rows: Rows, *, everything: bool = False) -> None:
        """The rows of the state that have changed; encoded once for all changes of a commit."""
        rows.put(self._active_key, self.state.active_record())
        if everything or self.state.done_changed:
            rows.put(self._done_key, self.state.done_record())
        if everything or self.state.failed_changed:
            rows.put(self._failed_key, self.state.failed_record())
        rows.put(self._counters_key, self.state.counters_record())

    def changed(self) -> None:
        """Say that the state has changed, after a transition and before anything is awaited."""
        self._mark_changed(self)

    def batch_is_durable(self) -> None:
        durable = self._committer.durable_batch
        self._backlog_overlay.prune(durable)
        self._schedule_overlay.prune(durable)

    def put_backlog(self, message: Waiting) -> None:
        key = self._backlog_prefix + _pack_backlog_suffix(message.priority, message.message_id)
        value = _pack_backlog(message.visible_at, message.retention_deadline, message.attempts)
        self._committer.rows.put(key, value)
        self._backlog_overlay.note(message[:2], message, self._committer.batch)

    def delete_backlog(self, message: Waiting) -> None:
        key = self._backlog_prefix + _pack_backlog_suffix(message.priority, message.message_id)
        self._committer.rows.delete(key)
        self._backlog_overlay.note(message[:2], None, self._committer.batch)

    def put_schedule(self, message: Waiting) -> None:
        key = self._schedule_prefix + encode_due(message.visible_at, message.message_id)
        value = _pack_schedule(message.priority, message.retention_deadline, message.attempts)
        self._committer.rows.put(key, value)
        self._note_schedule(message, message)

    def delete_schedule(self, message: Waiting) -> None:
        key = self._schedule_prefix + encode_due(message.visible_at, message.message_id)
        self._committer.rows.delete(key)
        self._note_schedule(message, None)

    def _note_schedule(self, message: Waiting, value: Waiting | None) -> None:
        key = (message.visible_at, message.message_id)
        self._schedule_overlay.note(key, value, self._committer.batch)

    def seal_done(self, bucket: int, value: bytes) -> None:
        self._committer.rows.put(
            SealedDoneKey(queue_id=self.queue_id, bucket=bucket).encode(), value
        )

    def seal_failed(self, bucket: int, value: bytes) -> None:
        self._committer.rows.put(
            SealedFailedKey(queue_id=self.queue_id, bucket=bucket).encode(), value
        )

    def put_failure(self, message_id: int, failure: Failure) -> None:
        key = FailureKey(queue_id=self.queue_id, message_id=message_id).encode()
        self._committer.rows.put(key, failure.encode())

    def delete_failure(self, message_id: int) -> None:
        key = FailureKey(queue_id=self.queue_id, message_id=message_id).encode()
        self._committer.rows.delete(key)

    # --- reading ----------------------------------------------------------------------------------

    async def first_of_backlog(self, count: int) -> list[Waiting]:
        """The first ``count`` messages behind the window, in order. Hold ``reading``."""
        overlay = self._backlog_overlay
        overlay.hold(self._committer.durable_batch)
        try:
            scanned: dict[tuple[int, int], Waiting] = {}
            for priority, from_id, _ in self.state.backlog.ranges():
                if len(scanned) >= count + len(overlay):
                    break
                limit = count + len(overlay) - len(scanned)
                start = self._backlog_prefix + _pack_backlog_suffix(priority, from_id)
                end = self._backlog_prefix + _pack_backlog_suffix(priority, LAST_ID) + b"\x00"
                async for chunk in self._database.scan(start, end, limit=limit):
                    for key, value in chunk:
                        message = self._backlog_message(key, value)
                        scanned[message[:2]] = message
            return sorted(overlay.over(scanned))[:count]
        finally:
            overlay.let_go()

    async def first_of_schedule(self, now: int) -> tuple[list[Waiting], int]:
        """Scheduled messages that are due, some hundred at most, and when the next one is.

        Hold ``reading``.
        """
        overlay = self._schedule_overlay
        overlay.hold(self._committer.durable_batch)
        try:
            limit = DUE_AT_ONCE + 1 + len(overlay)
            start = self._schedule_prefix + encode_due(self.state.scheduled_from)
            end = self._schedule_prefix + encode_due(LAST_TIME_MS, LAST_ID)
            scanned: dict[tuple[int, int], Waiting] = {}
            async for chunk in self._database.scan(start, end, limit=limit):
                for key, value in chunk:
                    message = self._scheduled_message(key, value)
                    scanned[message.visible_at, message.message_id] = message
            rows = sorted(overlay.over(scanned), key=_due_order)
        finally:
            overlay.let_go()
        due = [message for message in rows[:DUE_AT_ONCE] if message.visible_at <= now]
        later = rows[len(due) : len(due) + 1]
        return due, later[0].visible_at if later else LAST_TIME_MS

    def _backlog_message(self, key: bytes, value: bytes) -> Waiting:
        row = self._database.decode(BacklogEntry.decode, key, value)
        suffix = key[len(self._backlog_prefix) :]
        priority, message_id = BacklogKey.suffix.struct.unpack(suffix)
        return Waiting(priority, message_id, row.visible_at, row.retention_deadline, row.attempts)

    def _scheduled_message(self, key: bytes, value: bytes) -> Waiting:
        row = self._database.decode(ScheduleEntry.decode, key, value)
        due = self._database.decode(ScheduleKey.decode, key, key)
        return Waiting(
            row.priority, due.message_id, due.visible_at, row.retention_deadline, row.attempts
        )

    async def failures(self, after_id: int = -1, *, limit: int) -> list[tuple[int, Failure]]:
        """Failed messages by ascending id."""
        prefix = FailureKey.prefix(self.queue_id)
        start = prefix + FailureKey.suffix.struct.pack(after_id + 1)
        end = prefix + FailureKey.suffix.struct.pack(LAST_ID) + b"\x00"
        found = []
        async for chunk in self._database.scan(start, end, limit=limit):
            for key, value in chunk:
                (message_id,) = FailureKey.suffix.struct.unpack(key[len(prefix) :])
                found.append((message_id, self._database.decode(Failure.decode, key, value)))
        return found

    async def failure(self, message_id: int) -> Failure | None:
        key = FailureKey(queue_id=self.queue_id, message_id=message_id).encode()
        value = await self._database.get(key)
        return None if value is None else self._database.decode(Failure.decode, key, value)

    # --- waiting consumers ------------------------------------------------------------------------

    async def wait(self, seconds: float) -> None:
        """Wait until there may be something to claim; first come, first served."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[turn] = None
        try:
            async with asyncio.timeout(seconds):
                await turn
        except TimeoutError:
            return
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was our turn: let the next one have it
                self.wake()
            raise
        finally:
            self._waiters.pop(turn, None)

    def wake(self) -> None:
        """Wake as many of those who wait as there are messages for."""
        self._wake(self.state.promised)

    def wake_all(self) -> None:
        self._wake(len(self._waiters))

    def _wake(self, count: int) -> None:
        while self._waiters and count > 0:
            turn = next(iter(self._waiters))
            del self._waiters[turn]
            if not turn.done():
                turn.set_result(None)
                count -= 1


def _due_order(message: Waiting) -> tuple[int, int]:
    return message.visible_at, message.message_id
