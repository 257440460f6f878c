"""Keeping what was claimed for as long as somebody works on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from opendata_queue.errors import OdqError
from opendata_queue.messages import ClaimedMessage

if TYPE_CHECKING:
    from opendata_queue.interface import AsyncSystem

logger = logging.getLogger(__name__)

_EXTENSIONS_PER_LEASE: Final = 3


class LeaseKeeper:
    """Extends the leases of messages of one queue, one call for all that are due.

    It looks three times in a lease, and passes over what it has not seen before: short work costs
    no extension, and an extension may fail once before a lease is lost.
    """

    def __init__(self, system: AsyncSystem, queue: str, lease_ms: int | None) -> None:
        self._system = system
        self._queue = queue
        self._lease_ms = lease_ms
        # By identity: a message may be claimed twice, and is told apart by nothing that costs less.
        self._held: dict[int, tuple[ClaimedMessage, int]] = {}
        self._turn = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """The lease to claim with: the one wanted, or else the queue's own."""
        if self._lease_ms is None:
            self._lease_ms = (await self._system.get_queue(self._queue)).options.lease_ms
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(
                self._run(self._lease_ms), name=f"leases of {self._queue}"
            )
        return self._lease_ms

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

    async def _run(self, lease_ms: int) -> None:
        while True:
            await asyncio.sleep(lease_ms / 1000 / _EXTENSIONS_PER_LEASE)
            self._turn += 1
            due = [message for message, since in self._held.values() if since < self._turn - 1]
            if not due:
                continue
            try:
                deadlines = await self._system.extend(self._queue, *due, lease_ms=lease_ms)
            except OdqError as error:
                # If it is more than a moment's trouble, whoever claims or acks is told.
                logger.warning("could not extend leases of queue %s: %s", self._queue, error)
                continue
            for message, deadline in zip(due, deadlines, strict=True):
                if deadline is None and self.drop(message):
                    logger.warning("lost the lease of a message of queue %s", self._queue)
