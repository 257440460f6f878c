"""What consumers and workers need of a system: claims, and what becomes of them.

A system offers consumers and workers, which use a system. They know it by this alone, so that the
modules do not import each other in a circle.
"""

from __future__ import annotations

from typing import Protocol

from opendata_queue.model.messages import ClaimedMessage
from opendata_queue.model.values import Outcome, QueueInfo


class ClaimingSystem(Protocol):
    """See ``AsyncSystem`` for what each call does."""

    async def get_queue(self, name: str) -> QueueInfo: ...

    async def _claim_in_loop(
        self, name: str, count: int, *, consumer: str | None, lease_ms: int | None, wait_ms: int
    ) -> list[ClaimedMessage]: ...

    async def ack(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]: ...

    async def nack(
        self,
        name: str,
        *receipts: str | ClaimedMessage,
        error: str = "",
        delay_ms: int | None = None,
    ) -> list[Outcome]: ...

    async def release(self, name: str, *receipts: str | ClaimedMessage) -> list[Outcome]: ...

    async def extend(
        self, name: str, *receipts: str | ClaimedMessage, lease_ms: int | None = None
    ) -> list[int | None]: ...
