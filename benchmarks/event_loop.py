"""Where the time of the event loop goes: processor time of its tasks, for each message.

    python benchmarks/event_loop.py [--batches 300] [--batch 100] [--root /tmp]

Tasks are Python's own here, and each of their steps is timed, so that all takes a little longer
than in service: read the shares. *The rest* is the loop itself, callbacks, and the timing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.compare.content import HEADERS, payloads
from opendata_queue import AsyncSystem, NewMessage, open_async

QUEUE: Final = "bench"
CALLER: Final = "caller"

_PythonTask: Any = asyncio.tasks._PyTask  # type: ignore[attr-defined]
_spent_ns: Counter[str] = Counter()
_steps: Counter[str] = Counter()


class TimedTask(_PythonTask):  # type: ignore[misc]
    """A task whose steps are timed, by the first word of its name."""

    def _Task__step(self, exc: BaseException | None = None) -> None:
        began = time.thread_time_ns()
        super()._Task__step(exc)
        name = self.get_name().split()[0]
        _spent_ns[name] += time.thread_time_ns() - began
        _steps[name] += 1


async def timed(work: Callable[[], Awaitable[int]]) -> tuple[int, float]:
    """How many messages there were, and the processor time of the loop in nanoseconds."""
    gc.collect()
    gc.freeze()
    _spent_ns.clear()
    _steps.clear()
    began = time.thread_time_ns()
    messages = await asyncio.create_task(_awaited(work), name=CALLER)
    return messages, time.thread_time_ns() - began


async def _awaited(work: Callable[[], Awaitable[int]]) -> int:
    return await work()


async def published(system: AsyncSystem, batches: int, size: int) -> int:
    for number in range(batches):
        made = payloads(number * size, size)
        await system.publish_many([NewMessage(one, headers=HEADERS) for one in made])
    return batches * size


async def consumed(system: AsyncSystem, size: int) -> int:
    total = 0
    while claimed := await system.claim(QUEUE, size):
        await system.ack(QUEUE, *claimed)
        total += len(claimed)
    return total


def shown(title: str, messages: int, loop_ns: float) -> Table:
    table = Table(f"{title}, {messages:,} messages", "µs for each message", "steps for each 100")
    for name, spent_ns in _spent_ns.most_common():
        if spent_ns > loop_ns / 200:
            steps = _steps[name] / messages * 100
            table.add_row(name, f"{spent_ns / messages / 1e3:.2f}", f"{steps:.1f}")
    rest_ns = loop_ns - sum(_spent_ns.values())
    table.add_row("the rest", f"{rest_ns / messages / 1e3:.2f}", "")
    table.add_section()
    table.add_row("the event loop", f"{loop_ns / messages / 1e3:.2f}", "")
    return table


async def measured(root: str, batches: int, size: int) -> None:
    asyncio.get_running_loop().set_task_factory(
        lambda loop, coro, **options: TimedTask(coro, loop=loop, **options)
    )
    console = Console()
    async with await open_async(root) as system:
        await system.create_queue(QUEUE)
        await published(system, 20, size)
        found = await timed(lambda: published(system, batches, size))
        console.print(shown(f"publish and route ×{size}", *found))
        found = await timed(lambda: consumed(system, size))
        console.print(shown(f"claim and ack ×{size}", *found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.root, prefix="odq-loop-") as folder:
        asyncio.run(measured(f"file://{folder}/root", given.batches, given.batch))


if __name__ == "__main__":
    main()
