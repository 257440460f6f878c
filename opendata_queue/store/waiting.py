"""Waiting for the store no longer than is agreed: SlateDB tries again for ever."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterator
from typing import Final, TypeVar

from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.model.figures import Figure

logger = logging.getLogger(__name__)

T = TypeVar("T")

_timeouts: Final[Counter[str]] = Counter()
"""How often there was no answer, by the kind of work: its first word, like open or write."""


async def in_time(work: Awaitable[T], timeout_ms: int, doing: str) -> T:
    """The result of ``work``; a store that does not answer in time counts as unavailable.

    What SlateDB is doing meanwhile ends with it: a call that is cancelled sends no more requests.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            return await work
    except TimeoutError:
        error = StoreUnavailableError(f"could not {doing}: no answer within {timeout_ms} ms")
        _note(error, doing)
        raise error from None


def timeout_figures() -> Iterator[Figure]:
    """How often this process got no answer in time."""
    for kind, count in sorted(_timeouts.items()):
        yield Figure(
            name="odq_store_timeouts",
            help="Calls to the store that got no answer in time, by what was tried.",
            kind="counter",
            labels=(("doing", kind),),
            value=count,
        )


def is_worth_a_warning(count: int) -> bool:
    """Whether to log something that happens for the ``count``-th time: ever more rarely."""
    return count & (count - 1) == 0


def _note(error: StoreUnavailableError, doing: str) -> None:
    kind = doing.partition(" ")[0]
    _timeouts[kind] += 1
    level = logging.WARNING if is_worth_a_warning(_timeouts[kind]) else logging.DEBUG
    logger.log(level, "%s (%d times to %s so far)", error, _timeouts[kind], kind)
