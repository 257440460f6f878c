"""How often an owner looks for what others have brought."""

from __future__ import annotations

import asyncio

import pytest

from opendata_queue import Engine, NewMessage
from opendata_queue.runtime.polling import PollingPace
from tests.conftest import NewRoot
from tests.support.bulk_jobs import append


def test_rests_grow_while_nothing_happens_and_are_short_when_something_does() -> None:
    pace = PollingPace(2, 60)

    assert [pace.rest_ms(0) for _ in range(8)] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert [pace.rest_ms(happened) for happened in (1, 2, 3, 3, 3)] == [2, 2, 2, 4, 8]


def test_where_a_look_costs_nothing_all_rests_are_the_same() -> None:
    pace = PollingPace(1_000, 1_000)

    assert {pace.rest_ms(0) for _ in range(10)} == {1_000}


async def test_whoever_asks_for_messages_ends_the_rest(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PollingPace, "rest_ms", lambda _pace, _happened: 3_600_000)
    url = new_memory_root()
    async with await Engine.open(url) as engine, asyncio.timeout(120):
        await engine.create_queue("q")
        await append(url, "job", [NewMessage(b"from a job")])

        (claimed,) = await engine.claim("q", wait_ms=3_600_000)

    assert claimed.payload == b"from a job"
