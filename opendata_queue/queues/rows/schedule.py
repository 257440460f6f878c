"""The rows of a queue's schedule: delayed messages, by the time at which they are due."""

from __future__ import annotations

from typing import Final

from odq_encodings import ScheduleEntry, ScheduleKey, decode_due, encode_due
from opendata_queue.model.options import FOR_EVER_MS
from opendata_queue.queues.lanes import LAST_ID
from opendata_queue.queues.rows.overlay import Commits, Overlay, Place, with_id
from opendata_queue.queues.state import Schedule, Waiting
from opendata_queue.store import DatabaseReads

LAST_TIME_MS: Final = (1 << 63) - 1
DUE_AT_ONCE: Final = 500

_pack_schedule = ScheduleEntry.layout.struct.pack
_unpack_schedule = ScheduleEntry.layout.struct.unpack
_SCHEDULE_BYTES: Final = ScheduleEntry.layout.struct.size
_DUE_BYTES: Final = ScheduleKey.suffix.struct.size


class ScheduleRows:
    """Writes and reads them. Reads are for the one that holds the queue's ``Indexes``."""

    __slots__ = (
        "_committer",
        "_database",
        "_from",
        "_prefix",
        "overlay",
    )

    def __init__(self, queue_id: bytes, database: DatabaseReads, committer: Commits) -> None:
        self._database = database
        self._committer = committer
        self._prefix = ScheduleKey.prefix(queue_id)
        self.overlay = Overlay()
        self._from: Place = (FOR_EVER_MS, 0)
        """No row is before it: where a scan for what is due begins."""

    def begins_at(self, place: Place) -> None:
        """What is before that was taken."""
        self._from = place

    def put_schedule(self, message: Waiting) -> None:
        self._from = min(self._from, due_order(message))
        key = self._prefix + encode_due(message.visible_at, message.message_id)
        value = _pack_schedule(message.priority, message.retention_deadline, message.attempts)
        self._committer.rows.put(key, value)
        self._note(message, message)

    def delete_schedule(self, message: Waiting) -> None:
        key = self._prefix + encode_due(message.visible_at, message.message_id)
        self._committer.rows.delete(key)
        self._note(message, None)

    def _note(self, message: Waiting, value: Waiting | None) -> None:
        key = (message.visible_at, message.message_id)
        self.overlay.note(key, value, self._committer.batch)

    async def after(self, schedule: Schedule, after: Place, count: int) -> list[Waiting]:
        """Scheduled messages that come after a time and an id, in order."""
        if not schedule.count:
            return []
        overlay = self.overlay
        with overlay.held(self._committer.durable_batch):
            start = self._prefix + encode_due(schedule.due_from)
            start = max(start, self._prefix + encode_due(after[0], after[1] + 1))
            end = self._prefix + encode_due(LAST_TIME_MS, LAST_ID)
            scanned: dict[Place, Waiting] = {}
            async for chunk in self._database.scan(start, end, limit=count + len(overlay)):
                for key, value in chunk:
                    message = self._scheduled_message(key, value)
                    scanned[due_order(message)] = message
            rows = (m for m in overlay.over(scanned) if due_order(m) > after)
            return sorted(rows, key=due_order)[:count]

    async def find(self, schedule: Schedule, visible_at: int, message_id: int) -> Waiting | None:
        """A message if it is scheduled for that time, or has just been."""
        if not schedule.count:
            return None
        overlay = self.overlay
        with overlay.held(self._committer.durable_batch):
            key = self._prefix + encode_due(visible_at, message_id)
            value = await self._database.get(key)
            scanned = {}
            if value is not None:
                scanned[visible_at, message_id] = self._scheduled_message(key, value)
            return with_id(message_id, overlay.over(scanned))

    async def due(self, schedule: Schedule, now: int) -> tuple[list[Waiting], Place]:
        """Scheduled messages that are due, some hundred at most, and the place of the next one."""
        overlay = self.overlay
        with overlay.held(self._committer.durable_batch):
            # Not the beginning of its millisecond, of which thousands may have been taken already.
            first = max((schedule.due_from, 0), self._from)
            limit = DUE_AT_ONCE + 1 + overlay.gone_from(first)
            start = self._prefix + encode_due(*first)
            end = self._prefix + encode_due(LAST_TIME_MS, LAST_ID)
            scanned: dict[Place, Waiting] = {}
            async for chunk in self._database.scan(start, end, limit=limit):
                for key, value in chunk:
                    message = self._scheduled_message(key, value)
                    scanned[message.visible_at, message.message_id] = message
            rows = sorted(overlay.over(scanned), key=due_order)
        due = [message for message in rows[:DUE_AT_ONCE] if message.visible_at <= now]
        later = rows[len(due) : len(due) + 1]
        return due, due_order(later[0]) if later else (LAST_TIME_MS, LAST_ID)

    def _scheduled_message(self, key: bytes, value: bytes) -> Waiting:
        suffix = key[len(self._prefix) :]
        if len(value) == _SCHEDULE_BYTES and len(suffix) == _DUE_BYTES:  # a fifth of the time
            visible_at, message_id = decode_due(suffix)
            priority, deadline, attempts = _unpack_schedule(value)
            return Waiting(priority, message_id, visible_at, deadline, attempts)
        row = self._database.decode(ScheduleEntry.decode, key, value)
        due = self._database.decode(ScheduleKey.decode, key, key)
        return Waiting(
            row.priority, due.message_id, due.visible_at, row.retention_deadline, row.attempts
        )


def due_order(message: Waiting) -> Place:
    return message.visible_at, message.message_id
