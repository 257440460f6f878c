"""Takeovers between machines whose clocks differ by minutes (RFC 0012)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from opendata_queue import (
    ClaimedMessage,
    Engine,
    NewMessage,
    PublishOptions,
    QueueOptions,
    SystemClock,
)
from opendata_queue.store import Objects, StoreSettings
from tests.conftest import NewRoot
from tests.root.shifted import ShiftedClock

MINUTE_MS = 60_000
MOST_LOST_MS = 20_000
"""What a takeover may take on a busy machine: much less than a minute."""

SLOWER_MS = MINUTE_MS // 50 + 2
"""By what a minute is longer for a clock that is ahead, and so runs slower."""

QUEUE = QueueOptions(lease_ms=MINUTE_MS, backoff_ms=MINUTE_MS, backoff_jitter=0)
KEYED = NewMessage(payload=b"short", retention_seconds=60, idempotency_key="once")
PUBLISHING = PublishOptions(idempotency_window_seconds=60)

# By how much the clock of the first owner is ahead of the real time, and that of the second.
PAIRS = [
    pytest.param(2 * MINUTE_MS, 0, id="first-ahead"),
    pytest.param(-7 * MINUTE_MS, 0, id="first-behind"),
    pytest.param(0, 7 * MINUTE_MS, id="second-ahead"),
    pytest.param(0, -2 * MINUTE_MS, id="second-behind"),
]


async def owner(root: str, ahead_ms: int) -> Engine:
    """One whose machine shares no clock with others, but for the store's."""
    # Heartbeats are far apart: whoever is not closed is silent.
    return await Engine.open(
        root,
        clock=ShiftedClock(ahead_ms),
        options=PUBLISHING,
        takeover=True,
        owner_lease_ms=600_000,
    )


