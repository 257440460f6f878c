"""The shop: what happens in it, which queues there are, and who works on them.

What happens is drawn from a seed, and with it how often each queue has to deliver what: so the
demo can say at its end whether the numbers add up.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from opendata_queue import (
    ClaimedMessage,
    NewMessage,
    QueueOptions,
    RetryLater,
    System,
    SystemClock,
    Worker,
)

SEED: Final = 17
NOBODY: Final = "nobody@nowhere.example"
POISON_AT: Final = (0.15, 0.4, 0.6)
"""Where in the stream there is a customer with a typo in the address."""
MAX_ATTEMPTS: Final = 3
URGENT: Final = 1

FILTERS: Final = {
    "audit": "",
    "orders": "total >= 100 PRIORITY 1; type LIKE 'order.%'",
    "emails": "type IN ('order.paid', 'user.joined')",
    "reminders": "type = 'reminder'",
}

Tell = Callable[[str, str, str], None]
"""Called with the sign, the queue and the text of what has happened."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens in the shop, and the queues that must get it."""

    headers: dict[str, str]
    queues: frozenset[str]
    delay_ms: int | None = None

    def message(self) -> NewMessage:
        return NewMessage(b"details", headers=self.headers, delay_ms=self.delay_ms)

    @property
    def is_poison(self) -> bool:
        return self.headers.get("to") == NOBODY

    @property
    def is_retried(self) -> bool:
        return "emails" in self.queues and not self.is_poison and server_is_busy(self.headers)


def server_is_busy(headers: dict[str, str]) -> bool:
    """Whether the first attempt to send this one fails."""
    return int(headers["number"]) % 6 == 0


def events(count: int) -> list[Event]:
    """What happens, the same each time."""
    chance = random.Random(SEED)
    made = [_event(number, chance) for number in range(count)]
    for part in POISON_AT:
        number = int(count * part)
        made[number] = _joined(number, NOBODY)
    return made


def _event(number: int, chance: random.Random) -> Event:
    (kind,) = chance.choices(["placed", "paid", "joined", "viewed", "reminder"], [3, 2, 1, 3, 1])
    if kind == "joined":
        return _joined(number, f"customer-{number}@shop.example")
    if kind == "viewed":
        return Event({"type": "page.viewed", "number": str(number)}, frozenset({"audit"}))
    if kind == "reminder":
        return Event(
            {"type": "reminder", "number": str(number)},
            frozenset({"audit", "reminders"}),
            delay_ms=chance.randrange(500, 1_500),
        )
    total = chance.choices([chance.uniform(5, 99), chance.uniform(100, 900)], [5, 1])[0]
    headers = {"type": f"order.{kind}", "number": str(number), "total": f"{total:.2f}"}
    if kind == "placed":
        return Event(headers, frozenset({"audit", "orders"}))
    headers["to"] = f"customer-{number}@shop.example"
    return Event(headers, frozenset({"audit", "orders", "emails"}))


def _joined(number: int, address: str) -> Event:
    return Event(
        {"type": "user.joined", "number": str(number), "to": address},
        frozenset({"audit", "emails"}),
    )


@dataclass
class Ledger:
    """What was published and what became of it, as producer and workers have seen it."""

    published: dict[int, Event] = field(default_factory=dict)
    done: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in FILTERS})
    failures: Counter[str] = field(default_factory=Counter)
    waited_ms: dict[bool, list[int]] = field(default_factory=lambda: {True: [], False: []})
    left_behind: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def expected(self, queue: str) -> list[int]:
        return sorted(id for id, event in self.published.items() if queue in event.queues)

    def expected_failures(self) -> int:
        return sum(
            MAX_ATTEMPTS * event.is_poison + event.is_retried for event in self.published.values()
        )

    def settled(self) -> bool:
        """Whether all is done, except what is poison until ``replay_the_dead``."""
        with self.lock:
            done = sum(map(len, self.done.values()))
        due = sum(len(event.queues) for event in self.published.values())
        poison = sum(event.is_poison for event in self.published.values())
        return done >= due - poison + len(self.replayed)

    def add_done(self, message: ClaimedMessage, waited_ms: int | None = None) -> None:
        with self.lock:
            self.done[message.queue].append(message.message_id)
            if waited_ms is not None:
                self.waited_ms[message.priority == URGENT].append(waited_ms)

    def add_failure(self, message: ClaimedMessage) -> None:
        with self.lock:
            self.failures[message.queue] += 1


