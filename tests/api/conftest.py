"""Systems to run tests on, with and without await."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import opendata_queue
from opendata_queue import AsyncSystem, System
from opendata_queue.store import forget_memory_root
from opendata_queue.testing import ManualClock

_numbers = itertools.count()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/root"
        return
    url = f"memory:///api-{os.getpid()}-{next(_numbers)}"
    yield url
    forget_memory_root(url)


@pytest.fixture
def system(url: str) -> Iterator[System]:
    """A system for code that blocks, on each kind of local store."""
    with opendata_queue.open(url) as system:
        yield system


@pytest.fixture
def memory_system(clock: ManualClock) -> Iterator[System]:
    """The same in memory, with a clock that is turned by hand."""
    with opendata_queue.open("memory:///", clock=clock) as system:
        yield system


@pytest.fixture
async def async_system(clock: ManualClock) -> AsyncIterator[AsyncSystem]:
    async with await opendata_queue.open_async("memory:///", clock=clock) as system:
        yield system