def time_of(system: Engine) -> int:
    return system.stores.queues.clock.now_ms()


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What a first owner leaves: everything in it takes a minute."""

    claimed: ClaimedMessage
    keyed: int
    at_ms: int
    elapsed_ns: int


async def fill(system: Engine) -> Left:
    await system.create_queue("q", options=QUEUE)
    await system.publish(b"claimed")
    (claimed,) = await system.claim("q")
    await system.publish(b"failed")
    (failed,) = await system.claim("q")
    assert await system.nack("q", failed) == ["ok"]
    await system.publish(b"delayed", delay_ms=MINUTE_MS)
    (message_id,) = await system.publish_many([KEYED])
    return Left(
        claimed=claimed,
        keyed=message_id,
        at_ms=time_of(system),
        elapsed_ns=SystemClock().elapsed_ns(),
    )


async def check(system: Engine, left: Left) -> None:
    """A moment later, whatever clocks show: nothing is early, and in a minute all of it is due."""
    assert await system.publish_many([KEYED]) == [left.keyed]
    assert [one.payload for one in await system.claim("q", 10)] == [b"short"]
    stats = await system.stats("q")
    assert (stats.in_flight, stats.delayed, stats.expired) == (2, 2, 0)
    assert await system.ack("q", left.claimed.receipt) == ["ok"]
    await system.publish(b"new", retention_seconds=60)
    await system.publish(b"new and delayed", delay_ms=MINUTE_MS)
    assert [one.payload for one in await system.claim("q", 10)] == [b"new"]
    passed_ms = (SystemClock().elapsed_ns() - left.elapsed_ns) // 1_000_000
    shown_ms = time_of(system) - left.at_ms
    assert 0 <= shown_ms <= passed_ms + 1
    assert passed_ms - shown_ms <= MOST_LOST_MS
    assert await due_in_a_minute(system) == {b"delayed", b"failed", b"new and delayed"}


async def due_in_a_minute(system: Engine) -> set[bytes | None]:
    """What can be claimed then, though the machine's clock may still be behind the root's start."""
    machine = system.stores.queues.clock.machine
    assert isinstance(machine, ShiftedClock)
    machine.pass_ms(MINUTE_MS + SLOWER_MS)
    return {one.payload for one in await system.claim("q", 10)}


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "silent"])
@pytest.mark.parametrize(("first_ms", "second_ms"), PAIRS)
async def test_nothing_is_early_or_stuck_after_a_takeover(
    new_memory_root: NewRoot, first_ms: int, second_ms: int, closed: bool
) -> None:
    await hand_over(new_memory_root(), first_ms, second_ms, closed=closed)


@pytest.mark.parametrize(("first_ms", "second_ms"), PAIRS[:2])
async def test_nothing_is_early_or_stuck_after_a_takeover_by_the_time_of_a_bucket(
    new_s3_root: NewRoot, first_ms: int, second_ms: int
) -> None:
    await hand_over(new_s3_root(), first_ms, second_ms, closed=False)


async def hand_over(root: str, first_ms: int, second_ms: int, *, closed: bool) -> None:
    first = await owner(root, first_ms)
    try:
        left = await fill(first)
        if closed:
            await first.close()
        async with await owner(root, second_ms) as second:
            await check(second, left)
    finally:
        await first.close()


@pytest.mark.parametrize("first_ms", [2 * MINUTE_MS, -7 * MINUTE_MS], ids=["ahead", "behind"])
async def test_nothing_is_early_or_stuck_after_an_owner_was_killed(
    tmp_path: Path, first_ms: int
) -> None:
    root = f"file://{tmp_path}/root"
    command = [sys.executable, "-m", "tests.root.clock_owner_process", root, str(first_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "filled\n"
        process.kill()

    async with await owner(root, 0) as system:
        assert [one.payload for one in await system.claim("q", 10)] == [b"short"]
        stats = await system.stats("q")
        assert (stats.in_flight, stats.delayed, stats.expired) == (2, 2, 0)
        assert await due_in_a_minute(system) == {b"delayed", b"failed"}


@pytest.mark.parametrize("first_ms", [2 * MINUTE_MS, -7 * MINUTE_MS], ids=["ahead", "behind"])
async def test_an_owner_that_dies_while_it_opens_leaves_what_it_knew(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch, first_ms: int
) -> None:
    root = new_memory_root()
    first = await owner(root, first_ms)
    left = await fill(first)
    await first.close()

    async def no_beat(*_: object) -> None:
        """It dies before the first one."""

    with monkeypatch.context() as dying:
        dying.setattr("opendata_queue.root.owner_files.OwnerFiles.beat", no_beat)
        dying.setattr("opendata_queue.root.owner_files.OwnerFiles.release", no_beat)
        await (await owner(root, -5 * MINUTE_MS)).close()

    async with await owner(root, 0) as system:
        await check(system, left)


@pytest.mark.parametrize("first_ms", [2 * MINUTE_MS, -7 * MINUTE_MS], ids=["ahead", "behind"])
async def test_an_owner_of_0_1_went_by_the_clock_that_its_heartbeats_show(
    new_memory_root: NewRoot, first_ms: int
) -> None:
    root = new_memory_root()
    first = await owner(root, first_ms)
    left = await fill(first)
    await first.close()
    objects = Objects.open(root, StoreSettings())
    for name in await objects.names("owners/queues"):
        path = f"owners/queues/{name}"
        said = json.loads(await objects.read(path) or b"")
        for unknown in ("root", "opening", "check"):
            said.pop(unknown, None)
        await objects.write(path, json.dumps(said).encode())

    async with await owner(root, 0) as system:
        await check(system, left)


async def test_times_of_callers_are_by_the_clock_of_the_machine(new_memory_root: NewRoot) -> None:
    root, in_an_hour = new_memory_root(), SystemClock().now_ms() + 3_600_000
    async with await owner(root, 7 * MINUTE_MS) as ahead:
        await ahead.create_queue("q")
    async with await owner(root, 0) as system:
        message_id = await system.publish(b"x", visible_at_ms=in_an_hour)
        (stored,) = await system.read_many([message_id])
        assert stored is not None
        left_ms = stored.visible_at_ms - time_of(system)
        assert abs(left_ms - 3_600_000) < MOST_LOST_MS

        await system.create_queue("all", start=SystemClock().now_ms() - MINUTE_MS)
        await system._replay.finished()
        # It was received seven minutes from now, by the clock of the root.
        assert (await system.stats("all")).delayed == 1
