"""What an engine does: commits, rows and bytes of each of its databases, encodings, and waits.

Counters tell what a machine's speed can't hide: the tests hold some of them still, and the
benchmarks show how others grow.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from functools import partial
from typing import Any, Final, TypeVar

import slatedb.uniffi as slatedb

import odq_encodings
from odq_encodings import AvailableMessage, DoneMessage, FailedMessage, InFlightMessage
from opendata_queue.store import Database, Rows, active_tier
from opendata_queue.store.group_commit import GroupCommitter
from opendata_queue.store.journal.journal import Journal
from opendata_queue.store.native.abi import JobFlag
from opendata_queue.store.rows.writer import Tier, native_jobs

MESSAGES: Final = "messages"
QUEUES: Final = "queues"

T = TypeVar("T")

# Where a message's bytes are made, and those of its entries in the records of a queue.
_ENCODERS: Final = (
    "encode_inline_payload",
    "inline_payload_columns",
    "encode_message_metadata",
    "message_metadata_columns",
    "encode_payload_key",
    "encode_metadata_log_key",
    "metadata_log_key_columns",
    "encode_headers",
)
_ENTRIES: Final = (AvailableMessage, InFlightMessage, DoneMessage, FailedMessage)
_PROJECT: Final = ("odq_encodings", "opendata_queue", "odq_compactor")


class Counters:
    """Counts by name: ``messages.commits``, ``queues.rows``, ``queues.bytes``, ``encode_…``.

    ``….awaits`` are the times that commits had to wait for something, ``….turns`` those that the
    committer had to, these included. ``InFlightMessage`` and the like are entries that were packed.
    ``journal.…`` is what was handed to the journals of ``file:///``.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] += count

    def take(self) -> dict[str, int]:
        """What was counted since the last time."""
        taken, self._counts = self._counts, Counter()
        return {name: count for name, count in taken.items() if count}

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
def counted(*, in_detail: bool = False) -> Iterator[Counters]:
    """Count what every engine of this process does until the end of the block.

    Commits and what is in them; ``in_detail`` all else, too, which takes time for every message,
    and so is not for those who measure time. Engines have to be opened within the block then.
    """
    counters = Counters()
    commit = Database.commit

    async def counting(self: Database, rows: Rows, *args: Any, **kwargs: Any) -> None:
        database = MESSAGES if "/messages/" in self.name else QUEUES
        counters.add(f"{database}.commits")
        counters.add(f"{database}.rows", len(rows))
        counters.add(f"{database}.bytes", rows.size_bytes)
        await Suspensions(commit(self, rows, *args, **kwargs), counters, f"{database}.awaits")

    run = GroupCommitter._run

    async def running(self: GroupCommitter) -> None:
        database = MESSAGES if "/messages/" in self._database.name else QUEUES
        await Suspensions(run(self), counters, f"{database}.turns")

    with contextlib.ExitStack() as stack:
        _replace(stack, Database, "commit", counting)
        if in_detail:
            _replace(stack, GroupCommitter, "_run", running)
            _count_encodings(stack, counters)
            _count_writes(stack, counters)
        yield counters


def _count_encodings(stack: contextlib.ExitStack, counters: Counters) -> None:
    for name in _ENCODERS:
        encode = getattr(odq_encodings, name)
        _replace_everywhere(stack, encode, _counting(encode, counters, name))
    for entry in _ENTRIES:
        packing = _CountingStruct(entry.layout.struct, counters, entry.__name__)
        _replace_everywhere(stack, entry.layout.struct.pack, packing.pack)
        _replace(stack, entry.layout, "struct", packing)


class _CountingStruct:
    """Packs entries of one kind; all else is left to the struct that it is made of."""

    def __init__(self, packing: struct.Struct, counters: Counters, name: str) -> None:
        self._packing = packing
        self._counters = counters
        self._name = name

    def pack(self, *values: Any) -> bytes:
        self._counters.add(self._name)
        return self._packing.pack(*values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packing, name)


def _count_writes(stack: contextlib.ExitStack, counters: Counters) -> None:
    """What is handed to those who write, at the last place where Python sees it."""

    def appended(size: int, synced: bool) -> None:
        counters.add("journal.appends")
        counters.add("journal.bytes", size)
        counters.add("journal.syncs", bool(synced))

    def before(owner: object, name: str, count: Callable[..., None]) -> None:
        do = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            count(*args)
            return do(*args, **kwargs)

        _replace(stack, owner, name, counting)

    for name in ("flush", "flush_with_options"):
        before(slatedb.Db, name, lambda *_: counters.add("slatedb.flushes"))
    if active_tier() is Tier.compiled:
        # The arguments are those of the C functions.
        before(native_jobs(), "_submit_append", lambda *args: appended(
            args[4] + args[6], args[2].flags & JobFlag.SYNC
        ))  # fmt: skip
        before(native_jobs(), "_submit_write", lambda *args: counters.add(
            "slatedb.flushes", bool(args[5] & JobFlag.FLUSH)
        ))  # fmt: skip
    else:
        before(Journal, "_append_now", lambda journal, _, __, record: appended(
            len(record), journal._sync
        ))  # fmt: skip


def _counting(encode: Callable[..., Any], counters: Counters, name: str) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        encoded = encode(*args, **kwargs)
        counters.add(name, len(args[0]) if name.endswith("_columns") else 1)
        return encoded

    return counting


def _replace(stack: contextlib.ExitStack, owner: object, name: str, by: object) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, by)


def _replace_everywhere(stack: contextlib.ExitStack, what: object, by: object) -> None:
    """In every module of the project that has it, by whatever name and from wherever imported."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PROJECT:
            for held, value in list(vars(module).items()):
                if type(value) is type(what) and value == what:
                    _replace(stack, module, held, by)
