"""The workloads of docs/benchmarks.md, on a store or a broker of the user's.

Payloads carry numbers: every message that is consumed is checked, and none may come twice or be
missing. Threads stand for producers and consumers, as the code of most users does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from opendata_queue.errors import OdqError
from opendata_queue.messages import ClaimedMessage, NewMessage
from opendata_queue.queue_options import QueueOptions
from opendata_queue.shard import NAMESPACE_HEADER
from opendata_queue.sync import System

_MARK_HEADER: Final = "odq-bench"
RETENTION_SECONDS: Final = 3_600
WAIT_MS: Final = 10_000

_BULK: Final = 500
_PER_SECOND: Final = 500
_PUBLISHERS: Final = 64
"""So that a publish that takes 100 ms does not keep others from being in time."""

_NUMBER_BYTES: Final = 8
_OPTIONS: Final = QueueOptions(lease_ms=3_600_000)  # nothing may come back meanwhile


@dataclass(kw_only=True)
class Measured:
    """Calls of one kind, by however many threads."""

    messages: int = 0
    seconds: float = 0.0
    calls: list[float] = field(default_factory=list)

    def result(self, workload: str) -> dict[str, Any]:
        ordered = sorted(self.calls)
        return {
            "workload": workload,
            "what": WORKLOADS[workload],
            "messages_per_second": round(self.messages / max(self.seconds, 1e-9), 1),
            "p50_ms": round(quantile(ordered, 0.5) * 1e3, 3),
            "p99_ms": round(quantile(ordered, 0.99) * 1e3, 3),
            "messages": self.messages,
        }


def quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


WORKLOADS: Final = {
    "W1": "single publishes in sequence",
    "W2": "publish x100",
    "W3": "claim and ack one at a time",
    "W4": "claim and ack x100",
    "W5": "publish to claim at 500 messages/s",
    "W7": "8 consumers at once, x10",
}


def run_workload(
    workload: str, system: System, namespace: str | None, size: int, seconds: float
) -> dict[str, Any]:
    """Measure one workload on a queue of its own."""
    with own_queue(system, namespace, _OPTIONS) as (queue, headers):
        bench = _Bench(system, queue, headers, size, seconds)
        measure: dict[str, Callable[[], Measured]] = {
            "W1": lambda: bench.publish(1),
            "W2": lambda: bench.publish(100),
            "W3": lambda: bench.consume(1, 1),
            "W4": lambda: bench.consume(100, 1),
            "W5": bench.latency,
            "W7": lambda: bench.consume(10, 8),
        }
        return measure[workload]().result(workload)


@contextmanager
def own_queue(
    system: System, namespace: str | None, options: QueueOptions | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """A queue that only takes messages with these headers, and is deleted in the end."""
    mark = secrets.token_hex(8)
    queue = f"{_MARK_HEADER}-{mark}"
    headers = {_MARK_HEADER: mark}
    if namespace is not None:
        queue = f"{namespace}/{queue}"
        headers[NAMESPACE_HEADER] = namespace
    system.create_queue(queue, filter=f"\"{_MARK_HEADER}\" = '{mark}'", options=options)
    try:
        yield queue, headers
    finally:
        system.delete_queue(queue)


class _Bench:
    def __init__(
        self, system: System, queue: str, headers: dict[str, str], size: int, seconds: float
    ) -> None:
        self._system = system
        self._queue = queue
        self._headers = headers
        self._filler = secrets.token_bytes(max(0, size - _NUMBER_BYTES))
        self._seconds = seconds

    def _new(self, numbers: range) -> list[NewMessage]:
        return [
            NewMessage(
                number.to_bytes(_NUMBER_BYTES, "big") + self._filler,
                headers=self._headers,
                retention_seconds=RETENTION_SECONDS,
            )
            for number in numbers
        ]

    def _number(self, message: ClaimedMessage) -> int:
        payload = message.payload or b""
        if payload[_NUMBER_BYTES:] != self._filler:
            raise OdqError(f"message {message.message_id} came back changed")
        return int.from_bytes(payload[:_NUMBER_BYTES], "big")

    def publish(self, batch: int) -> Measured:
        found = Measured()
        began = now = time.perf_counter()
        while now - began < self._seconds:
            self._system.publish_many(self._new(range(found.messages, found.messages + batch)))
            before, now = now, time.perf_counter()
            found.calls.append(now - before)
            found.messages += batch
        found.seconds = now - began
        return found

    def consume(self, batch: int, consumers: int) -> Measured:
        """For so long, of as many as could be consumed if a call took a millisecond."""
        count = max(batch * consumers, int(1_000 * self._seconds) * min(batch, 20))
        for first in range(0, count, _BULK):
            self._system.publish_many(self._new(range(first, min(count, first + _BULK))))
        found = Measured()
        numbers: list[int] = []
        end = time.perf_counter() + self._seconds

        def work() -> None:
            while time.perf_counter() < end and len(numbers) < count:
                before = time.perf_counter()
                messages = self._system.claim(self._queue, batch, wait_ms=200)
                if messages:
                    self._system.ack(self._queue, *messages)
                    found.calls.append(time.perf_counter() - before)
                    numbers.extend(map(self._number, messages))

        began = time.perf_counter()
        with ThreadPoolExecutor(consumers) as threads:
            for done in [threads.submit(work) for _ in range(consumers)]:
                done.result()
        found.seconds, found.messages = time.perf_counter() - began, len(numbers)
        self._check(numbers, count)
        return found

    def _check(self, numbers: list[int], count: int) -> None:
        if not numbers:
            raise OdqError(f"none of {count} messages came within {self._seconds:g} s")
        if len(set(numbers)) != len(numbers):
            raise OdqError("a message was handed out twice")
        left = self._system.stats(self._queue).available
        if len(numbers) + left != count:
            raise OdqError(f"{count} were published, {len(numbers)} came, and {left} are waiting")

    def latency(self) -> Measured:
        """From when a publish was due to when its message is in hand."""
        count = max(1, int(self._seconds * _PER_SECOND))
        found = Measured()
        numbers: list[int] = []
        began = time.perf_counter()

        def consume() -> None:
            deadline = began + self._seconds + WAIT_MS / 1e3
            while len(numbers) < count and time.perf_counter() < deadline:
                messages = self._system.claim(self._queue, 100, wait_ms=200)
                now = time.perf_counter()
                for number in map(self._number, messages):
                    numbers.append(number)
                    found.calls.append(now - began - number / _PER_SECOND)
                if messages:
                    self._system.ack(self._queue, *messages)

        with ThreadPoolExecutor(_PUBLISHERS) as publishers, ThreadPoolExecutor(1) as consumer:
            consuming = consumer.submit(consume)
            for number in range(count):
                time.sleep(max(0.0, began + number / _PER_SECOND - time.perf_counter()))
                publishers.submit(self._system.publish_many, self._new(range(number, number + 1)))
            consuming.result()
        found.seconds, found.messages = time.perf_counter() - began, len(numbers)
        self._check(numbers, count)
        return found
