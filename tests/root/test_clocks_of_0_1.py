"""Clocks that were written for release 0.1, which knew the wall clock alone (RFC 0012)."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

import opendata_queue as odq
from opendata_queue import Clock, Engine, Ingest, InvalidInputError
from opendata_queue.model.clock import machine_clock
from tests.conftest import NewRoot

START_MS = 1_700_000_000_000
MINUTE_MS = 60_000


class ClockOf01:
    """What a caller's own test clock had to have in 0.1."""

    def __init__(self) -> None:
        self.time_ms = START_MS
        self.moved = asyncio.Event()

    def now_ms(self) -> int:
        return self.time_ms

    async def wait_until(self, time_ms: int) -> None:
        while self.time_ms < time_ms:
            await self.moved.wait()

    def advance_ms(self, milliseconds: int) -> None:
        self.time_ms += milliseconds
        self.moved.set()
        self.moved = asyncio.Event()


@pytest.fixture
def old() -> ClockOf01:
    return ClockOf01()


def as_clock(clock: object) -> Clock:
    return cast("Clock", clock)


async def test_an_engine_goes_by_it(new_memory_root: NewRoot, old: ClockOf01) -> None:
    async with await Engine.open(new_memory_root(), clock=as_clock(old)) as system:
        await system.create_queue("q")
        await system.publish(b"x", delay_ms=MINUTE_MS)
        assert await system.claim("q") == []

        old.advance_ms(MINUTE_MS)

        assert [one.payload for one in await system.claim("q")] == [b"x"]


async def test_what_passes_by_it_between_two_owners_counts(
    new_memory_root: NewRoot, old: ClockOf01
) -> None:
    root = new_memory_root()
    async with await Engine.open(root, clock=as_clock(old)) as system:
        await system.create_queue("q")
        await system.publish(b"x", delay_ms=MINUTE_MS)

    old.advance_ms(MINUTE_MS)

    async with await Engine.open(root, clock=as_clock(old)) as system:
        assert [one.payload for one in await system.claim("q")] == [b"x"]


async def test_publishers_readers_and_systems_that_are_opened_go_by_it(
    new_memory_root: NewRoot, old: ClockOf01
) -> None:
    root = new_memory_root()
    async with (
        await Engine.open(root, clock=as_clock(old)) as system,
        await Ingest.open(root, clock=as_clock(old)) as ingest,
    ):
        await system.create_queue("q")
        old.advance_ms(MINUTE_MS)
        message_id = await ingest.publish(b"x")
        await system.all_is_routed()
        async with await odq.open_async(root, read_only=True, clock=as_clock(old)) as reader:
            (stored,) = await reader.read_many([message_id])
        assert stored is not None
        assert stored.received_at_ms == START_MS + MINUTE_MS


def test_one_that_is_set_back_stands_still_until_it_has_caught_up(old: ClockOf01) -> None:
    clock = machine_clock(as_clock(old))
    before_ns = clock.elapsed_ns()

    old.time_ms -= MINUTE_MS
    assert clock.elapsed_ns() == before_ns
    old.time_ms += MINUTE_MS + 1
    assert clock.elapsed_ns() == before_ns + 1_000_000


@pytest.mark.parametrize("missing", ["now_ms", "wait_until"])
async def test_one_without_what_0_1_asked_for_is_refused_by_the_name_of_that(
    new_memory_root: NewRoot, old: ClockOf01, missing: str
) -> None:
    setattr(old, missing, None)

    with pytest.raises(InvalidInputError, match=f"has no {missing}"):
        await Engine.open(new_memory_root(), clock=as_clock(old))


async def test_one_of_now_is_taken_as_it_is() -> None:
    clock: Any = odq.SystemClock()

    assert machine_clock(clock) is clock
