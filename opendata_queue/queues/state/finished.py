"""What is finished: done and failed messages, in open buckets that are sealed when they are full.

A sealed bucket is a row, and is not in memory any more (RFC 0006).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter

from odq_encodings import (
    DoneMessage,
    DoneMessages,
    FailedMessage,
    FailedMessages,
    Failure,
    QueueCounters,
)
from opendata_queue.queues.state.records import FinishedChanges, Held

_encode_done = DoneMessage.layout.struct.pack
_id_of = attrgetter("message_id")
_attempts_of = attrgetter("attempts")
_encode_failed = FailedMessage.layout.struct.pack


class Finished:
    """The open buckets, and how many messages are done and have failed in all."""

    __slots__ = (
        "_bucket",
        "_done_open",
        "_failed_open",
        "_rows",
        "done",
        "done_bucket",
        "done_changed",
        "failed",
        "failed_bucket",
        "failed_changed",
    )

    def __init__(
        self,
        bucket: int,
        rows: FinishedChanges,
        *,
        done: DoneMessages | None,
        failed: FailedMessages | None,
        counters: QueueCounters | None,
    ) -> None:
        self._bucket = bucket
        self._rows = rows
        self._done_open = [] if done is None else [m.encode() for m in done.messages]
        self._failed_open = (
            {} if failed is None else {m.message_id: m.encode() for m in failed.messages}
        )
        self.done = 0 if counters is None else counters.done
        self.failed = 0 if counters is None else counters.failed
        self.done_bucket = 0 if counters is None else counters.done_bucket
        """The number under which the open bucket will be sealed."""
        self.failed_bucket = 0 if counters is None else counters.failed_bucket
        self.done_changed = False
        """Whether the open bucket differs from the last ``done_record``."""
        self.failed_changed = False

    def follow(self, bucket: int) -> None:
        """Seal buckets of another size from now on."""
        self._bucket = bucket

    # --- done -------------------------------------------------------------------------------------

    def add_done(self, messages: Sequence[Held], now: int) -> None:
        if not messages:
            return
        ids, attempts = map(_id_of, messages), map(_attempts_of, messages)
        entries = list(map(_encode_done, ids, repeat(now), attempts))
        done, taken = self._done_open, 0
        while taken < len(entries):
            room = max(1, self._bucket - len(done))
            done += entries[taken : taken + room]
            taken += room
            if len(done) >= self._bucket:
                self._rows.seal_done(self.done_bucket, DoneMessages.join(done))
                self.done_bucket += 1
                done = self._done_open = []
        self.done += len(messages)
        self.done_changed = True

    def open_done(self) -> bytes:
        """The record of the done messages that are in no sealed bucket, the latest last."""
        return DoneMessages.join(self._done_open)

    def done_record(self) -> bytes:
        """The open bucket, to be written: ``done_changed`` is about what comes after."""
        self.done_changed = False
        return DoneMessages.join(self._done_open)

    def trim_done(self, since: int) -> int:
        """Forget what was done before a time and is in the open bucket; returns how many."""
        kept = [one for one in self._done_open if DoneMessage.decode(one).done_at >= since]
        forgotten = len(self._done_open) - len(kept)
        if forgotten:
            self._done_open = kept
            self.forget_done(forgotten)
        return forgotten

    def forget_done(self, count: int) -> None:
        """So many entries of sealed buckets were dropped."""
        self.done -= count
        self.done_changed = True

    # --- failed -----------------------------------------------------------------------------------

    def add_failed(self, held: Held, retention_deadline: int, now: int, error: str) -> None:
        self.failed += 1
        self.failed_changed = True
        self._failed_open[held.message_id] = _encode_failed(held.message_id, now, held.attempts)
        self._rows.put_failure(
            held.message_id,
            Failure(
                bucket=self.failed_bucket,
                failed_at=now,
                attempts=held.attempts,
                priority=held.priority,
                retention_deadline=retention_deadline,
                consumer=held.consumer,
                error=error,
            ),
        )
        if len(self._failed_open) >= self._bucket:
            value = FailedMessages.join(self._failed_open.values())
            self._rows.seal_failed(self.failed_bucket, value)
            self.failed_bucket += 1
            self._failed_open = {}

    def forget_failed(self, message_id: int) -> bool:
        """Drop a failed message; true if its entry was in the open bucket.

        If it is false, the entry is in the sealed bucket that its failure names, which the caller
        must rewrite.
        """
        self.failed -= 1
        self.failed_changed = True
        self._rows.delete_failure(message_id)
        return self._failed_open.pop(message_id, None) is not None

    def failed_open(self, message_id: int) -> bool:
        """Whether a failed message's entry is in the open bucket."""
        return message_id in self._failed_open

    def failed_record(self) -> bytes:
        """The open bucket, to be written: ``failed_changed`` is about what comes after."""
        self.failed_changed = False
        return FailedMessages.join(self._failed_open.values())

    def trim_failed(self, since: int) -> int:
        """Forget what failed before a time and is in the open bucket; returns how many."""
        old = [
            message_id
            for message_id, one in self._failed_open.items()
            if FailedMessage.decode(one).failed_at < since
        ]
        for message_id in old:
            del self._failed_open[message_id]
        self.forget_failures(old)
        return len(old)

    def forget_failures(self, message_ids: Sequence[int]) -> None:
        """Failed messages whose entries were dropped go with all that is known of them."""
        for message_id in message_ids:
            self._rows.delete_failure(message_id)
        if message_ids:
            self.failed -= len(message_ids)
            self.failed_changed = True
