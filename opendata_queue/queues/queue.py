"""One queue in the store: its state in memory, the rows behind it, and those who wait (RFC 0006).

What is where is the state's to say. Rows have their owners in ``rows``; indexes are read by the
one that holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    DoneMessages,
    DoneMessagesKey,
    FailedMessages,
    FailedMessagesKey,
    QueueConfig,
    QueueConfigKey,
    QueueCounters,
    QueueCountersKey,
    QueueOptionsKey,
    RecordType,
    Replay,
    ReplayKey,
)
from opendata_queue.filters import Filter
from opendata_queue.model.errors import QueueNotFoundError
from opendata_queue.model.options import QueueOptions
from opendata_queue.model.values import QueueInfo, QueueStats
from opendata_queue.queues.rows.backlog import BacklogRows
from opendata_queue.queues.rows.finished import FailedBuckets, FinishedRows
from opendata_queue.queues.rows.indexes import Indexes, IndexGuard
from opendata_queue.queues.rows.overlay import Commits
from opendata_queue.queues.rows.schedule import ScheduleRows
from opendata_queue.queues.state import Changes, QueueState
from opendata_queue.queues.waiters import Waiters
from opendata_queue.store import DatabaseReads, Rows

# The records of done or failed messages, and of active ones, that hold none.
_NO_MESSAGES: Final = (bytes(2), bytes(4))

T = TypeVar("T")


class StoredQueue:
    """The state of a queue, the owners of its rows, and the writing of its records."""

    __slots__ = (
        "__weakref__",
        "_active_key",
        "_backlog",
        "_changes",
        "_committer",
        "_counters_key",
        "_database",
        "_done_key",
        "_failed_key",
        "_guard",
        "_mark_changed",
        "_schedule",
        "announced",
        "created_at_ms",
        "deleted",
        "filter",
        "finished",
        "name",
        "options",
        "queue_id",
        "refilling",
        "replays",
        "state",
        "waiters",
    )

    def __init__(
        self,
        name: str,
        filter: Filter,
        options: QueueOptions,
        created_at_ms: int,
        database: DatabaseReads,
        committer: Commits,
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
        self._active_key = ActiveMessagesKey(queue_id=self.queue_id).encode()
        self._done_key = DoneMessagesKey(queue_id=self.queue_id).encode()
        self._failed_key = FailedMessagesKey(queue_id=self.queue_id).encode()
        self._counters_key = QueueCountersKey(queue_id=self.queue_id).encode()
        self._backlog = BacklogRows(self.queue_id, database, committer)
        self._schedule = ScheduleRows(self.queue_id, database, committer)
        self.finished = FinishedRows(self.queue_id, database, committer)
        failed = FailedBuckets(self.queue_id, database, committer)
        self._guard = IndexGuard(self._backlog, self._schedule, failed)
        self.refilling = False
        """Whether a refill is under way in the background."""
        self.announced: frozenset[int] = frozenset()
        """Messages of which it was said last that they will be claimed soon."""
        self.deleted = False
        self.replays: dict[int, Replay] = {}
        """By shard, how far its log has been replayed, where the queue began in the past."""
        self._changes = Changes(
            backlog=self._backlog, schedule=self._schedule, finished=self.finished
        )
        self.state = QueueState(options.rules(), self._changes)
        self.waiters = Waiters(lambda: self.state.promised)

    def load(self, values: dict[RecordType, bytes]) -> None:
        """Take over the state that the store holds, given its records by their type."""

        def decoded(kind: RecordType, decode: Callable[[bytes], T]) -> T | None:
            value = values.get(kind)
            if value is None or value in _NO_MESSAGES:
                return None
            return self._database.decode(decode, kind.prefix + self._active_key[2:], value)

        self.state = QueueState(
            self.options.rules(),
            self._changes,
            active=decoded(RecordType.ACTIVE_MESSAGES, ActiveMessages.decode),
            done=decoded(RecordType.DONE_MESSAGES, DoneMessages.decode),
            failed=decoded(RecordType.FAILED_MESSAGES, FailedMessages.decode),
            counters=decoded(RecordType.QUEUE_COUNTERS, QueueCounters.decode),
        )

    def stats(self) -> QueueStats:
        """How many messages are where, without the age of the oldest."""
        state = self.state
        return QueueStats(
            available=len(state.ready),
            delayed=state.schedule.count,
            in_flight=len(state.in_flight),
            done=state.finished.done,
            failed=state.finished.failed,
            expired=state.expired,
            replaying=sum(r.end_sequence - r.next_sequence for r in self.replays.values()),
        )

    def info(self) -> QueueInfo:
        """How it is configured."""
        return QueueInfo(
            name=self.name,
            filter=self.filter.text,
            options=self.options,
            created_at_ms=self.created_at_ms,
        )

    def check(self) -> None:
        """Raise if it was deleted. To be asked after awaiting, before anything is changed."""
        if self.deleted:
            raise QueueNotFoundError(f"there is no queue {self.name!r} any more: it was deleted")

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
            self.options.encode(self.created_at_ms, being_deleted=self.deleted),
        )

    def put_replay(self, shard: int, replay: Replay) -> None:
        """The row that says how far a replay has come; it goes when the replay is finished."""
        key = ReplayKey(queue_id=self.queue_id, shard=shard).encode()
        if replay.next_sequence < replay.end_sequence:
            self.replays[shard] = replay
            self._committer.rows.put(key, replay.encode())
        else:
            self.replays.pop(shard, None)
            self._committer.rows.delete(key)

    def put_state(self, rows: Rows, *, everything: bool = False) -> None:
        """The rows of the state that have changed; encoded once for all changes of a commit."""
        rows.put(self._active_key, self.state.active_record())
        if everything or self.state.finished.done_changed:
            rows.put(self._done_key, self.state.finished.done_record())
        if everything or self.state.finished.failed_changed:
            rows.put(self._failed_key, self.state.finished.failed_record())
        rows.put(self._counters_key, self.state.counters_record())

    def changed(self) -> None:
        """Say that the state has changed, after a transition and before anything is awaited."""
        self.check()
        self._mark_changed(self)

    def batch_is_durable(self) -> None:
        durable = self._committer.durable_batch
        self._backlog.overlay.prune(durable)
        self._schedule.overlay.prune(durable)

    # --- reading ----------------------------------------------------------------------------------

    def reading(self) -> AbstractAsyncContextManager[Indexes]:
        """Hold the indexes: for what reads them, or moves messages out of them."""
        return self._guard.hold(self.state)

    @property
    def front_may_be_taken(self) -> bool:
        """Whether a refill that needs no read may be made now."""
        return self._guard.front_may_be_taken
