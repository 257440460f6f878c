"""What a message costs on object storage: requests and bytes of its whole life, and dollars.

    python -m benchmarks.compare.cost '{"rate": 1000, "seconds": 15, "linger_ms": 100, …}'

Messages are published at an even pace and consumed as they come, against the S3 server of the
tests, which answers as slowly as S3 does. Whatever the engine does meanwhile is counted:
heartbeats, manifests, garbage collection. Prices are list prices of us-east-1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from benchmarks.common import percentile, run_fast
from benchmarks.compare.content import HEADERS, check_numbers, opened, payload_of
from benchmarks.compare.processes import process, result
from benchmarks.compare.report import Target, table
from benchmarks.compare.systems.moto import BUCKET
from opendata_queue import CommitLimits, Engine, PublishOptions, QueueOptions
from tests.support.s3_server import S3Server

DOLLARS_PER_REQUEST: Final = {
    "PUT": 0.005 / 1_000, "LIST": 0.005 / 1_000,
    "GET": 0.0004 / 1_000, "HEAD": 0.0004 / 1_000,
    "DELETE": 0.0, "POST": 0.0,
}  # fmt: skip
"""Deletes are free, and so are those of many files at once, which are the POSTs. Two POSTs for each
file that is uploaded in parts are not, and the server does not tell them apart: there was one such
file in 80,000 messages, 0.2 % of the price at 1,000 messages/s, and 2 % at 10,000."""
DELETES: Final = ("DELETE", "POST")
SQS_DOLLARS_PER_REQUEST: Final = 0.40 / 1_000_000
SQS_REQUESTS_PER_MESSAGE: Final = 3
"""Send, receive, delete. A batch of ten is charged as one."""

MAIN_RATE: Final = 1_000
MAIN_LINGER_MS: Final = 100.0
_TICK_S: Final = 0.01
# Enough to keep up while each claim and each ack waits for a linger.
_CONSUMERS: Final = 16
_CLAIM: Final = 250
_QUEUE: Final = "bench"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    rate: int
    seconds: float
    linger_ms: float
    latency_ms: float
    rest_s: float = 0.0
    """Before anything is counted: what is done for the last messages is not what idling costs."""


@dataclass(kw_only=True)
class Spent:
    """What was counted in one scenario."""

    scenario: dict[str, Any]
    messages: int
    seconds: float
    requests: dict[str, int]
    latencies_ms: dict[str, float] = field(default_factory=dict)
    received_s: float = 0.0
    """From the first message in hand to the last one."""

    def per_thousand(self, name: str) -> float:
        return self.requests[name] / self.messages * 1_000

    @property
    def held(self) -> float:
        """How much of the rate was kept up with; all of it if all messages came at once."""
        wanted_s = self.messages / float(self.scenario["rate"])
        return min(1.0, wanted_s / self.received_s) if self.received_s else 1.0

    @property
    def dollars(self) -> float:
        return sum(self.requests[name] * price for name, price in DOLLARS_PER_REQUEST.items())

    @property
    def dollars_per_million(self) -> float:
        return self.dollars / self.messages * 1_000_000


# --- one scenario, in a process of its own --------------------------------------------------------


async def open_lingering(url: str, linger_ms: float) -> Engine:
    """An engine whose commits wait for company."""
    limits = CommitLimits(linger_ms=linger_ms)
    return await Engine.open(url, options=PublishOptions(limits=limits), queue_limits=limits)


async def live(scenario: Scenario, server: S3Server) -> Spent:
    system = await open_lingering(f"s3://{BUCKET}/cost", scenario.linger_ms)
    async with system:
        await system.create_queue(_QUEUE, options=QueueOptions(lease_ms=3_600_000))
        await system.publish(b"opens the shard")
        (first,) = await system.claim(_QUEUE, 1, wait_ms=10_000)
        await system.ack(_QUEUE, first)
        server.slow_down(scenario.latency_ms)
        await asyncio.sleep(scenario.rest_s)
        server.reset_requests()
        began = time.monotonic()
        latencies, numbers, received_s = await _published_and_consumed(system, scenario)
        took = time.monotonic() - began
        requests = server.requests()
        server.slow_down(0)
    check_numbers(numbers, range(len(numbers)))
    parts = {"0.5": 0.5, "0.99": 0.99}
    return Spent(
        scenario={name: getattr(scenario, name) for name in scenario.__slots__},
        messages=len(numbers),
        seconds=took,
        requests=requests,
        latencies_ms={n: percentile(latencies, p) for n, p in parts.items()} if numbers else {},
        received_s=received_s,
    )


async def _published_and_consumed(
    system: Any, scenario: Scenario
) -> tuple[list[float], list[int], float]:
    """Let messages live; how long each one took, their numbers, and how long they came in."""
    latencies: list[float] = []
    times: list[int] = []
    numbers: list[int] = []
    total = int(scenario.rate * scenario.seconds)

    async def consume() -> None:
        while len(numbers) < total:
            messages = await system.claim(_QUEUE, _CLAIM, wait_ms=200)
            now_ns = time.monotonic_ns()
            for one in messages:
                number, due_ns = opened(one.payload, dict(one.headers))
                numbers.append(number)
                latencies.append((now_ns - due_ns) / 1e6)
            if messages:
                times.append(now_ns)
                await system.ack(_QUEUE, *messages)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_CONSUMERS):
            tasks.create_task(consume())
        await _publish(system, scenario, total, tasks)
    if not total:
        await asyncio.sleep(scenario.seconds)
    return latencies, numbers, (max(times) - min(times)) / 1e9 if numbers else 0.0


async def _publish(system: Any, scenario: Scenario, total: int, tasks: asyncio.TaskGroup) -> None:
    """One call for each message; over 1,000 a second ten of them share one, as clients would."""
    from opendata_queue import NewMessage

    batch = 10 if scenario.rate > 1_000 else 1
    began_ns = time.monotonic_ns()

    def due_ns(number: int) -> int:
        return began_ns + number * 1_000_000_000 // scenario.rate

    published = 0
    while published < total:
        now_ns = time.monotonic_ns()
        due = min(total, int((now_ns - began_ns) / 1e9 * scenario.rate) + 1)
        while published < due:
            count = min(batch, total - published)
            messages = [
                NewMessage(payload_of(number, due_ns(number)), headers=HEADERS)
                for number in range(published, published + count)
            ]
            tasks.create_task(system.publish_many(messages))
            published += count
        await asyncio.sleep(_TICK_S)


def _main(spec: str) -> None:
    """The process of one scenario."""
    scenario = Scenario(**json.loads(spec))
    with S3Server() as server:
        os.environ.update(server.environment())
        server.create_bucket(BUCKET)
        print(json.dumps(vars(run_fast(live(scenario, server)))))


@contextlib.contextmanager
def started(scenarios: Sequence[Scenario]) -> Iterator[Callable[[], list[Spent]]]:
    """Run scenarios at once, each in a process of its own; gives what waits for them."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                process(
                    "benchmarks.compare.cost",
                    {name: getattr(one, name) for name in one.__slots__},
                )
            )
            for one in scenarios
        ]
        longest_s = max(one.rest_s + one.seconds * 4 for one in scenarios) + 120
        yield lambda: [Spent(**result(worker, timeout_s=longest_s)) for worker in workers]


