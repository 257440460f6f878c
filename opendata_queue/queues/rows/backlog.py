"""The rows of a queue's backlog: the messages behind its window, by priority and id."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import Final

from odq_encodings import BacklogEntry, BacklogKey, Column
from opendata_queue.queues.lanes import Past, in_turns, lane_end, lane_of
from opendata_queue.queues.rows.overlay import FIRST, Commits, Overlay, Place, with_id
from opendata_queue.queues.state import Ready, Waiting, new_tuple
from opendata_queue.store import DatabaseReads

_LANES_AT_ONCE: Final = 16

_pack_backlog_suffix = BacklogKey.suffix.struct.pack
_unpack_backlog_suffixes = BacklogKey.suffix.struct.iter_unpack
_unpack_backlog = BacklogEntry.layout.struct.iter_unpack
_BACKLOG_BYTES: Final = BacklogEntry.layout.struct.size
_pack_backlog = BacklogEntry.layout.struct.pack


class BacklogRows:
    """Writes and reads them. Reads are for the one that holds the queue's ``Indexes``."""

    __slots__ = (
        "_committer",
        "_database",
        "_prefix",
        "overlay",
    )

    def __init__(self, queue_id: bytes, database: DatabaseReads, committer: Commits) -> None:
        self._database = database
        self._committer = committer
        self._prefix = BacklogKey.prefix(queue_id)
        self.overlay = Overlay()

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
        self.overlay.note_all(changes, self._committer.batch)

    def _put_one(self, message: Waiting) -> None:
        key = self._prefix + _pack_backlog_suffix(message.priority, message.message_id)
        value = _pack_backlog(message.visible_at, message.retention_deadline, message.attempts)
        self._committer.rows.put(key, value)
        self.overlay.note(message[:2], message, self._committer.batch)

    def delete_backlog(self, messages: Sequence[Waiting]) -> None:
        if not messages:
            return
        priorities, ids, *_ = zip(*messages, strict=True)
        self._committer.rows.delete_columns(len(messages), self._backlog_keys(priorities, ids))
        places = zip(priorities, ids, strict=True)
        self.overlay.note_gone(places, self._committer.batch)

    def _backlog_keys(self, priorities: Sequence[int], ids: Sequence[int]) -> list[Column]:
        return [self._prefix, *BacklogKey.suffix.columns("BacklogKey", priorities, ids)]

    async def first(
        self, ready: Ready, count: int, after: Place = FIRST, *, past: Past | None = None
    ) -> list[Waiting]:
        """The first ``count`` messages behind the window, in order.

        Only those that come after a priority and an id, and those that are in the past, if these
        are given.
        """
        overlay, first = self.overlay, (after[0], after[1] + 1)
        with overlay.held(self._committer.durable_batch):
            scanned: list[Waiting] = []
            for priority, from_id, _ in ready.backlog.ranges():
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
                start = self._prefix + _pack_backlog_suffix(priority, from_id)
                behind = lane_end(lane) if past is None else past.end_of(lane)
                end = self._prefix + _pack_backlog_suffix(priority, behind)
                async for chunk in self._database.scan(start, end, limit=limit):
                    scanned += self._backlog_rows(chunk)
            rows = overlay.over_from(first, scanned)
            if past is not None:
                rows = [m for m in rows if m.message_id in past]
            rows.sort()
            start_at = bisect_left(rows, first)
            return rows[start_at : start_at + count]

    async def in_turns(self, ready: Ready, count: int) -> list[Waiting]:
        """The first messages behind the window, lanes of equal priority in turns.

        Of each lane a beginning, and of a worse priority nothing unless all of a better one is
        there. So there may be fewer than ``count``.
        """
        overlay = self.overlay
        with overlay.held(self._committer.durable_batch):
            ranges = ready.backlog.ranges()
            scanned: dict[Place, Waiting] = {}
            shares: dict[Place, int] = {}
            cut: set[int] = set()
            for priority, together in groupby(ranges, key=itemgetter(0)):
                starts = {lane_of(start): start for _, start, _ in together}
                order = in_turns({lane: [lane] for lane in starts}, ready.last_turn)
                share = max(1, count // min(len(order), _LANES_AT_ONCE))
                if len(order) > _LANES_AT_ONCE:
                    cut.add(priority)
                for lane in order[:_LANES_AT_ONCE]:
                    limit = share + len(overlay)
                    rows = await self.scan_lane(priority, starts[lane], limit)
                    scanned |= rows
                    shares[priority, lane] = share
                    if len(rows) == limit:
                        cut.add(priority)
                if priority in cut or len(scanned) >= count + len(overlay):
                    break
            # Nothing is awaited from here on. What has come in meanwhile is in the overlay, of
            # lanes and priorities too that were empty before.
            unread = {(p, lane_of(start)) for p, start, _ in ranges} - shares.keys()
            return self._in_turns(ready, overlay.over(scanned), shares, unread, cut)[:count]

    def _in_turns(
        self,
        ready: Ready,
        messages: Iterable[Waiting],
        shares: Mapping[Place, int],
        unread: Collection[Place],
        cut: Collection[int],
    ) -> list[Waiting]:
        """What the backlog begins with, given the beginnings of its lanes.

        ``unread`` are lanes that were there and not read. Of the priorities in ``cut`` not
        everything was.
        """
        lanes: dict[Place, list[Waiting]] = {}
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
            found += in_turns(shared, ready.last_turn)
            if any(len(lanes[priority, lane]) > len(some) for lane, some in shared.items()):
                break
        return found

    async def scan_lane(self, priority: int, from_id: int, limit: int) -> dict[Place, Waiting]:
        start = self._prefix + _pack_backlog_suffix(priority, from_id)
        end = self._prefix + _pack_backlog_suffix(priority, lane_end(lane_of(from_id)))
        scanned: dict[Place, Waiting] = {}
        async for chunk in self._database.scan(start, end, limit=limit):
            scanned |= self._backlog_messages(chunk)
        return scanned

    async def find(self, ready: Ready, message_id: int) -> Waiting | None:
        """A message if it is in the backlog, by one read for each priority."""
        overlay = self.overlay
        with overlay.held(self._committer.durable_batch):
            priorities = [
                p
                for p, from_id, _ in ready.backlog.ranges()
                if from_id <= message_id and lane_of(from_id) == lane_of(message_id)
            ]
            keys = [self._prefix + _pack_backlog_suffix(p, message_id) for p in priorities]
            values = await self._database.get_many(keys)
            scanned = self._backlog_messages(
                [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
            )
            return with_id(message_id, overlay.over(scanned))

    async def between(self, ready: Ready, first_id: int, last_id: int) -> list[Waiting]:
        """The messages of the backlog with these ids, of all priorities."""
        overlay = self.overlay
        with overlay.held(self._committer.durable_batch):
            scanned: dict[Place, Waiting] = {}
            for priority, from_id, _ in ready.backlog.ranges():
                if from_id > last_id:
                    continue
                start = self._prefix + _pack_backlog_suffix(priority, max(first_id, from_id))
                end = self._prefix + _pack_backlog_suffix(priority, last_id) + b"\x00"
                async for chunk in self._database.scan(start, end, limit=last_id - first_id + 1):
                    scanned |= self._backlog_messages(chunk)
            return [m for m in overlay.over(scanned) if first_id <= m.message_id <= last_id]

    def _backlog_messages(self, rows: Iterable[tuple[bytes, bytes]]) -> dict[Place, Waiting]:
        """Rows of the backlog, by priority and id."""
        return {one[:2]: one for one in self._backlog_rows(rows)}

    def _backlog_rows(self, rows: Iterable[tuple[bytes, bytes]]) -> list[Waiting]:
        rows = list(rows)
        for key, value in rows:
            if len(value) != _BACKLOG_BYTES:
                self._database.decode(BacklogEntry.decode, key, value)  # says what is wrong
        # By column: for each of them it took three times as long.
        suffix_at = len(self._prefix)
        suffixes = b"".join([key[suffix_at:] for key, _ in rows])
        values = b"".join([value for _, value in rows])
        keys = list(chain.from_iterable(_unpack_backlog_suffixes(suffixes)))
        entries = list(chain.from_iterable(_unpack_backlog(values)))
        columns = keys[0::2], keys[1::2], entries[0::3], entries[1::3], entries[2::3]
        return list(map(new_tuple, repeat(Waiting), zip(*columns, strict=True)))
