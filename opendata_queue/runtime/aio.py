"""Tasks that belong to something, and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final

_to_their_end: Final[set[asyncio.Task[Any]]] = set()
"""An event loop holds its tasks only weakly."""


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that goes on to its end, also if the caller is cancelled."""
    task = asyncio.create_task(work)
    _to_their_end.add(task)
    task.add_done_callback(_to_their_end.discard)
    await asyncio.shield(task)


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks and wait until they have ended, however they end.

    Those of an event loop that is gone have ended with it; waiting for them would raise.
    """
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
