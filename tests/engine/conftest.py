"""Systems to run tests on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from opendata_queue import (
    Engine,
)
from opendata_queue.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def system(root: str, clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open(root, clock=clock) as system:
        yield system


@pytest.fixture
async def memory_system(clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open("memory:///", clock=clock) as system:
        yield system
