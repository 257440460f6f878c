"""What was changed in an index and can't be read yet: laid over what a scan returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from opendata_queue.queues.state import Waiting
from opendata_queue.store import Rows

Place = tuple[int, int]
"""In the backlog priority and id, in the schedule time and id."""

FIRST: Place = (-1, -1)
"""Comes before every place in the backlog or in the schedule."""


class Commits(Protocol):
    """Where the rows of a queue go, and how many batches of them are durable."""

    durable_batch: int

    @property
    def batch(self) -> int: ...
    @property
    def rows(self) -> Rows: ...


class Overlay:
    """Changes to index rows that a scan may not see yet.

    A scan sees what was durable when it began. What was changed in a batch that was not
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

    @contextmanager
    def held(self, durable_batch: int) -> Iterator[None]:
        """While a scan runs, keep what was not durable when it began; one scan at a time."""
        assert self._floor is None, "two scans of one index at once"
        self._floor = durable_batch
        try:
            yield
        finally:
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


def with_id(message_id: int, messages: Iterable[Waiting]) -> Waiting | None:
    return next((message for message in messages if message.message_id == message_id), None)
