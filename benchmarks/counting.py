"""What an engine writes: commits, rows and bytes of each of its databases, and its encodings.

Counters tell what a machine's speed can't hide: the tests hold some of them still, and the
benchmarks show how others grow.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from opendata_queue.store import Database, Rows

MESSAGES: Final = "messages"
QUEUES: Final = "queues"

T = TypeVar("T")

# Where a message's bytes are made: each is looked up in the module that calls it.
_ENCODERS: Final = {
    "encode_inline_payload": "opendata_queue.message_rows",
    "inline_payload_columns": "opendata_queue.message_rows",
    "encode_message_metadata": "opendata_queue.message_rows",
    "message_metadata_columns": "opendata_queue.message_rows",
    "encode_payload_key": "opendata_queue.message_rows",
    "encode_metadata_log_key": "opendata_queue.message_rows",
    "metadata_log_key_columns": "opendata_queue.message_rows",
    "encode_headers": "opendata_queue.recent",
}


class Counters:
    """Counts by name: ``messages.commits``, ``queues.rows``, ``queues.bytes``, ``encode_…``.

    ``….awaits`` are the times that commits had to wait for something.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] += count

    def take(self) -> dict[str, int]:
        """What was counted since the last time."""
        taken, self._counts = self._counts, Counter()
        return dict(taken)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]


class Suspensions(Awaitable[T]):
    """Awaits something, and counts how often that had to wait."""

    def __init__(self, awaited: Awaitable[T], counters: Counters, name: str) -> None:
        self._awaited = awaited
        self._counters = counters
        self._name = name

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._awaited.__await__()
        step = partial(steps.send, None)
        while True:
            try:
                waits_for = step()
            except StopIteration as end:
                result: T = end.value
                return result
            self._counters.add(self._name)
            try:
                step = partial(steps.send, (yield waits_for))
            except BaseException as error:  # cancelled: what was awaited has to know
                step = partial(steps.throw, error)


@contextlib.contextmanager
def counted() -> Iterator[Counters]:
    """Count what every engine of this process does until the end of the block."""
    counters = Counters()
    commit = Database.commit

    async def counting(self: Database, rows: Rows, *args: Any, **kwargs: Any) -> None:
        database = MESSAGES if "/messages/" in self.name else QUEUES
        counters.add(f"{database}.commits")
        counters.add(f"{database}.rows", len(rows))
        counters.add(f"{database}.bytes", rows.size_bytes)
        await Suspensions(commit(self, rows, *args, **kwargs), counters, f"{database}.awaits")

    with contextlib.ExitStack() as stack:
        _replace(stack, Database, "commit", counting)
        for name, module_name in _ENCODERS.items():
            module = importlib.import_module(module_name)
            _replace(stack, module, name, _counting(getattr(module, name), counters, name))
        yield counters


def _counting(encode: Callable[..., Any], counters: Counters, name: str) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        encoded = encode(*args, **kwargs)
        counters.add(name, len(args[0]) if name.endswith("_columns") else 1)
        return encoded

    return counting


def _replace(stack: contextlib.ExitStack, owner: object, name: str, by: object) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, by)
