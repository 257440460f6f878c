"""Brokers are killed or stopped under load, on S3; clients that know the root follow the next."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import opendata_queue
from opendata_queue import (
    AsyncSystem,
    ClaimedMessage,
    NewMessage,
    OtherRoleError,
    QueueOptions,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.http.client import RemoteSystem
from opendata_queue.http.client_options import ClientOptions
from opendata_queue.http.server.serving import _bind, _listen, run, run_tailer
from opendata_queue.http.settings import ServerSettings
from opendata_queue.root.roles import Role
from tests.conftest import NewRoot
from tests.support.broker import BrokerProcess, reserved_port
from tests.support.s3_server import S3Server

# Long enough for an owner on a busy machine to keep its root.
LEASE_MS = "3000"
QUEUE = "orders"
SOME = 200
FAST = ClientOptions(backoff_ms=50, max_backoff_ms=500, attempts=100)


class Load:
    """Producers and consumers that go on until they are told to end, and what they were told."""

    def __init__(self, system: AsyncSystem) -> None:
        self._system = system
        self._publishing = True
        self.published: list[int] = []
        self.acked: Counter[int] = Counter()
        self._tasks = [asyncio.create_task(self._publish()) for _ in range(3)]
        self._tasks += [asyncio.create_task(self._consume()) for _ in range(3)]

    async def _publish(self) -> None:
        while self._publishing:
            self.published += await self._system.publish_many([NewMessage(b"x")] * 5)

    async def _consume(self) -> None:
        while self._publishing or not set(self.acked) >= set(self.published):
            claimed = await self._system._claim_in_loop(
                QUEUE, 10, consumer="me", lease_ms=None, wait_ms=1_000
            )
            outcomes = await self._system.ack(QUEUE, *(one.receipt for one in claimed))
            for one, outcome in zip(claimed, outcomes, strict=True):
                if outcome == "ok":
                    self.acked[one.message_id] += 1

    async def until(self, more: int) -> None:
        """Until so much more was published and acked; what ends the load is raised."""
        published, acked = len(self.published) + more, len(self.acked) + more
        while len(self.published) < published or len(self.acked) < acked:
            ended = [task for task in self._tasks if task.done()]
            for task in ended:
                task.result()
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Until all that was published is acked."""
        self._publishing = False
        await asyncio.gather(*self._tasks)


@contextlib.asynccontextmanager
async def load_on(root: str) -> AsyncIterator[Load]:
    async with await opendata_queue.connect_async(root, options=FAST) as system:
        # What was claimed in an answer that got lost comes back when its lease ends: soon.
        await system.create_queue(QUEUE, options=QueueOptions(lease_ms=5_000))
        load = Load(system)
        try:
            yield load
        finally:
            for task in load._tasks:
                task.cancel()
            await asyncio.gather(*load._tasks, return_exceptions=True)


async def check_the_end(load: Load, root: str) -> None:
    """Nothing acknowledged was lost, nothing was acked twice, and there is nothing else."""
    await load.end()
    assert len(set(load.published)) == len(load.published)
    assert set(load.acked) == set(load.published)
    assert set(load.acked.values()) == {1}
    async with await opendata_queue.open_async(root, read_only=True) as looker:
        while (await looker.stats(QUEUE)).done < len(load.published):
            await asyncio.sleep(0.05)  # it is behind by a moment
        stats = await looker.stats(QUEUE)
    assert stats.done == len(load.published)
    assert stats.available == stats.in_flight == stats.failed == 0