# --- all scenarios --------------------------------------------------------------------------------


def measure_cost(
    found: dict[str, Any], *, latency_ms: float, quick: bool, say: Callable[[str], None]
) -> None:
    """At three rates, along the dial, and idle. Those that leave room run at the same time.

    What is found is there as soon as it is known, whatever fails later.
    """
    # Garbage is collected every 15 s, once it is a minute old: the long ones see that.
    long, short = (1.0, 1.0) if quick else (78.0, 8.0)
    # Polls of an idle root become rarer and rarer, up to one a minute.
    rest_s, idle_s = (0.0, 1.0) if quick else (75.0, 60.0)

    def at(rate: int, seconds: float, linger_ms: float) -> Scenario:
        return Scenario(rate=rate, seconds=seconds, linger_ms=linger_ms, latency_ms=latency_ms)

    together: list[list[Scenario]] = [
        [
            at(10, long, MAIN_LINGER_MS),
            at(10, long, 1_000),
            at(MAIN_RATE, long, MAIN_LINGER_MS),
        ],
        [at(10_000, short, MAIN_LINGER_MS)],
    ]
    if not quick:
        together += [
            [at(MAIN_RATE, short, 0), at(MAIN_RATE, short, 1_000)],
            [at(MAIN_RATE, short, 25), at(MAIN_RATE, short, 250)],
        ]
    found |= {"latency_ms": latency_ms, "spent": []}
    idle = replace(at(0, idle_s, 0), rest_s=rest_s)
    with started([idle]) as idling:  # along with all others, since it does next to nothing
        for scenarios in together:
            shown = ", ".join(f"{one.rate}/s linger {one.linger_ms:g} ms" for one in scenarios)
            say(f"cost on S3: {shown}")
            with started(scenarios) as running:
                found["spent"] += [vars(one) for one in running()]
        say("cost on S3: idle")
        found["spent"] += [vars(one) for one in idling()]


