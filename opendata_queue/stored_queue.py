"""One queue in the store: its state in memory, and the rows behind it (RFC 0006)."""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import Final, Protocol, TypeVar

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    Attempts,
    AttemptsKey,
    BacklogEntry,
    BacklogKey,
    Column,
    DoneMessage,
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
    Replay,
    ReplayKey,
    RetentionFloor,
    RetentionFloorKey,
    ScheduleEntry,
    ScheduleKey,
    SealedDoneKey,
    SealedFailedKey,
    decode_due,
    encode_due,
)
from opendata_queue.errors import QueueNotFoundError
from opendata_queue.filters import Filter
from opendata_queue.interface import QueueInfo, QueueStats
from opendata_queue.lanes import LAST_ID, Past, in_turns, lane_end, lane_of
from opendata_queue.queue_options import FOR_EVER_MS, QueueOptions
from opendata_queue.queue_state import QueueState, Waiting, new_tuple
from opendata_queue.store import DatabaseReads, Rows

_LANES_AT_ONCE: Final = 16
LAST_TIME_MS: Final = (1 << 63) - 1
DUE_AT_ONCE: Final = 500
FIRST: Final = (-1, -1)
"""Comes before every place in the backlog or in the schedule."""

_pack_backlog_suffix = BacklogKey.suffix.struct.pack
_unpack_backlog_suffixes = BacklogKey.suffix.struct.iter_unpack
_unpack_backlog = BacklogEntry.layout.struct.iter_unpack
_BACKLOG_BYTES: Final = BacklogEntry.layout.struct.size
_pack_backlog = BacklogEntry.layout.struct.pack
_pack_schedule = ScheduleEntry.layout.struct.pack
_unpack_schedule = ScheduleEntry.layout.struct.unpack
_SCHEDULE_BYTES: Final = ScheduleEntry.layout.struct.size
_DUE_BYTES: Final = ScheduleKey.suffix.struct.size

Place = tuple[int, int]
"""In the backlog priority and id, in the schedule time and id."""
# The records of done or failed messages, and of active ones, that hold none.
_NO_MESSAGES: Final = (bytes(2), bytes(4))

T = TypeVar("T")


class Overlay:
    """Changes to index rows that a scan may not see yet.

    A scan sees what was durable when it began. Whatever was changed in a batch that was not
    durable by then is kept here, to be laid over what the scan returns.
    """

    __slots__ = ("_by_batch", "_floor")

    def __init__(self) -> None:
        self._by_batch: dict[int, dict[Place, Waiting | None]] = {}
        self._floor: int | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_batch.values()))

    def gone_from(self, first: Place) -> int:
        """How many deleted rows a scan from there may still see, at most."""
        return sum(
            message is None and key >= first
            for changes in self._by_batch.values()
            for key, message in changes.items()
        )

    def note(self, key: Place, message: Waiting | None, batch: int) -> None:
        """A row is changed in a batch, the one that gathers: batches come in their order."""
        changes = self._by_batch.get(batch)
        if changes is None:
            changes = self._by_batch[batch] = {}
        changes[key] = message

    def note_all(self, changes: Iterable[tuple[Place, Waiting]], batch: int) -> None:
        """Rows are put in a batch."""
        self._by_batch.setdefault(batch, {}).update(changes)

    def note_gone(self, keys: Iterable[Place], batch: int) -> None:
        """Rows are deleted in a batch."""
        self._by_batch.setdefault(batch, {}).update(dict.fromkeys(keys))

    def hold(self, durable_batch: int) -> None:
        """A scan begins: keep what was not durable yet, however long the scan takes."""
        self._floor = durable_batch

    def let_go(self) -> None:
        self._floor = None

    def prune(self, durable_batch: int) -> None:
        """Drop what every later scan will see."""
        limit = durable_batch if self._floor is None else min(durable_batch, self._floor)
        for batch in [number for number in self._by_batch if number <= limit]:
            del self._by_batch[batch]

    def over_from(self, first: Place, scanned: list[Waiting]) -> list[Waiting]:
        """The same for rows of the backlog from a place on, of which most often none has changed.

        With a dictionary of all of them a scan took half as long again.
        """
        changed = any(key >= first for changes in self._by_batch.values() for key in changes)
        return self.over({one[:2]: one for one in scanned}) if changed else scanned

    def over(self, scanned: dict[Place, Waiting]) -> list[Waiting]:
        """What the rows are, given what a scan said they were."""
        merged = dict(scanned) if self._by_batch else scanned
        for changes in self._by_batch.values():
            for key, message in changes.items():
                if message is None:
                    merged.pop(key, None)
                else:
                    merged[key] = message
        return list(merged.values())


