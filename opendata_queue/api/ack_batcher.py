"""Acks that share a call, as publishes share a commit."""

from __future__ import annotations

import asyncio

from opendata_queue.api.claiming import ClaimingSystem
from opendata_queue.model.messages import ClaimedMessage
from opendata_queue.model.values import Outcome


class SharedAcks:
    """Acks messages of one queue: one call is under way while the next one gathers."""

    def __init__(self, system: ClaimingSystem, queue: str) -> None:
        self._system = system
        self._queue = queue
        self._gathered: list[tuple[ClaimedMessage, asyncio.Future[Outcome]]] = []
        self._acking: asyncio.Task[None] | None = None

    def ack(self, message: ClaimedMessage) -> asyncio.Future[Outcome]:
        """The outcome, when it is durable. A caller that gives up waiting does not stop it."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._gathered.append((message, outcome))
        if self._acking is None or self._acking.done():
            self._acking = asyncio.create_task(self._run(), name=f"acks of {self._queue}")
        return outcome

    async def _run(self) -> None:
        while self._gathered:
            gathered, self._gathered = self._gathered, []
            try:
                outcomes = await self._system.ack(self._queue, *(one for one, _ in gathered))
            except BaseException as error:
                for _, waiting in gathered:
                    _fail(waiting, error)
                if not isinstance(error, Exception):
                    raise
            else:
                for (_, waiting), outcome in zip(gathered, outcomes, strict=True):
                    if not waiting.done():
                        waiting.set_result(outcome)


def _fail(waiting: asyncio.Future[Outcome], error: BaseException) -> None:
    if waiting.done():
        return
    if isinstance(error, Exception):
        waiting.set_exception(error)
        waiting.exception()  # seen, even if no caller waits any more
    else:
        waiting.cancel()
