"""Which queues there are: by name, by filter, and since when."""

from __future__ import annotations

from collections import Counter
from typing import Final

from opendata_queue.filters import Filter, FilterIndex
from opendata_queue.model.errors import InvalidInputError, QueueNotFoundError
from opendata_queue.model.ids import is_bulk
from opendata_queue.queues.names import SortedNames
from opendata_queue.queues.queue import StoredQueue

ALL_BULK_SHARDS: Final = (1 << 32) - 1
"""Stands for all bulk shards in the key of a replay row (RFC 0009)."""


class QueueRegistry:
    """The queues of a root, those left out that are being deleted."""

    def __init__(self) -> None:
        self._queues: dict[str, StoredQueue] = {}
        self._names = SortedNames()
        self._counts: Counter[str] = Counter()
        """How many queues there are by the first part of their names."""
        self.index: FilterIndex[str] = FilterIndex()
        self.made_from_ms = 0
        """No queue that is made now was made earlier: later than all that were deleted."""

    def add(self, queue: StoredQueue) -> None:
        self._queues[queue.name] = queue
        self._names.add(queue.name)
        self._counts[_first_part(queue.name)] += 1
        self.index.add(queue.name, queue.filter)

    def remove(self, queue: StoredQueue) -> None:
        """From here on it can't be found."""
        del self._queues[queue.name]
        self._names.remove(queue.name)
        self._counts -= Counter([_first_part(queue.name)])  # none stays that has come to nothing
        self.index.remove(queue.name)

    def set_filter(self, queue: StoredQueue, filter: Filter) -> None:
        """Messages that are routed from now on must satisfy another filter."""
        queue.filter = filter
        self.index.add(queue.name, filter)

    def made_at(self, now: int) -> int:
        """When a queue is made that is made now."""
        return max(now, self.made_from_ms)

    def make_later_than(self, time_ms: int) -> None:
        """Queues from now on are made after that."""
        self.made_from_ms = max(self.made_from_ms, time_ms + 1)

    def has(self, queue: StoredQueue) -> bool:
        """Whether that very queue is there, and not another one of its name."""
        return self._queues.get(queue.name) is queue

    def get(self, name: str) -> StoredQueue | None:
        return self._queues.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._queues

    def queue(self, name: str) -> StoredQueue:
        try:
            return self._queues[name]
        except KeyError:
            raise QueueNotFoundError(f"there is no queue {name!r}") from None
        except TypeError:  # it can't be a key
            raise InvalidInputError(
                f"the name of a queue is text, and not a {type(name).__name__}"
            ) from None

    def names(self, prefix: str = "", after: str = "", limit: int | None = None) -> list[str]:
        """See ``AsyncSystem.list_queues``."""
        return self._names.page(self._queues, prefix, after, limit)

    def count(self, first_part: str | None = None) -> int:
        """How many queues there are, or how many whose names begin with that and a ``/``."""
        return len(self._queues) if first_part is None else self._counts[first_part]

    def queues(self) -> list[StoredQueue]:
        return list(self._queues.values())

    def has_queue_made_until(self, time_ms: int) -> bool:
        """Whether there is a queue that was there at that time."""
        return any(queue.created_at_ms <= time_ms for queue in self._queues.values())

    def replaying(self, shard: int | None = None) -> list[StoredQueue]:
        """The queues that the past is still replayed for, of one shard or of any."""
        if shard is None:
            return [queue for queue in self._queues.values() if queue.replays]
        wanted = {shard, ALL_BULK_SHARDS} if is_bulk(shard) else {shard}
        return [one for one in self._queues.values() if not wanted.isdisjoint(one.replays)]

    def wake_everybody(self) -> None:
        """Let those who wait find out that it is over."""
        for queue in self._queues.values():
            queue.waiters.wake_all()


def _first_part(name: str) -> str:
    """What is before the first ``/``; nothing in a name without one."""
    first, slash, _ = name.partition("/")
    return first if slash else ""
