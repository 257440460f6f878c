"""How fast a broker is over HTTP, next to the same engine in one process.

    python -m benchmarks.http [--seconds 2] [--root DIR] [--quick]

256-byte payloads with two headers on a local disk, synced. Clients of the broker are processes of
their own, each with one call under way; embedded, they are tasks of one event loop. Publishing
includes routing into one queue; claim+ack takes from what was published just before. The broker and
its clients share the machine, so that 16 clients on few cores mostly measure the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

import opendata_queue
from benchmarks.common import HEADERS, PAYLOAD, percentile
from opendata_queue import AsyncSystem, NewMessage

REPOSITORY = Path(__file__).parents[1]
QUEUE = "orders"
BATCHES = (1, 10, 100)
CLIENTS = (1, 16)
KINDS = ("publish", "claim+ack")


@dataclass(kw_only=True)
class Figures:
    """What clients have measured."""

    messages: int = 0
    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        self.messages += other.messages
        self.seconds = max(self.seconds, other.seconds)
        self.latencies_ms += other.latencies_ms


Call = Callable[[AsyncSystem, int], Awaitable[int]]


async def publish(system: AsyncSystem, batch: int) -> int:
    await system.publish_many([NewMessage(PAYLOAD, headers=HEADERS) for _ in range(batch)])
    return batch


async def claim_and_ack(system: AsyncSystem, batch: int) -> int:
    claimed = await system.claim(QUEUE, batch)
    if claimed:
        await system.ack(QUEUE, *claimed)
    return len(claimed)


CALLS: dict[str, Call] = {"publish": publish, "claim+ack": claim_and_ack}


async def measure(system: AsyncSystem, call: Call, batch: int, seconds: float) -> Figures:
    """Call for so long, or until there is nothing left."""
    figures = Figures()
    start = now = time.perf_counter()
    while now - start < seconds:
        done = await call(system, batch)
        before, now = now, time.perf_counter()
        if not done:
            break
        figures.messages += done
        figures.latencies_ms.append((now - before) * 1000)
        figures.seconds = now - start
    return figures


# --- embedded -------------------------------------------------------------------------------------


async def embedded(folder: Path, clients: int, seconds: float) -> dict[tuple[str, int], Figures]:
    found = {}
    async with await opendata_queue.open_async(f"file://{folder}") as system:
        await system.create_queue(QUEUE)
        for batch in BATCHES:
            for kind in KINDS:
                tasks = [measure(system, CALLS[kind], batch, seconds) for _ in range(clients)]
                found[kind, batch] = total(await asyncio.gather(*tasks))
            await system.purge_queue(QUEUE)
    return found


def total(parts: Sequence[Figures]) -> Figures:
    whole = Figures()
    for part in parts:
        whole.add(part)
    return whole


# --- through a broker -----------------------------------------------------------------------------


def remote(folder: Path, clients: int, seconds: float) -> dict[tuple[str, int], Figures]:
    command = "from opendata_queue.cli import main; main()"
    paths = (REPOSITORY, REPOSITORY / "encodings", REPOSITORY / "compactor")
    broker = subprocess.Popen(
        [sys.executable, "-c", command, "serve", "--store", f"file://{folder}", "--port", "0"],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert broker.stdout is not None
        address = re.search(r"http://\S+", broker.stdout.readline())
        assert address is not None, "the broker did not start"
        return drive(address.group(), clients, seconds)
    finally:
        broker.terminate()
        broker.communicate()


def drive(url: str, clients: int, seconds: float) -> dict[tuple[str, int], Figures]:
    """Let processes go through all rounds in step, and gather what they measure."""
    spawn = multiprocessing.get_context("spawn")
    with opendata_queue.open(url) as system:
        system.create_queue(QUEUE)
    barrier = spawn.Barrier(clients)
    results: Queue[tuple[str, int, Figures]] = spawn.Queue()
    processes = [
        spawn.Process(target=client, args=(url, barrier, results, seconds, number == 0))
        for number in range(clients)
    ]
    for process in processes:
        process.start()
    found: dict[tuple[str, int], Figures] = {}
    for _ in range(clients * len(BATCHES) * len(KINDS)):
        kind, batch, figures = results.get(timeout=300)
        found.setdefault((kind, batch), Figures()).add(figures)
    for process in processes:
        process.join()
    return found


def client(
    url: str,
    barrier: Barrier,
    results: Queue[tuple[str, int, Figures]],
    seconds: float,
    is_first: bool,
) -> None:
    async def run() -> None:
        async with await opendata_queue.open_async(url) as system:
            for batch in BATCHES:
                for kind in KINDS:
                    await asyncio.to_thread(barrier.wait)
                    results.put((kind, batch, await measure(system, CALLS[kind], batch, seconds)))
                await asyncio.to_thread(barrier.wait)
                if is_first:
                    await system.purge_queue(QUEUE)

    uvloop.run(run())


# --- the table ------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--root", type=Path, help="where to put roots, on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="just to see that it runs")
    arguments = parser.parse_args()
    seconds = 0.1 if arguments.quick else arguments.seconds
    client_counts = (1, 2) if arguments.quick else CLIENTS
    table = Table("clients", "batch", "call", title="messages/s, and ms per call (p50 / p99)")
    table.add_column("embedded", justify="right")
    table.add_column("broker", justify="right")
    with tempfile.TemporaryDirectory(dir=arguments.root) as folder:
        for clients in client_counts:
            inside = uvloop.run(embedded(Path(folder, f"embedded-{clients}"), clients, seconds))
            outside = remote(Path(folder, f"broker-{clients}"), clients, seconds)
            for kind in KINDS:
                for batch in BATCHES:
                    table.add_row(
                        str(clients), str(batch), kind,
                        shown(inside[kind, batch]), shown(outside[kind, batch]),
                    )  # fmt: skip
    Console(width=100).print(table)


def shown(figures: Figures) -> str:
    if not figures.latencies_ms:
        return "nothing"
    rate = figures.messages / figures.seconds
    p50, p99 = (percentile(figures.latencies_ms, part) for part in (0.5, 0.99))
    return f"{rate:,.0f}/s  {p50:.1f} / {p99:.1f}"


if __name__ == "__main__":
    main()