async def test_a_broker_that_is_killed_under_load_is_replaced_and_nothing_is_lost_or_done_twice(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    root, environment = new_s3_root(), s3_environment.environment()
    with (
        BrokerProcess(root, "--owner-lease-ms", LEASE_MS, environment=environment) as first,
        BrokerProcess(root, "--standby", environment=environment) as second,
    ):
        async with load_on(root) as load:
            await load.until(SOME)
            os.kill(first.pid, signal.SIGKILL)
            await asyncio.to_thread(second.wait_until_it_listens)
            await load.until(SOME)
            await check_the_end(load, root)
        assert await asyncio.to_thread(second.stop) == 0, second.complaints
        assert "Traceback" not in second.complaints


async def test_a_broker_that_is_only_stopped_is_replaced_and_steps_down_when_it_goes_on(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    root, environment = new_s3_root(), s3_environment.environment()
    with (
        BrokerProcess(root, "--owner-lease-ms", LEASE_MS, environment=environment) as first,
        BrokerProcess(root, "--standby", environment=environment) as second,
    ):
        async with load_on(root) as load:
            await load.until(SOME)
            os.kill(first.pid, signal.SIGSTOP)
            await asyncio.to_thread(second.wait_until_it_listens)
            await load.until(SOME)
            os.kill(first.pid, signal.SIGCONT)
            assert await asyncio.to_thread(first.wait) == 1
            assert "taken over" in first.complaints
            await load.until(SOME)
            await check_the_end(load, root)
        assert await asyncio.to_thread(second.stop) == 0, second.complaints


def test_a_standby_whose_address_is_taken_says_so_before_it_is_needed(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    with BrokerProcess(root) as owner:
        port = owner.url.rpartition(":")[2]
        with BrokerProcess(root, "--standby", "--port", port) as standby:
            assert standby.wait() == 1
            assert f"can't listen on 127.0.0.1 port {port}" in standby.complaints


@pytest.mark.parametrize("serve", [run, run_tailer])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ServerSettings(standby=True, takeover=True), "--standby or --takeover, not both"),
        (ServerSettings(role=Role.INGEST, standby=True), "without --standby and --takeover"),
        (ServerSettings(role=Role.INGEST, takeover=True), "without --standby and --takeover"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_made_or_waited_for(
    tmp_path: Path, serve: Callable[..., None], settings: ServerSettings, message: str
) -> None:
    announced: list[str] = []

    with pytest.raises(StoreAccessError, match=message):
        serve(f"file://{tmp_path}/root", settings, announce=announced.append)

    assert not announced
    assert not list(tmp_path.iterdir())


def test_a_standby_keeps_its_address_and_listens_to_nobody() -> None:
    with _bind(ServerSettings(port=0)) as bound:
        address = bound.getsockname()
        same = ServerSettings(port=address[1])
        with pytest.raises(StoreAccessError, match="can't listen"):
            _bind(same)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

        _listen(bound)

        with socket.create_connection(address):
            pass
        with pytest.raises(StoreAccessError, match="can't listen"):
            _bind(same)


def test_connections_of_a_broker_that_is_gone_do_not_keep_its_address_from_the_next() -> None:
    with _bind(ServerSettings(port=0)) as first:
        _listen(first)
        address = first.getsockname()
        client = socket.create_connection(address)
        served, _ = first.accept()
    with client, served, _bind(ServerSettings(port=address[1])) as second:
        _listen(second)


async def test_a_worker_outlives_a_broker_that_is_killed_while_it_waits(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    handled: asyncio.Queue[ClaimedMessage] = asyncio.Queue()
    with reserved_port() as port, BrokerProcess(root, "--port", f"{port}") as first:
        async with await RemoteSystem.open(first.url, options=FAST) as system:
            await system.create_queue(QUEUE)
            system.worker(QUEUE)(handled.put)
            (worker,) = system.workers
            worker.start()
            await system.publish(b"1")
            assert (await handled.get()).payload == b"1"
            first.kill()
            with await asyncio.to_thread(BrokerProcess, root, "--port", f"{port}"):
                await system.publish(b"2")
                assert (await handled.get()).payload == b"2"
                await worker.stop()


def test_a_root_that_nobody_serves_can_not_be_connected_to(tmp_path: Path) -> None:
    with pytest.raises(StoreAccessError, match="there is no root"):
        opendata_queue.connect(f"file://{tmp_path}/typo")
    assert not list(tmp_path.iterdir())
    root = f"file://{tmp_path}/root"
    opendata_queue.open(root).close()

    with pytest.raises(StoreUnavailableError, match=f"no broker serves {root}: start one with"):
        opendata_queue.connect(root)


async def test_a_broker_that_is_gone_and_has_no_successor_is_named(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    with reserved_port() as port:
        address = f"http://127.0.0.1:{port}"
        async with await opendata_queue.open_async(root, address=address):
            with pytest.raises(StoreUnavailableError, match=f"can't reach the broker at {address}"):
                await opendata_queue.connect_async(
                    root, options=ClientOptions(attempts=2, backoff_ms=1)
                )


def test_a_brokers_own_url_does_as_well(tmp_path: Path) -> None:
    with BrokerProcess(f"file://{tmp_path}/root") as broker:
        with opendata_queue.connect(broker.url) as system:
            system.create_queue(QUEUE)
        with opendata_queue.connect(f"file://{tmp_path}/root", timeout_ms=60_000) as system:
            assert system.list_queues() == [QUEUE]
            with system.consumer(QUEUE, limit=1) as messages:
                system.publish(b"hello")
                assert [message.payload for message in messages] == [b"hello"]


@pytest.mark.parametrize("with_claims", [True, False])
def test_a_root_whose_roles_are_split_is_one_system_to_its_clients(
    tmp_path: Path, with_claims: bool
) -> None:
    root = f"file://{tmp_path}/root"
    with opendata_queue.open(root) as owner:
        owner.create_queue(QUEUE)
    with ExitStack() as stack:
        publisher = stack.enter_context(BrokerProcess(root, "--role", "ingest"))
        if with_claims:
            stack.enter_context(BrokerProcess(root, "--role", "queues"))
        for system in (
            stack.enter_context(opendata_queue.connect(root)),
            stack.enter_context(opendata_queue.open(publisher.url)),
        ):
            system.publish(b"hello")
            if not with_claims:
                with pytest.raises(OtherRoleError):
                    system.claim(QUEUE)
                continue
            (claimed,) = system.claim(QUEUE, wait_ms=30_000)
            assert claimed.payload == b"hello"
            assert system.ack(QUEUE, claimed.receipt) == ["ok"]
