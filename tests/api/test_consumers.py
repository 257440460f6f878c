"""Loops over a queue: what is acked, what is nacked, what is given back."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import Any

import pytest

import opendata_queue
from opendata_queue import (
    AsyncSystem,
    ClosedError,
    Engine,
    FencedError,
    InvalidInputError,
    NewMessage,
    QueueOptions,
    RetryLater,
    System,
    WrongContextError,
)
from opendata_queue.api.consumers import LEFT_THE_LOOP
from opendata_queue.testing import ManualClock

ONE_TRY = QueueOptions(max_attempts=1)


def fill(system: System, count: int, options: QueueOptions | None = None) -> None:
    """A queue with so many messages, all routed."""
    system.create_queue("q", options=options)
    system.publish_many([NewMessage(b"%d" % number) for number in range(count)])
    engine = system._system
    assert isinstance(engine, Engine)
    system._thread.call(engine.parts.tailer.caught_up())


async def fill_async(system: AsyncSystem, count: int, options: QueueOptions | None = None) -> None:
    await system.create_queue("q", options=options)
    await system.publish_many([NewMessage(b"%d" % number) for number in range(count)])
    assert isinstance(system, Engine)
    await system.parts.tailer.caught_up()


def state(system: System) -> tuple[int, int, int, int]:
    """Available or delayed, in flight, done, failed."""
    stats = system.stats("q")
    return stats.available + stats.delayed, stats.in_flight, stats.done, stats.failed


def errors(system: System) -> list[str]:
    return [failed.error for failed in system.failed("q")]


# --- the end of a turn ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 10])
def test_each_message_is_acked_when_the_loop_goes_on(system: System, batch: int) -> None:
    fill(system, 5)

    seen = [message.payload for message in system.consumer("q", batch=batch, idle_ms=0)]

    assert seen == [b"%d" % number for number in range(5)]
    assert state(system) == (0, 0, 5, 0)


async def test_each_message_is_acked_when_the_loop_goes_on_with_await(
    async_system: AsyncSystem,
) -> None:
    await fill_async(async_system, 5)

    seen = [message.payload async for message in async_system.consumer("q", idle_ms=0)]

    assert seen == [b"%d" % number for number in range(5)]
    assert (await async_system.stats("q")).done == 5


def test_with_a_batch_of_one_the_last_one_is_done_before_the_next_is_claimed(
    system: System,
) -> None:
    fill(system, 3)

    found = [state(system) for _ in system.consumer("q", batch=1, idle_ms=0)]

    assert found == [(2, 1, 0, 0), (1, 1, 1, 0), (0, 1, 2, 0)]


def test_a_limit_ends_the_loop_and_claims_no_more_than_that(memory_system: System) -> None:
    fill(memory_system, 5)

    with memory_system.consumer("q", limit=3) as messages:
        assert [message.payload for message in messages] == [b"0", b"1", b"2"]
        assert state(memory_system)[0] == 2
    assert state(memory_system) == (2, 0, 3, 0)


async def test_a_loop_ends_when_nothing_has_come_for_long_enough(
    async_system: AsyncSystem, clock: ManualClock
) -> None:
    await fill_async(async_system, 2)
    seen = 0

    async def consume() -> None:
        nonlocal seen
        async for _ in async_system.consumer("q", wait_ms=100, idle_ms=250):
            seen += 1

    consuming = asyncio.create_task(consume())
    while not consuming.done():  # waits of 100, 100 and 50
        if clock.waits_ms:
            clock.advance_ms(10)
        await asyncio.sleep(0.001)
    await consuming

    assert seen == 2


def test_a_consumer_can_loop_again(memory_system: System) -> None:
    fill(memory_system, 4)
    consumer = memory_system.consumer("q", limit=2)

    assert [message.payload for message in consumer] == [b"0", b"1"]
    assert [message.payload for message in consumer] == [b"2", b"3"]


def test_a_loop_waits_for_messages_that_come_later(system: System) -> None:
    system.create_queue("q")
    seen: list[bytes | None] = []

    def consume() -> None:
        seen.extend(message.payload for message in system.consumer("q", limit=3, wait_ms=50))

    thread = threading.Thread(target=consume)
    thread.start()
    for number in range(3):
        system.publish(b"%d" % number)
    thread.join(120)

    assert seen == [b"0", b"1", b"2"]


# --- leaving a block ------------------------------------------------------------------------------


def test_an_exception_that_leaves_the_block_is_a_nack_with_its_text(system: System) -> None:
    fill(system, 5, ONE_TRY)

    with pytest.raises(ZeroDivisionError), system.consumer("q") as messages:  # noqa: PT012
        for message in messages:
            if message.payload == b"1":
                1 / 0  # noqa: B018

    assert state(system) == (3, 0, 1, 1)
    assert errors(system) == ["ZeroDivisionError: division by zero"]


async def test_an_exception_that_leaves_the_block_is_a_nack_with_await(
    async_system: AsyncSystem,
) -> None:
    await fill_async(async_system, 2, ONE_TRY)

    with pytest.raises(KeyError):  # noqa: PT012
        async with async_system.consumer("q") as messages:
            async for _ in messages:
                raise KeyError("who?")

    assert [one.error for one in await async_system.failed("q")] == ["KeyError: 'who?'"]
    assert (await async_system.stats("q")).available == 1


def test_leaving_the_block_in_peace_acks_the_message_in_hand(memory_system: System) -> None:
    fill(memory_system, 3)

    with memory_system.consumer("q") as messages:
        for _ in messages:
            break

    assert state(memory_system) == (2, 0, 1, 0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_releases_the_message_and_does_not_count(
    memory_system: System, kind: type[BaseException]
) -> None:
    fill(memory_system, 3)

    with pytest.raises(kind), memory_system.consumer("q") as messages:  # noqa: PT012
        for _ in messages:
            raise kind

    assert state(memory_system) == (3, 0, 0, 0)
    assert [message.attempts for message in memory_system.claim("q", 3)] == [1, 1, 1]


async def test_a_cancelled_loop_releases_what_it_holds(async_system: AsyncSystem) -> None:
    await fill_async(async_system, 3)
    in_hand = asyncio.Event()

    async def consume() -> None:
        async with async_system.consumer("q") as messages:
            async for _ in messages:
                in_hand.set()
                await asyncio.Event().wait()

    consuming = asyncio.create_task(consume())
    await in_hand.wait()
    consuming.cancel()
    await asyncio.wait([consuming])

    assert (await async_system.stats("q")).available == 3


def test_a_message_that_was_released_by_closing_comes_first_again(memory_system: System) -> None:
    fill(memory_system, 5)

    with memory_system.consumer("q", batch=5) as messages:
        for _ in messages:
            assert state(memory_system)[1] == 5
            messages.release()
            break

    assert [(m.payload, m.attempts) for m in memory_system.claim("q", 5)] == [
        (b"%d" % number, 1) for number in range(5)
    ]


# --- a bare loop ----------------------------------------------------------------------------------


def test_an_exception_out_of_a_bare_loop_is_a_nack(system: System) -> None:
    fill(system, 5, ONE_TRY)

    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for message in system.consumer("q"):
            if message.payload == b"1":
                1 / 0  # noqa: B018

    assert state(system) == (3, 0, 1, 1)
    assert errors(system) == [LEFT_THE_LOOP]


def test_an_exception_out_of_a_bare_loop_is_a_nack_when_the_consumer_has_a_name(
    system: System,
) -> None:
    fill(system, 2, ONE_TRY)
    consumer = system.consumer("q")

    try:
        for _ in consumer:
            raise ValueError
    except ValueError:
        settled = state(system)  # while the traceback still refers to the frame

    assert settled == (1, 0, 0, 1)


def test_a_break_out_of_a_bare_loop_is_a_nack_too(system: System) -> None:
    fill(system, 3)

    for _ in system.consumer("q"):
        break

    assert state(system) == (3, 0, 0, 0)
    assert system.stats("q").delayed == 1


def test_an_interruption_on_the_way_to_a_message_releases_it_and_does_not_count(
    memory_system: System,
) -> None:
    fill(memory_system, 3, ONE_TRY)
    loop = memory_system.consumer("q").__iter__()
    next(loop)

    with pytest.raises(KeyboardInterrupt):
        loop.throw(KeyboardInterrupt())  # as when it comes before the body has the message

    assert state(memory_system) == (3, 0, 0, 0)
    assert [message.attempts for message in memory_system.claim("q", 3)] == [1, 1, 1]


async def test_an_exception_out_of_a_bare_loop_is_a_nack_with_await(
    async_system: AsyncSystem,
) -> None:
    await fill_async(async_system, 3, ONE_TRY)

    async def consume() -> None:
        async for _ in async_system.consumer("q"):
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        await consume()
    gc.collect()
    while not (failed := await async_system.failed("q")):  # the event loop closes the iterator
        await asyncio.sleep(0)

    assert [one.error for one in failed] == [LEFT_THE_LOOP]
    assert (await async_system.stats("q")).available == 2


def test_an_iterator_that_the_event_loop_collects_is_settled_as_well(
    memory_system: System,
) -> None:
    fill(memory_system, 2, ONE_TRY)
    loop = iter(memory_system.consumer("q", batch=1))
    next(loop)
    holder = [loop]
    del loop

    async def drop() -> None:
        holder.clear()

    memory_system._thread.call(drop())
    while not errors(memory_system):
        pass

    assert errors(memory_system) == [LEFT_THE_LOOP]


# --- deciding in the loop -------------------------------------------------------------------------


def test_a_message_can_fail_without_an_end_to_the_loop(system: System) -> None:
    fill(system, 4, ONE_TRY)

    with system.consumer("q", idle_ms=0) as messages:
        for message in messages:
            if message.payload == b"1":
                messages.nack("not this one")
            if message.payload == b"2":
                messages.ack()
                assert state(system)[2] == 2

    assert state(system) == (0, 0, 3, 1)
    assert errors(system) == ["not this one"]


async def test_a_message_can_fail_without_an_end_to_the_loop_with_await(
    async_system: AsyncSystem, clock: ManualClock
) -> None:
    await fill_async(async_system, 2)

    async with async_system.consumer("q", limit=2) as messages:
        async for _ in messages:
            await messages.nack("later", delay_ms=5_000)

    clock.advance_ms(4_999)
    assert await async_system.claim("q", 2) == []
    clock.advance_ms(1)
    assert [message.attempts for message in await async_system.claim("q", 2)] == [2, 2]


def test_retry_later_says_when(memory_system: System, clock: ManualClock) -> None:
    fill(memory_system, 1)

    with pytest.raises(RetryLater), memory_system.consumer("q") as messages:  # noqa: PT012
        for _ in messages:
            raise RetryLater(60_000, "busy")

    clock.advance_ms(59_999)
    assert memory_system.claim("q") == []
    clock.advance_ms(1)
    assert len(memory_system.claim("q")) == 1


def test_a_delay_that_can_not_be_is_a_failure_with_the_usual_back_off(
    memory_system: System,
) -> None:
    fill(memory_system, 3)

    with pytest.raises(RetryLater), memory_system.consumer("q") as messages:  # noqa: PT012
        for _ in messages:
            raise RetryLater(10**18)

    assert state(memory_system) == (3, 0, 0, 0)
    assert memory_system.stats("q").delayed == 1


# --- leases ---------------------------------------------------------------------------------------


def watch_extensions(system: AsyncSystem, monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    """Counts of leases that were extended, as that happens."""
    extended: asyncio.Queue[int] = asyncio.Queue()
    extend = system.extend

    async def watched(name: str, *receipts: str, lease_ms: int | None = None) -> list[int | None]:
        deadlines = await extend(name, *receipts, lease_ms=lease_ms)
        extended.put_nowait(len(receipts))
        return deadlines

    monkeypatch.setattr(system, "extend", watched)
    return extended


async def test_leases_are_extended_while_the_body_takes_its_time(
    async_system: AsyncSystem, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_async(async_system, 3)
    extended = watch_extensions(async_system, monkeypatch)

    async with async_system.consumer("q", lease_ms=90, idle_ms=0) as messages:
        async for message in messages:
            if message.payload == b"0":
                for _ in range(4):  # by the clock that counts, more than two leases
                    assert await extended.get() == 3  # those that wait are kept as well
                    clock.advance_ms(60)

    stats = await async_system.stats("q")
    assert (stats.done, stats.available, stats.delayed) == (3, 0, 0)


async def test_a_loop_goes_on_when_the_queue_allows_only_shorter_leases(
    async_system: AsyncSystem,
) -> None:
    await fill_async(async_system, 3)

    async for _ in async_system.consumer("q", batch=1, idle_ms=0):
        await async_system.update_queue("q", lease_ms=1_000, max_lease_ms=2_000)

    assert (await async_system.stats("q")).done == 3


async def test_a_lease_that_was_lost_is_not_acked_and_that_is_logged(
    async_system: AsyncSystem,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill_async(async_system, 2, QueueOptions(backoff_ms=0))
    theirs = []

    with caplog.at_level(logging.WARNING, "opendata_queue"):
        async with async_system.consumer("q", batch=1, lease_ms=60_000, limit=1) as messages:
            async for message in messages:
                clock.advance_ms(60_001)
                theirs = await async_system.claim("q", 2)
                assert message.message_id in [one.message_id for one in theirs]

    assert "its lease was lost" in caplog.text
    assert await async_system.ack("q", *(one.receipt for one in theirs)) == ["ok", "ok"]


async def test_settling_says_whether_the_message_was_still_ours(async_system: AsyncSystem) -> None:
    await fill_async(async_system, 4, QueueOptions(backoff_ms=60_000))
    told: list[bool] = []

    async with async_system.consumer("q", batch=1, limit=4) as messages:
        async for message in messages:
            number = len(told)
            if number % 2:  # somebody else has settled it behind our back
                await async_system.ack("q", message.receipt)
            told.append(await (messages.ack() if number < 2 else messages.nack("no")))

    assert told == [True, False, True, False]


async def test_messages_that_were_lost_before_their_turn_are_not_handed_out(
    async_system: AsyncSystem, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_async(async_system, 3)
    extended = watch_extensions(async_system, monkeypatch)
    seen = []

    async with async_system.consumer("q", lease_ms=90, idle_ms=0) as messages:
        async for message in messages:
            seen.append(message.payload)
            clock.advance_ms(91)
            await extended.get()  # and finds that all are lost
            await asyncio.sleep(0)

    assert seen == [b"0"]


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_consumer_is_for_one_loop_at_a_time(memory_system: System) -> None:
    fill(memory_system, 3)
    consumer = memory_system.consumer("q", idle_ms=0)

    for _ in consumer:
        with pytest.raises(WrongContextError, match="in a loop already"):
            list(consumer)

    assert state(memory_system) == (0, 0, 3, 0)


def test_closing_the_system_gives_back_what_a_loop_holds(url: str) -> None:
    system = opendata_queue.open(url)
    fill(system, 3)
    loop = iter(system.consumer("q"))
    next(loop)

    system.close()

    with pytest.raises(ClosedError):
        next(loop)
    with opendata_queue.open(url) as again:
        assert state(again) == (3, 0, 0, 0)


def test_a_consumer_that_is_closed_gives_back_what_it_holds(memory_system: System) -> None:
    fill(memory_system, 3)
    consumer = memory_system.consumer("q")
    loop = iter(consumer)
    next(loop)

    consumer.close()

    assert state(memory_system) == (3, 0, 0, 0)
    with pytest.raises(ClosedError):
        next(loop)


async def test_a_loop_of_a_system_that_was_taken_over_raises_what_happened(
    tmp_path: Any,
) -> None:
    url = f"file://{tmp_path}/root"
    first = await opendata_queue.open_async(url)
    await fill_async(first, 3)
    second: AsyncSystem | None = None

    with pytest.raises(FencedError):  # noqa: PT012
        async with first.consumer("q", batch=1) as messages:
            async for _ in messages:
                second = second or await opendata_queue.open_async(url, takeover=True)

    await first.close()
    assert second is not None
    assert (await second.stats("q")).done == 0
    await second.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 0},
        {"batch": 1_001},
        {"wait_ms": 0},
        {"limit": -1},
        {"idle_ms": -1},
        {"lease_ms": 0},
    ],
)
def test_what_makes_no_sense_is_refused(memory_system: System, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        memory_system.consumer("q", **wrong)
