"""The workloads of docs/benchmarks.md, on a store or a broker of the user's.

Payloads carry numbers: every message that is consumed is checked, and none may come twice or be
missing. Threads stand for producers and consumers, as the code of most users does.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from opendata_queue.api.sync import System
from opendata_queue.log.checks import NAMESPACE_HEADER
from opendata_queue.model.errors import OdqError, TimedOutError
from opendata_queue.model.messages import ClaimedMessage, NewMessage
from opendata_queue.model.options import QueueOptions

_MARK_HEADER: Final = "odq-bench"
RETENTION_SECONDS: Final = 3_600
WAIT_MS: Final = 10_000
ANSWER_MS: Final = 5_000
"""How long one message may take to be published or claimed: a client would try for longer."""
_GIVE_BACK_MS: Final = 2_000

_BULK: Final = 500
_PER_SECOND: Final = 500
_PUBLISHERS: Final = 64
"""So that a publish that takes 100 ms does not keep others from being in time."""

NUMBER_BYTES: Final = 8
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
    workload: str,
    system: System,
    namespace: str | None,
    size: int,
    seconds: float,
    *,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measure one workload on a queue of its own, with payloads of 8 bytes or more."""
    with own_queue(system, namespace, _OPTIONS) as (queue, headers):
        bench = _Bench(system, queue, headers, size, seconds, now)
        measure: dict[str, Callable[[], Measured]] = {
            "W1": lambda: bench.publish(1),
            "W2": lambda: bench.publish(100),
            "W3": lambda: bench.consume(1, 1),
            "W4": lambda: bench.consume(100, 1),
            "W5": bench.latency,
            "W7": lambda: bench.consume(10, 8),
        }
        return measure[workload]().result(workload)


@contextlib.contextmanager
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
    except BaseException:
        # Report what went wrong, and soon, even if nothing can be deleted any more.
        with contextlib.suppress(OdqError):
            system.delete_queue(queue, timeout_ms=_GIVE_BACK_MS)
        raise
    system.delete_queue(queue)


class _Bench:
    def __init__(
        self,
        system: System,
        queue: str,
        headers: dict[str, str],
        size: int,
        seconds: float,
        now: Callable[[], float],
    ) -> None:
        self._system = system
        self._queue = queue
        self._headers = headers
        self._filler = secrets.token_bytes(size - NUMBER_BYTES)
        self._seconds = seconds
        self._now = now

    def _new(self, numbers: range) -> list[NewMessage]:
        return [
            NewMessage(
                number.to_bytes(NUMBER_BYTES, "big") + self._filler,
                headers=self._headers,
                retention_seconds=RETENTION_SECONDS,
            )
            for number in numbers
        ]

    def _number(self, message: ClaimedMessage) -> int:
        payload = message.payload or b""
        if payload[NUMBER_BYTES:] != self._filler:
            raise OdqError(f"message {message.message_id} came back changed")
        return int.from_bytes(payload[:NUMBER_BYTES], "big")

    def publish(self, batch: int) -> Measured:
        found = Measured()
        began = now = self._now()
        while now - began < self._seconds:
            self._system.publish_many(self._new(range(found.messages, found.messages + batch)))
            before, now = now, self._now()
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
        began = self._now()
        end = began + self._seconds

        def work() -> float:
            last = began
            while self._now() < end and len(numbers) < count:
                before = self._now()
                messages = self._system.claim(self._queue, batch, wait_ms=200)
                if messages:
                    self._system.ack(self._queue, *messages)
                    last = self._now()
                    found.calls.append(last - before)
                    numbers.extend(map(self._number, messages))
            return last

        with ThreadPoolExecutor(consumers) as threads:
            working = [threads.submit(work) for _ in range(consumers)]
            # With the last message it is over: some still wait for more then.
            found.seconds = max([one.result() for one in working]) - began
        found.messages = len(numbers)
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
        failures: list[Exception] = []
        began = self._now()

        def publish(number: int) -> None:
            if not failures:
                new = self._new(range(number, number + 1))
                with _attempting(f"publish message {number}"):
                    self._system.publish_many(new, timeout_ms=ANSWER_MS)

        def consume() -> None:
            deadline = began + self._seconds + WAIT_MS / 1e3
            while len(numbers) < count and not failures and self._now() < deadline:
                with _attempting("claim messages"):
                    messages = self._system.claim(
                        self._queue, 100, wait_ms=200, timeout_ms=200 + ANSWER_MS
                    )
                now = self._now()
                for number in map(self._number, messages):
                    numbers.append(number)
                    found.calls.append(now - began - number / _PER_SECOND)
                if messages:
                    found.seconds = now - began
                    with _attempting("ack messages"):
                        self._system.ack(self._queue, *messages, timeout_ms=ANSWER_MS)

        def watched(work: Callable[..., None], *args: int) -> None:
            try:
                work(*args)
            except Exception as error:  # of any thread: the first one ends the run
                failures.append(error)

        with ThreadPoolExecutor(_PUBLISHERS) as publishers, ThreadPoolExecutor(1) as consumer:
            consumer.submit(watched, consume)
            for number in range(count):
                if failures:
                    break
                time.sleep(max(0.0, began + number / _PER_SECOND - self._now()))
                publishers.submit(watched, publish, number)
        if failures:
            raise failures[0]
        found.messages = len(numbers)
        self._check(numbers, count)
        return found


@contextlib.contextmanager
def _attempting(doing: str) -> Iterator[None]:
    """Let an error say what was attempted."""
    try:
        yield
    except TimedOutError as error:
        raise OdqError(
            f"could not {doing} within {ANSWER_MS / 1000:g} s: is the store, or the broker, still "
            "there?"
        ) from error
    except OdqError as error:
        raise OdqError(f"could not {doing}: {error}") from error
