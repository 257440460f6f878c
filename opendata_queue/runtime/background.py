"""Work that goes on in the background, while callers call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from opendata_queue.model.figures import Figure
from opendata_queue.runtime.aio import end_tasks


class BackgroundTasks:
    """Tasks that go on until their system is closed, and what they show of themselves."""

    __slots__ = ("_figures", "_tasks")

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._figures: list[Callable[[], Iterable[Figure]]] = []

    def run(
        self,
        work: Coroutine[Any, Any, None],
        figures: Callable[[], Iterable[Figure]] | None = None,
    ) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if figures is not None:
            self._figures.append(figures)

    def figures(self) -> Iterator[Figure]:
        for figures in self._figures:
            yield from figures()

    async def close(self) -> None:
        await end_tasks(self._tasks)
