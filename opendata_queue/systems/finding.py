"""``find``: the messages of a queue in one state that satisfy conditions, page by page.

A page examines a bounded number of entries, whatever it finds among them, and says how to go on.
What an entry of the queue says by itself is judged first: metadata is read of what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Final

from odq_encodings import MessageMetadata
from opendata_queue.filters import Filter
from opendata_queue.log.all_shards import AllMessages
from opendata_queue.model.allowance import MESSAGE_BYTES, headers_bytes
from opendata_queue.model.checks import check_integer
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.model.values import BrowsedState, FoundEntry, FoundPage, QueueEntry
from opendata_queue.queues.browse import QueueBrowser, check_state, token_of
from opendata_queue.queues.rows.overlay import Place
from opendata_queue.queues.views import given_filter, satisfying
from opendata_queue.runtime.turns import Turn

MOST_EXAMINED: Final = 2_000
"""Entries, for one page."""
PAGE_BYTES: Final = 1024 * 1024
"""Headers and errors of a page, about: the entry that exceeds it is the last one."""

_AT_ONCE: Final = 250
_IN_FLIGHT_AT_ONCE: Final = 500
"""Fewer steps: each one goes through all that is in flight."""
_MAX_TIME: Final = (1 << 63) - 1
_TIMES: Final[Mapping[str, str]] = {
    "available": "visible_at_ms",
    "delayed": "visible_at_ms",
    "in_flight": "claimed_at_ms",
    "done": "finished_at_ms",
    "failed": "finished_at_ms",
}
_STATES_WITH: Final[Mapping[str, tuple[BrowsedState, ...]]] = {
    "error": ("failed",),
    "consumer": ("in_flight", "failed"),
}
_FIELDS: Final = tuple(field.name for field in fields(QueueEntry))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Conditions that a message has to satisfy, all of them; none is no condition."""

    state: BrowsedState
    filter: Filter | None
    error: str | None
    consumer: str | None
    since_ms: int | None
    until_ms: int | None

    @classmethod
    async def checked(
        cls,
        state: BrowsedState,
        filter: str | None,
        error: str | None,
        consumer: str | None,
        since_ms: int | None,
        until_ms: int | None,
    ) -> Wanted:
        """What a caller gives, refused if it makes no sense for the state."""
        check_state(state)
        for name, text in (("error", error), ("consumer", consumer)):
            _check_text(name, text, state)
        for name, time in (("since_ms", since_ms), ("until_ms", until_ms)):
            if time is not None:
                check_integer(name, time, 0, _MAX_TIME)
        return cls(
            state=state,
            filter=None if filter is None else await given_filter(filter),
            error=error,
            consumer=consumer,
            since_ms=since_ms,
            until_ms=until_ms,
        )

    def admits(self, entry: QueueEntry) -> bool:
        """Whether an entry satisfies all but the filter, which needs the message's headers."""
        if self.error is not None and self.error not in (entry.error or ""):
            return False
        if self.consumer is not None and self.consumer != entry.consumer:
            return False
        time = getattr(entry, _TIMES[self.state])
        return (self.since_ms is None or time >= self.since_ms) and (
            self.until_ms is None or time < self.until_ms
        )


async def find_page(
    browser: QueueBrowser,
    messages: AllMessages,
    name: str,
    wanted: Wanted,
    *,
    after: str | None,
    limit: int,
) -> FoundPage:
    """The next entries that are wanted behind ``after``, at most ``limit``."""
    page = _Page(wanted, limit)
    place = browser.place(name, wanted.state, after)
    at_once = _IN_FLIGHT_AT_ONCE if wanted.state == "in_flight" else _AT_ONCE
    while True:
        step = min(at_once, MOST_EXAMINED - page.examined)
        # One more than wanted shows whether there is anything behind them.
        entries = await browser.entries(name, wanted.state, place, step + 1)
        await page.turn.pause()
        is_end = len(entries) <= step
        stopped_at = await page.take(entries[:step], messages)
        if is_end and (stopped_at is None or stopped_at == entries[-1][0]):
            return page.ending(None)
        place = stopped_at or entries[step - 1][0]
        if stopped_at is not None or page.examined == MOST_EXAMINED:
            return page.ending(token_of(wanted.state, place))


class _Page:
    """A page that is being filled."""

    def __init__(self, wanted: Wanted, limit: int) -> None:
        self._wanted = wanted
        self._limit = limit
        self._found: list[FoundEntry] = []
        self._size_bytes = 0
        self.examined = 0
        self.turn = Turn.of_a_caller()

    async def take(
        self, entries: Sequence[tuple[Place, QueueEntry]], messages: AllMessages
    ) -> Place | None:
        """Take what is wanted of some entries; the place of the last one if the page is full."""
        before = self.examined
        admitted = [
            (number, place, entry)
            for number, (place, entry) in enumerate(entries, 1)
            if self._wanted.admits(entry)
        ]
        while admitted:
            # Without a filter all of them are wanted, and metadata of more is read in vain.
            wanted = _AT_ONCE if self._wanted.filter else self._limit - len(self._found)
            some = min(wanted, _AT_ONCE)
            chosen, admitted = admitted[:some], admitted[some:]
            left = iter(chosen)
            ids = [entry.message_id for _, _, entry in chosen]
            async for some_ids, metadata in messages.metadata_in_steps(ids):
                await self.turn.pause()  # what is at hand was read without waiting
                satisfied = set(await satisfying(self._wanted.filter, some_ids, metadata))
                await self.turn.pause()
                for number, place, entry in islice(left, len(some_ids)):
                    if entry.message_id in satisfied:
                        self._add(entry, metadata.get(entry.message_id))
                    if self._is_full:
                        self.examined = before + number
                        return place
        self.examined = before + len(entries)
        return None

    def _add(self, entry: QueueEntry, about: MessageMetadata | None) -> None:
        headers = () if about is None else about.headers
        fields = {field: getattr(entry, field) for field in _FIELDS}
        self._found.append(FoundEntry(headers=headers, **fields))
        self._size_bytes += MESSAGE_BYTES + len(entry.error or "") + headers_bytes(headers)

    @property
    def _is_full(self) -> bool:
        return len(self._found) == self._limit or self._size_bytes >= PAGE_BYTES

    def ending(self, token: str | None) -> FoundPage:
        return FoundPage(entries=tuple(self._found), next=token, examined=self.examined)


def _check_text(name: str, text: str | None, state: BrowsedState) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise InvalidInputError(f"{name} is {text!r}, not a text")
    having = _STATES_WITH[name]
    if state not in having:
        raise InvalidInputError(
            f"{state} messages have no {name}: it is a condition for {' and '.join(having)} ones"
        )
