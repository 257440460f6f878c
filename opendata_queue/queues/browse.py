"""What queues hold: the next messages, pages of each state, and where one message is.

Nothing here costs more because a queue holds more: every call is a bounded number of reads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, get_args

from odq_encodings import DoneMessage, Failure
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.values import BrowsedState, QueueEntry, QueuePage
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.rows.indexes import Indexes
from opendata_queue.queues.rows.overlay import FIRST, Place
from opendata_queue.queues.state import Held, Waiting
from opendata_queue.runtime.turns import Turn

MAX_HISTORY_QUEUES: Final = 256

_PRIORITIES_READ: Final = 32
_PEEK_LEAST: Final = 100
_PEEK_ROUNDS: Final = 10
_SCHEDULE_SEARCHED: Final = 1_000
_BUCKETS_AT_ONCE: Final = 64
_BUCKETS_SEARCHED: Final = 64
_COUNT_BYTES: Final = 2
_IDS_AT_ONCE: Final = 5_000
"""Of messages in flight: they take half a millisecond."""
_DONE_BYTES: Final = DoneMessage.layout.size
_STATES: Final = get_args(BrowsedState)
_MAX_NUMBER: Final = (1 << 63) - 1


class Sought(NamedTuple):
    """A message to be found, and when it was received and first visible."""

    message_id: int
    received_at: int
    visible_at: int


class QueuesToBrowse(Protocol):
    """The queue store as its owner has it, or as a reader sees it."""

    @property
    def clock(self) -> Clock: ...
    def names(self) -> list[str]: ...
    def queue(self, name: str) -> StoredQueue: ...
    async def catch_up_with_time(self, queue: StoredQueue) -> None: ...
    async def all_durable(self) -> None: ...
    async def failures(
        self, name: str, *, after_id: int, limit: int
    ) -> list[tuple[int, Failure]]: ...
    async def failures_in(
        self, queues: Sequence[StoredQueue], message_id: int
    ) -> list[Failure | None]: ...


class QueueBrowser:
    """Reads queues, and changes nothing but what is due anyway."""

    def __init__(self, store: QueuesToBrowse) -> None:
        self._store = store

    # --- what comes next --------------------------------------------------------------------------

    async def peek(self, name: str, count: int) -> list[Waiting]:
        """The next messages to be claimed, those left out that are expired.

        Behind more than a thousand of the latter it finds nothing.
        """
        queue = self._store.queue(name)
        await self._store.catch_up_with_time(queue)
        found: list[Waiting] = []
        after = FIRST
        for _ in range(_PEEK_ROUNDS):
            wanted = max(count, _PEEK_LEAST)
            page = await _available(queue, after, wanted)
            now = self._store.clock.now_ms()
            found += [message for message in page if not message.expired(now)]
            if len(found) >= count or len(page) < wanted:
                break
            after = page[-1][:2]
        return found[:count]

    async def oldest(self, name: str) -> Waiting | None:
        """The available message that was visible first; a read only if it can be in the backlog.

        In one shard that is the one with the smallest id. Of several, those in the window and the
        first ones behind it are compared.
        """
        queue = self._store.queue(name)
        window = queue.state.ready.window()
        several = queue.state.ready.several_lanes
        best = min(window, key=_id_of) if window else None
        seen = list(window)
        starts = sorted(
            (start, priority) for priority, start, _ in queue.state.ready.backlog.ranges()
        )
        for start, priority in starts[:_PRIORITIES_READ]:
            if best is not None and best.message_id <= start and not several:
                break
            async with queue.reading() as indexes:
                first = await indexes.first_of_backlog(1, (priority, start - 1))
            seen += first
            best = min(first if best is None else [best, *first], key=_id_of, default=None)
        return min(seen, key=_visible_at, default=None) if several else best

    # --- pages ------------------------------------------------------------------------------------

    async def browse(
        self, name: str, state: BrowsedState, *, after: str | None, limit: int
    ) -> QueuePage:
        place = self.place(name, state, after)
        # One more than wanted shows whether there is another page.
        found = await self.entries(name, state, place, limit + 1)
        shown = found[:limit]
        token = token_of(state, shown[-1][0]) if len(found) > limit else None
        return QueuePage(entries=tuple(entry for _, entry in shown), next=token)

    def place(self, name: str, state: BrowsedState, after: str | None) -> Place | None:
        """Where a page begins that is asked for; an error if that makes no sense."""
        self._store.queue(name)
        check_state(state)
        return None if after is None else _read_token(state, after)

    async def entries(
        self, name: str, state: BrowsedState, after: Place | None, count: int
    ) -> list[tuple[Place, QueueEntry]]:
        """Up to ``count`` entries behind a place, each with its own."""
        queue = self._store.queue(name)
        await self._store.catch_up_with_time(queue)
        pages = {
            "available": self._available_page,
            "delayed": self._delayed_page,
            "in_flight": self._in_flight_page,
            "done": self._done_page,
            "failed": self._failed_page,
        }
        return await pages[state](queue, after, count)

    async def _available_page(
        self, queue: StoredQueue, after: Place | None, count: int
    ) -> list[tuple[Place, QueueEntry]]:
        messages = await _available(queue, after or FIRST, count)
        return [(one[:2], _waiting_entry(queue, "available", one)) for one in messages]

    async def _delayed_page(
        self, queue: StoredQueue, after: Place | None, count: int
    ) -> list[tuple[Place, QueueEntry]]:
        async with queue.reading() as indexes:
            messages = await indexes.schedule_after(after or FIRST, count)
        return [
            ((one.visible_at, one.message_id), _waiting_entry(queue, "delayed", one))
            for one in messages
        ]

    async def _in_flight_page(
        self, queue: StoredQueue, after: Place | None, count: int
    ) -> list[tuple[Place, QueueEntry]]:
        after_id = -1 if after is None else after[0]
        found: list[tuple[Place, QueueEntry]] = []
        while len(found) < count:
            ids = await _first_in_flight(queue, after_id, count)
            held = map(queue.state.in_flight.holding, ids)
            found += [((one.message_id, 0), _held_entry(queue, one)) for one in held if one]
            if len(ids) < count:
                break
            after_id = ids[-1]  # some were finished while they were searched for
        return found[:count]

    async def _failed_page(
        self, queue: StoredQueue, after: Place | None, count: int
    ) -> list[tuple[Place, QueueEntry]]:
        after_id = -1 if after is None else after[0]
        failures = await self._store.failures(queue.name, after_id=after_id, limit=count)
        return [((one, 0), _failed_entry(queue, one, failure)) for one, failure in failures]

    async def _done_page(
        self, queue: StoredQueue, before: Place | None, count: int
    ) -> list[tuple[Place, QueueEntry]]:
        """Done messages, the latest first. A place is a bucket and a number in it.

        The open bucket has the number under which it will be sealed, so places don't change.
        """
        since = queue.options.done_since(self._store.clock.now_ms())
        bucket = queue.state.finished.done_bucket
        if before is not None and before[0] < bucket:
            found = []
            bucket = before[0] + 1
        else:
            opened = queue.finished.decode_done(queue.state.finished.open_done())
            found = _latest_first(queue, bucket, opened, before, since)
        if len(found) < count and bucket:
            await self._store.all_durable()
        at_once = min(_BUCKETS_AT_ONCE, count // queue.options.bucket + 1)
        while len(found) < count and bucket:
            first = max(0, bucket - at_once)
            sealed = await queue.finished.sealed_done(first, bucket)
            for number in sorted(sealed, reverse=True):
                entries = queue.finished.decode_done(sealed[number])
                found += _latest_first(queue, number, entries, before, since)
            if not sealed and at_once == _BUCKETS_AT_ONCE:
                break  # retention drops the oldest first: there is nothing before these
            # Smaller ones than the queue makes now, or gaps: reach further.
            at_once = min(2 * at_once, _BUCKETS_AT_ONCE) if sealed else _BUCKETS_AT_ONCE
            bucket = first
        return found[:count]

    # --- one message ------------------------------------------------------------------------------

    async def find(
        self, message: Sought, matching: Sequence[str]
    ) -> tuple[tuple[QueueEntry, ...], int]:
        """Where a message is, and how many queues were not searched.

        ``matching`` are those that it is likely to be in.
        """
        asked = set(matching)
        names = [*matching, *(name for name in self._store.names() if name not in asked)]
        # Before anything is awaited: names may come and go.
        queues = [self._store.queue(name) for name in names[:MAX_HISTORY_QUEUES]]
        found = []
        for queue in queues[: len(matching)]:
            entry = await self.find_in(queue, message)
            if entry is not None:
                found.append(entry)
        found += await self._find_elsewhere(queues[len(matching) :], message.message_id)
        return tuple(found), len(names) - len(queues)

    async def _find_elsewhere(
        self, queues: Sequence[StoredQueue], message_id: int
    ) -> list[QueueEntry]:
        """In queues that it does not match, or not any more: at hand, or with one look-up."""
        found = []
        failures = await self._failures_in(queues, message_id)
        for queue, failure in zip(queues, failures, strict=True):
            entry = _at_hand(queue, message_id)
            if entry is not None:
                entry = self._unless_past(queue, entry)
            elif failure is not None:
                entry = _failed_entry(queue, message_id, failure)
            if entry is not None:
                found.append(entry)
        return found

    async def find_in(self, queue: StoredQueue, message: Sought) -> QueueEntry | None:
        """Where a message is in a queue; none if it is not there."""
        await self._store.catch_up_with_time(queue)
        # Held so that nothing leaves the indexes while they are read one by one. What is not
        # at hand at first does not come to be at hand then, and all of it can soon be read.
        async with queue.reading() as indexes:
            entry = _at_hand(queue, message.message_id)
            if entry is not None:
                return self._unless_past(queue, entry)
            await self._store.all_durable()
            (failure,) = await self._failures_in([queue], message.message_id)
            if failure is not None:
                return _failed_entry(queue, message.message_id, failure)
            waiting = await indexes.find_in_backlog(message.message_id)
            if waiting is not None:
                return _waiting_entry(queue, "available", waiting)
            delayed, all_delayed = await _find_in_schedule(indexes, message)
            if delayed is not None:
                return _waiting_entry(queue, "delayed", delayed)
            done, all_done = await _find_done(queue, message)
            if done is not None:
                return self._unless_past(queue, done)
        if all_delayed and all_done:
            return None
        return QueueEntry(queue=queue.name, message_id=message.message_id, state="unknown")

    async def _failures_in(
        self, queues: Sequence[StoredQueue], message_id: int
    ) -> list[Failure | None]:
        """How a message has failed in queues, where that is not past its retention."""
        failures = await self._store.failures_in(queues, message_id)
        now = self._store.clock.now_ms()
        return [
            None if one is None or one.failed_at < queue.options.failed_since(now) else one
            for queue, one in zip(queues, failures, strict=True)
        ]

    def _unless_past(self, queue: StoredQueue, entry: QueueEntry) -> QueueEntry | None:
        """The entry; none if it is done and past its retention, and so must not be shown."""
        since = queue.options.done_since(self._store.clock.now_ms())
        past = entry.state == "done" and (entry.finished_at_ms or 0) < since
        return None if past else entry


# --- reading --------------------------------------------------------------------------------------


async def _available(queue: StoredQueue, after: Place, count: int) -> list[Waiting]:
    """Available messages behind a place, window and backlog as they are in one moment."""

    def at_hand() -> list[Waiting]:
        return [message for message in queue.state.ready.window() if message[:2] > after][:count]

    if not queue.state.ready.several_lanes and len(first := at_hand()) == count:
        return first
    async with queue.reading() as indexes:
        behind = await indexes.first_of_backlog(count, after)
        # With several lanes some of the backlog may come before some of the window.
        return sorted(at_hand() + behind)[:count]


async def _first_in_flight(queue: StoredQueue, after_id: int, count: int) -> list[int]:
    """The smallest ids in flight behind one. There may be very many, so it takes turns."""
    turn = Turn.of_a_caller()
    ids = queue.state.in_flight.message_ids()
    first: list[int] = []
    below = _MAX_NUMBER + 1
    for start in range(0, len(ids), _IDS_AT_ONCE):
        some = [one for one in ids[start : start + _IDS_AT_ONCE] if after_id < one < below]
        if some:
            first = sorted(first + some)[:count]
        if len(first) == count:
            below = first[-1]
        await turn.pause()
    return first


def _at_hand(queue: StoredQueue, message_id: int) -> QueueEntry | None:
    """Where a message is, if that is known without a read."""
    held = queue.state.in_flight.holding(message_id)
    if held is not None:
        return _held_entry(queue, held)
    for waiting in queue.state.ready.window():
        if waiting.message_id == message_id:
            return _waiting_entry(queue, "available", waiting)
    return _in_bucket(queue, queue.state.finished.open_done(), message_id)


async def _find_in_schedule(indexes: Indexes, message: Sought) -> tuple[Waiting | None, bool]:
    """A message if it is delayed, and whether it is known not to be if it was not found."""
    found = await indexes.find_in_schedule(message.visible_at, message.message_id)
    if found is not None:
        return found, True
    # A retry: when it is due is not known, but the first ones are close by.
    delayed = await indexes.schedule_after(FIRST, _SCHEDULE_SEARCHED)
    for one in delayed:
        if one.message_id == message.message_id:
            return one, True
    return None, len(delayed) < _SCHEDULE_SEARCHED


async def _find_done(queue: StoredQueue, message: Sought) -> tuple[QueueEntry | None, bool]:
    """The same for the sealed buckets of done messages, which are in the order of time."""
    sealed = queue.state.finished.done_bucket
    first = await _first_bucket_since(queue, sealed, message.received_at)
    behind = min(sealed, first + _BUCKETS_SEARCHED)
    for value in (await queue.finished.sealed_done(first, behind)).values():
        entry = _in_bucket(queue, value, message.message_id)
        if entry is not None:
            return entry, True
    return None, behind == sealed


async def _first_bucket_since(queue: StoredQueue, sealed: int, since_ms: int) -> int:
    """The first sealed bucket that ends at that time or later, by bisection."""
    low, high = 0, sealed
    while low < high:
        middle = (low + high) // 2
        value = await queue.finished.sealed_done_at(middle)
        # One that is not there was dropped, and so were those before it.
        if (
            value is None
            or queue.finished.decode_done_entry(value[-_DONE_BYTES:]).done_at < since_ms
        ):
            low = middle + 1
        else:
            high = middle
    return low


def _in_bucket(queue: StoredQueue, value: bytes, message_id: int) -> QueueEntry | None:
    """The entry of a message in a record of done ones, found without decoding all of it."""
    wanted = struct.pack("<Q", message_id)
    start = value.find(wanted, _COUNT_BYTES)
    while start >= 0:
        if (start - _COUNT_BYTES) % _DONE_BYTES == 0:
            return _done_entry(
                queue, queue.finished.decode_done_entry(value[start : start + _DONE_BYTES])
            )
        start = value.find(wanted, start + 1)
    return None


def _latest_first(
    queue: StoredQueue,
    bucket: int,
    messages: Sequence[DoneMessage],
    before: Place | None,
    since: int,
) -> list[tuple[Place, QueueEntry]]:
    return [
        ((bucket, number), _done_entry(queue, messages[number]))
        for number in reversed(range(len(messages)))
        if (before is None or (bucket, number) < before) and messages[number].done_at >= since
    ]


def _id_of(message: Waiting | Held) -> int:
    return message.message_id


def _visible_at(message: Waiting) -> int:
    return message.visible_at


# --- entries --------------------------------------------------------------------------------------


def _waiting_entry(queue: StoredQueue, state: BrowsedState, message: Waiting) -> QueueEntry:
    return QueueEntry(
        queue=queue.name,
        message_id=message.message_id,
        state=state,
        priority=message.priority,
        attempts=message.attempts,
        visible_at_ms=message.visible_at,
        expires_at_ms=message.retention_deadline or None,
    )


def _held_entry(queue: StoredQueue, held: Held) -> QueueEntry:
    return QueueEntry(
        queue=queue.name,
        message_id=held.message_id,
        state="in_flight",
        priority=held.priority,
        attempts=held.attempts,
        claimed_at_ms=held.claimed_at,
        lease_deadline_ms=held.lease_deadline,
        consumer=held.consumer or None,
        expires_at_ms=held.retention_deadline or None,
    )


def _done_entry(queue: StoredQueue, message: DoneMessage) -> QueueEntry:
    return QueueEntry(
        queue=queue.name,
        message_id=message.message_id,
        state="done",
        attempts=message.attempts,
        finished_at_ms=message.done_at,
    )


def _failed_entry(queue: StoredQueue, message_id: int, failure: Failure) -> QueueEntry:
    return QueueEntry(
        queue=queue.name,
        message_id=message_id,
        state="failed",
        priority=failure.priority,
        attempts=failure.attempts,
        consumer=failure.consumer or None,
        finished_at_ms=failure.failed_at,
        error=failure.error,
        expires_at_ms=failure.retention_deadline or None,
    )


# --- states and tokens ----------------------------------------------------------------------------


def check_state(state: BrowsedState) -> None:
    if state not in _STATES:
        raise InvalidInputError(f"state is {state!r}, not one of {', '.join(_STATES)}")


def token_of(state: str, place: Place) -> str:
    """The same for all callers, at any time: a place in the order of a state."""
    return f"{state}:{place[0]}.{place[1]}"


def _read_token(state: str, token: str) -> Place:
    kind, _, place = token.partition(":") if isinstance(token, str) else ("", "", "")
    first, _, second = place.partition(".")
    if kind == state and first.isdecimal() and second.isdecimal() and first.isascii():
        found = int(first), int(second)
        if max(found) <= _MAX_NUMBER and token == token_of(state, found):
            return found
    raise InvalidInputError(f"after is {token!r}, which is no `next` of a page of {state} entries")
