"""What is delayed: how many messages, and when the first of them may be due."""

from __future__ import annotations

from collections.abc import Sequence

from opendata_queue.queues.state.records import ScheduleChanges, Waiting


class Schedule:
    """The messages that can be claimed later. They are in rows; here they are counted."""

    __slots__ = ("_rows", "count", "due_from")

    def __init__(self, rows: ScheduleChanges, count: int, due_from: int) -> None:
        self._rows = rows
        self.count = count
        self.due_from = due_from
        """None of them is due before; some may be due later only."""

    def add(self, message: Waiting) -> None:
        if 0 < message.retention_deadline < message.visible_at:
            # It will never be delivered: it is due when it has expired, and dropped then.
            message = message._replace(visible_at=message.retention_deadline + 1)
        if not self.count or message.visible_at < self.due_from:
            self.due_from = message.visible_at
        self.count += 1
        self._rows.put_schedule(message)

    def remove(self, messages: Sequence[Waiting]) -> None:
        for message in messages:
            self._rows.delete_schedule(message)
        self.count -= len(messages)
