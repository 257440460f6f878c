"""What a contender has to offer to be measured."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

Address = dict[str, str]
"""Where a system is: it is passed to the processes that use it."""

FILL_BATCH: Final = 1_000
_POLL_S: Final = 0.001

T = TypeVar("T")


class Received(NamedTuple):
    """A message in hand, and what it is acknowledged with."""

    handle: Any
    payload: bytes
    headers: Mapping[str, str]


class Client(ABC):
    """One producer or consumer of one queue.

    Calls are coroutines for all, so that one loop measures all; those of a library that blocks just
    block, and each of its consumers gets a thread of its own.
    """

    @abstractmethod
    async def publish(self, payloads: Sequence[bytes]) -> None:
        """Publish messages with ``HEADERS``; they are as durable as the system says on return."""

    @abstractmethod
    async def receive(self, count: int, *, wait_ms: int) -> list[Received]:
        """Up to ``count`` messages; waits for the first one."""

    async def receive_whole(self, count: int, *, wait_ms: int) -> list[Received]:
        """The same where many wait: ``count`` messages, also of a system that sends them one by
        one, unless no more come."""
        return await self.receive(count, wait_ms=wait_ms)

    @abstractmethod
    async def ack(self, handles: Sequence[Any]) -> None:
        """Finish messages."""

    @abstractmethod
    async def depth(self) -> int:
        """How many messages wait."""

    async def fill(self, payloads: Sequence[bytes]) -> None:
        """Publish many, unmeasured: in the fastest way, which need not be durable."""
        for first in range(0, len(payloads), FILL_BATCH):
            await self.publish(payloads[first : first + FILL_BATCH])


def polled(look: Callable[[], list[T]], wait_ms: int) -> list[T]:
    """What is found within the time, by polling."""
    deadline = time.monotonic() + wait_ms / 1e3
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


Serve = Callable[[Path, bool], AbstractContextManager[Address]]
"""Starts what a system needs on a folder, and stops it; relaxed (second argument) it need not be
durable, to be filled in less time."""

Connect = Callable[[Address, str, int], AbstractAsyncContextManager[list[Client]]]
"""So many clients of a queue, for one event loop."""


def available() -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class System:
    """One contender."""

    key: str
    name: str
    serve: Serve
    connect: Connect
    missing: Callable[[], str | None] = available
    """Why it can't be measured here, if it can't."""

    version: Callable[[], str] = lambda: ""
    settings: str = ""
    """How it was set up, for the report."""

    durable: bool = True
    """Whether it syncs to the disk before it acknowledges; ⚠ if not."""

    loops: frozenset[str] = frozenset()
    """Workloads whose batches are loops, since there is no batch call: †."""

    workloads: frozenset[str] = field(
        default_factory=lambda: frozenset({"W1", "W2", "W2L", "W3", "W4", "W5", "W6", "W7"})
    )
    blocking: bool = False
    """Its clients block: each consumer gets a thread."""

    one_process: bool = False
    """Producers and consumers must share a process."""

    processes: int = 1
    clients: int = 1
    """How many producers or consumers work at once in W1 to W4, in how many processes."""

    relaxes: bool = False
    """Whether its server must be started anew to be filled in less time."""

    deep_rounds: int = 1_000
    """In how many rounds W6 is measured, if one takes too long for all of them."""

    grows: bool = False
    """Each publish costs more than the one before: of a workload it has to publish all messages."""

    in_memory: bool = False
    """Its server forgets everything when it stops."""

    ours: bool = False

    @property
    def label(self) -> str:
        return self.name if self.durable else f"{self.name} ⚠"


@contextlib.asynccontextmanager
async def no_clients(address: Address, queue: str, count: int) -> AsyncIterator[list[Client]]:
    """For systems that are not here."""
    yield []


@contextlib.contextmanager
def no_server(folder: Path, relaxed: bool) -> Any:
    """For libraries that only need a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    yield {"folder": str(folder), "relaxed": "yes" if relaxed else ""}
