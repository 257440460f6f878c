"""Routing: every message goes into every queue whose filter it satisfies, exactly once.

What is routed and how far it has come in a shard are in one batch of the queue store, so a crash
repeats nothing and skips nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

from odq_encodings import MetadataColumns, decode_headers
from opendata_queue.filters import Evaluation, SystemFields
from opendata_queue.log.metadata_log import LogChunk
from opendata_queue.model.ids import SEQUENCE_MASK
from opendata_queue.model.messages import Published
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.state import Waiting, new_tuple
from opendata_queue.queues.store import QueueStore
from opendata_queue.runtime.turns import ASK_AFTER_US, Turn

_PLACES_AT_FIRST: Final = 128
_PLACES_AT_LEAST: Final = 16
_PLACES_AT_MOST: Final = 4_096
"""Into how many queues, all messages together, is routed before the clock is asked. It follows what
that takes: a good part of a turn, and never all of it."""
_MAX_TIME_MS: Final = (1 << 63) - 1
_KNOWN_AT_MOST: Final = 4_096
_NO_FIELDS: Final = SystemFields(0, 0, 0, 0)
_DECODED_IN_A_US: Final = 256
"""Bytes of headers, roughly."""

_Places = tuple[tuple[StoredQueue, int], ...]
"""Where a message goes, and with which priority."""
_Step = Callable[[Turn, int], int]
"""Routes some messages from a place on, until a turn is over; returns the place behind them."""
_Routed = dict[str, tuple[StoredQueue, list[Waiting]]]
"""What goes into queues, by their names."""


def retention_deadline(received_at: int, retention_seconds: int) -> int:
    """When a message expires; 0 for never (RFC 0001)."""
    if not retention_seconds:
        return 0
    return min(received_at + retention_seconds * 1_000, _MAX_TIME_MS)


def received_by(now: int, received_at: int, visible_at: int) -> tuple[int, int]:
    """When a message was received and is visible, by the root's clock (RFC 0012).

    One that another process has received later than now was received now, at the latest: its
    delay and its retention count from here.
    """
    if received_at <= now:
        return received_at, visible_at
    return now, visible_at - (received_at - now)


def _alike_until(messages: Sequence[Published], first: int) -> int:
    """Behind the last message that has the headers of the first, and so has all in between."""
    headers = messages[first].headers
    for place in range(first + 1, len(messages)):
        its_headers = messages[place][5]
        if its_headers is not headers and its_headers != headers:
            return place
    return len(messages)


class _Columns(NamedTuple):
    """What is put into queues of messages that follow each other."""

    ids: Sequence[int]
    received: Sequence[int]
    visible: Sequence[int]
    retentions: Sequence[int]

    def until(self, count: int) -> _Columns:
        """The first ones of them."""
        if count >= len(self.ids):
            return self
        return _Columns(*[column[:count] for column in self])

    def by(self, now: int) -> _Columns:
        """The same by the root's clock: nothing was received later than now."""
        if max(self.received) <= now:
            return self
        both = map(received_by, repeat(now), self.received, self.visible)
        received, visible = zip(*both, strict=True)
        return self._replace(received=received, visible=visible)

    def deadlines(self) -> Iterable[int]:
        if not any(self.retentions):
            return repeat(0)
        return [*map(retention_deadline, self.received, self.retentions)]


def _put_together(columns: _Columns, places: _Places, routed: _Routed) -> None:
    """Add messages to what waits in each of the places, with its priority, by column."""
    deadlines = columns.deadlines()
    for queue, priority in places:
        _, waiting = routed.get(queue.name) or routed.setdefault(queue.name, (queue, []))
        fields = zip(
            repeat(priority), columns.ids, columns.visible, deadlines, repeat(0), strict=False
        )
        waiting.extend(map(new_tuple, repeat(Waiting), fields))


