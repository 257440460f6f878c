"""One process of a cell: connects, says that it is ready, waits for the word, works, and reports.

    python -m benchmarks.compare.worker '{"system": "redis", "address": {…}, "jobs": [{…}], …}'

It writes ``ready`` to its standard output, reads a line, and writes its figures as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import run_fast
from benchmarks.compare.content import opened, payload_of, payloads, slices
from benchmarks.compare.contract import Client, System
from benchmarks.compare.systems import find
from benchmarks.compare.workloads import MESSAGES_PER_SECOND

WAIT_MS = 200
PATIENCE_S = 60.0
_FILL_SLICE = 20_000
_WARM_PUBLISHES = 3


@dataclass(kw_only=True)
class Figures:
    """What one job has measured; times are on the clock that all processes share."""

    messages: int = 0
    unmeasured: int = 0
    """Messages of the first calls, in which connections and caches get warm."""

    begin_s: float = 0.0
    end_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    depth: int = 0


Job = Callable[[Client, dict[str, Any]], Coroutine[Any, Any, Figures]]


async def fill(client: Client, job: dict[str, Any]) -> Figures:
    for first, count in slices(job["messages"], _FILL_SLICE):
        await client.fill(payloads(first, count))
    deadline = time.monotonic() + PATIENCE_S
    depth = await client.depth()
    while depth < job["messages"] and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        depth = await client.depth()
    return Figures(messages=job["messages"], depth=depth)


async def publish(client: Client, job: dict[str, Any]) -> Figures:
    """Publish for so long, or longer until enough are there.

    The messages are made anew for each call, as a producer does.
    """
    batch, first = job["batch"], job["first"]
    for _ in range(_WARM_PUBLISHES):
        await client.publish(payloads(first, batch))
        first += batch
    found = Figures(begin_s=time.monotonic(), unmeasured=_WARM_PUBLISHES * batch)
    now, end = found.begin_s, found.begin_s + job["seconds"]
    longest = found.begin_s + job.get("longest", 0)
    while now < end or (now < longest and found.messages < job["at_least"]):
        await client.publish(payloads(first + found.messages, batch))
        before, now = now, time.monotonic()
        found.messages += batch
        found.latencies_ms.append((now - before) * 1e3)
    found.end_s = now
    return found


async def consume(client: Client, job: dict[str, Any]) -> Figures:
    """Receive and ack for so long, or until nothing is left."""
    received = await client.receive_whole(job["batch"], wait_ms=WAIT_MS)
    if received:
        await client.ack([one.handle for one in received])
    found = Figures(begin_s=time.monotonic(), unmeasured=len(received))
    now, end = found.begin_s, found.begin_s + job["seconds"]
    found.end_s = now
    while now < end:
        before = time.monotonic()
        got = await client.receive_whole(job["batch"], wait_ms=WAIT_MS)
        if not got:
            break
        await client.ack([one.handle for one in got])
        now = found.end_s = time.monotonic()
        found.latencies_ms.append((now - before) * 1e3)
        received += got
    found.messages = len(received) - found.unmeasured
    found.numbers = [opened(one.payload, one.headers)[0] for one in received]
    return found


async def publish_paced(client: Client, job: dict[str, Any]) -> Figures:
    """Publish at an even pace, however long one publish takes.

    A library that blocks publishes one after the other: what comes late by that is late.
    """
    count, begin_ns = job["messages"], time.monotonic_ns()
    under_way: set[asyncio.Task[None]] = set()
    for number in range(count):
        due_ns = begin_ns + number * 1_000_000_000 // MESSAGES_PER_SECOND
        # Again, for uvloop's timers may be early.
        while (early_ns := due_ns - time.monotonic_ns()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(early_ns / 1e9)
        task = asyncio.create_task(client.publish([payload_of(number, due_ns)]))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    return Figures(messages=count, begin_s=begin_ns / 1e9, end_s=time.monotonic())


async def consume_paced(client: Client, job: dict[str, Any]) -> Figures:
    """Receive as messages come, and note how old each one is in hand."""
    found = Figures(begin_s=time.monotonic())
    deadline = found.begin_s + job["messages"] / MESSAGES_PER_SECOND + PATIENCE_S
    while len(found.numbers) < job["messages"] and time.monotonic() < deadline:
        got = await client.receive(100, wait_ms=WAIT_MS)
        now_ns = time.monotonic_ns()
        for one in got:
            number, due_ns = opened(one.payload, one.headers)
            found.numbers.append(number)
            found.latencies_ms.append((now_ns - due_ns) / 1e6)
        if got:
            await client.ack([one.handle for one in got])
    found.messages, found.end_s = len(found.numbers), time.monotonic()
    return found


JOBS: dict[str, Job] = {
    "fill": fill,
    "publish": publish,
    "consume": consume,
    "publish_paced": publish_paced,
    "consume_paced": consume_paced,
}


def wait_for_the_word() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


async def in_tasks(system: System, spec: dict[str, Any]) -> list[Figures]:
    """All jobs of this process on one event loop."""
    jobs = spec["jobs"]
    connecting = system.connect(spec["address"], spec["queue"], len(jobs))
    async with connecting as clients:
        await asyncio.to_thread(wait_for_the_word)
        working = (JOBS[job["job"]](client, job) for client, job in zip(clients, jobs, strict=True))
        found = await asyncio.gather(*working)
        if spec["count_after"]:
            found[0].depth = await clients[0].depth()
        return found


def in_threads(system: System, spec: dict[str, Any]) -> list[Figures]:
    """Each job in a thread of its own, with a client of its own."""
    jobs = spec["jobs"]
    found: list[Figures] = []
    failures: list[BaseException] = []
    connected = threading.Barrier(len(jobs) + 1)
    begin = threading.Event()

    async def one(job: dict[str, Any]) -> None:
        async with system.connect(spec["address"], spec["queue"], 1) as (client,):
            connected.wait(PATIENCE_S)
            begin.wait()
            found.append(await JOBS[job["job"]](client, job))

    def thread(job: dict[str, Any]) -> None:
        try:
            run_fast(one(job))  # as the others: timers of other loops are later
        except BaseException as error:
            failures.append(error)
            connected.abort()

    threads = [threading.Thread(target=thread, args=(job,), daemon=True) for job in jobs]
    for each in threads:
        each.start()
    try:
        connected.wait(PATIENCE_S)
        wait_for_the_word()
        begin.set()
        for each in threads:
            each.join()
    except threading.BrokenBarrierError:
        pass
    if failures:
        raise failures[0]
    if spec["count_after"]:
        found[0].depth = asyncio.run(counted(system, spec))
    return found


async def counted(system: System, spec: dict[str, Any]) -> int:
    async with system.connect(spec["address"], spec["queue"], 1) as (client,):
        return await client.depth()


def run(spec: dict[str, Any]) -> Sequence[Figures]:
    """All contenders alike run as a service would: what was imported is no garbage to collect."""
    system = find(spec["system"])
    gc.collect()
    gc.freeze()
    if system.blocking:
        return in_threads(system, spec)
    return run_fast(in_tasks(system, spec))


def main() -> None:
    found = run(json.loads(sys.argv[1]))
    json.dump([vars(one) for one in found], sys.stdout)


if __name__ == "__main__":
    main()
