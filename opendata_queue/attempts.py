"""Who has claimed a message, over all queues (RFC 0001, Attempts)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from odq_encodings import Attempts, AttemptsKey
from opendata_queue.store import DatabaseReads, Rows

_KEPT: Final = 100_000
_MOST_CLAIMS: Final = 65_535


class AttemptsLedger:
    """Knows the claims of recent messages without reading, and reads those of older ones.

    A message's record is shared by all queues that hold it, and rewritten by every claim. For
    messages that were routed by this process, and not forgotten since, all claims are known here:
    reading is for messages that were there before.
    """

    def __init__(self, database: DatabaseReads) -> None:
        self._database = database
        self._claims: dict[int, tuple[str, ...]] = {}
        self._known_from: int | None = None

    def starts_at(self, message_id: int) -> None:
        """From this id on, no message has been claimed yet."""
        if self._known_from is None:
            self._known_from = message_id

    def knows(self, message_id: int) -> bool:
        known_from = self._known_from
        return message_id in self._claims or (known_from is not None and message_id >= known_from)

    async def learn(self, message_ids: Iterable[int]) -> None:
        """Read the records of messages whose claims are not known."""
        unknown = [message_id for message_id in message_ids if not self.knows(message_id)]
        if not unknown:
            return
        values = await self._database.get_by_id(unknown, _key_of)
        for message_id in unknown:
            claims: tuple[str, ...] = ()
            if message_id in values:
                key, value = _key_of(message_id), values[message_id]
                claims = self._database.decode(Attempts.decode, key, value).consumer_ids
            self._claims.setdefault(message_id, claims)

    def claim(self, message_id: int, consumer: str, rows: Rows) -> None:
        """Add a claim, and the row that says so."""
        claims = (*self._claims.pop(message_id, ()), consumer)[:_MOST_CLAIMS]
        self._claims[message_id] = claims
        if len(self._claims) > _KEPT:
            forgotten = next(iter(self._claims))
            del self._claims[forgotten]
            self._known_from = max(self._known_from or 0, forgotten + 1)
        rows.put(_key_of(message_id), Attempts(consumer_ids=claims).encode())


def _key_of(message_id: int) -> bytes:
    return AttemptsKey(message_id=message_id).encode()
