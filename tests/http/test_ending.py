"""How brokers end: asked to, killed, or taken over."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

import opendata_queue
from opendata_queue import (
    AsyncSystem,
    Engine,
    NewMessage,
    OdqError,
    OwnedError,
    StoreUnavailableError,
)
from opendata_queue.http.client import RemoteSystem
from opendata_queue.http.client_options import ClientOptions
from tests.support.broker import PATIENCE_SECONDS, BrokerProcess, reserved_port


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"file://{tmp_path}/root"


async def test_a_broker_that_is_asked_to_ends_well(root: str) -> None:
    with BrokerProcess(root) as broker:
        system = await RemoteSystem.open(broker.url, options=ClientOptions(attempts=2))
        await system.create_queue("q")
        await system.create_queue("empty", filter="FALSE")
        waiting = [asyncio.create_task(_poll(broker.url, "empty")) for _ in range(3)]
        await _are_open(broker.url, "/v1/claim", 3)
        publishing = [asyncio.create_task(system.publish(b"%d" % n)) for n in range(50)]
        await asyncio.wait(publishing, return_when=asyncio.FIRST_COMPLETED)

        broker.terminate()

        assert await asyncio.gather(*waiting) == [[], [], []]
        outcomes = await asyncio.gather(*publishing, return_exceptions=True)
        code = await asyncio.to_thread(broker.wait)
        await system.close()

    assert code == 0, broker.complaints
    assert "Traceback" not in broker.complaints
    acknowledged = {one for one in outcomes if isinstance(one, int)}
    assert acknowledged
    assert all(isinstance(one, int | StoreUnavailableError) for one in outcomes)
    async with await Engine.open(root) as after:
        await after.parts.tailer.caught_up()
        found = await _claim_everything(after, "q")
    assert acknowledged <= set(found)


async def test_who_comes_while_a_broker_ends_is_told_so_as_long_as_work_is_under_way() -> None:
    body = b'{"messages": [{"payload": ""}]}'
    with BrokerProcess("memory:///") as broker:
        host, _, port = broker.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/publish HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body[:10])
        )
        await _are_open(broker.url, "/v1/publish", 1)

        broker.terminate()
        while await _is_ready(broker.url):
            pass
        # That many take a broker that does not wait long enough to be gone.
        told = [await _is_ready(broker.url) for _ in range(200)]
        writer.write(body[10:])
        answer = await reader.readuntil(b"\r\n")
        writer.close()
        code = await asyncio.to_thread(broker.wait)

    assert not any(told)
    assert answer == b"HTTP/1.1 200 OK\r\n"
    assert code == 0, broker.complaints


async def _is_ready(url: str) -> bool:
    """What a broker says over a connection of its own."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status = (await reader.readuntil(b"\r\n")).split()[1]
    finally:
        writer.close()
    return {b"200": True, b"503": False}[status]


async def _are_open(url: str, route: str, count: int) -> None:
    """Wait until the broker works on so many requests."""
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        while f'odq_requests_open{{route="{route}"}} {count}.0' not in (
            (await client.get(f"{url}/metrics")).text
        ):
            pass


async def _poll(url: str, queue: str) -> list[object]:
    """One long poll, whose answer is not asked for again."""
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        answer = await client.post(f"{url}/v1/claim", json={"queue": queue, "wait_ms": 30_000})
        assert answer.status_code == 200
        messages: list[object] = answer.json()["messages"]
        return messages


async def _claim_everything(system: AsyncSystem, queue: str) -> list[int]:
    """All that was routed."""
    found: list[int] = []
    while claimed := await system.claim(queue, 1_000):
        found += [one.message_id for one in claimed]
        await system.ack(queue, *(one.receipt for one in claimed))
    return found


async def test_a_client_waits_out_a_restart(root: str) -> None:
    with reserved_port() as port, BrokerProcess(root, "--port", f"{port}") as broker:
        options = ClientOptions(backoff_ms=200, max_backoff_ms=1_000, attempts=60)
        async with await RemoteSystem.open(broker.url, options=options) as system:
            await system.create_queue("q")
            first = await system.publish(b"1")
            assert await asyncio.to_thread(broker.stop) == 0
            publishing = asyncio.create_task(system.publish(b"2"))
            with await asyncio.to_thread(BrokerProcess, root, "--port", f"{port}") as again:
                second = await publishing
                claimed = await system.claim("q", 10, wait_ms=30_000)
                assert [one.message_id for one in claimed] == [first, second]
                assert await asyncio.to_thread(again.stop) == 0