class Commits(Protocol):
    """Where the rows of a queue go, and how many batches of them are durable."""

    durable_batch: int

    @property
    def batch(self) -> int: ...
    @property
    def rows(self) -> Rows: ...


class StoredQueue:
    """The state of a queue, and the writing and reading of all its rows."""

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
        self._backlog_prefix = BacklogKey.prefix(self.queue_id)
        self._schedule_prefix = ScheduleKey.prefix(self.queue_id)
        self._active_key = ActiveMessagesKey(queue_id=self.queue_id).encode()
        self._done_key = DoneMessagesKey(queue_id=self.queue_id).encode()
        self._failed_key = FailedMessagesKey(queue_id=self.queue_id).encode()
        self._counters_key = QueueCountersKey(queue_id=self.queue_id).encode()
        self._backlog_overlay = Overlay()
        self._schedule_overlay = Overlay()
        self._due_from: Place = (FOR_EVER_MS, 0)
        """No row of the schedule is before it: where a scan for what is due begins."""
        # Those who wait, by their tickets; those who were woken in vain come before all others.
        self._waiters: OrderedDict[int, asyncio.Future[None]] = OrderedDict()
        self._waiting_again: dict[int, asyncio.Future[None]] = {}
        self._tickets = itertools.count()
        self._woken_up_to = -1
        self.refilling = False
        self.reading_ahead = False
        """Whether whoever holds ``reading`` only reads behind the front, which may be taken."""
        self.announced: frozenset[int] = frozenset()
        """Messages of which it was said last that they will be claimed soon."""
        self.reading = asyncio.Lock()
        """Held by whoever moves messages out of the indexes."""
        self.deleted = False
        self.replays: dict[int, Replay] = {}
        """By shard, how far its log has been replayed, where the queue began in the past."""
        self.state = QueueState(options.rules(), self)

    def load(self, values: dict[RecordType, bytes]) -> None:
        """Take over the state that the store holds, given its records by their type."""

        def decoded(kind: RecordType, decode: Callable[[bytes], T]) -> T | None:
            value = values.get(kind)
            if value is None or value in _NO_MESSAGES:
                return None
            return self._database.decode(decode, kind.prefix + self._active_key[2:], value)

        self.state = QueueState(
            self.options.rules(),
            self,
            active=decoded(RecordType.ACTIVE_MESSAGES, ActiveMessages.decode),
            done=decoded(RecordType.DONE_MESSAGES, DoneMessages.decode),
            failed=decoded(RecordType.FAILED_MESSAGES, FailedMessages.decode),
            counters=decoded(RecordType.QUEUE_COUNTERS, QueueCounters.decode),
        )

    def stats(self) -> QueueStats:
        """How many messages are where, without the age of the oldest."""
        state = self.state
        return QueueStats(
            available=state.available,
            delayed=state.scheduled,
            in_flight=state.in_flight,
            done=state.done,
            failed=state.failed,
            expired=state.expired,
            replaying=sum(r.end_sequence - r.next_sequence for r in self.replays.values()),
        )

    def info(self) -> QueueInfo:
        """What it was told."""
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
        if everything or self.state.done_changed:
            rows.put(self._done_key, self.state.done_record())
        if everything or self.state.failed_changed:
            rows.put(self._failed_key, self.state.failed_record())
        rows.put(self._counters_key, self.state.counters_record())

    def changed(self) -> None:
        """Say that the state has changed, after a transition and before anything is awaited."""
        self.check()
        self._mark_changed(self)

    def batch_is_durable(self) -> None:
        durable = self._committer.durable_batch
        self._backlog_overlay.prune(durable)
        self._schedule_overlay.prune(durable)

    def put_backlog(self, messages: Sequence[Waiting]) -> None:
        if len(messages) == 1:  # a fifth of the time
            self._put_one(messages[0])
            return
        # All in a few calls: for each of them it took three times as long.
        priorities, ids, visible_at, deadlines, attempts = zip(*messages, strict=True)
        self._committer.rows.put_columns(
            len(messages),
            self._backlog_keys(priorities, ids),
            BacklogEntry.layout.columns("BacklogEntry", visible_at, deadlines, attempts),
        )
        places = zip(priorities, ids, strict=True)
        changes = zip(places, messages, strict=True)
        self._backlog_overlay.note_all(changes, self._committer.batch)

    def _put_one(self, message: Waiting) -> None:
        key = self._backlog_prefix + _pack_backlog_suffix(message.priority, message.message_id)
        value = _pack_backlog(message.visible_at, message.retention_deadline, message.attempts)
        self._committer.rows.put(key, value)
        self._backlog_overlay.note(message[:2], message, self._committer.batch)

    def delete_backlog(self, messages: Sequence[Waiting]) -> None:
        if not messages:
            return
        priorities, ids, *_ = zip(*messages, strict=True)
        self._committer.rows.delete_columns(len(messages), self._backlog_keys(priorities, ids))
        places = zip(priorities, ids, strict=True)
        self._backlog_overlay.note_gone(places, self._committer.batch)

    def _backlog_keys(self, priorities: Sequence[int], ids: Sequence[int]) -> list[Column]:
        return [self._backlog_prefix, *BacklogKey.suffix.columns("BacklogKey", priorities, ids)]

    def put_schedule(self, message: Waiting) -> None:
        self._due_from = min(self._due_from, _due_order(message))
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

    def rewrite_done(self, bucket: int, entries: Iterable[bytes]) -> None:
        """Replace what a sealed bucket of done messages holds; an empty one is deleted."""
        key = SealedDoneKey(queue_id=self.queue_id, bucket=bucket).encode()
        if left := list(entries):
            self._committer.rows.put(key, DoneMessages.join(left))
        else:
            self._committer.rows.delete(key)

    def put_floor(self, floor: RetentionFloor) -> None:
        """Where the sealed buckets begin."""
        key = RetentionFloorKey(queue_id=self.queue_id).encode()
        self._committer.rows.put(key, floor.encode())

    def rewrite_failed(self, bucket: int, entries: dict[int, bytes]) -> None:
        """Replace what a sealed bucket of failed messages holds; an empty one is deleted."""
        key = SealedFailedKey(queue_id=self.queue_id, bucket=bucket).encode()
        if entries:
            self._committer.rows.put(key, FailedMessages.join(entries.values()))
        else:
            self._committer.rows.delete(key)

    def put_failure(self, message_id: int, failure: Failure) -> None:
        key = FailureKey(queue_id=self.queue_id, message_id=message_id).encode()
        self._committer.rows.put(key, failure.encode())

    def delete_failure(self, message_id: int) -> None:
        key = FailureKey(queue_id=self.queue_id, message_id=message_id).encode()
        self._committer.rows.delete(key)

    # --- reading ----------------------------------------------------------------------------------

    async def first_of_backlog(
        self, count: int, after: tuple[int, int] = FIRST, *, past: Past | None = None
    ) -> list[Waiting]:
        """The first ``count`` messages behind the window, in order. Hold ``reading``.

        Only those that come after a priority and an id, and those that are in the past, if these
        are given.
        """
        overlay, first = self._backlog_overlay, (after[0], after[1] + 1)
        overlay.hold(self._committer.durable_batch)
        try:
            scanned: list[Waiting] = []
            for priority, from_id, _ in self.state.backlog.ranges():
                limit = count + overlay.gone_from(first) - len(scanned)
                if limit <= 0:
                    break
                if priority < after[0]:
                    continue
                lane = lane_of(from_id)
                if priority == after[0]:
                    from_id = max(from_id, after[1] + 1)
                    if lane_of(from_id) != lane:
                        continue  # all of it comes before
                start = self._backlog_prefix + _pack_backlog_suffix(priority, from_id)
                behind = lane_end(lane) if past is None else past.end_of(lane)
                end = self._backlog_prefix + _pack_backlog_suffix(priority, behind)
                async for chunk in self._database.scan(start, end, limit=limit):
                    scanned += self._backlog_rows(chunk)
            rows = overlay.over_from(first, scanned)
            if past is not None:
                rows = [m for m in rows if m.message_id in past]
            rows.sort()
            start_at = bisect_left(rows, first)
            return rows[start_at : start_at + count]
        finally:
            overlay.let_go()

    async def backlog_in_turns(self, count: int) -> list[Waiting]:
        """The first messages behind the window, lanes of equal priority in turns. Hold ``reading``.

        Of each lane a beginning, and of a worse priority nothing unless all of a better one is
        there. So there may be fewer than ``count``.
        """
        overlay = self._backlog_overlay
        overlay.hold(self._committer.durable_batch)
        try:
            ranges = self.state.backlog.ranges()
            scanned: dict[tuple[int, int], Waiting] = {}
            shares: dict[tuple[int, int], int] = {}
            cut: set[int] = set()
            for priority, together in groupby(ranges, key=itemgetter(0)):
                starts = {lane_of(start): start for _, start, _ in together}
                order = in_turns({lane: [lane] for lane in starts}, self.state.last_turn)
                share = max(1, count // min(len(order), _LANES_AT_ONCE))
                if len(order) > _LANES_AT_ONCE:
                    cut.add(priority)
                for lane in order[:_LANES_AT_ONCE]:
                    limit = share + len(overlay)
                    rows = await self._scan_lane(priority, starts[lane], limit)
                    scanned |= rows
                    shares[priority, lane] = share
                    if len(rows) == limit:
                        cut.add(priority)
                if priority in cut or len(scanned) >= count + len(overlay):
                    break
            # Nothing is awaited from here on. What has come in meanwhile is in the overlay, of
            # lanes and priorities too that were empty before.
            unread = {(p, lane_of(start)) for p, start, _ in ranges} - shares.keys()
            return self._in_turns(overlay.over(scanned), shares, unread, cut)[:count]
        finally:
            overlay.let_go()

    def _in_turns(
        self,
        messages: Iterable[Waiting],
        shares: Mapping[tuple[int, int], int],
        unread: Collection[tuple[int, int]],
        cut: Collection[int],
    ) -> list[Waiting]:
        """What the backlog begins with, given the beginnings of its lanes.

        ``unread`` are lanes that were there and not read. Of the priorities in ``cut`` not
        everything was.
        """
        lanes: dict[tuple[int, int], list[Waiting]] = {}
        for message in sorted(messages):
            lane = message.priority, lane_of(message.message_id)
            if lane not in unread:
                lanes.setdefault(lane, []).append(message)
        found: list[Waiting] = []
        last = min([*cut, *(priority for priority, _ in unread)], default=None)
        for priority, together in groupby(sorted(lanes), key=itemgetter(0)):
            if last is not None and priority > last:
                break
            shared = {
                lane: lanes[priority, lane][: shares.get((priority, lane))] for _, lane in together
            }
            found += in_turns(shared, self.state.last_turn)
            if any(len(lanes[priority, lane]) > len(some) for lane, some in shared.items()):
                break
        return found

    async def _scan_lane(
        self, priority: int, from_id: int, limit: int
    ) -> dict[tuple[int, int], Waiting]:
        start = self._backlog_prefix + _pack_backlog_suffix(priority, from_id)
        end = self._backlog_prefix + _pack_backlog_suffix(priority, lane_end(lane_of(from_id)))
        scanned: dict[tuple[int, int], Waiting] = {}
        async for chunk in self._database.scan(start, end, limit=limit):
            scanned |= self._backlog_messages(chunk)
        return scanned

    async def find_in_backlog(self, message_id: int) -> Waiting | None:
        """A message if it is in the backlog, by one read for each priority. Hold ``reading``."""
        overlay = self._backlog_overlay
        overlay.hold(self._committer.durable_batch)
        try:
            priorities = [
                p
                for p, from_id, _ in self.state.backlog.ranges()
                if from_id <= message_id and lane_of(from_id) == lane_of(message_id)
            ]
            keys = [self._backlog_prefix + _pack_backlog_suffix(p, message_id) for p in priorities]
            values = await self._database.get_many(keys)
            scanned = self._backlog_messages(
                [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
            )
            return _with_id(message_id, overlay.over(scanned))
        finally:
            overlay.let_go()

    async def schedule_after(self, after: tuple[int, int], count: int) -> list[Waiting]:
        """Scheduled messages that come after a time and an id, in order. Hold ``reading``."""
        if not self.state.scheduled:
            return []
        overlay = self._schedule_overlay
        overlay.hold(self._committer.durable_batch)
        try:
            start = self._schedule_prefix + encode_due(self.state.scheduled_from)
            start = max(start, self._schedule_prefix + encode_due(after[0], after[1] + 1))
            end = self._schedule_prefix + encode_due(LAST_TIME_MS, LAST_ID)
            scanned: dict[tuple[int, int], Waiting] = {}
            async for chunk in self._database.scan(start, end, limit=count + len(overlay)):
                for key, value in chunk:
                    message = self._scheduled_message(key, value)
                    scanned[_due_order(message)] = message
            rows = (m for m in overlay.over(scanned) if _due_order(m) > after)
            return sorted(rows, key=_due_order)[:count]
        finally:
            overlay.let_go()

    async def find_in_schedule(self, visible_at: int, message_id: int) -> Waiting | None:
        """A message if it is scheduled for that time, or has just been. Hold ``reading``."""
        if not self.state.scheduled:
            return None
        overlay = self._schedule_overlay
        overlay.hold(self._committer.durable_batch)
        try:
            key = self._schedule_prefix + encode_due(visible_at, message_id)
            value = await self._database.get(key)
            scanned = {}
            if value is not None:
                scanned[visible_at, message_id] = self._scheduled_message(key, value)
            return _with_id(message_id, overlay.over(scanned))
        finally:
            overlay.let_go()

    async def sealed_done(self, first: int, behind: int) -> dict[int, bytes]:
        """Those done buckets from ``first`` up to, not including, ``behind`` that are there."""
        prefix = SealedDoneKey.prefix(self.queue_id)
        pack = SealedDoneKey.suffix.struct
        found = {}
        async for chunk in self._database.scan(
            prefix + pack.pack(first), prefix + pack.pack(behind)
        ):
            for key, value in chunk:
                found[pack.unpack(key[len(prefix) :])[0]] = value
        return found

    async def oldest_done(self, floor: int, count: int) -> list[tuple[int, DoneMessages]]:
        """The oldest sealed buckets of done messages, none of which is before ``floor``."""
        found = []
        async for number, key, value in self._oldest(SealedDoneKey, floor, count):
            found.append((number, self._database.decode(DoneMessages.decode, key, value)))
        return found

    async def oldest_failed(self, floor: int, count: int) -> list[tuple[int, FailedMessages]]:
        """The same for failed messages. Hold ``reading``."""
        found = []
        async for number, key, value in self._oldest(SealedFailedKey, floor, count):
            found.append((number, self._database.decode(FailedMessages.decode, key, value)))
        return found

    async def _oldest(
        self, kind: type[SealedDoneKey] | type[SealedFailedKey], floor: int, count: int
    ) -> AsyncIterator[tuple[int, bytes, bytes]]:
        prefix, pack = kind.prefix(self.queue_id), kind.suffix.struct
        start, end = prefix + pack.pack(floor), prefix + pack.pack(LAST_ID)
        async for chunk in self._database.scan(start, end, limit=count):
            for key, value in chunk:
                yield pack.unpack(key[len(prefix) :])[0], key, value

    async def backlog_between(self, first_id: int, last_id: int) -> list[Waiting]:
        """The messages of the backlog with these ids, of all priorities. Hold ``reading``."""
        overlay = self._backlog_overlay
        overlay.hold(self._committer.durable_batch)
        try:
            scanned: dict[tuple[int, int], Waiting] = {}
            for priority, from_id, _ in self.state.backlog.ranges():
                if from_id > last_id:
                    continue
                start = self._backlog_prefix + _pack_backlog_suffix(
                    priority, max(first_id, from_id)
                )
                end = self._backlog_prefix + _pack_backlog_suffix(priority, last_id) + b"\x00"
                async for chunk in self._database.scan(start, end, limit=last_id - first_id + 1):
                    scanned |= self._backlog_messages(chunk)
            return [m for m in overlay.over(scanned) if first_id <= m.message_id <= last_id]
        finally:
            overlay.let_go()

    async def sealed_done_at(self, bucket: int) -> bytes | None:
        key = SealedDoneKey(queue_id=self.queue_id, bucket=bucket).encode()
        return await self._database.get(key)

    def decode_done(self, value: bytes) -> tuple[DoneMessage, ...]:
        return self._database.decode(DoneMessages.decode, self._done_key, value).messages

    def decode_done_entry(self, value: bytes) -> DoneMessage:
        return self._database.decode(DoneMessage.decode, self._done_key, value)

    async def first_of_schedule(self, now: int) -> tuple[list[Waiting], Place]:
        """Scheduled messages that are due, some hundred at most, and the place of the next one.

        Hold ``reading``.
        """
        overlay = self._schedule_overlay
        overlay.hold(self._committer.durable_batch)
        try:
            # Not the beginning of its millisecond, of which thousands may have been taken already.
            first = max((self.state.scheduled_from, 0), self._due_from)
            limit = DUE_AT_ONCE + 1 + overlay.gone_from(first)
            start = self._schedule_prefix + encode_due(*first)
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
        return due, _due_order(later[0]) if later else (LAST_TIME_MS, LAST_ID)

    def take_due(self, due: Iterable[Waiting], next_due: Place, now: int) -> None:
        """Admit what ``first_of_schedule`` has found, right after it."""
        self.state.take_due(due, now)
        self.state.scheduled_from, _ = self._due_from = next_due

    def _backlog_messages(
        self, rows: Iterable[tuple[bytes, bytes]]
    ) -> dict[tuple[int, int], Waiting]:
        """Rows of the backlog, by priority and id."""
        return {one[:2]: one for one in self._backlog_rows(rows)}

    def _backlog_rows(self, rows: Iterable[tuple[bytes, bytes]]) -> list[Waiting]:
        rows = list(rows)
        for key, value in rows:
            if len(value) != _BACKLOG_BYTES:
                self._database.decode(BacklogEntry.decode, key, value)  # says what is wrong
        # By column: for each of them it took three times as long.
        suffix_at = len(self._backlog_prefix)
        suffixes = b"".join([key[suffix_at:] for key, _ in rows])
        values = b"".join([value for _, value in rows])
        keys = list(chain.from_iterable(_unpack_backlog_suffixes(suffixes)))
        entries = list(chain.from_iterable(_unpack_backlog(values)))
        columns = keys[0::2], keys[1::2], entries[0::3], entries[1::3], entries[2::3]
        return list(map(new_tuple, repeat(Waiting), zip(*columns, strict=True)))

    def _scheduled_message(self, key: bytes, value: bytes) -> Waiting:
        suffix = key[len(self._schedule_prefix) :]
        if len(value) == _SCHEDULE_BYTES and len(suffix) == _DUE_BYTES:  # a fifth of the time
            visible_at, message_id = decode_due(suffix)
            priority, deadline, attempts = _unpack_schedule(value)
            return Waiting(priority, message_id, visible_at, deadline, attempts)
        row = self._database.decode(ScheduleEntry.decode, key, value)
        due = self._database.decode(ScheduleKey.decode, key, key)
        return Waiting(
            row.priority, due.message_id, due.visible_at, row.retention_deadline, row.attempts
        )

    async def failures(
        self, after_id: int = -1, *, limit: int, since: int = FOR_EVER_MS
    ) -> list[tuple[int, Failure]]:
        """Failed messages by ascending id, those left out that failed before a time."""
        prefix = FailureKey.prefix(self.queue_id)
        end = prefix + FailureKey.suffix.struct.pack(LAST_ID) + b"\x00"
        found: list[tuple[int, Failure]] = []
        while len(found) < limit:
            start = prefix + FailureKey.suffix.struct.pack(after_id + 1)
            wanted, seen = limit - len(found), 0
            async for chunk in self._database.scan(start, end, limit=wanted):
                for key, value in chunk:
                    seen += 1
                    (after_id,) = FailureKey.suffix.struct.unpack(key[len(prefix) :])
                    failure = self._database.decode(Failure.decode, key, value)
                    if failure.failed_at >= since:
                        found.append((after_id, failure))
            if seen < wanted:
                break
        return found

    async def failures_of(
        self, message_ids: Iterable[int], *, since: int = FOR_EVER_MS
    ) -> dict[int, Failure]:
        """Those of the messages that have failed, and not before a time."""

        def key_of(message_id: int) -> bytes:
            return FailureKey(queue_id=self.queue_id, message_id=message_id).encode()

        values = await self._database.get_by_id(message_ids, key_of)
        found = {
            one: self._database.decode(Failure.decode, key_of(one), value)
            for one, value in values.items()
        }
        return {one: failure for one, failure in found.items() if failure.failed_at >= since}

    async def sealed_failed(self, buckets: set[int]) -> dict[int, dict[int, bytes]]:
        """The entries of sealed buckets of failed messages, by message, of those that are there."""
        ordered = sorted(buckets)
        keys = [SealedFailedKey(queue_id=self.queue_id, bucket=one).encode() for one in ordered]
        found = {}
        for number, key, value in zip(
            ordered, keys, await self._database.get_many(keys), strict=True
        ):
            if value is not None:
                bucket = self._database.decode(FailedMessages.decode, key, value)
                found[number] = {m.message_id: m.encode() for m in bucket.messages}
        return found

    # --- waiting consumers ------------------------------------------------------------------------

    def draw_ticket(self) -> int:
        """A place in the line of those who wait."""
        return next(self._tickets)

    async def wait(self, patience: asyncio.Future[None], ticket: int) -> None:
        """Wait until there may be something to claim, or ``patience`` is over.

        First come, first served: whoever finds nothing and waits again keeps its place.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._waiters if ticket > self._woken_up_to else self._waiting_again
        line[ticket] = turn
        try:
            await asyncio.wait((turn, patience), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if turn.done():  # it was our turn: let the next one have it
                self.wake()
            raise
        finally:
            line.pop(ticket, None)

    def wake(self) -> None:
        """Wake as many of those who wait as there are messages for."""
        self._wake(self.state.promised)

    def wake_all(self) -> None:
        self._wake(len(self._waiters) + len(self._waiting_again))

    def _wake(self, count: int) -> None:
        for _ in range(count):
            if self._waiting_again:
                turn = self._waiting_again.pop(min(self._waiting_again))
            elif self._waiters:
                self._woken_up_to, turn = self._waiters.popitem(last=False)
            else:
                return
            if not turn.done():
                turn.set_result(None)


async def failures_in(
    database: DatabaseReads, queues: Sequence[StoredQueue], message_id: int
) -> list[Failure | None]:
    """How one message has failed in each of some queues."""
    keys = [FailureKey(queue_id=one.queue_id, message_id=message_id).encode() for one in queues]
    values = await database.get_many(keys)
    return [
        None if value is None else database.decode(Failure.decode, key, value)
        for key, value in zip(keys, values, strict=True)
    ]


async def consumers_of(database: DatabaseReads, message_id: int) -> tuple[str, ...]:
    """Who has claimed a message, in all queues."""
    key = AttemptsKey(message_id=message_id).encode()
    value = await database.get(key)
    if value is None:
        return ()
    return database.decode(Attempts.decode, key, value).consumer_ids


def _with_id(message_id: int, messages: Iterable[Waiting]) -> Waiting | None:
    return next((message for message in messages if message.message_id == message_id), None)


def _due_order(message: Waiting) -> Place:
    return message.visible_at, message.message_id
