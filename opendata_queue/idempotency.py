"""Publishing the same key twice stores one message (RFC 0003)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from odq_encodings import IdempotencyRecord, IdempotencyRecordKey
from opendata_queue.clock import Clock
from opendata_queue.store import DatabaseReads

Scoped = tuple[str, str]
"""A namespace and an idempotency key in it."""


@dataclass(kw_only=True, slots=True)
class HeldKeys:
    """The keys of one publish: those known already, and those it now holds."""

    known: dict[Scoped, int] = field(default_factory=dict)
    held: list[Scoped] = field(default_factory=list)


class IdempotencyKeys:
    """Looks keys up, and lets publishes with the same key go one after the other."""

    def __init__(self, database: DatabaseReads, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._holders: dict[Scoped, asyncio.Event] = {}

    async def hold(self, keys: set[Scoped]) -> HeldKeys:
        """Look ``keys`` up, and hold those that are new until ``release``.

        They are taken in sorted order, so that two publishes can't wait for each other.
        """
        taken = HeldKeys()
        try:
            for key in sorted(keys):
                while key in self._holders:
                    await self._holders[key].wait()
                self._holders[key] = asyncio.Event()
                taken.held.append(key)
            for key, message_id in (await self._look_up(taken.held)).items():
                taken.known[key] = message_id
        except BaseException:
            self.release(taken)
            raise
        return taken

    def release(self, taken: HeldKeys) -> None:
        """Let the next publish with these keys look again."""
        for key in taken.held:
            self._holders.pop(key).set()
        taken.held.clear()

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