async def test_nothing_acknowledged_is_lost_or_done_twice_when_a_broker_is_killed(
    root: str,
) -> None:
    published: list[int] = []
    done: Counter[int] = Counter()
    with BrokerProcess(root) as broker:
        async with await opendata_queue.open_async(broker.url) as system:
            await system.create_queue("q")
            tasks = [asyncio.create_task(_publish(broker.url, published)) for _ in range(4)]
            tasks += [asyncio.create_task(_consume(broker.url, done)) for _ in range(2)]
            while len(published) < 200 or len(done) < 50:
                await asyncio.sleep(0.01)
            os.kill(broker.pid, signal.SIGKILL)
            await asyncio.gather(*tasks)
    acked_before = set(done)

    with BrokerProcess(root) as broker:
        async with await opendata_queue.open_async(broker.url) as system:
            # What was claimed and not acked is given back when its lease ends.
            page = await system.browse("q", "in_flight", limit=1_000)
            in_flight = {one.message_id for one in page.entries}
            # What was published last is routed last, and claimed last.
            last = await system.publish(b"last")
            rest = set[int]()
            while last not in rest:
                rest.update(await _claim_everything(system, "q"))
            states = await asyncio.gather(*(system.history(one) for one in acked_before))

    assert not acked_before & rest
    assert not acked_before & in_flight
    assert max(done.values()) == 1
    assert all(one is not None and one.entries[0].state == "done" for one in states)
    # The rest was done without its answer reaching anybody.
    missing = set(published) - acked_before - rest - in_flight
    assert len(missing) <= 20


async def _publish(url: str, published: list[int]) -> None:
    """Publish until the broker is gone; keeps what was acknowledged."""
    options = ClientOptions(attempts=1)
    async with await RemoteSystem.open(url, options=options) as system:
        while True:
            try:
                published += await system.publish_many([NewMessage(b"x")] * 5)
            except OdqError:
                return


async def _consume(url: str, done: Counter[int]) -> None:
    options = ClientOptions(attempts=1)
    async with await RemoteSystem.open(url, options=options) as system:
        while True:
            try:
                claimed = await system.claim("q", 10, wait_ms=30_000)
                outcomes = await system.ack("q", *(one.receipt for one in claimed))
            except OdqError:
                return
            assert outcomes == ["ok"] * len(claimed)
            done.update(one.message_id for one in claimed)


async def test_a_broker_whose_root_is_taken_over_ends_and_says_why(root: str) -> None:
    with BrokerProcess(root) as broker:
        options = ClientOptions(attempts=1)
        async with await RemoteSystem.open(broker.url, options=options) as system:
            async with await Engine.open(root, takeover=True):
                with pytest.raises(OdqError):
                    await system.publish(b"x")
            code = await asyncio.to_thread(broker.wait)

    assert code == 1
    assert "Error:" in broker.complaints


async def test_a_root_that_a_broker_serves_is_refused_with_its_address(root: str) -> None:
    with BrokerProcess(root) as broker:
        with pytest.raises(OwnedError) as refused:
            await Engine.open(root)
        assert refused.value.address == broker.url
        with pytest.raises(AssertionError, match=f"{broker.pid}"):
            BrokerProcess(root)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_standby_that_is_asked_to_ends_well(root: str, number: signal.Signals) -> None:
    with BrokerProcess(root), BrokerProcess(root, "--standby") as standby:
        await asyncio.to_thread(standby.wait_until_it_stands_by)

        os.kill(standby.pid, number)

        assert await asyncio.to_thread(standby.wait) == 0, standby.complaints
        assert standby.complaints == ""


async def test_a_broker_may_leave_retention_to_others(root: str) -> None:
    with BrokerProcess(root, "--retention-every", "0s") as broker:
        assert await asyncio.to_thread(broker.stop) == 0, broker.complaints


async def test_a_standby_takes_over_from_a_broker_that_is_killed(root: str) -> None:
    with BrokerProcess(root, "--owner-lease-ms", "1000") as broker:
        async with await opendata_queue.open_async(broker.url) as system:
            message_id = await system.publish(b"x")
        with BrokerProcess(root, "--standby", "--owner-lease-ms", "1000") as standby:
            await asyncio.to_thread(standby.wait_until_it_stands_by)
            broker.kill()
            await asyncio.to_thread(standby.wait_until_it_listens)
            async with await opendata_queue.open_async(standby.url) as system:
                assert await system.read(message_id) is not None
            assert await asyncio.to_thread(standby.stop) == 0


def test_a_broker_that_can_not_listen_says_so(root: str) -> None:
    with (
        BrokerProcess("memory:///") as broker,
        pytest.raises(AssertionError, match="can't listen"),
    ):
        BrokerProcess(root, "--port", broker.url.rpartition(":")[2])


def test_a_broker_without_tokens_does_not_listen_to_others(root: str) -> None:
    with pytest.raises(AssertionError, match="without tokens"):
        BrokerProcess(root, "--host", "0.0.0.0")


@pytest.mark.parametrize("variable", ["ODQ_JWT_SECRET", "ODQ_JWT_KEY_FILE"])
def test_a_broker_whose_key_for_tokens_is_empty_does_not_start(root: str, variable: str) -> None:
    with pytest.raises(AssertionError, match=f"{variable} is set, and empty"):
        BrokerProcess(root, environment={variable: "", "COLUMNS": "160"})
