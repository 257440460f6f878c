"""Extending the leases of claimed messages for as long as they are worked on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from opendata_queue.api.claiming import ClaimingSystem
from opendata_queue.model.errors import InvalidInputError, OdqError
from opendata_queue.model.messages import ClaimedMessage
from opendata_queue.model.options import QueueOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

_EXTENSIONS_PER_LEASE: Final = 3


class LeaseKeeper:
    """Claims messages of one queue, and extends their leases, one call for all that are due.

    It checks three times in a lease, and passes over what it has not seen before: short work costs
    no extension, and an extension may fail once before a lease is lost.

    All leases have the length that was wanted, or else the queue's own. It is learned once, and
    shortened when the queue does not allow it any more: others may change a queue at any time.
    """

    def __init__(self, system: ClaimingSystem, queue: str, lease_ms: int | None) -> None:
        is_number = isinstance(lease_ms, int) and not isinstance(lease_ms, bool)
        if lease_ms is not None and (not is_number or lease_ms < 1):
            raise InvalidInputError(f"lease_ms is {lease_ms!r}, not 1 or more")
        self._system = system
        self._queue = queue
        self._wanted_ms = lease_ms
        self._lease_ms = 0
        self._shortened = asyncio.Event()
        # By identity: a message may be claimed twice, and any other key costs more.
        self._held: dict[int, tuple[ClaimedMessage, int]] = {}
        self._turn = 0
        self._task: asyncio.Task[None] | None = None

    async def claim(
        self, count: int, *, consumer: str | None, wait_ms: int
    ) -> list[ClaimedMessage]:
        """What can be claimed. The caller says which of it to hold."""
        if self._task is None or self._task.done():
            self._lease_ms = self._wanted_ms or (await self._options()).lease_ms
            self._task = asyncio.create_task(self._run(), name=f"leases of {self._queue}")
        return await self._with_lease(
            lambda lease_ms: self._system._claim_in_loop(
                self._queue, count, consumer=consumer, lease_ms=lease_ms, wait_ms=wait_ms
            )
        )

    async def stop(self) -> None:
        """Keep nothing any more."""
        self._held.clear()
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])

    def hold(self, messages: Iterable[ClaimedMessage]) -> None:
        for message in messages:
            self._held[id(message)] = message, self._turn

    def holds(self, message: ClaimedMessage) -> bool:
        """Whether it is held, and its lease is not known to be lost."""
        return id(message) in self._held

    def drop(self, message: ClaimedMessage) -> bool:
        """Hold a message no longer; false if its lease was lost."""
        return self._held.pop(id(message), None) is not None

    async def _run(self) -> None:
        while True:
            await self._next_turn()
            self._turn += 1
            due = [message for message, since in self._held.values() if since < self._turn - 1]
            if not due:
                continue
            try:
                deadlines = await self._extend(due)
            except OdqError as error:
                # If it lasts, the next claim or ack raises it.
                logger.warning("could not extend leases of queue %s: %s", self._queue, error)
                continue
            for message, deadline in zip(due, deadlines, strict=True):
                if deadline is None and self.drop(message):
                    logger.warning("lost the lease of a message of queue %s", self._queue)

    async def _next_turn(self) -> None:
        """Wait a third of a lease, and not for the end of one that is longer than those to come."""
        self._shortened.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lease_ms / 1000 / _EXTENSIONS_PER_LEASE):
                await self._shortened.wait()

    async def _extend(self, due: Sequence[ClaimedMessage]) -> list[int | None]:
        return await self._with_lease(
            lambda lease_ms: self._system.extend(self._queue, *due, lease_ms=lease_ms)
        )

    async def _with_lease(self, call: Callable[[int], Awaitable[T]]) -> T:
        """Call with the lease, and again with a shorter one if it is over the queue's longest."""
        while True:
            lease_ms = self._lease_ms
            try:
                return await call(lease_ms)
            except InvalidInputError:
                if not await self._shorten(lease_ms):
                    raise

    async def _shorten(self, refused_ms: int) -> bool:
        """Whether there is a shorter lease than one that was refused."""
        options = await self._options()
        allowed_ms = options.lease_ms if self._wanted_ms is None else options.max_lease_ms
        if allowed_ms < self._lease_ms:
            logger.warning(
                "leases of queue %s are for %d ms now: it does not allow %d ms any more",
                self._queue,
                allowed_ms,
                self._lease_ms,
            )
            self._lease_ms = allowed_ms
            self._shortened.set()
        return self._lease_ms < refused_ms

    async def _options(self) -> QueueOptions:
        return (await self._system.get_queue(self._queue)).options
