"""What is in flight: messages under leases, and when these run out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Final

from odq_encodings import InFlightMessage
from opendata_queue.queues.state.records import Claim, Held, Waiting, new_tuple

MAX_ATTEMPTS_COUNTED: Final = 0xFFFF

_encode_in_flight = InFlightMessage.layout.struct.pack
_entry_of = itemgetter(1)
_NOT_IN_FLIGHT: Final = (None, b"")


class InFlight:
    """Messages that consumers have, each with its entry in the active record."""

    __slots__ = (
        "_deadline_unknown",
        "_held",
        "_last_claim_at",
        "_leased",
        "_leases",
        "claims_after",
    )

    def __init__(self, messages: Iterable[InFlightMessage] = ()) -> None:
        self._held: dict[int, tuple[Held, bytes]] = {}
        # Deadlines, each with the messages of one claim. Entries of messages that were finished
        # or extended stay until they are due, or until most of them are such.
        self._leases: list[tuple[int, list[int]]] = []
        self._leased = 0
        self._deadline_unknown: set[int] = set()
        self.claims_after = 0
        """Claims are made at this time or later: none may equal one that was given back. After
        a restart the clock sees to it, if its mark is not before this."""
        self._last_claim_at = 0
        for one in messages:
            held = Held(
                one.message_id,
                one.priority,
                one.claimed_at,
                one.lease_deadline,
                one.attempts,
                None,
                "",
            )
            self._held[one.message_id] = held, one.encode()
            self._last_claim_at = max(self._last_claim_at, one.claimed_at)
            self._lease(one.lease_deadline, [one.message_id])
            self._deadline_unknown.add(one.message_id)

    # --- what it holds ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> list[Held]:
        return [held for held, _ in self._held.values()]

    def message_ids(self) -> list[int]:
        """Those in flight, mostly in the order of their claims."""
        return list(self._held)

    def holding(self, message_id: int) -> Held | None:
        """A message if it is in flight."""
        return self._held.get(message_id, _NOT_IN_FLIGHT)[0]

    def entries(self) -> list[bytes]:
        """Its part of the active record."""
        return list(map(_entry_of, self._held.values()))

    @property
    def next_deadline(self) -> int | None:
        """No lease runs out before; that one may have been finished or extended meanwhile."""
        return self._leases[0][0] if self._leases else None

    @property
    def lacks_deadline(self) -> set[int]:
        """Messages in flight whose retention must be looked up before they can be given back.

        Only those that were in flight when the queue was loaded.
        """
        return self._deadline_unknown

    def learn_deadline(self, message_id: int, retention_deadline: int) -> None:
        """Fill in what the version-1 entry could not hold."""
        self._deadline_unknown.discard(message_id)
        if message_id in self._held:
            held, encoded = self._held[message_id]
            self._held[message_id] = held._replace(retention_deadline=retention_deadline), encoded

    # --- messages come in -------------------------------------------------------------------------

    def hold(
        self, chosen: Sequence[Waiting], now: int, *, lease_ms: int, consumer: str
    ) -> list[Held]:
        """Begin the leases of messages that are claimed together."""
        if not chosen:
            return []
        claimed_at, lease_deadline = max(now, self.claims_after), now + lease_ms
        # Column by column: for each of them it took twice as long.
        priorities, ids, _, deadlines, tried = zip(*chosen, strict=True)
        attempts = [one + 1 if one < MAX_ATTEMPTS_COUNTED else one for one in tried]
        fixed = ids, priorities, repeat(claimed_at), repeat(lease_deadline), attempts
        fields = zip(*fixed, deadlines, repeat(consumer), strict=False)
        held = list(map(new_tuple, repeat(Held), fields))
        entries = zip(held, map(_encode_in_flight, *fixed), strict=True)
        self._held.update(zip(ids, entries, strict=True))
        self._last_claim_at = claimed_at
        self._lease(lease_deadline, list(ids))
        return held

    def let_claims_differ(self) -> None:
        """Claims have the same numbers of attempts as earlier ones: they must differ in time."""
        self.claims_after = self._last_claim_at + 1

    def extend(self, claim: Claim | Held, now: int, *, lease_ms: int) -> int | None:
        """Let a lease run for so long from now; the new deadline, or none."""
        held = self._valid(claim, now)
        if held is None:
            return None
        deadline = now + lease_ms
        held = held._replace(lease_deadline=deadline)
        self._held[held.message_id] = held, _in_flight_bytes(held)
        self._lease(deadline, [held.message_id])
        return deadline

    def _lease(self, deadline: int, message_ids: list[int]) -> None:
        """Remember when messages in flight are to be taken back."""
        heapq.heappush(self._leases, (deadline, message_ids))
        self._leased += len(message_ids)
        if self._leased > 2 * len(self._held) + 64:  # mostly of what is not in flight any more
            by_deadline: dict[int, list[int]] = {}
            for held, _ in self._held.values():
                by_deadline.setdefault(held.lease_deadline, []).append(held.message_id)
            self._leases = sorted(by_deadline.items())
            self._leased = len(self._held)

    # --- messages leave ---------------------------------------------------------------------------

    def take(self, claim: Claim | Held, now: int, *, unused: bool = False) -> Held | None:
        """End the lease of a message; none, and nothing has changed, if the claim is not valid.

        The next claim of one that was ``unused`` has the same number of attempts.
        """
        held, _ = self._held.get(claim.message_id, _NOT_IN_FLIGHT)
        if held is not claim:  # not as it was handed out
            held = self._valid(claim, now)
        if held is None or now > held.lease_deadline:
            return None
        del self._held[held.message_id]
        if unused:
            self.claims_after = self._last_claim_at + 1
        return held

    def take_many(self, claims: Iterable[Claim | Held], now: int) -> tuple[list[bool], list[Held]]:
        """The same for many: whether each claim was valid, and the messages of those that were."""
        outcomes, taken = [], []
        in_flight = self._held
        for claim in claims:
            message_id = claim.message_id
            held, _ = in_flight.get(message_id, _NOT_IN_FLIGHT)
            if held is not claim:  # not as it was handed out
                held = self._valid(claim, now)
            elif now > held.lease_deadline:
                held = None
            if held is None:
                outcomes.append(False)
            else:
                del in_flight[message_id]
                outcomes.append(True)
                taken.append(held)
        return outcomes, taken

    def take_over(self, now: int, *, grace_ms: int, at_most: int | None) -> list[Held]:
        """End leases that have run out; reads only those that are due."""
        taken: list[Held] = []
        while self._leases and self._leases[0][0] + grace_ms < now and len(taken) != at_most:
            deadline, message_ids = self._leases[0]
            message_id = message_ids.pop()
            self._leased -= 1
            if not message_ids:
                heapq.heappop(self._leases)
            held, _ = self._held.get(message_id, _NOT_IN_FLIGHT)
            if held is None or held.lease_deadline != deadline:
                continue  # acknowledged, or extended: then there is a later entry
            del self._held[message_id]
            taken.append(held)
        return taken

    def _valid(self, claim: Claim | Held, now: int) -> Held | None:
        held, _ = self._held.get(claim.message_id, _NOT_IN_FLIGHT)
        if held is None or now > held.lease_deadline:
            return None
        same = held.attempts == claim.attempts and held.claimed_at == claim.claimed_at
        return held if same else None


def _in_flight_bytes(held: Held) -> bytes:
    message_id, priority, claimed_at, lease_deadline, attempts, _, _ = held
    return _encode_in_flight(message_id, priority, claimed_at, lease_deadline, attempts)
