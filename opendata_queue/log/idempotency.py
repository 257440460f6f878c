"""Publishing the same key twice stores one message (RFC 0003)."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from odq_encodings import IdempotencyRecord, IdempotencyRecordKey
from opendata_queue.model.clock import Clock
from opendata_queue.store import DatabaseReads

Scoped = tuple[str, str]
"""A namespace and an idempotency key in it."""

REQUEST_MARK: Final = "\0"
"""What the stored key of a publish of many begins with, and no key of a caller does."""


@dataclass(kw_only=True, slots=True)
class HeldKeys:
    """The keys of one publish: those known already, and all that it now holds."""

    known: dict[Scoped, int] = field(default_factory=dict)
    held: list[Scoped] = field(default_factory=list)


class IdempotencyKeys:
    """Looks up keys, and lets publishes with the same key go one after the other."""

    def __init__(self, database: DatabaseReads, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        # A key is here while it is held, with those who wait for it, first come first served.
        self._waiting: dict[Scoped, deque[asyncio.Future[None]]] = {}

    async def hold(self, keys: set[Scoped]) -> HeldKeys:
        """Hold ``keys`` until ``release``, and look them up.

        They are taken in sorted order, so that two publishes can't wait for each other.
        """
        taken = HeldKeys()
        try:
            for key in sorted(keys):
                await self._take(key)
                taken.held.append(key)
            taken.known = await self._look_up(taken.held)
        except BaseException:
            self.release(taken)
            raise
        return taken

    def release(self, taken: HeldKeys) -> None:
        """Hand the keys to those who wait for them."""
        for key in taken.held:
            self._hand_on(key)
        taken.held.clear()

    async def _take(self, key: Scoped) -> None:
        if key not in self._waiting:
            self._waiting[key] = deque()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was our turn already
                self._hand_on(key)
            raise

    def _hand_on(self, key: Scoped) -> None:
        waiting = self._waiting[key]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[key]

    async def _look_up(self, keys: list[Scoped]) -> dict[Scoped, int]:
        encoded = [record_key(key) for key in keys]
        values = await self._database.get_many(encoded)
        now_ms = self._clock.now_ms()
        found = {}
        for key, row, value in zip(keys, encoded, values, strict=True):
            if value is None:
                continue
            record = self._database.decode(IdempotencyRecord.decode, row, value)
            if now_ms <= record.expires_at:
                found[key] = record.message_id
        return found


def record_key(key: Scoped) -> bytes:
    namespace, idempotency_key = key
    return IdempotencyRecordKey(namespace=namespace, idempotency_key=idempotency_key).encode()
