"""The system for code that blocks: threads, timeouts, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import opendata_queue
from opendata_queue import (
    AsyncSystem,
    ClosedError,
    Engine,
    InvalidInputError,
    NewMessage,
    QueueNotFoundError,
    QueueOptions,
    StoreAccessError,
    System,
    TimedOutError,
    WrongContextError,
)
from tests.support import scripts

# Longer than any test may take: whoever waits has to be woken.
LONG_MS = 600_000
# These block until a signal comes, or give back something that blocks later.
WITHOUT_TIMEOUT = {"consumer", "worker", "run_workers"}


def methods(of: type) -> dict[str, Callable[..., Any]]:
    return {
        name: member
        for name, member in inspect.getmembers(of, inspect.isfunction)
        if not name.startswith("_")
    }


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_both_systems_offer_the_same_methods() -> None:
    assert set(methods(System)) == set(methods(AsyncSystem))


@pytest.mark.parametrize("name", sorted(methods(AsyncSystem)))
def test_a_method_takes_the_same_with_and_without_await(name: str) -> None:
    theirs = parameters(methods(AsyncSystem)[name])
    ours = parameters(methods(System)[name])
    timeout = ours.pop("timeout_ms", None)

    assert (timeout is None) == (name in WITHOUT_TIMEOUT)
    assert timeout is None or (timeout.kind, timeout.default) == (timeout.KEYWORD_ONLY, None)
    assert list(ours.items()) == list(theirs.items())


def test_both_ways_to_open_take_the_same() -> None:
    ours = parameters(opendata_queue.open)
    del ours["timeout_ms"]

    assert list(ours.items()) == list(parameters(opendata_queue.open_async).items())
    for name in ("token", "hosts", "read_only", "retention"):  # not for an engine alone
        del ours[name]
    theirs = parameters(Engine.open)
    del theirs["publishes"]  # not for a system that does everything
    assert list(ours) == list(theirs)


def test_a_message_goes_from_publish_to_ack(system: System) -> None:
    system.create_queue("emails", filter="type = 'order.created'")
    message_id = system.publish(b"hi", headers={"type": "order.created"})

    (message,) = system.claim("emails", wait_ms=LONG_MS)

    assert (message.message_id, message.payload) == (message_id, b"hi")
    assert system.ack("emails", message.receipt) == ["ok"]
    assert system.stats("emails").done == 1
    stored = system.read(message_id)
    assert stored is not None
    assert stored.payload == b"hi"


def test_every_other_method_works_without_await(system: System) -> None:
    system.create_queue("q", options=QueueOptions(max_attempts=1))
    system.publish_many([NewMessage(b"a")])
    (message,) = system.claim("q", consumer="me", wait_ms=LONG_MS)

    assert [found is not None for found in system.read_many([message.message_id, 99])] == [
        True,
        False,
    ]
    assert system.extend("q", message.receipt, lease_ms=60_000) != [None]
    assert [one.message_id for one in system.browse("q", "in_flight").entries] == [
        message.message_id
    ]
    assert system.release("q", message.receipt) == ["ok"]
    assert [one.message_id for one in system.peek("q", 5)] == [message.message_id]
    (message,) = system.claim("q")
    assert system.nack("q", message.receipt, error="no") == ["ok"]
    assert [one.error for one in system.failed("q")] == ["no"]
    assert system.history(message.message_id) is not None
    assert system.replay("q", all=True) == [message.message_id]
    assert system.purge_failed("q", message.message_id) == []
    assert system.update_queue("q", paused=True, timeout_ms=60_000).options.paused
    assert system.list_queues() == [system.get_queue("q").name]
    assert system.consumer_id


def test_errors_reach_the_caller(system: System) -> None:
    with pytest.raises(QueueNotFoundError, match="'nope'"):
        system.stats("nope")
    with pytest.raises(InvalidInputError, match="count"):
        system.claim("nope" if system.list_queues() else system.create_queue("q").name, 0)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis://x", "use memory:///"),
        ("nonsense", "if you mean the folder, that is file:///.*/nonsense"),
        ("", "use memory:///"),
    ],
)
async def test_a_url_that_is_not_supported_is_refused(url: str, advice: str) -> None:
    with pytest.raises(StoreAccessError, match=advice):
        opendata_queue.open(url)
    with pytest.raises(StoreAccessError, match=advice):
        await opendata_queue.open_async(url)


# --- threads --------------------------------------------------------------------------------------


def test_many_threads_finish_each_message_once(system: System) -> None:
    threads, each = 8, 40
    system.create_queue("q")
    done: Counter[int] = Counter()
    left = threading.Semaphore(0)
    over = threading.Event()

    def publish(number: int) -> None:
        for place in range(each):
            if place % 4:
                system.publish(b"%d" % place)
            else:
                system.publish_many([NewMessage(b"%d" % number)])

    def consume(number: int) -> list[int]:
        finished = []
        while not over.is_set():
            for message in system.claim("q", 1 + number, wait_ms=50):
                (outcome,) = system.ack("q", message.receipt)
                assert outcome == "ok"
                finished.append(message.message_id)
                left.release()
        return finished

    with ThreadPoolExecutor(2 * threads) as pool:
        publishing = [pool.submit(publish, n) for n in range(threads)]
        consuming = [pool.submit(consume, n) for n in range(threads)]
        try:
            for one in publishing:
                one.result(timeout=120)
            for _ in range(threads * each):
                assert left.acquire(timeout=120)
        finally:
            over.set()
        for other in consuming:
            done.update(other.result(timeout=120))

    assert len(done) == threads * each
    assert set(done.values()) == {1}
    assert system.stats("q").done == threads * each


# --- timeouts -------------------------------------------------------------------------------------


def test_a_call_that_takes_too_long_is_given_up_and_the_system_goes_on(system: System) -> None:
    system.create_queue("q")

    with pytest.raises(TimedOutError, match="20 ms"):
        system.claim("q", wait_ms=LONG_MS, timeout_ms=20)

    system.publish(b"x")
    assert [m.attempts for m in system.claim("q", wait_ms=LONG_MS)] == [1]


def test_a_timeout_is_a_timeout_error_for_those_who_know_only_that(memory_system: System) -> None:
    memory_system.create_queue("q")

    with pytest.raises(TimeoutError):
        memory_system.claim("q", wait_ms=LONG_MS, timeout_ms=0)


@pytest.mark.parametrize("timeout_ms", [-1, 0.5, "1", 10**30])
def test_a_timeout_that_makes_no_sense_is_refused(memory_system: System, timeout_ms: Any) -> None:
    with pytest.raises(InvalidInputError, match="timeout_ms"):
        memory_system.list_queues(timeout_ms=timeout_ms)
    with pytest.raises(InvalidInputError, match="timeout_ms"):
        memory_system.close(timeout_ms=timeout_ms)


def test_a_result_that_comes_as_the_time_is_over_is_not_thrown_away(memory_system: System) -> None:
    begun, answer = threading.Event(), ""

    async def stubborn() -> str:
        begun.set()
        try:
            await asyncio.sleep(LONG_MS)
        except asyncio.CancelledError:
            return "here it is"
        return ""

    while not begun.is_set():  # on a busy machine, the time may be over before it begins
        with contextlib.suppress(TimedOutError):
            answer = memory_system._thread.call(stubborn(), timeout_ms=10)

    assert answer == "here it is"


# --- closing --------------------------------------------------------------------------------------


def test_closing_twice_does_nothing_and_what_comes_after_is_refused(url: str) -> None:
    system = opendata_queue.open(url)
    system.close()
    system.close()

    with pytest.raises(ClosedError):
        system.publish(b"x")
    with pytest.raises(ClosedError), system.consumer("q") as messages:
        list(messages)


def test_closing_from_many_threads_at_once_closes_once(url: str) -> None:
    system = opendata_queue.open(url)

    with ThreadPoolExecutor(8) as pool:
        for closing in [pool.submit(system.close) for _ in range(8)]:
            closing.result(timeout=120)

    assert not system._thread._thread.is_alive()


def test_calls_under_way_end_when_the_system_is_closed(url: str) -> None:
    system = opendata_queue.open(url)
    system.create_queue("q")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(system.claim, "q", wait_ms=LONG_MS) for _ in range(4)]
        engine = system._system
        assert isinstance(engine, Engine)
        while len(engine._queues.queue("q").waiters) < 4:
            system.list_queues()
        system.close()

        for one in waiting:
            with pytest.raises(ClosedError):
                one.result(timeout=120)


def test_publishers_get_an_id_or_an_error_when_it_is_closed_under_them(url: str) -> None:
    system = opendata_queue.open(url)
    acknowledged: list[int] = []
    started = threading.Semaphore(0)

    def publish() -> None:
        with pytest.raises(ClosedError):  # noqa: PT012
            while True:
                acknowledged.append(system.publish(b"x"))
                started.release()

    with ThreadPoolExecutor(4) as pool:
        publishing = [pool.submit(publish) for _ in range(4)]
        for _ in range(20):
            assert started.acquire(timeout=120)
        system.close()
        for one in publishing:
            one.result(timeout=120)

    with opendata_queue.open(url) as again:
        assert None not in again.read_many(acknowledged)


def test_a_system_that_nobody_refers_to_is_closed(url: str) -> None:
    system = opendata_queue.open(url)
    thread = system._thread._thread
    engine = system._system

    del system
    gc.collect()

    thread.join(120)
    assert not thread.is_alive()
    assert isinstance(engine, Engine)
    assert engine._closing is not None


def test_a_system_that_can_not_be_opened_leaves_no_thread() -> None:
    before = set(threading.enumerate())

    with pytest.raises(StoreAccessError):
        opendata_queue.open("nonsense://")

    assert not [one for one in set(threading.enumerate()) - before if one.name == "odq-loop"]


# --- where it can't work --------------------------------------------------------------------------


def test_a_call_from_its_own_event_loop_is_refused_instead_of_waiting_for_ever(
    memory_system: System,
) -> None:
    async def handler() -> None:
        memory_system.list_queues()

    with pytest.raises(WrongContextError, match="plain function"):
        memory_system._thread.call(handler())


def test_a_forked_process_is_told_to_open_its_own(url: str) -> None:
    said = scripts.run(
        """
        import os, sys, opendata_queue
        with opendata_queue.open(sys.argv[1]) as system:
            system.create_queue("q")
            if os.fork() == 0:
                for use in (system.list_queues, lambda: opendata_queue.open(sys.argv[1])):
                    try:
                        use()
                    except opendata_queue.WrongContextError as error:
                        print("child:", error, flush=True)
                system.close()
                sys.exit()
            os.wait()
            print("parent:", system.list_queues())
        """,
        url,
    )

    assert [line.partition(":")[0] for line in said] == ["child", "child", "parent"]
    assert all("spawn" in line for line in said[:2])


def test_ctrl_c_ends_the_call_and_leaves_the_system_usable() -> None:
    said = scripts.run(
        """
        import os, signal, threading, opendata_queue
        # Whoever runs the tests may have it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with opendata_queue.open("memory:///") as system:
            system.create_queue("q")
            waiters = system._system._queues.queue("q").waiters

            def interrupt():
                while not waiters:
                    system.list_queues()
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()
            try:
                system.claim("q", wait_ms=600_000)
            except KeyboardInterrupt:
                print("interrupted")
            system.publish(b"x")
            print([m.payload for m in system.claim("q", wait_ms=600_000)])
        """
    )

    assert said == ["interrupted", "[b'x']"]


def test_a_script_that_forgets_to_close_ends_and_loses_nothing(tmp_path: Any) -> None:
    url = f"file://{tmp_path}/root"
    (said,) = scripts.run(
        """
        import sys, threading, opendata_queue
        system = opendata_queue.open(sys.argv[1])
        system.create_queue("q")
        system.create_queue("other")
        ids = system.publish_many([opendata_queue.NewMessage(b"%d" % n) for n in range(5)])

        loop = iter(system.consumer("q"))
        in_hand = next(loop)

        handled = threading.Event()

        @system.worker("other")
        def handle(message):
            handled.set()

        handle.start()
        handled.wait()
        print(*ids)
        """,
        url,
    )

    with opendata_queue.open(url) as system:
        ids = [int(word) for word in said.split()]
        assert None not in system.read_many(ids)
        stats = system.stats("q")
        assert (stats.available + stats.delayed, stats.in_flight) == (5, 0)
        assert system.stats("other").in_flight == 0
        assert system.stats("other").done >= 1
