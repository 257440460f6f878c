"""Clients that send too much, too fast, too slowly, or nonsense."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from http.client import BadStatusLine, HTTPResponse, IncompleteRead

import httpx
import pytest

from opendata_queue.http.refusals import Refusal
from opendata_queue.http.requests.limits import RateLimits
from opendata_queue.http.settings import ServerSettings
from opendata_queue.http.wire import MSGPACK
from opendata_queue.testing import ManualClock
from tests.http.conftest import SECRET, Serving
from tests.support.broker import PATIENCE_SECONDS, BrokerProcess

Token = Callable[..., dict[str, str]]

PUBLISH = {"messages": [{"payload": ""}]}


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(
        "memory:///", "--max-body-bytes", "1000", "--max-connections", "20",
        "--header-timeout-ms", "300", "--body-timeout-ms", "300",
    ) as broker:  # fmt: skip
        yield broker


def connect(broker: BrokerProcess) -> socket.socket:
    host, _, port = broker.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)


def request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


HEALTHZ_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
PUBLISH_REQUEST = request("/v1/publish", b'{"messages": [{"payload": ""}]}', "Content-Length: 31")


@contextlib.contextmanager
def answered(broker: BrokerProcess, said: bytes) -> Iterator[tuple[socket.socket, int]]:
    """The status of an answer, which is read to its end and no further, and the connection.

    On a busy machine, what we say may be late, or others may not be gone yet: the broker hangs up
    then, and we come again.
    """
    while True:
        with connect(broker) as connection:
            try:
                connection.sendall(said)
                response = HTTPResponse(connection)
                response.begin()
                response.read()
            except (BadStatusLine, ConnectionError):
                continue
            yield connection, response.status
            return


def is_hung_up_on(connection: socket.socket) -> bool:
    """Wait until it is, without an answer; with unread data a system says so in another way."""
    try:
        return connection.recv(10_000) == b""
    except ConnectionResetError:
        return True


# --- bodies ---------------------------------------------------------------------------------------


async def test_a_body_that_announces_to_be_too_long_is_refused(serving: Serving) -> None:
    async with serving(max_body_bytes=100) as client:
        answer = await client.post("/v1/publish", content=b"x" * 101)

    assert answer.status_code == 413


async def test_a_body_that_becomes_too_long_is_refused(serving: Serving) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 10

    async with serving(max_body_bytes=100) as client:
        answer = await client.post("/v1/publish", content=chunks())

    assert answer.status_code == 413
    assert sent <= 20


def test_a_hundred_megabytes_are_not_even_read(broker: BrokerProcess) -> None:
    announced = request("/v1/publish", b"", "Content-Length: 100000000")

    with answered(broker, announced) as (connection, status):
        assert status == 413
        assert is_hung_up_on(connection)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x81\xa8messages\xdd\xff\xff\xff\xff",
        b"\x81\xa8messages\xc6\xff\xff\xff\xff",
        b"\x91" * 5_000,
        b"\x81\xa8messages\x91\x81\xa7headers\x81\xa1a\xa1\xff",
        b"\x80trailing",
    ],
)
async def test_malformed_msgpack_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post("/v1/publish", content=body, headers={"Content-Type": MSGPACK})

    assert answer.status_code == 400
    assert answer.headers["content-type"] == MSGPACK


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"messages": [{"payload": "\xff"}]}',
        b'{"messages": [{"headers": {"a": "\\ud800"}}]}',
        b'{"messages": [{"delay_ms": 1e400}]}',
        b'{"messages": [{"delay_ms": 99999999999999999999}]}',
    ],
)
async def test_malformed_json_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post(
        "/v1/publish", content=body, headers={"Content-Type": "application/json"}
    )

    assert answer.status_code == 400
    assert answer.json()["error"] == "InvalidInputError"


async def test_a_batch_has_a_limit(serving: Serving) -> None:
    async with serving(max_batch=2) as client:
        answer = await client.post("/v1/publish", json={"messages": [{"payload": ""}] * 3})
        read = await client.post("/v1/read", json={"message_ids": [1, 2, 3]})

    assert (answer.status_code, read.status_code) == (400, 400)


# --- slow clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"POST /v1/publish HTTP/1.1\r\nHost: bro"])
def test_a_client_that_does_not_finish_its_head_is_hung_up_on(
    broker: BrokerProcess, said: bytes
) -> None:
    with connect(broker) as connection:
        connection.sendall(said)

        assert is_hung_up_on(connection)


def test_a_client_that_does_not_finish_its_second_head_is_hung_up_on(
    broker: BrokerProcess,
) -> None:
    whole = request("/v1/list_queues", b"{}", "Content-Length: 2")

    with answered(broker, whole) as (connection, status):
        assert status == 200
        connection.sendall(b"POST /v1/li")

        assert is_hung_up_on(connection)


def test_a_client_that_does_not_finish_its_body_is_told_so(broker: BrokerProcess) -> None:
    half = request("/v1/publish", b'{"mess', "Content-Length: 500")

    with answered(broker, half) as (_, status):
        assert status == 408


@pytest.fixture
def large() -> dict[str, list[dict[str, str]]]:
    """A message of which a system keeps only a part for a client that does not read."""
    return {"messages": [{"payload": base64.b64encode(bytes(12_000_000)).decode()}]}


def ask_for(broker: BrokerProcess, message_ids: list[str]) -> socket.socket:
    """Ask for messages, and do not read the answer."""
    body = json.dumps({"message_ids": message_ids}).encode()
    connection = connect(broker)
    connection.sendall(request("/v1/read", body, f"Content-Length: {len(body)}"))
    return connection


def test_a_client_that_does_not_read_its_answer_is_hung_up_on(
    large: dict[str, list[dict[str, str]]],
) -> None:
    with BrokerProcess("memory:///", "--write-timeout-ms", "100") as broker:
        published = httpx.post(f"{broker.url}/v1/publish", json=large, timeout=PATIENCE_SECONDS)
        with ask_for(broker, published.json()["message_ids"]) as connection:
            while not any("does not read its answer" in line for line in broker.said):
                pass
            response = HTTPResponse(connection)
            response.begin()
            with pytest.raises((IncompleteRead, ConnectionResetError)):
                response.read()


def test_while_too_much_waits_to_be_read_nobody_is_given_more(
    large: dict[str, list[dict[str, str]]],
) -> None:
    with (
        BrokerProcess("memory:///", "--max-unsent-bytes", "1") as broker,
        httpx.Client(base_url=broker.url, timeout=PATIENCE_SECONDS) as client,
    ):
        message_ids = client.post("/v1/publish", json=large).json()["message_ids"]

        def read() -> httpx.Response:
            return client.post("/v1/read", json={"message_ids": []})

        with ask_for(broker, message_ids):
            while (refused := read()).status_code == 200:
                pass
            dequeued = client.get("/dequeue", params={"namespace": "n", "topic": "t"})
            published = client.post("/v1/publish", json=PUBLISH)
        while read().status_code == 503:
            pass

    assert (refused.status_code, refused.json()["refused"]) == (503, True)
    assert (dequeued.status_code, published.status_code) == (503, 200)


def test_idle_connections_beyond_the_limit_are_closed_and_others_served(
    broker: BrokerProcess,
) -> None:
    idle = [connect(broker) for _ in range(60)]
    try:
        # Whether too many or too quiet: none is kept.
        assert all(is_hung_up_on(connection) for connection in idle)
        with answered(broker, PUBLISH_REQUEST) as (_, status):
            assert status == 200
    finally:
        for connection in idle:
            connection.close()


MANY = 5_000


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as that takes, in this process; the broker sees to itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MANY + 1_000:
        pytest.skip(f"this system permits {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY + 1_000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("most", [MANY + 100, 2_000], ids=["survived", "refused"])
def test_five_thousand_idle_connections_keep_nobody_from_being_served(most: int) -> None:
    with BrokerProcess("memory:///", "--max-connections", f"{most}") as broker:
        served = httpx.Client(base_url=broker.url, timeout=PATIENCE_SECONDS)
        assert served.post("/v1/create_queue", json={"queue": "q"}).status_code == 200
        idle = [connect(broker) for _ in range(MANY)]
        try:
            newcomer = httpx.get(f"{broker.url}/healthz", timeout=PATIENCE_SECONDS)
            assert newcomer.status_code == 200
            assert served.post("/v1/publish", json=PUBLISH).status_code == 200
            claimed = served.post("/v1/claim", json={"queue": "q", "wait_ms": 30_000})
            assert len(claimed.json()["messages"]) == 1
        finally:
            for connection in idle:
                connection.close()
            served.close()
        with answered(broker, HEALTHZ_REQUEST) as (_, status):
            assert status == 200
        assert broker.stop() == 0, broker.complaints
        assert "Traceback" not in broker.complaints


# --- rates ----------------------------------------------------------------------------------------


async def test_a_namespace_over_its_rate_is_told_when_to_come_back(
    serving: Serving, clock: ManualClock
) -> None:
    async with serving(rate_per_second=2, rate_burst=2) as client:
        answers = [await client.post("/v1/publish", json=PUBLISH) for _ in range(3)]
        other = {"messages": [{"payload": "", "headers": {"namespace": "other"}}]}
        elsewhere = await client.post("/v1/publish", json=other)
        clock.advance_ms(1_000)
        later = await client.post("/v1/publish", json=PUBLISH)

    assert [one.status_code for one in answers] == [200, 200, 429]
    assert answers[2].headers["Retry-After"] == "1"
    assert answers[2].json()["refused"] is True
    assert elsewhere.status_code == 200
    assert later.status_code == 200


@pytest.mark.parametrize(
    ("operation", "asked"),
    [("read", {"message_ids": [1]}), ("history", {"message_id": 1}), ("list_queues", {})],
)
async def test_a_look_at_no_queue_in_particular_counts_as_a_request_of_its_namespace(
    serving: Serving, token: Token, operation: str, asked: dict[str, object]
) -> None:
    async with serving(rate_per_second=1, rate_burst=1, jwt_key=SECRET) as client:

        async def status(*namespaces: str) -> int:
            headers = token(*namespaces)
            return (await client.post(f"/v1/{operation}", json=asked, headers=headers)).status_code

        assert [await status("a"), await status("a")] == [200, 429]
        assert [await status("b"), await status("*"), await status("*")] == [200, 200, 429]
        assert await status("b", "c") == 429


def test_a_batch_larger_than_the_bucket_passes_and_is_made_up_for(clock: ManualClock) -> None:
    rates = RateLimits(ServerSettings(rate_per_second=10, rate_burst=10), clock)
    rates.take("a", 110)

    with pytest.raises(Refusal) as refused:
        rates.take("a")

    assert refused.value.body.retry_after_ms == 10_101
    clock.advance_ms(10_101)
    rates.take("a")


def test_a_namespace_may_have_a_rate_of_its_own(clock: ManualClock) -> None:
    rates = RateLimits(ServerSettings(namespace_rates={"a": 1}, rate_burst=1), clock)

    for _ in range(100):
        rates.take("b")
    rates.take("a")
    with pytest.raises(Refusal):
        rates.take("a")


# --- waiting --------------------------------------------------------------------------------------


async def test_a_claim_waits_no_longer_than_the_broker_lets_it(
    serving: Serving, clock: ManualClock
) -> None:
    async with serving(max_wait_ms=1_000) as client:
        await client.post("/v1/create_queue", json={"queue": "q"})
        claiming = asyncio.ensure_future(
            client.post("/v1/claim", json={"queue": "q", "wait_ms": 3_600_000})
        )
        while not claiming.done():
            clock.advance_ms(100)
            await asyncio.sleep(0)
        answer = await claiming

    assert answer.json() == {"messages": []}
    assert clock.now_ms() < ManualClock().now_ms() + 3_600_000


async def test_a_head_that_is_too_long_is_refused(broker: BrokerProcess) -> None:
    host, port = broker.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        writer.write(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 2_000_000 + b"\r\n\r\n")
        answer = await reader.read(100)
    except ConnectionError:  # it was closed before all was read
        pass
    finally:
        writer.close()

    assert b"200" not in answer
    with answered(broker, HEALTHZ_REQUEST) as (_, status):
        assert status == 200
