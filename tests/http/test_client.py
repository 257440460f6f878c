"""What the client does when answers get lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import opendata_queue
from opendata_queue import (
    AsyncSystem,
    ClosedError,
    InvalidInputError,
    NewMessage,
    QueueExistsError,
    QueueNotFoundError,
    QueueOptions,
    StoreAccessError,
    StoreUnavailableError,
)
from opendata_queue.http.client import RemoteSystem
from opendata_queue.http.client_options import ClientOptions
from tests.http.unreliable import UnreliableNetwork
from tests.support.broker import BrokerProcess, reserved_port

PATIENT = ClientOptions(backoff_ms=1, max_backoff_ms=10)


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess("memory:///") as broker:
        yield broker


@pytest.fixture
async def network(broker: BrokerProcess) -> AsyncIterator[UnreliableNetwork]:
    async with UnreliableNetwork(broker.url) as network:
        yield network


@pytest.fixture
async def system(network: UnreliableNetwork) -> AsyncIterator[AsyncSystem]:
    async with await RemoteSystem.open(network.url, options=PATIENT) as system:
        for queue in await system.list_queues():
            await system.delete_queue(queue)
        yield system


async def test_a_publish_whose_answer_is_lost_is_published_once(
    system: AsyncSystem, network: UnreliableNetwork
) -> None:
    await system.create_queue("q")
    network.lose("/v1/publish", 2)

    ids = await system.publish_many([NewMessage(b"1"), NewMessage(b"2", idempotency_key="mine")])

    assert network.lost == 2
    claimed = await system.claim("q", 10, wait_ms=30_000)
    assert [one.message_id for one in claimed] == ids
    assert await system.publish(b"3", idempotency_key="mine") == ids[1]
    assert (await system.stats("q")).available == 0


async def test_a_batch_whose_answer_is_lost_is_published_once(
    system: AsyncSystem, network: UnreliableNetwork
) -> None:
    await system.create_queue("q")
    network.lose("/v1/publish", 3)

    ids = await system.publish_many([NewMessage(b"%d" % number) for number in range(20)])

    assert network.lost == 3
    claimed = await system.claim("q", 100, wait_ms=30_000)
    assert [one.message_id for one in claimed] == ids
    assert [one.payload for one in claimed] == [b"%d" % number for number in range(20)]
    assert (await system.stats("q")).available == 0


async def test_a_claim_whose_answer_is_lost_is_in_doubt(
    system: AsyncSystem, network: UnreliableNetwork
) -> None:
    await system.create_queue("q")
    await system.publish(b"x")
    network.lose("/v1/claim")

    with pytest.raises(StoreUnavailableError, match="no answer") as trouble:
        await system.claim("q", wait_ms=30_000)

    assert trouble.value.in_doubt
    assert network.lost == 1
    assert (await system.stats("q")).in_flight == 1


async def test_a_claim_is_repeated_for_those_who_say_so(
    broker: BrokerProcess, network: UnreliableNetwork, system: AsyncSystem
) -> None:
    await system.create_queue("q")
    await system.publish_many([NewMessage(b"1"), NewMessage(b"2")])
    network.lose("/v1/claim")
    options = ClientOptions(backoff_ms=1, repeat_claims=True)

    async with await RemoteSystem.open(network.url, options=options) as tough:
        (claimed,) = await tough.claim("q", wait_ms=30_000)

    assert claimed.payload == b"2"
    assert (await system.stats("q")).in_flight == 2


async def test_an_ack_whose_answer_is_lost_is_still_ok(
    system: AsyncSystem, network: UnreliableNetwork
) -> None:
    await system.create_queue("q", options=QueueOptions(backoff_ms=0))
    await system.publish_many([NewMessage(b"1"), NewMessage(b"2")])
    done, lost = await system.claim("q", 2, wait_ms=30_000)
    await system.release("q", lost.receipt)
    network.lose("/v1/ack")

    assert await system.ack("q", done.receipt, lost.receipt) == ["ok", "lease_lost"]

    assert network.lost == 1
    assert await system.ack("q", done.receipt) == ["lease_lost"]


async def test_making_and_deleting_a_queue_survive_lost_answers(
    system: AsyncSystem, network: UnreliableNetwork
) -> None:
    network.lose("/v1/create_queue")
    made = await system.create_queue("q", filter="a='b'  and  c<1")
    assert made == await system.get_queue("q")
    with pytest.raises(QueueExistsError):
        await system.create_queue("q")

    network.lose("/v1/delete_queue")
    await system.delete_queue("q")
    with pytest.raises(QueueNotFoundError):
        await system.delete_queue("q")


async def test_somebody_elses_queue_is_not_taken_for_the_one_that_was_made(
    system: AsyncSystem, network: UnreliableNetwork
) -> None:
    await system.create_queue("q", options=QueueOptions(max_attempts=3))
    await system.create_queue("filtered", filter="a = 'b'")

    for name in ("q", "filtered"):
        network.lose("/v1/create_queue")
        with pytest.raises(QueueExistsError):
            await system.create_queue(name)


async def test_what_can_not_be_repeated_is_not(
    system: AsyncSystem, network: UnreliableNetwork
) -> None:
    await system.create_queue("q")
    for path, call in (
        ("/v1/purge_queue", system.purge_queue("q")),
        ("/v1/replay", system.replay("q", all=True)),
    ):
        network.lose(path)
        with pytest.raises(StoreUnavailableError):
            await call
    assert network.lost == 2


async def test_after_so_many_attempts_it_gives_up(
    system: AsyncSystem, network: UnreliableNetwork
) -> None:
    network.lose("/v1/stats", 100)

    with pytest.raises(StoreUnavailableError):
        await system.stats("q")

    assert network.lost == PATIENT.attempts


async def test_a_broker_that_is_not_there_is_reported_after_a_few_attempts() -> None:
    with (
        reserved_port() as port,
        pytest.raises(StoreUnavailableError, match="can't reach") as trouble,
    ):
        await RemoteSystem.open(f"http://127.0.0.1:{port}", options=PATIENT)

    assert not trouble.value.in_doubt


async def test_something_else_than_a_broker_is_recognised(broker: BrokerProcess) -> None:
    with pytest.raises(StoreAccessError, match="is that a broker"):
        await RemoteSystem.open(f"{broker.url}/elsewhere", options=PATIENT)


@pytest.mark.parametrize("url", ["http://", "https:///path"])
async def test_a_url_without_a_host_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError):
        await opendata_queue.open_async(url)


async def test_what_is_for_a_root_is_not_for_a_broker(broker: BrokerProcess) -> None:
    with pytest.raises(InvalidInputError, match="lease_grace_ms"):
        await opendata_queue.open_async(broker.url, lease_grace_ms=5)
    with pytest.raises(InvalidInputError, match="token"):
        await opendata_queue.open_async("memory:///", token="x")


async def test_a_claim_that_is_closed_under_way_says_so(broker: BrokerProcess) -> None:
    system = await RemoteSystem.open(broker.url)
    await system.close()

    with pytest.raises(ClosedError):
        await system.claim("q", wait_ms=1_000)


def test_a_token_is_not_shown() -> None:
    assert "hush" not in repr(ClientOptions(token="hush"))


async def test_a_publish_is_repeated_only_by_the_process_that_may_have_done_it(
    tmp_path: Path,
) -> None:
    root = f"file://{tmp_path}/root"
    with (
        BrokerProcess(root, "--role", "ingest") as one,
        BrokerProcess(root, "--role", "ingest") as other,
    ):
        async with UnreliableNetwork(one.url) as network:
            network.lose("/v1/publish")
            async with await RemoteSystem.open(network.url, options=PATIENT) as system:
                first = await system.publish_many([NewMessage(b"1"), NewMessage(b"2")])
                mixed = [NewMessage(b"3", idempotency_key="mine"), NewMessage(b"4")]
                network.lose("/v1/publish")
                second = await system.publish_many(mixed)

                # As behind a balancer that sends the repetition to somebody else.
                network.lose("/v1/publish")
                network.redirect(other.url)
                with pytest.raises(StoreUnavailableError, match="no answer") as trouble:
                    await system.publish_many([NewMessage(b"5")])
        assert (first, second) == ([1 << 32, (1 << 32) + 1], [(1 << 32) + 2, (1 << 32) + 3])
        assert trouble.value.in_doubt
        assert network.lost == 3
        async with await RemoteSystem.open(other.url) as there:
            assert await there.publish(b"6") == 2 << 32
