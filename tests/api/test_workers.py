"""Workers: handlers of all kinds, leases, failures, and how they stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import opendata_queue
from opendata_queue import (
    AsyncSystem,
    ClaimedMessage,
    Engine,
    FencedError,
    InvalidInputError,
    NewMessage,
    QueueNotFoundError,
    QueueOptions,
    RetryLater,
    System,
    TimedOutError,
    WrongContextError,
)
from opendata_queue.api import workers
from opendata_queue.testing import ManualClock
from tests.support import scripts

GUARD_SECONDS = 120
ONE_TRY = QueueOptions(max_attempts=1)


def publish(system: System, count: int) -> None:
    system.publish_many([NewMessage(b"%d" % number) for number in range(count)])


async def publish_async(system: AsyncSystem, count: int) -> None:
    """Publish, and wait until it is routed."""
    await system.publish_many([NewMessage(b"%d" % number) for number in range(count)])
    assert isinstance(system, Engine)
    await system.parts.tailer.caught_up()


async def until(system: AsyncSystem, **wanted: int) -> None:
    """Wait until so many messages are there; nothing else in here is timed."""
    async with asyncio.timeout(GUARD_SECONDS):
        while True:
            stats = await system.stats("q")
            if all(getattr(stats, name) == count for name, count in wanted.items()):
                return
            await asyncio.sleep(0.001)


def until_sync(system: System, **wanted: int) -> None:
    system._thread.call(until(system._system, **wanted))


# --- handling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_every_message_is_handled_once(system: System, kind: str, prefetch: int) -> None:
    system.create_queue("q")
    seen: Counter[bytes | None] = Counter()

    def plain(message: ClaimedMessage) -> None:
        seen[message.payload] += 1

    async def asynchronous(message: ClaimedMessage) -> None:
        await asyncio.sleep(0)
        seen[message.payload] += 1

    handler = plain if kind == "plain" else asynchronous
    worker = system.worker("q", concurrency=4, prefetch=prefetch)(handler)
    worker.start()
    publish(system, 100)
    until_sync(system, done=100)
    worker.stop()

    assert seen == {b"%d" % number: 1 for number in range(100)}
    assert not worker.running


async def test_a_worker_may_hold_more_than_one_claim_gives(async_system: AsyncSystem) -> None:
    await async_system.create_queue("q")
    await publish_async(async_system, 1_500)
    go_on = asyncio.Event()

    @async_system.worker("q", concurrency=1_000, prefetch=1_000)
    async def handle(message: ClaimedMessage) -> None:
        await go_on.wait()

    handle.start()
    await until(async_system, in_flight=1_500)
    go_on.set()
    await until(async_system, done=1_500)
    await handle.stop()


def test_plain_handlers_run_side_by_side_in_threads_and_may_use_the_system(
    memory_system: System,
) -> None:
    memory_system.create_queue("q")
    memory_system.create_queue("replies", filter="kind = 'reply'")
    memory_system.update_queue("q", filter="kind IS NULL")
    all_here = threading.Barrier(4, timeout=GUARD_SECONDS)

    @memory_system.worker("q", concurrency=4)
    def reply(message: ClaimedMessage) -> None:
        all_here.wait()  # broken unless four run at the same time
        memory_system.publish(message.payload, headers={"kind": "reply"})

    reply.start()
    publish(memory_system, 8)
    until_sync(memory_system, done=8)

    assert sum(1 for _ in memory_system.consumer("replies", limit=8)) == 8


async def test_async_handlers_run_side_by_side_in_the_loop(async_system: AsyncSystem) -> None:
    await async_system.create_queue("q")
    thread = threading.get_ident()
    running, most, everybody = 0, 0, asyncio.Event()

    @async_system.worker("q", concurrency=3)
    async def handle(message: ClaimedMessage) -> None:
        nonlocal running, most
        assert threading.get_ident() == thread
        running += 1
        most = max(most, running)
        if running == 3:
            everybody.set()
        await everybody.wait()
        running -= 1

    handle.start()
    await publish_async(async_system, 9)
    await until(async_system, done=9)
    await handle.stop()

    assert most == 3


async def test_plain_handlers_of_an_async_system_do_not_block_the_loop(
    async_system: AsyncSystem,
) -> None:
    await async_system.create_queue("q")
    go_on = threading.Event()

    @async_system.worker("q")
    def handle(message: ClaimedMessage) -> None:
        assert go_on.wait(GUARD_SECONDS)

    handle.start()
    await publish_async(async_system, 1)
    await until(async_system, in_flight=1)
    go_on.set()
    await until(async_system, done=1)
    await handle.stop()


class Greeter:
    async def __call__(self, message: ClaimedMessage) -> None:
        await asyncio.sleep(0)

    def plainly(self, extra: int, message: ClaimedMessage) -> None:
        assert extra == 1


async def test_whatever_can_be_called_is_a_handler(async_system: AsyncSystem) -> None:
    await async_system.create_queue("q")
    greeter = Greeter()
    handlers: list[Callable[[ClaimedMessage], Any]] = [
        greeter,
        functools.partial(greeter.plainly, 1),
        lambda message: greeter(message),  # plain, and gives back something to await
    ]
    for number, handler in enumerate(handlers):
        worker = async_system.worker("q")(handler)
        worker.start()
        await publish_async(async_system, 1)
        await until(async_system, done=number + 1)
        await worker.stop()


async def test_a_worker_can_be_called_like_its_handler(async_system: AsyncSystem) -> None:
    @async_system.worker("q")
    async def shout(message: Any) -> str:
        return str(message).upper()

    assert await shout("hey") == "HEY"  # type: ignore[arg-type]


# --- failing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such customer"), "ValueError: no such customer"),
        (RuntimeError(), "RuntimeError"),
        (StopIteration(1), "StopIteration: 1"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handler_that_raises_has_failed_whatever_it_raises(
    memory_system: System, kind: str, error: BaseException, text: str
) -> None:
    memory_system.create_queue("q", options=ONE_TRY)

    def plain(message: ClaimedMessage) -> None:
        if message.payload == b"0":
            raise error

    async def asynchronous(message: ClaimedMessage) -> None:
        plain(message)

    worker = memory_system.worker("q")(plain if kind == "plain" else asynchronous)
    worker.start()
    publish(memory_system, 2)
    until_sync(memory_system, done=1, failed=1)
    worker.stop()

    (failed,) = memory_system.failed("q")
    if isinstance(error, StopIteration) and kind == "async":
        text = "RuntimeError: coroutine raised StopIteration"
    assert failed.error == text


def test_a_poison_message_fails_for_good_after_its_attempts(memory_system: System) -> None:
    memory_system.create_queue("q", options=QueueOptions(max_attempts=3, backoff_ms=0))
    attempts = []

    @memory_system.worker("q")
    def handle(message: ClaimedMessage) -> None:
        attempts.append(message.attempts)
        raise ValueError(f"attempt {message.attempts}")

    handle.start()
    publish(memory_system, 1)
    until_sync(memory_system, failed=1)
    handle.stop()

    assert attempts == [1, 2, 3]
    (failed,) = memory_system.failed("q")
    assert (failed.error, failed.attempts) == ("ValueError: attempt 3", 3)
    assert memory_system.replay("q", failed.message_id) == [failed.message_id]


async def test_retry_later_says_when(async_system: AsyncSystem, clock: ManualClock) -> None:
    await async_system.create_queue("q")

    @async_system.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        if message.attempts == 1:
            raise RetryLater(5_000)

    handle.start()
    await publish_async(async_system, 1)
    await until(async_system, delayed=1)
    await handle.stop()
    clock.advance_ms(4_999)
    assert await async_system.claim("q") == []
    clock.advance_ms(1)
    handle.start()
    await until(async_system, done=1)


@pytest.mark.parametrize(
    ("delay_ms", "whole_ms"), [(250.0, 250), (0.29 * 1000, 290), (0, 0), (1.2, 1)]
)
def test_retry_later_rounds_to_milliseconds(delay_ms: float, whole_ms: int) -> None:
    error = RetryLater(delay_ms)

    assert (error.delay_ms, str(error)) == (whole_ms, f"retry in {whole_ms} ms")


@pytest.mark.parametrize("delay_ms", [-5, -0.1, math.nan, math.inf, "soon", None, True])
def test_retry_later_refuses_what_is_no_delay(delay_ms: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"delay_ms is .*, not 0 or more"):
        RetryLater(delay_ms)


class RetrySometime(RetryLater):
    """One that says nothing of when."""

    def __init__(self) -> None: ...


@pytest.mark.parametrize(
    "error",
    [lambda: RetryLater(-5), lambda: RetryLater(10**18), RetrySometime],
    ids=["negative", "too long", "none"],
)
async def test_a_delay_that_can_not_be_is_a_failure_with_the_usual_back_off(
    async_system: AsyncSystem, error: Callable[[], Exception]
) -> None:
    await async_system.create_queue("q")

    @async_system.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        if message.payload == b"0":
            raise error()

    handle.start()
    await publish_async(async_system, 3)
    await until(async_system, done=2, delayed=1)

    assert handle.running


# --- leases ---------------------------------------------------------------------------------------


def watch_extensions(
    system: AsyncSystem, monkeypatch: pytest.MonkeyPatch
) -> asyncio.Queue[list[int | None]]:
    """The new deadlines, as leases are extended."""
    extended: asyncio.Queue[list[int | None]] = asyncio.Queue()
    extend = system.extend

    async def watched(*arguments: Any, **named: Any) -> list[int | None]:
        deadlines = await extend(*arguments, **named)
        extended.put_nowait(deadlines)
        return deadlines

    monkeypatch.setattr(system, "extend", watched)
    return extended


async def test_a_lease_is_extended_while_its_handler_runs(
    async_system: AsyncSystem, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await async_system.create_queue("q")
    extended = watch_extensions(async_system, monkeypatch)
    attempts = []

    @async_system.worker("q", lease_ms=90)
    async def handle(message: ClaimedMessage) -> None:
        attempts.append(message.attempts)
        for _ in range(4):  # by the clock that counts, more than two leases
            await extended.get()
            clock.advance_ms(60)

    handle.start()
    await publish_async(async_system, 1)
    await until(async_system, done=1)
    await handle.stop()

    assert attempts == [1]


@pytest.mark.parametrize("lease_ms", [None, 90])
async def test_a_lease_is_extended_when_the_queue_allows_only_shorter_ones_meanwhile(
    async_system: AsyncSystem,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    lease_ms: int | None,
) -> None:
    await async_system.create_queue("q", options=QueueOptions(lease_ms=90))
    extended = watch_extensions(async_system, monkeypatch)
    attempts = []

    @async_system.worker("q", lease_ms=lease_ms)
    async def handle(message: ClaimedMessage) -> None:
        attempts.append(message.attempts)
        await async_system.update_queue("q", lease_ms=50, max_lease_ms=60)
        for _ in range(4):  # by the clock that counts, more than two leases
            (deadline_ms,) = await extended.get()
            assert deadline_ms == clock.now_ms() + (60 if lease_ms else 50)
            clock.advance_ms(40)

    handle.start()
    await publish_async(async_system, 1)
    await until(async_system, done=1)
    await handle.stop()

    assert attempts == [1]


@pytest.mark.parametrize("lease_ms", [None, 60_000])
async def test_a_worker_goes_on_when_the_queue_allows_only_shorter_leases(
    async_system: AsyncSystem,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    lease_ms: int | None,
) -> None:
    await async_system.create_queue("q", options=QueueOptions(lease_ms=60_000))
    extended = watch_extensions(async_system, monkeypatch)

    @async_system.worker("q", lease_ms=lease_ms)
    async def handle(message: ClaimedMessage) -> None:
        if message.payload == b"1":
            assert message.lease_deadline_ms == clock.now_ms() + 90
            await extended.get()  # it does not wait for a third of the former lease

    handle.start()
    await publish_async(async_system, 1)
    await until(async_system, done=1)
    # A claim that waits already is for a lease that was allowed when it began.
    await async_system.update_queue("q", lease_ms=90, max_lease_ms=90)
    await publish_async(async_system, 2)
    await until(async_system, done=3)

    assert handle.running


async def test_a_worker_that_starts_again_learns_the_lease_of_its_queue_anew(
    async_system: AsyncSystem, clock: ManualClock
) -> None:
    await async_system.create_queue("q", options=QueueOptions(lease_ms=10_000))
    leases_ms = []

    @async_system.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        leases_ms.append(message.lease_deadline_ms - clock.now_ms())

    for times, lease_ms in enumerate((10_000, 20_000), 1):
        await async_system.update_queue("q", lease_ms=lease_ms)
        handle.start()
        await publish_async(async_system, 1)
        await until(async_system, done=times)
        await handle.stop()

    assert leases_ms == [10_000, 20_000]


async def test_a_message_whose_lease_was_lost_is_not_acked(
    async_system: AsyncSystem, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await async_system.create_queue("q", options=QueueOptions(backoff_ms=0))
    started, go_on = asyncio.Event(), asyncio.Event()

    @async_system.worker("q", lease_ms=60_000)
    async def handle(message: ClaimedMessage) -> None:
        started.set()
        await go_on.wait()

    handle.start()
    await publish_async(async_system, 1)
    await started.wait()
    clock.advance_ms(60_001)
    (theirs,) = await async_system.claim("q", lease_ms=60_000)
    go_on.set()
    await handle.stop()

    assert "its lease was lost" in caplog.text
    assert await async_system.ack("q", theirs.receipt) == ["ok"]


# --- stopping -------------------------------------------------------------------------------------


async def test_stopping_waits_for_handlers_and_gives_back_what_has_not_begun(
    async_system: AsyncSystem,
) -> None:
    await async_system.create_queue("q")
    started, go_on = asyncio.Event(), asyncio.Event()

    @async_system.worker("q", concurrency=2, prefetch=2)
    async def handle(message: ClaimedMessage) -> None:
        started.set()
        await go_on.wait()

    handle.start()
    await publish_async(async_system, 6)
    await started.wait()
    await until(async_system, in_flight=4)
    stopping = asyncio.create_task(handle.stop())
    await until(async_system, in_flight=2, available=4)
    assert handle.running
    go_on.set()
    await stopping

    stats = await async_system.stats("q")
    assert (stats.done, stats.available, stats.in_flight) == (2, 4, 0)
    assert [message.attempts for message in await async_system.claim("q", 4)] == [1] * 4


async def test_an_async_handler_that_takes_too_long_is_cancelled_and_its_message_given_back(
    async_system: AsyncSystem,
) -> None:
    await async_system.create_queue("q")
    started, cancelled = asyncio.Event(), asyncio.Event()

    @async_system.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    handle.start()
    await publish_async(async_system, 1)
    await started.wait()
    await handle.stop(timeout_ms=10)

    assert cancelled.is_set()
    (message,) = await async_system.claim("q")
    assert message.attempts == 1


async def test_an_async_handler_that_goes_on_when_it_is_cancelled_is_left_behind(
    async_system: AsyncSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "CANCEL_TIMEOUT_MS", 10)
    await async_system.create_queue("q")
    started, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @async_system.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        started.set()
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()
        ended.set()

    handle.start()
    await publish_async(async_system, 1)
    await started.wait()
    await handle.stop(timeout_ms=10)

    assert not handle.running
    (message,) = await async_system.claim("q")
    assert message.attempts == 1
    go_on.set()
    await ended.wait()
    assert await async_system.ack("q", message) == ["ok"]


async def test_an_async_handler_that_ends_well_when_it_is_cancelled_has_done_its_message(
    async_system: AsyncSystem,
) -> None:
    await async_system.create_queue("q")
    started = asyncio.Event()

    @async_system.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    handle.start()
    await publish_async(async_system, 1)
    await started.wait()
    await handle.stop(timeout_ms=10)

    assert (await async_system.stats("q")).done == 1


@pytest.mark.parametrize("timeout_ms", [-1, 1.5, "x"])
def test_stopping_with_a_timeout_that_makes_no_sense_is_refused_and_changes_nothing(
    memory_system: System, timeout_ms: Any
) -> None:
    memory_system.create_queue("q")

    @memory_system.worker("q")
    def handle(message: ClaimedMessage) -> None: ...

    with pytest.raises(InvalidInputError, match="timeout_ms"):
        memory_system.run_workers(stop_timeout_ms=timeout_ms)
    assert not handle.running
    handle.start()
    with pytest.raises(InvalidInputError, match="timeout_ms"):
        handle.stop(timeout_ms=timeout_ms)
    publish(memory_system, 1)
    until_sync(memory_system, done=1)

    assert handle.running


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handler_can_ask_its_worker_to_stop(memory_system: System, kind: str) -> None:
    memory_system.create_queue("q")
    publish(memory_system, 3)

    def plain(message: ClaimedMessage) -> None:
        worker.request_stop()

    async def asynchronous(message: ClaimedMessage) -> None:
        worker.request_stop()

    worker = memory_system.worker("q")(plain if kind == "plain" else asynchronous)
    memory_system.run_workers()

    stats = memory_system.stats("q")
    assert (stats.done, stats.available, stats.in_flight) == (1, 2, 0)


@pytest.mark.parametrize("call", ["stop", "join", "close"])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handler_can_not_wait_for_itself(memory_system: System, kind: str, call: str) -> None:
    memory_system.create_queue("q")
    refusals: list[str] = []

    def plain(message: ClaimedMessage) -> None:
        waiting = {"stop": worker.stop, "join": worker.join, "close": memory_system.close}[call]
        with pytest.raises(WrongContextError, match="use request_stop") as refused:
            waiting()
        refusals.append(str(refused.value))

    async def asynchronous(message: ClaimedMessage) -> None:
        plain(message)

    worker = memory_system.worker("q")(plain if kind == "plain" else asynchronous)
    worker.start()
    publish(memory_system, 2)
    until_sync(memory_system, done=2)
    worker.stop()

    assert len(refusals) == 2


async def test_a_handler_can_not_wait_for_itself_with_await(async_system: AsyncSystem) -> None:
    await async_system.create_queue("q")

    @async_system.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        for waiting in (handle.stop, handle.join):
            with pytest.raises(WrongContextError, match="use request_stop"):
                await waiting()
        handle.request_stop()

    handle.start()
    await publish_async(async_system, 1)
    await handle.join()

    assert (await async_system.stats("q")).done == 1


async def test_a_handler_can_stop_another_worker(async_system: AsyncSystem) -> None:
    await async_system.create_queue("q")
    await async_system.create_queue("others", filter="FALSE")
    other = async_system.worker("others")(print)
    other.start()

    @async_system.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        await other.stop()

    handle.start()
    await publish_async(async_system, 1)
    await until(async_system, done=1)

    assert not other.running


def test_asking_a_worker_that_does_not_run_to_stop_does_nothing(memory_system: System) -> None:
    memory_system.create_queue("q")
    worker = memory_system.worker("q")(print)

    worker.request_stop()
    worker.start()
    worker.stop()
    worker.request_stop()
    worker.start()

    assert worker.running


def test_a_plain_handler_that_takes_too_long_loses_its_message(memory_system: System) -> None:
    memory_system.create_queue("q")
    started, go_on = threading.Event(), threading.Event()

    @memory_system.worker("q")
    def handle(message: ClaimedMessage) -> None:
        started.set()
        assert go_on.wait(GUARD_SECONDS)

    handle.start()
    publish(memory_system, 1)
    assert started.wait(GUARD_SECONDS)
    handle.stop(timeout_ms=10)

    (message,) = memory_system.claim("q")
    go_on.set()
    assert memory_system.ack("q", message.receipt) == ["ok"]


async def test_a_worker_that_was_stopped_as_it_claimed_holds_nothing(
    async_system: AsyncSystem,
) -> None:
    await async_system.create_queue("q")
    await publish_async(async_system, 3)

    @async_system.worker("q", concurrency=3)
    async def handle(message: ClaimedMessage) -> None: ...

    for steps in range(40):
        handle.start()
        for _ in range(steps):
            await asyncio.sleep(0)
        await handle.stop()
        stats = await async_system.stats("q")
        assert stats.in_flight == 0
        assert stats.available + stats.done == 3


async def test_closing_the_system_lets_handlers_finish(url: str) -> None:
    system = await opendata_queue.open_async(url)
    await system.create_queue("q")
    started = asyncio.Event()
    go_on = asyncio.Event()

    @system.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        started.set()
        await go_on.wait()

    handle.start()
    await publish_async(system, 1)
    await started.wait()
    closing = asyncio.create_task(system.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing

    async with await opendata_queue.open_async(url) as again:
        assert (await again.stats("q")).done == 1


def test_a_worker_goes_on_when_nobody_refers_to_it(url: str) -> None:
    handled = threading.Semaphore(0)
    kept: list[weakref.ref[System]] = []

    def serve() -> System:
        system = opendata_queue.open(url)
        system.create_queue("q")
        system.worker("q")(lambda message: handled.release()).start()
        return system

    kept.append(weakref.ref(serve()))
    gc.collect()
    system = kept[0]()
    assert system is not None

    publish(system, 1)
    assert handled.acquire(timeout=GUARD_SECONDS)
    system.close()


def test_stopping_a_worker_that_does_not_run_does_nothing(memory_system: System) -> None:
    worker = memory_system.worker("q")(print)

    worker.stop()
    worker.join()

    assert not worker.running


def test_a_worker_runs_once_at_a_time(memory_system: System) -> None:
    memory_system.create_queue("q")
    worker = memory_system.worker("q")(print)
    worker.start()

    with pytest.raises(WrongContextError, match="runs already"):
        worker.start()
    with pytest.raises(TimedOutError):
        worker.join(timeout_ms=1)


# --- failures of the system -----------------------------------------------------------------------


async def test_a_worker_of_a_system_that_was_taken_over_ends_and_says_so(tmp_path: Any) -> None:
    url = f"file://{tmp_path}/root"
    first = await opendata_queue.open_async(url)
    await first.create_queue("q")
    seen = asyncio.Event()
    go_on = asyncio.Event()

    @first.worker("q")
    async def handle(message: ClaimedMessage) -> None:
        seen.set()
        await go_on.wait()

    running = asyncio.create_task(first.run_workers())
    await publish_async(first, 1)
    await seen.wait()
    async with await opendata_queue.open_async(url, takeover=True) as second:
        go_on.set()
        with pytest.raises(FencedError):
            await running
        with pytest.raises(FencedError):
            await handle.join()
        assert not handle.running
        assert (await second.stats("q")).done == 0
    with contextlib.suppress(FencedError):
        await first.close()


def test_a_worker_without_a_queue_ends_and_says_so(memory_system: System) -> None:
    worker = memory_system.worker("nope")(print)

    with pytest.raises(QueueNotFoundError):
        memory_system.run_workers()
    with pytest.raises(QueueNotFoundError):
        worker.join()


def test_running_no_workers_is_refused(memory_system: System) -> None:
    with pytest.raises(InvalidInputError, match="no workers"):
        memory_system.run_workers()


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"concurrency": 1_001},
        {"prefetch": 2},
        {"wait_ms": 0},
        {"lease_ms": 0},
        {"lease_ms": "long"},
        {"lease_ms": True},
    ],
)
def test_what_makes_no_sense_is_refused(memory_system: System, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        memory_system.worker("q", **wrong)(print)
    with pytest.raises(InvalidInputError, match="no handler"):
        memory_system.worker("q")(None)  # type: ignore[arg-type]


# --- running all workers --------------------------------------------------------------------------


def test_running_workers_ends_when_they_are_stopped(memory_system: System) -> None:
    memory_system.create_queue("q")

    @memory_system.worker("q")
    def handle(message: ClaimedMessage) -> None:
        threading.Thread(target=handle.stop).start()

    publish(memory_system, 1)
    memory_system.run_workers()

    assert memory_system.stats("q").done == 1


SYNC = """
    import sys, opendata_queue
    with opendata_queue.open(sys.argv[1]) as system:
        system.create_queue("q")

        @system.worker("q")
        def handle(message):
            print("started", flush=True)
            sys.stdin.readline()

        system.publish(b"x")
        system.run_workers()
        print("done", system.stats("q").done)
"""
ASYNC = """
    import asyncio, sys, opendata_queue

    async def main():
        async with await opendata_queue.open_async(sys.argv[1]) as system:
            await system.create_queue("q")

            @system.worker("q")
            async def handle(message):
                print("started", flush=True)
                await asyncio.to_thread(sys.stdin.readline)

            await system.publish(b"x")
            await system.run_workers()
            print("done", (await system.stats("q")).done)

    asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("script", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_signal_stops_workers_when_their_handlers_are_done(script: str, number: int) -> None:
    process = scripts.start(script, "memory:///")
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"

    process.send_signal(number)
    said, complaints = process.communicate("go on\n", timeout=GUARD_SECONDS)

    assert (said, process.returncode) == ("done 1\n", 0), complaints


def test_a_second_signal_does_not_wait_for_handlers() -> None:
    process = scripts.start(
        SYNC.replace("system.run_workers()", "system.run_workers(stop_timeout_ms=None)"),
        "memory:///",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    try:
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(Exception):
                process.wait(0.05)
    finally:
        process.kill()
    _, complaints = process.communicate(timeout=GUARD_SECONDS)

    assert process.returncode == -signal.SIGTERM, complaints