class Router:
    """Routes the messages of one shard, in the order of its log."""

    def __init__(
        self,
        store: QueueStore,
        shard: int,
        next_sequence: int,
        *,
        always_remember: bool = True,
        made_until_ms: int = _MAX_TIME_MS,
    ) -> None:
        """Go on at a sequence.

        Where this process writes the shard, it knows where the log ends: then the cursor need not
        be written while there are no queues (``always_remember=False``). Queues that were made
        after ``made_until_ms`` are passed over.
        """
        self.store = store
        self.shard = shard
        self.next_sequence = next_sequence
        self._always_remember = always_remember
        self._made_until_ms = made_until_ms
        self._places_at_once = _PLACES_AT_FIRST
        self._known_version = -1
        self._known: dict[bytes, _Places] = {}
        """Where messages go, by their headers, as long as no filter has changed."""
        self._same: dict[_Places, _Places] = {}
        self._evaluation: Evaluation[str] | None = None
        """Of the next message, if its filters were not all evaluated when a turn was over."""

    def pass_by(self, last_id: int) -> None:
        """Take note that there was no queue for messages, up to the last one of them."""
        self.next_sequence = max(self.next_sequence, (last_id & SEQUENCE_MASK) + 1)

    async def route(
        self, messages: Sequence[Published], *, on_batch: Callable[[], None] | None = None
    ) -> None:
        """Route messages that callers wait for, in as many batches as it takes."""
        done, step = 0, partial(self._route, messages)
        ids = [message[0] for message in messages]
        while done < len(messages):
            await self.store.committer.room()
            done = self._route_for(self.store.turns.of_a_caller(), step, ids, done)
            if on_batch is not None:
                on_batch()
            if done < len(messages):
                await asyncio.sleep(0)

    async def route_log(
        self, chunk: LogChunk, *, on_batch: Callable[[], None] | None = None
    ) -> None:
        """Route in the background, by column and in turns: callers go first."""
        done, index = 0, self.store.index
        ids = chunk.columns(index.headers).message_ids
        while done < len(ids):
            async with self.store.turns.turn() as turn:
                await self.store.room_for_turn(turn)
                # A filter may have come meanwhile that wants other headers.
                columns = chunk.columns(index.headers)
                step = partial(self._route_columns, columns)
                done = self._route_for(turn, step, columns.message_ids, done)
            if on_batch is not None:
                on_batch()

    def _route_for(self, turn: Turn, step: _Step, ids: Sequence[int], first: int) -> int:
        """Route for a turn from a place on, and move the cursor, in the batch that gathers.

        Returns the place behind what is routed. That may be the same one: a message with many
        costly filters takes several turns, and the cursor moves in the one that puts it in queues.
        """
        if not len(self.store.index):
            # The first queue starts where we are then.
            self.pass_by(ids[-1])
            if self._always_remember:
                self._remember()
            return len(ids)
        place = self._routed_before(ids, first)
        before_s, began_at = turn.took_s, self.next_sequence
        try:
            while place < len(ids):
                behind = step(turn, place)
                if behind > place:
                    place = behind
                    self.next_sequence = (ids[place - 1] & SEQUENCE_MASK) + 1
                now_s = turn.took_s
                self._adapt(turn, now_s - before_s)
                before_s = now_s
                if turn.is_over:
                    break
        finally:
            if self.next_sequence != began_at:
                self._remember()
        return place

    def _adapt(self, turn: Turn, took_s: float) -> None:
        """Take more at once where that takes little of a turn, and less where it takes much."""
        if took_s > turn.length_s / 2:
            self._places_at_once = max(self._places_at_once // 2, _PLACES_AT_LEAST)
        elif took_s < turn.length_s / 8:
            self._places_at_once = min(self._places_at_once * 2, _PLACES_AT_MOST)

    def _route(self, messages: Sequence[Published], turn: Turn, first: int) -> int:
        """Route some messages from a place on; returns the place behind them."""
        routed: _Routed = {}
        place, checks, count, most = first, 0, 0, self._places_at_once
        by_headers = not self.store.index.asks_for_system_fields
        while place < len(messages) and max(checks, count) < most and not turn.has_ended:
            behind = _alike_until(messages, place) if by_headers else place + 1
            message = messages[place]
            places = self._places(turn, message.headers, SystemFields(*message[:4]))
            if places is None:
                break
            if places:
                behind = min(behind, place + -(-(most - count) // len(places)))
                count += len(places) * (behind - place)
                ids, _, received, visible, retentions, _ = zip(*messages[place:behind], strict=True)
                columns = _Columns(ids, received, visible, retentions)
                _put_together(columns.by(self.store.clock.now_ms()), places, routed)
            place = behind
            checks += 1
        self._take_in(routed)
        return place

    def _route_columns(self, log: MetadataColumns, turn: Turn, first: int) -> int:
        """The same with messages that are given by column."""
        routed: _Routed = {}
        some = slice(first, first + self._places_at_once)
        if self.store.index.asks_for_system_fields:
            found = self._found_one_by_one(log, some, turn)
        else:
            found = self._found_by_kind(log, some, turn)
        if not found:
            return first
        some = slice(first, first + len(found))
        columns = _Columns(
            log.message_ids[some],
            log.received_at[some],
            log.visible_at[some],
            log.retention_seconds[some],
        )
        count = self._put_each(columns.by(self.store.clock.now_ms()), found, routed)
        self._take_in(routed)
        return first + count

    def _found_by_kind(self, log: MetadataColumns, some: slice, turn: Turn) -> list[_Places]:
        """Where messages go of which those with equal headers go alike.

        Fewer than were asked for, if the turn ends before all filters are evaluated.
        """
        kinds = log.kinds[some]
        by_kind: dict[int, _Places] = {}
        for kind in dict.fromkeys(kinds):
            places = None if turn.has_ended else self._places_of(turn, log.headers[kind])
            if places is None:
                kinds = kinds[: kinds.index(kind)]
                break
            by_kind[kind] = places
        return [*map(by_kind.__getitem__, kinds)]

    def _found_one_by_one(self, log: MetadataColumns, some: slice, turn: Turn) -> list[_Places]:
        """The same where filters ask for more than headers."""
        found: list[_Places] = []
        headers: dict[int, Mapping[str, str]] = {}
        fields = zip(
            log.message_ids[some],
            log.created_at[some],
            log.received_at[some],
            log.visible_at[some],
            strict=True,
        )
        for kind, its in zip(log.kinds[some], fields, strict=True):
            if kind not in headers:
                headers[kind] = self._decoded(turn, log.headers[kind])
            places = self._places(turn, headers[kind], SystemFields(*its))
            if places is None:
                break
            found.append(places)
            if turn.has_ended:
                break
        return found

    def _put_each(self, columns: _Columns, found: Sequence[_Places], routed: _Routed) -> int:
        """Add messages to what waits in the places that were found for each; how many these are.

        Not all, if they go into many queues.
        """
        most, count = self._places_at_once, 0
        if found.count(found[0]) == len(found):  # all go the same way, most often
            behind = -(-most // max(1, len(found[0])))
            _put_together(columns.until(behind), found[0], routed)
            return min(behind, len(found))
        fields = zip(columns.ids, columns.visible, columns.deadlines(), strict=False)
        for place, (message_id, visible, deadline) in enumerate(fields):
            for queue, priority in found[place]:
                _, waiting = routed.get(queue.name) or routed.setdefault(queue.name, (queue, []))
                waiting.append(new_tuple(Waiting, (priority, message_id, visible, deadline, 0)))
            count += len(found[place])
            if count >= most:
                return place + 1
        return len(found)

    def _take_in(self, routed: _Routed) -> None:
        """Let queues have what goes into them."""
        now = self.store.clock.now_ms()
        for queue, waiting in routed.values():
            queue.state.route_many(waiting, now)
            queue.changed()
            queue.waiters.wake()

    def _routed_before(self, ids: Sequence[int], first: int) -> int:
        """The place of the first one, from a place on, that was not routed yet.

        Some may have been scanned before they were handed over.
        """
        for place in range(first, len(ids)):
            if ids[place] & SEQUENCE_MASK >= self.next_sequence:
                return place
        return len(ids)

    def _places_of(self, turn: Turn, encoded: bytes) -> _Places | None:
        """Where messages with these headers go, if no filter reads anything else of them."""
        if self._known_version != self.store.index.version or len(self._known) >= _KNOWN_AT_MOST:
            self._known_version = self.store.index.version
            self._known, self._same = {}, {}
        places = self._known.get(encoded)
        if places is None:
            places = self._places(turn, self._decoded(turn, encoded), _NO_FIELDS)
            if places is not None:
                # One object for all that go the same way: then they are found to be equal at once.
                places = self._known[encoded] = self._same.setdefault(places, places)
        return places

    @staticmethod
    def _decoded(turn: Turn, encoded: bytes) -> dict[str, str]:
        turn.spent(len(encoded) // _DECODED_IN_A_US)
        return decode_headers(encoded)

    def _places(
        self, turn: Turn, headers: Mapping[str, str], fields: SystemFields
    ) -> _Places | None:
        """Where a message goes, and with which priority; none if the turn ends before.

        Then the next turn goes on with the filters that are left.
        """
        index = self.store.index
        evaluation = self._evaluation
        if evaluation is None and index.worst_us < ASK_AFTER_US:
            found: list[tuple[str, int]] | None = index.route(headers, fields)
            turn.spent(index.worst_us)
        else:
            if evaluation is None or not evaluation.is_of(headers, fields):
                evaluation = Evaluation(index, headers, fields)
            found = evaluation.go_on(turn.spent)
            self._evaluation = evaluation if found is None else None
        if found is None:
            return None
        places = [(self.store.queue(name), priority) for name, priority in found]
        return tuple([one for one in places if one[0].created_at_ms <= self._made_until_ms])

    def _remember(self) -> None:
        self.store.put_cursor(self.shard, self.next_sequence)
        self.store.committer.commit(lazy=True)