def _spent(found: Mapping[str, Any]) -> list[Spent]:
    return [Spent(**one) for one in found["spent"]]


def _rate(spent: Spent) -> int:
    return int(spent.scenario["rate"])


def _linger_ms(spent: Spent) -> float:
    return float(spent.scenario["linger_ms"])


def dial(found: Mapping[str, Any]) -> list[Spent]:
    """The same rate with other lingers, shortest first."""
    return sorted((one for one in _spent(found) if _rate(one) == MAIN_RATE), key=_linger_ms)


def sqs_dollars_per_million(batch: int = 1) -> float:
    return SQS_DOLLARS_PER_REQUEST * SQS_REQUESTS_PER_MESSAGE * 1_000_000 / batch


def cost_lines(found: Mapping[str, Any]) -> list[str]:
    everything = _spent(found)
    idle = [one for one in everything if not _rate(one)]
    header = [
        "messages/s", "linger ms", "held", "PUT", "GET", "LIST", "deletes", "KiB in", "KiB out",
        "$ per million", "of SQS", "of SQS ×10", "p50 / p99 ms",
    ]  # fmt: skip
    busy = sorted(
        (one for one in everything if _rate(one)), key=lambda s: (_rate(s), _linger_ms(s))
    )
    lines = [
        "Requests and KiB are for 1,000 messages, from publish to ack, everything else that the",
        f"engine does included. Each request takes {found['latency_ms']:g} ms longer than moto.",
        "*Deletes*, of one file or of many at once, are free. SQS at list price, one message in",
        f"each call: ${sqs_dollars_per_million():.2f} for a million messages; in full batches of",
        f"ten (×10): ${sqs_dollars_per_million(10):.2f}. *Held* is how much of the rate this",
        "machine could keep up with, moto included. Every scenario was measured once.",
        "",
        *table(header, [_row(one) for one in busy]),
    ]
    for one in idle:
        monthly = one.dollars / one.seconds * 30 * 24 * 3_600
        counts = ", ".join(
            f"{one.requests[name] / one.seconds * 60:.0f} {name}" for name in ("PUT", "GET", "LIST")
        )
        rest_s = one.scenario["rest_s"]
        lines += [
            "",
            f"An idle root, {rest_s:.0f} s after its last message, costs ${monthly:.2f} a month in",
            f"requests: {counts} a minute.",
        ]
    return lines


def _row(spent: Spent) -> list[str]:
    return [
        f"{_rate(spent):,}",
        f"{_linger_ms(spent):g}",
        f"{spent.held:.0%}",
        *(f"{spent.per_thousand(name):.1f}" for name in ("PUT", "GET", "LIST")),
        f"{sum(spent.per_thousand(name) for name in DELETES):.1f}",
        *(f"{spent.per_thousand(name) / 1024:.0f}" for name in ("bytes_in", "bytes_out")),
        f"{spent.dollars_per_million:.3f}",
        *(f"{spent.dollars_per_million / sqs_dollars_per_million(batch):.1%}" for batch in (1, 10)),
        " / ".join(f"{spent.latencies_ms[part]:.0f}" for part in ("0.5", "0.99")),
    ]


def cost_targets(found: Mapping[str, Any]) -> Sequence[Target]:
    main = [one for one in dial(found) if _linger_ms(one) == MAIN_LINGER_MS]
    return [
        Target(
            what=f"cost per million at {MAIN_RATE:,} msg/s, linger {MAIN_LINGER_MS:g} ms",
            target=f"below a tenth of SQS, ${sqs_dollars_per_million() / 10:.2f}",
            measured=f"${one.dollars_per_million:.3f}",
            met=one.dollars_per_million < sqs_dollars_per_million() / 10,
        )
        for one in main
    ]


if __name__ == "__main__":
    _main(sys.argv[1])