class Shop:
    """A system with queues, and workers that are sometimes slow and sometimes fail."""

    def __init__(self, system: System, tell: Tell) -> None:
        self.system = system
        self.ledger = Ledger()
        self._tell = tell
        self._clock = SystemClock()
        self._address_book_is_right = False
        options = QueueOptions(max_attempts=MAX_ATTEMPTS, backoff_ms=300)
        for name, filter in FILTERS.items():
            system.create_queue(name, filter=filter, options=options)
        self._workers = [
            system.worker("audit", concurrency=4, consumer="auditor")(self._write_down),
            system.worker("orders", concurrency=2, consumer="packer")(self._pack),
            system.worker("emails", concurrency=4, consumer="mailer")(self._send),
            system.worker("reminders", consumer="reminder")(self._remind),
        ]

    @property
    def workers(self) -> list[Worker]:
        return self._workers

    def publish(self, some: list[Event]) -> None:
        ids = self.system.publish_many([event.message() for event in some])
        self.ledger.published.update(zip(ids, some, strict=True))

    def leave_orders_behind(self) -> None:
        """A consumer claims some and is never heard of again: their leases run out."""
        claimed = self.system.claim("orders", 5, consumer="runaway", lease_ms=1_000)
        self.ledger.left_behind += [message.message_id for message in claimed]
        self._tell("!", "orders", f"a consumer ran away with {len(claimed)} orders; lease: 1 s")

    def replay_the_dead(self) -> None:
        """Mend the cause, and have the dead letters delivered again."""
        self._address_book_is_right = True
        self.ledger.replayed += self.system.replay("emails", filter=f"to = '{NOBODY}'")

    # --- the workers: to return is to ack, to raise is to nack ------------------------------------

    def _write_down(self, message: ClaimedMessage) -> None:
        self.ledger.add_done(message)

    def _pack(self, message: ClaimedMessage) -> None:
        waited_ms = self._clock.now_ms() - message.received_at_ms
        time.sleep(0.03)
        headers = dict(message.headers)
        first = message.attempts == 1
        self.ledger.add_done(message, waited_ms if first else None)
        urgent = "urgent, " if message.priority == URGENT else ""
        again = "" if first else ", back from the runaway"
        self._tell(
            "✓",
            "orders",
            f"order of {headers['total']} packed: {urgent}waited {waited_ms:,} ms{again}",
        )

    def _send(self, message: ClaimedMessage) -> None:
        time.sleep(0.01)
        headers = dict(message.headers)
        address, attempt = headers["to"], message.attempts
        if address == NOBODY and not self._address_book_is_right:
            self.ledger.add_failure(message)
            last = attempt == MAX_ATTEMPTS
            what = "a dead letter now" if last else f"attempt {attempt}, comes back later"
            self._tell("✗" if last else "↻", "emails", f"no mailbox {address}: {what}")
            raise LookupError(f"no mailbox {address}")
        if address != NOBODY and attempt == 1 and server_is_busy(headers):
            self.ledger.add_failure(message)
            self._tell("↻", "emails", f"mail server busy: {address} again in 400 ms")
            raise RetryLater(400, "the mail server is busy")
        self.ledger.add_done(message)
        self._tell("✓", "emails", f"mail to {address} sent, attempt {attempt}")

    def _remind(self, message: ClaimedMessage) -> None:
        self.ledger.add_done(message)
        delay_ms = message.visible_at_ms - message.received_at_ms
        self._tell("✓", "reminders", f"reminder given, published {delay_ms:,} ms before it was due")


def batches(some: list[Event], ticks: int) -> Iterator[list[Event]]:
    """Cut into ``ticks`` batches: few events at first, a rush in the middle, few at the end."""
    weights = [5 if 0.3 <= tick / ticks < 0.6 else 1 for tick in range(ticks)]
    taken = 0
    for tick in range(ticks):
        upto = len(some) * sum(weights[: tick + 1]) // sum(weights)
        yield some[taken:upto]
        taken = upto
