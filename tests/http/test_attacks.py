"""Small attacks over real sockets: states of a connection × what its client does then.

Time is moved by hand: ``later`` sweeps the connections as if so many seconds had gone by.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.http import v1
from opendata_queue.http.errors import MAX_ERROR_CHARS, body_of
from opendata_queue.http.requests.connections import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED
from opendata_queue.http.requests.exchange import Broker
from opendata_queue.http.server.app import make_app
from opendata_queue.http.server.serving import Server
from opendata_queue.http.settings import ServerSettings
from opendata_queue.http.wire import JSON, MSGPACK
from opendata_queue.log.writer import PublishOptions
from opendata_queue.model.allowance import PIECES_BYTES
from opendata_queue.model.errors import QueueNotFoundError
from opendata_queue.testing import ManualClock
from tests.http.conftest import BROKER_URL, SECRET, Serving

HEADER_SECONDS = ServerSettings().header_timeout_ms / 1000
IDLE_SECONDS = ServerSettings().idle_timeout_ms / 1000
WRITE_SECONDS = ServerSettings().write_timeout_ms / 1000

FLOOD_BYTES = 4_000_000
HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"

Token = Callable[..., dict[str, str]]


def head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


class Client:
    """One connection to the broker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Send all, or as much as the broker takes before it hangs up."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """The status and body of the next answer."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:] if line)
        if fields.get(b"transfer-encoding") == b"chunked":
            body = b"".join([one async for one in self._chunks()])
        else:
            body = await self._reader.readexactly(int(fields.get(b"content-length", b"0")))
        return int(lines[0].split()[1]), body

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)

    async def read_a_little(self) -> None:
        await self._reader.read(1_000)

    async def asks(self, data: bytes) -> int:
        await self.send(data)
        return (await self.answer())[0]

    async def is_hung_up_on(self) -> bool:
        """Wait until it is, and there is nothing more to read."""
        try:
            return await self._reader.read() == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self._writer.transport.abort()


class Attacked:
    """A broker in this process, and what it keeps."""

    def __init__(self, server: Server, broker: Broker, address: tuple[str, int]) -> None:
        self.kept = server.kept
        self.broker = broker
        self._address = address
        self._clients: list[Client] = []

    async def connect(self, receive_bytes: int | None = None) -> Client:
        kept = len(self.kept.all)
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, self._address)
        limit = 2**16 if receive_bytes is None else receive_bytes
        client = Client(*await asyncio.open_connection(sock=connection, limit=limit))
        self._clients.append(client)
        await until(lambda: len(self.kept.all) > kept or len(self.kept.all) >= self.limit)
        return client

    @property
    def limit(self) -> int:
        return self.broker.settings.max_connections

    def later(self, seconds: float) -> None:
        self.kept.sweep(asyncio.get_running_loop().time() + seconds)

    async def is_free(self) -> bool:
        """Wait until no connection is left but those of clients that are served; serve one."""
        client = await self.connect()
        status = await client.asks(HEALTHZ)
        client.close()
        await until(lambda: not self.kept.all)
        return status == 200 and not self.kept.silent and not self.kept.idle and not self.kept.slow

    def close(self) -> None:
        for client in self._clients:
            client.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


Attack = Callable[..., contextlib.AbstractAsyncContextManager[Attacked]]


@pytest.fixture
def attack(system: Engine, clock: ManualClock) -> Attack:
    @contextlib.asynccontextmanager
    async def attacked(**settings: Any) -> AsyncIterator[Attacked]:
        broker = Broker(system, ServerSettings(**settings), clock)
        server = Server(broker)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            # As uvloop does for a broker; asyncio does not for sockets that are made like this.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            await until(lambda: server.started)
            found = Attacked(server, broker, listening.getsockname())
            try:
                yield found
            finally:
                found.close()
                server.stop()
                await serving

    return attacked


# --- states × what the client does then -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """How a connection gets there, and how long it may stay."""

    sent: bytes
    seconds: float
    answers: int = 0
    drip: bytes = b"x"
    """What may come next, over and over."""


STATES = {
    "silent": State(sent=b"", seconds=HEADER_SECONDS, drip=b"\r\n"),
    "an empty line first": State(sent=b"\r\n", seconds=HEADER_SECONDS, drip=b"\r\n"),
    "half a head": State(sent=b"POST /v1/claim HTTP/1.1\r\nHost: ", seconds=HEADER_SECONDS),
    "half a URL": State(sent=b"POST /v1/cl", seconds=HEADER_SECONDS),
    "a body after the 401": State(
        sent=head("/v1/claim", "Content-Length: 60000000") + b"x",
        seconds=HEADER_SECONDS,
        answers=1,
    ),
    "chunks after the 401": State(
        sent=head("/v1/claim", "Transfer-Encoding: chunked"),
        seconds=HEADER_SECONDS,
        answers=1,
        drip=b"1\r\nx\r\n",
    ),
    "a trailer after the 401": State(
        sent=head("/v1/claim", "Transfer-Encoding: chunked") + b"0\r\nX-Trailer: ",
        seconds=HEADER_SECONDS,
        answers=1,
    ),
    "a chunk's size after the 401": State(
        sent=head("/v1/claim", "Transfer-Encoding: chunked") + b"1;x=",
        seconds=HEADER_SECONDS,
        answers=1,
    ),
    "idle": State(sent=HEALTHZ, seconds=IDLE_SECONDS, answers=1, drip=b"\r\n"),
    "an empty line after an answer": State(
        sent=HEALTHZ + b"\r\n", seconds=IDLE_SECONDS, answers=1, drip=b"\r\n"
    ),
    "half a second head": State(
        sent=HEALTHZ + b"GET /healthz HTTP/1.1\r\nX: ", seconds=HEADER_SECONDS, answers=1
    ),
}


async def nothing(attacked: Attacked, client: Client, state: State) -> None:
    """Wait, for less than is permitted."""
    attacked.later(state.seconds - 1)
    assert len(attacked.kept.all) == 1


async def one_byte(attacked: Attacked, client: Client, state: State) -> None:
    await client.send(state.drip[:1])
    await asyncio.sleep(0)
    attacked.later(state.seconds - 1)


async def trickle(attacked: Attacked, client: Client, state: State) -> None:
    for step in range(10):
        await client.send(state.drip)
        attacked.later(state.seconds * step / 10)


async def flood(attacked: Attacked, client: Client, state: State) -> None:
    """Send much of it, which ends the connection, but for empty lines: nothing is kept of those."""
    refused = attacked.broker.bad_requests.total
    await client.send(state.drip * (FLOOD_BYTES // len(state.drip)))
    if state.drip != b"\r\n":
        await until(lambda: attacked.broker.bad_requests.total > refused)


async def closing(attacked: Attacked, client: Client, state: State) -> None:
    client.close()
    await until(lambda: not attacked.kept.all)


Act = Callable[[Attacked, Client, State], Awaitable[None]]


ACTS: list[Act] = [nothing, one_byte, trickle, flood, closing]


@pytest.mark.parametrize("name", STATES)
async def test_no_client_without_a_token_holds_a_connection_for_longer_than_it_may(
    attack: Attack, name: str
) -> None:
    state = STATES[name]
    async with attack(jwt_key=SECRET, max_body_bytes=FLOOD_BYTES // 16) as attacked:
        for act in ACTS:
            client = await attacked.connect()
            await client.send(state.sent)
            for _ in range(state.answers):
                assert (await client.answer())[0] in (200, 401)

            await act(attacked, client, state)
            attacked.later(state.seconds + 1)

            await until(lambda: not attacked.kept.all)
            assert await attacked.is_free()


TINY_CHUNKS = b"1\r\n \r\n" * 40_000
"""Far fewer bytes than a body may have."""


async def test_a_client_without_a_token_sends_no_more_than_some_thousand_tiny_chunks(
    attack: Attack,
) -> None:
    async with attack(jwt_key=SECRET) as attacked:
        client = await attacked.connect()
        assert await client.asks(head("/v1/claim", "Transfer-Encoding: chunked")) == 401

        await client.send(TINY_CHUNKS)

        assert await client.is_hung_up_on()
        assert attacked.broker.bad_requests.total == 1


async def test_a_body_of_tiny_chunks_is_refused_and_one_of_small_ones_is_taken(
    attack: Attack, system: Engine
) -> None:
    async with attack() as attacked:
        chunks = head("/v1/create_queue", "Transfer-Encoding: chunked") + b'c\r\n{"queue":"q"\r\n'
        tiny, small = await attacked.connect(), await attacked.connect()

        await tiny.send(chunks + TINY_CHUNKS)
        status, text = await tiny.answer()
        taken = await small.asks(
            chunks + (b"100\r\n%b\r\n" % (b" " * 256)) * 10_000 + b"1\r\n}\r\n0\r\n\r\n"
        )

        assert (status, text) == (400, b"Bad request: a body in so many small pieces is not taken.")
        assert taken == 200
        assert await system.list_queues() == ["q"]


async def test_the_document_of_the_api_is_made_once(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attack(jwt_key=SECRET) as attacked:
        request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client = await attacked.connect()
        await client.send(request)
        first = await client.answer()
        monkeypatch.setattr(v1, "paths", lambda: pytest.fail("it was made again"))

        await client.send(request)

        assert await client.answer() == first
        assert json.loads(first[1])["openapi"] == "3.1.0"


# --- requests that are let in ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LetIn:
    """How the body of a request begins that may be made, and what may come next of it."""

    sent: bytes
    drip: bytes
    statuses: tuple[int, ...] = (408,)
    """Of the answer when it goes on like this."""


CHUNKS = head("/v1/create_queue", "Transfer-Encoding: chunked")
LET_IN = {
    "a body": LetIn(sent=head("/v1/create_queue", "Content-Length: 60000") + b"{", drip=b" "),
    "no body yet": LetIn(sent=head("/v1/create_queue", "Content-Length: 60000"), drip=b" "),
    "chunks": LetIn(sent=CHUNKS + b"1\r\n{\r\n", drip=b"1\r\n \r\n"),
    "within a chunk": LetIn(sent=CHUNKS + b"ea60\r\n{", drip=b" "),
    "a chunk's size": LetIn(sent=CHUNKS + b"1\r\n{\r\n0000", drip=b"0", statuses=(400, 408)),
    "behind a chunk's size": LetIn(sent=CHUNKS + b"1\r\n{\r\n1;x=", drip=b"x", statuses=(400, 408)),
    "a trailer": LetIn(sent=CHUNKS + b"1\r\n{\r\n0\r\nX", drip=b"x", statuses=(400, 408)),
}


@pytest.mark.parametrize("act", ["nothing", "trickle", "closing"])
@pytest.mark.parametrize("name", LET_IN)
async def test_a_body_that_is_let_in_comes_in_time_or_not_at_all(
    attack: Attack, system: Engine, name: str, act: str
) -> None:
    state = LET_IN[name]
    # One that trickles makes no pause of so long: only the time for all of its body ends it.
    timeouts_ms = {"nothing": 20, "trickle": 400, "closing": 30_000}
    async with asyncio.timeout(60), attack(body_timeout_ms=timeouts_ms[act]) as attacked:
        client = await attacked.connect()
        await client.send(state.sent)
        if act == "closing":
            await until(lambda: _under_way(attacked) == ["/v1/create_queue"])
            client.close()
        else:
            answering = asyncio.create_task(client.answer())
            while not answering.done():
                await client.send(state.drip if act == "trickle" else b"")
                await asyncio.sleep(0.002)
            assert (await answering)[0] in state.statuses
            assert await client.is_hung_up_on()

        await until(lambda: not attacked.kept.all and not _under_way(attacked))
        assert attacked.broker.bodies.taken_bytes == 0
        assert await attacked.is_free()
    assert await system.list_queues() == []


async def test_a_claim_whose_client_hung_up_waits_no_longer_and_takes_nothing(
    attack: Attack, system: Engine
) -> None:
    await system.create_queue("q")
    async with asyncio.timeout(20), attack() as attacked:
        client = await attacked.connect()
        await client.send(claim_that_waits("q") + HEALTHZ)
        await until(lambda: _under_way(attacked) == ["/v1/claim"])
        attacked.later(IDLE_SECONDS + 1)
        assert len(attacked.kept.all) == 1  # it is being worked for

        client.close()

        await until(lambda: not attacked.kept.all and not _under_way(attacked))
        await system.publish(b"for another one")
        (claimed,) = await system.claim("q")
        assert claimed.attempts == 1
        assert await attacked.is_free()


# --- heads and trailers ---------------------------------------------------------------------------


def chunked(body: bytes, trailer: str, *headers: str) -> bytes:
    chunk = b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(body), body, trailer.encode())
    return head("/v1/list_queues", "Transfer-Encoding: chunked", *headers) + chunk


async def test_a_trailer_in_the_packet_of_its_head_is_refused_and_no_header(
    attack: Attack, token: Token
) -> None:
    (authorization,) = token("*").items()
    trailer = ": ".join(authorization)
    async with attack(jwt_key=SECRET) as attacked:
        client = await attacked.connect()
        status, body = 0, b""
        await client.send(chunked(b"{}", trailer))
        status, body = await client.answer()

        assert (status, body) == (400, b"Bad request: trailers are not taken.")
        assert await client.is_hung_up_on()
        assert await attacked.is_free()


async def test_a_trailer_after_a_body_that_is_being_read_is_refused_and_nothing_done(
    attack: Attack, system: Engine
) -> None:
    asked = head("/v1/create_queue", "Transfer-Encoding: chunked") + b'd\r\n{"queue": "q"\r\n'
    async with attack() as attacked:
        client = await attacked.connect()
        await client.send(asked)
        await until(lambda: "/v1/create_queue" in _under_way(attacked))
        await client.send(b"1\r\n}\r\n0\r\nX: y\r\n\r\n")

        assert (await client.answer())[0] == 400
        assert await client.is_hung_up_on()
        assert await attacked.is_free()
        await until(lambda: not _under_way(attacked))
    assert await system.list_queues() == []


def _under_way(attacked: Attacked) -> list[str]:
    """The routes of requests that are worked on."""
    found = attacked.broker.metrics.registry.collect()
    samples = [one for family in found for one in family.samples]
    return [one.labels["route"] for one in samples if one.name == "odq_requests_open" and one.value]


async def test_a_trailer_of_a_request_that_was_answered_ends_the_connection(
    attack: Attack,
) -> None:
    async with attack(jwt_key=SECRET) as attacked:
        client = await attacked.connect()
        assert await client.asks(head("/v1/claim", "Transfer-Encoding: chunked")) == 401
        await client.send(b"0\r\nX: y\r\n\r\n")

        assert await client.is_hung_up_on()  # a second answer would be taken for another's


def claim_that_waits(queue: str) -> bytes:
    body = json.dumps({"queue": queue, "wait_ms": 30_000}).encode()
    return head("/v1/claim", f"Content-Length: {len(body)}") + body


async def test_requests_behind_one_that_is_under_way_wait_and_all_are_answered_in_order(
    attack: Attack, system: Engine
) -> None:
    await system.create_queue("q")
    count = 20 * MAX_PIPELINED
    async with attack() as attacked:
        client = await attacked.connect()
        gets = [b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % n for n in range(count)]
        sending = asyncio.create_task(client.send(claim_that_waits("q") + b"".join(gets)))
        (connection,) = attacked.kept.all
        await until(lambda: connection.flow.read_paused and bool(connection.pipeline))
        waiting = len(connection.pipeline)
        await system.publish(b"")

        claimed = await client.answer()
        answers = [await client.answer() for _ in range(count)]
        await sending

        assert waiting <= MAX_PIPELINED + 512 // len(gets[0])
        assert claimed[0] == 200
        assert [json.loads(body)["message"].split(":")[0] for _, body in answers] == [
            f"/{n}" for n in range(count)
        ]
        assert await client.asks(HEALTHZ) == 200


async def test_what_a_client_sends_while_enough_of_it_waits_is_not_read(
    attack: Attack, system: Engine
) -> None:
    await system.create_queue("q")
    async with attack() as attacked:
        client = await attacked.connect()
        flood = claim_that_waits("q") + HEALTHZ * (FLOOD_BYTES * 4 // len(HEALTHZ))
        sending = asyncio.create_task(client.send(flood))
        (connection,) = attacked.kept.all
        await until(lambda: bool(connection._unparsed))
        for _ in range(100):
            await asyncio.sleep(0.001)

        assert len(connection._unparsed) <= MIB
        assert not sending.done()  # the rest is with the client
        client.close()
        await sending


@pytest.mark.parametrize(
    "bad",
    [
        b"nonsense\r\n\r\n",
        head("/v1/stats", "Transfer-Encoding: chunked") + b"0\r\nX: y\r\n\r\n",
        head("/v1/stats", "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
    ],
    ids=["nonsense", "a trailer", "a coding"],
)
async def test_a_bad_request_takes_no_answer_from_those_before_it(
    attack: Attack, system: Engine, bad: bytes
) -> None:
    await system.create_queue("q")
    async with attack() as attacked:
        client = await attacked.connect()
        await client.send(claim_that_waits("q") + HEALTHZ + bad + HEALTHZ)
        await until(lambda: attacked.broker.bad_requests.total == 1)
        await system.publish(b"")

        statuses = [(await client.answer())[0] for _ in range(3)]

        assert statuses[:2] == [200, 200]
        assert statuses[2] in (400, 501)
        assert await client.is_hung_up_on()
        assert await attacked.is_free()


async def test_half_a_head_behind_a_claim_that_waits_does_not_end_it(
    attack: Attack, system: Engine
) -> None:
    await system.create_queue("q")
    async with attack() as attacked:
        client = await attacked.connect()
        await client.send(claim_that_waits("q") + HEALTHZ[:20])
        await until(lambda: "/v1/claim" in _under_way(attacked))
        attacked.later(HEADER_SECONDS + 1)
        await system.publish(b"")

        assert (await client.answer())[0] == 200
        attacked.later(HEADER_SECONDS + 1)
        assert await client.is_hung_up_on()


@pytest.mark.parametrize(
    ("codings", "status", "reason"),
    [
        (["gzip, chunked"], 501, "no transfer coding is taken but chunked"),
        (["gzip"], 501, "no transfer coding is taken but chunked"),
        (["identity"], 501, "no transfer coding is taken but chunked"),
        (["chunked, chunked"], 400, "Transfer-Encoding"),
        (["chunked;q=1"], 501, "no transfer coding is taken but chunked"),
        ([""], 400, "Transfer-Encoding"),
        (["gzip", "chunked"], 501, "no transfer coding is taken but chunked"),
        (["chunked", "chunked"], 400, "Transfer-Encoding"),
        (["chunked", "gzip"], 400, "Transfer-Encoding"),
    ],
)
async def test_no_transfer_coding_is_taken_but_chunked_alone(
    attack: Attack, system: Engine, codings: list[str], status: int, reason: str
) -> None:
    lines = [f"Transfer-Encoding: {one}" for one in codings]
    asked = head("/v1/create_queue", *lines) + b'e\r\n{"queue": "q"}\r\n0\r\n\r\n'
    async with attack() as attacked:
        client = await attacked.connect()
        await client.send(asked)
        answer = await client.answer()

        assert answer[0] == status
        assert reason in answer[1].decode()
        assert await client.is_hung_up_on()
    assert await system.list_queues() == []


@pytest.mark.parametrize("first", ["length", "coding"])
async def test_a_body_has_a_length_or_chunks_and_not_both(
    attack: Attack, system: Engine, first: str
) -> None:
    lines = ["Content-Length: 24", "Transfer-Encoding: chunked"]
    lines = lines if first == "length" else lines[::-1]
    asked = head("/v1/create_queue", *lines) + b'e\r\n{"queue": "q"}\r\n0\r\n\r\n'
    async with attack() as attacked:
        client = await attacked.connect()
        await client.send(asked)
        status, body = await client.answer()
        assert status == 400
        assert b"can't be present with" in body
        assert await client.is_hung_up_on()
        client = await attacked.connect()
        assert await client.asks(asked.replace(b"HTTP/1.1", b"HTTP/1.0")) == 400
    assert await system.list_queues() == []


async def test_chunks_are_for_http_1_1(attack: Attack, system: Engine) -> None:
    asked = head("/v1/create_queue", "Transfer-Encoding: chunked")
    async with attack() as attacked:
        client = await attacked.connect()
        await client.send(asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert await client.answer() == (400, b"Bad request: chunks are for HTTP/1.1.")


@pytest.mark.parametrize(
    "said",
    [
        b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /healthz?" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["many headers", "a long one", "a long URL"],
)
async def test_a_head_has_a_limit_in_one_packet_too(attack: Attack, said: bytes) -> None:
    async with attack() as attacked:
        client = await attacked.connect()

        assert await client.asks(said) == 400
        assert await client.is_hung_up_on()


async def test_a_client_that_offers_another_protocol_is_answered_and_that_is_all(
    attack: Attack, caplog: pytest.LogCaptureFixture
) -> None:
    offer = HEALTHZ[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with attack() as attacked:
        client = await attacked.connect()

        assert await client.asks(offer + HEALTHZ) == 200
        assert await client.is_hung_up_on()
    assert not caplog.records


# --- room for others ------------------------------------------------------------------------------


async def test_the_oldest_idle_connection_makes_room(attack: Attack) -> None:
    async with attack(max_connections=3) as attacked:
        clients = [await attacked.connect() for _ in range(3)]
        for client in clients:
            assert await client.asks(HEALTHZ) == 200
        assert await clients[0].asks(HEALTHZ) == 200  # now the second is the oldest

        newcomer = await attacked.connect()

        assert await newcomer.asks(HEALTHZ) == 200
        assert await clients[1].is_hung_up_on()
        assert [await clients[n].asks(HEALTHZ) for n in (0, 2)] == [200, 200]


async def test_one_that_has_asked_for_nothing_makes_room_before_an_idle_one(
    attack: Attack,
) -> None:
    async with attack(max_connections=2) as attacked:
        idle = await attacked.connect()
        assert await idle.asks(HEALTHZ) == 200
        silent = await attacked.connect()
        await until(lambda: len(attacked.kept.silent) == 1)
        for one in attacked.kept.silent:
            one._came_at -= 10  # it has had its time

        newcomer = await attacked.connect()

        assert await silent.is_hung_up_on()
        assert [await one.asks(HEALTHZ) for one in (idle, newcomer)] == [200, 200]


async def test_idle_ones_make_room_for_a_burst_of_newcomers(attack: Attack) -> None:
    async with attack(max_connections=4) as attacked:
        idle = [await attacked.connect() for _ in range(4)]
        assert [await one.asks(HEALTHZ) for one in idle] == [200] * 4

        newcomers = [await attacked.connect() for _ in range(4)]

        assert [await one.asks(HEALTHZ) for one in newcomers] == [200] * 4
        for one in idle:
            assert await one.is_hung_up_on()


# --- bodies ---------------------------------------------------------------------------------------


MIB = 1024 * 1024


async def test_unfinished_bodies_share_their_room_and_give_it_back(attack: Attack) -> None:
    async with attack(max_bodies_bytes=4 * MIB) as attacked:
        clients = [await attacked.connect() for _ in range(5)]
        for client in clients:
            await client.send(head("/v1/publish", f"Content-Length: {2 * MIB}"))
            await client.send(b" " * MIB)
        taken = attacked.broker.bodies
        await until(lambda: len(attacked.kept.all) == 3 and taken.taken_bytes > 2 * MIB)

        assert taken.taken_bytes <= 4 * MIB
        small = await attacked.connect()
        assert await small.asks(head("/v1/list_queues", "Content-Length: 2") + b"{}") == 200
        assert (await clients[-1].answer())[0] == 503
        attacked.close()
        await until(lambda: not taken.taken_bytes)


async def test_a_body_that_is_only_announced_takes_no_room(attack: Attack) -> None:
    async with attack(max_bodies_bytes=4 * MIB) as attacked:
        for _ in range(5):
            client = await attacked.connect()
            await client.send(head("/v1/publish", f"Content-Length: {3 * MIB}") + b"x")
        await until(lambda: _under_way(attacked) == ["/v1/publish"])

        assert attacked.broker.bodies.taken_bytes == 0


async def test_a_body_larger_than_all_bodies_may_be_is_taken_alone(
    serving: Serving, system: Engine
) -> None:
    body = {"messages": [{"payload": "A" * 400_000}]}
    async with serving(max_bodies_bytes=100_000) as client:
        answer = await client.post(
            "/v1/publish", content=_parts(json.dumps(body).encode()), headers={"Content-Type": JSON}
        )

    assert answer.status_code == 200


async def _parts(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 90_000):
        yield body[start : start + 90_000]


async def test_a_body_whose_length_has_many_digits_is_taken(attack: Attack) -> None:
    async with attack() as attacked:
        client = await attacked.connect()
        asked = head("/v1/list_queues", f"Content-Length: {2:05000}") + b"{}"

        assert await client.asks(asked) == 200


MANY = 300_000
EMPTY = b"\x81\xa8messages\xdd" + MANY.to_bytes(4, "big") + b"\x80" * MANY
HEADERS = b"\x81\xa8messages\x91\x81\xa7headers\xdf" + MANY.to_bytes(4, "big") + b"\xa0\xa0" * MANY


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/publish", EMPTY, 400),
        ("/v1/publish", HEADERS, 400),
        ("/v1/read", b"\x81\xabmessage_ids\xdd" + MANY.to_bytes(4, "big") + bytes(MANY), 400),
        ("/v1/publish", b'{"messages":[' + b"{}," * MANY + b"{}]}", 413),
        ("/v1/read", b'{"message_ids":[' + b"0," * MANY + b"0]}", 413),
        ("/v1/ack", b'{"queue":"q","receipts":[' + b'"",' * MANY + b'""]}', 413),
        ("/enqueue", b"[" + b"0," * MANY + b"0]", 413),
        ("/enqueue", b'"' + b'\\"' * MANY, 400),
        ("/enqueue", b"[" * MANY, 413),
        ("/v1/publish", b'{"messages":[{"headers":{"a":"' + b"," * MANY + b'"}}]}', 400),
    ],
    ids=map(str, range(10)),
)
async def test_what_a_body_becomes_is_bounded_before_it_is_decoded(
    client: httpx.AsyncClient, path: str, body: bytes, status: int
) -> None:
    kind = MSGPACK if body[0] == 0x81 else JSON
    tracemalloc.start()
    try:
        answer = await client.post(path, content=body, headers={"Content-Type": kind})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert answer.status_code == status
    assert peak_bytes < len(body) * 2 + 4 * MIB


@pytest.mark.parametrize("kind", [MSGPACK, JSON])
async def test_a_large_publish_is_decoded_in_steps_and_names_what_is_wrong(
    client: httpx.AsyncClient, system: Engine, kind: str
) -> None:
    encode = msgspec.msgpack.encode if kind == MSGPACK else msgspec.json.encode
    messages: list[dict[str, Any]] = [
        {"payload": b"x" * 100, "headers": {"n": str(n), "text": ',"{['}} for n in range(3_000)
    ]

    async def publish(**asked: Any) -> httpx.Response:
        content = encode({"messages": messages, **asked})
        return await client.post("/v1/publish", content=content, headers={"Content-Type": kind})

    published = await publish(key="once")
    again = await publish(key="once", retried=True)
    messages[2_999]["headers"] = 7
    refused = await publish()

    assert (published.status_code, again.content) == (200, published.content)
    first, last = await system.read_many([0, 2_999])
    assert first is not None
    assert last is not None
    assert (first.headers, last.headers) == (
        (("n", "0"), ("text", ',"{[')),
        (("n", "2999"), ("text", ',"{[')),
    )
    assert refused.status_code == 400
    assert b"message 2999 makes no sense" in refused.content


# --- answers --------------------------------------------------------------------------------------


async def published(system: Engine, *messages: NewMessage) -> list[int]:
    """Messages in the queue ``q``."""
    await system.create_queue("q")
    return await system.publish_many(messages)


async def test_an_id_that_is_asked_for_again_and_again_counts_each_time(
    serving: Serving, system: Engine
) -> None:
    await published(system, NewMessage(b"", headers={"h": "x" * 10_000}))

    async with serving(max_answer_bytes=100_000) as client:
        refused = await client.post("/v1/read", json={"message_ids": [0] * 500})
        read = await client.post("/v1/read", json={"message_ids": [0] * 5})

    assert refused.status_code == 400
    assert len(read.json()["messages"]) == 5


@pytest.mark.parametrize("payload", [b"", bytes(100_000)], ids=["headers", "payloads"])
async def test_headers_and_large_payloads_count_and_the_rest_can_be_had(
    serving: Serving, system: Engine, payload: bytes
) -> None:
    headers = {} if payload else {"h": "x" * 50_000, "i": "x" * 50_000}
    ids = await published(system, *[NewMessage(payload, headers=headers) for _ in range(20)])

    async with serving(max_answer_bytes=350_000) as client:

        async def ask(operation: str, **asked: Any) -> list[dict[str, Any]]:
            answer = await client.post(f"/v1/{operation}", json={"queue": "q", **asked})
            assert len(answer.content) < 500_000
            messages: list[dict[str, Any]] = answer.json()["messages"]
            return messages

        assert len(await ask("peek", count=20)) == 3
        claimed = []
        while some := await ask("claim", count=20):
            assert len(some) <= 3
            claimed += [int(one["message_id"]) for one in some]
        too_many = await client.post("/v1/read", json={"message_ids": ids})

    assert claimed == ids  # in their order, and what did not fit was not kept from anybody
    assert too_many.status_code == 400


LARGE_HEADERS = {str(n): "x" * 60_000 for n in range(10)}


@pytest.mark.parametrize("apart", [1, 5, 40], ids=["together", "close", "scattered"])
@pytest.mark.parametrize("operation", ["read", "claim", "peek", "failed"])
async def test_of_large_headers_no_more_is_read_at_once_than_a_step_and_all_can_be_had(
    clock: ManualClock, operation: str, apart: int
) -> None:
    """Small messages come first, so that nothing warns of the large ones behind them."""
    options = PublishOptions(recent_bytes=0, ahead_bytes=MIB)
    async with await Engine.open("memory:///", clock=clock, options=options) as system:
        await system.create_queue(
            "q", filter="wanted = 'yes'", options=QueueOptions(max_attempts=1)
        )
        wanted = []
        for number in range(120):
            headers = LARGE_HEADERS if number >= 60 else {}
            messages = [NewMessage(b"", headers={"wanted": "yes", **headers})]
            messages += [NewMessage(b"", headers={"wanted": "no"}) for _ in range(apart - 1)]
            wanted += (await system.publish_many(messages))[:1]
        if operation == "failed":
            for _ in range(12):
                await system.nack("q", *await system.claim("q", 10), error="no")
        broker = Broker(system, ServerSettings(max_answer_bytes=2 * MIB), clock)
        transport = httpx.ASGITransport(make_app(broker))
        async with httpx.AsyncClient(transport=transport, base_url=BROKER_URL) as client:
            asked: dict[str, Any] = (
                {"message_ids": wanted} if operation == "read" else {"queue": "q"}
            )
            if operation in ("claim", "peek"):
                asked["count"] = 120
            tracemalloc.start()
            try:
                answer = await client.post(f"/v1/{operation}", json=asked)
                _, peak_bytes = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            given = len(answer.json().get("messages", ()))
            assert peak_bytes < 24 * MIB
            assert answer.status_code == (400 if operation == "read" else 200)
            assert given == (0 if operation == "read" else 63)
            if operation == "claim":
                claimed = [int(one["message_id"]) for one in answer.json()["messages"]]
                while some := (await client.post("/v1/claim", json=asked)).json()["messages"]:
                    claimed += [int(one["message_id"]) for one in some]
                assert claimed == wanted


@pytest.mark.parametrize("max_unsent_bytes", [1, 1_000_000])
@pytest.mark.parametrize("size", [100, 100_000])
async def test_a_message_larger_than_an_answer_may_be_is_given_alone(
    serving: Serving, system: Engine, size: int, max_unsent_bytes: int
) -> None:
    await published(system, *[NewMessage(bytes(size)) for _ in range(3)])
    given = []

    async with serving(max_answer_bytes=10, max_unsent_bytes=max_unsent_bytes) as client:
        for _ in range(3):
            answer = await client.post("/v1/claim", json={"queue": "q", "count": 3})
            given.append(len(answer.json()["messages"]))
            await asyncio.sleep(0)  # an answer counts until the loop has written it

    assert given == [1, 1, 1]


async def test_failed_messages_come_in_answers_of_so_many_bytes_and_a_client_gets_all(
    system: Engine, clock: ManualClock
) -> None:
    headers = {"h": "x" * 30_000}
    await system.create_queue("q", options=QueueOptions(max_attempts=1))
    ids = await system.publish_many([NewMessage(b"", headers=headers) for _ in range(20)])
    await system.nack("q", *await system.claim("q", 20), error="no")
    broker = Broker(system, ServerSettings(max_answer_bytes=100_000), clock)
    transport = httpx.ASGITransport(make_app(broker))

    async with httpx.AsyncClient(transport=transport, base_url=BROKER_URL) as client:
        seen: list[int] = []
        more = True
        while more:
            after = {"after_id": seen[-1]} if seen else {}
            answer = (await client.post("/v1/failed", json={"queue": "q", **after})).json()
            assert 1 <= len(answer["messages"]) <= 3
            seen += [int(one["message_id"]) for one in answer["messages"]]
            more = answer.get("more", False)

    assert seen == ids


@pytest.mark.parametrize("operation", ["browse", "history"])
async def test_a_page_has_room_for_all_that_it_may_hold_before_it_is_read(
    system: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    await published(system, NewMessage(b""))
    broker = Broker(system, ServerSettings(max_unsent_bytes=3 * MIB), clock)
    transport = httpx.ASGITransport(make_app(broker))
    page = {"queue": "q", "state": "failed", "limit": 1_000}
    asked: dict[str, Any] = page if operation == "browse" else {"message_id": 0}
    reading = getattr(system, operation)
    reserved: list[int] = []

    async def read(*args: Any, **kwargs: Any) -> Any:
        reserved.append(broker.answers.taken_bytes)
        return await reading(*args, **kwargs)

    monkeypatch.setattr(system, operation, read)
    async with httpx.AsyncClient(transport=transport, base_url=BROKER_URL) as client:
        alone = await client.post(f"/v1/{operation}", json=asked)
        broker.answers.taken_bytes += 2 * MIB  # of another one
        refused = await client.post(f"/v1/{operation}", json=asked)
        few = await client.post("/v1/browse", json={**page, "state": "done", "limit": 1})

    assert (alone.status_code, refused.status_code, few.status_code) == (200, 503, 200)
    assert reserved[0] > (MIB if operation == "history" else 4 * MIB)
    assert broker.answers.taken_bytes == 2 * MIB


async def test_answers_share_their_room_while_clients_do_not_read(
    attack: Attack, system: Engine
) -> None:
    (message_id,) = await published(system, NewMessage(bytes(12 * MIB)))
    body = b'{"message_ids": [%d]}' % message_id
    asked = head("/v1/read", f"Content-Length: {len(body)}", "Accept: application/msgpack") + body
    async with attack(max_unsent_bytes=30 * MIB) as attacked:
        clients = [await attacked.connect(receive_bytes=4_096) for _ in range(5)]
        for client in clients:
            await client.send(asked)
        # Two have their messages, which count until their clients have read them.
        await until(lambda: len(attacked.kept.slow) + _answered(attacked, 503) == len(clients))

        assert _answered(attacked, 503) == 3
        assert 24 * MIB < attacked.broker.answers.used_bytes <= 30 * MIB
        assert attacked.kept.unsent_bytes() <= 2 * PIECES_BYTES
        other = await attacked.connect()
        assert await other.asks(PUBLISH) == 200
        assert await other.asks(HEALTHZ) == 200

        attacked.later(WRITE_SECONDS + 1)
        await until(lambda: not attacked.kept.slow)
        await until(lambda: not attacked.broker.answers.taken_bytes)
        await other.send(asked)
        assert len((await other.answer())[1]) > 12 * MIB


PUBLISH = head("/v1/publish", "Content-Length: 31") + b'{"messages": [{"payload": ""}]}'


def _answered(attacked: Attacked, *statuses: int) -> int:
    """How many requests to read were answered, with one of the statuses."""
    found = attacked.broker.metrics.registry.collect()
    samples = [one for family in found for one in family.samples]
    reads = [one for one in samples if one.labels.get("route") == "/v1/read"]
    counts = [one for one in reads if one.name == "odq_requests_total"]
    return int(sum(one.value for one in counts if int(one.labels["status"]) in statuses))


@pytest.mark.parametrize("reads", ["nothing", "a little"])
async def test_a_client_that_reads_its_answer_too_slowly_is_hung_up_on(
    attack: Attack, system: Engine, reads: str
) -> None:
    (message_id,) = await published(system, NewMessage(bytes(8 * MIB)))
    body = b'{"message_ids": [%d]}' % message_id
    async with attack() as attacked:
        client = await attacked.connect(receive_bytes=4_096)
        ending = "Connection: close" if reads == "nothing" else "X: y"
        await client.send(head("/v1/read", f"Content-Length: {len(body)}", ending) + body)
        await until(lambda: bool(attacked.kept.slow))

        if reads == "a little":
            for step in range(1, 9):
                unsent = attacked.kept.unsent_bytes()
                while attacked.kept.unsent_bytes() == unsent:
                    await client.read_a_little()
                attacked.later(WRITE_SECONDS * step / 2)
        attacked.later(WRITE_SECONDS)
        attacked.later(WRITE_SECONDS * 2 + 1)

        await until(lambda: not attacked.kept.all)
        assert await attacked.is_free()


# --- headers that say two things ------------------------------------------------------------------


@pytest.mark.parametrize(
    "repeated",
    [
        ["Authorization: Bearer x", "Authorization: Bearer {token}"],
        ["Authorization: Bearer {token}", "authorization: Bearer x"],
        ["Authorization: Bearer {token}", "Host: elsewhere"],
        ["Authorization: Bearer {token}", "Content-Type: application/msgpack"],
        ["Authorization: Bearer {token}", "Content-Length: 2"],
        ["Authorization: Bearer {token}", "Content-Length: 3"],
        ["Authorization: Bearer {token}", "Transfer-Encoding: chunked"],
    ],
)
async def test_a_header_that_decides_something_is_given_once(
    attack: Attack, token: Token, repeated: list[str]
) -> None:
    made = token("*")["Authorization"].removeprefix("Bearer ")
    headers = [one.format(token=made) for one in repeated]
    async with attack(jwt_key=SECRET) as attacked:
        client = await attacked.connect()

        assert (
            await client.asks(head("/v1/list_queues", "Content-Length: 2", *headers) + b"{}") == 400
        )


async def test_a_parameter_is_given_once(client: httpx.AsyncClient) -> None:
    answer = await client.get("/dequeue?namespace=a&namespace=b&topic=t")

    assert answer.status_code == 400
    assert "given twice" in answer.json()["message"]


# --- moments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment",
    [
        "0001-01-01T00:00:00+14:00",
        "0001-01-01T00:00:00Z",
        "9999-12-31T23:59:59.999999Z",
        "9999-12-31T23:59:59-23:59",
    ],
)
async def test_the_first_and_the_last_moment_that_can_be_said_are_taken(
    client: httpx.AsyncClient, moment: str
) -> None:
    item = {"namespace": "n", "topic": "t", "payload": "", "deliver_after": moment}

    enqueued = await client.post("/enqueue", json=[item])
    dequeued = await client.get("/dequeue?namespace=n&topic=t")

    assert enqueued.status_code == 200
    assert len(dequeued.json()) == (1 if moment < "1970" else 0)


# --- what is logged -------------------------------------------------------------------------------


async def test_a_hundred_bad_requests_write_a_few_lines_and_are_counted(
    attack: Attack, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with attack() as attacked:
        for _ in range(100):
            client = await attacked.connect()
            assert await client.asks(b"nonsense\r\n\r\n") == 400
            client.close()
        at_once = len(caplog.records)
        clock.advance_ms(60_000)
        attacked.later(0)

    assert at_once == 6
    assert caplog.messages[-1] == "95 more bad requests were not logged"
    assert len(caplog.records) == 7
    assert {one.levelno for one in caplog.records} == {logging.WARNING}


REFUSED = {
    "no token": (head("/v1/claim", "Content-Length: 2") + b"{}", 401),
    "no queue": (head("/v1/claim", "Content-Length: 13") + b'{"queue":"x"}', 404),
    "no sense": (head("/v1/claim", "Content-Length: 2") + b"[]", 400),
    "another site": (head("/v1/claim", "Origin: http://x", "Content-Length: 2") + b"{}", 403),
    "no route": (head("/v1/nothing", "Content-Length: 2") + b"{}", 404),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_without_a_token_write_a_line_each_and_so_many_a_minute(
    attack: Attack, clock: ManualClock, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO, "opendata_queue")
    asked, status = REFUSED[name]
    tokens = {"jwt_key": SECRET} if name == "no token" else {}
    async with attack(access_log=True, **tokens) as attacked:
        client = await attacked.connect()
        caplog.clear()
        assert await client.asks(asked) == status
        alone = len(caplog.records)
        for _ in range(299):
            assert await client.asks(asked) == status
        at_once = len(caplog.records)
        assert await client.asks(PUBLISH) == (401 if tokens else 200)
        clock.advance_ms(60_000)
        attacked.later(0)

    if name == "no route":
        assert at_once == 0
        return
    assert (alone, at_once) == (1, 101)
    refused = 201 if tokens else 200
    assert caplog.messages[-1] == f"{refused} more refused requests were not logged"


async def test_refusals_of_callers_with_a_token_are_all_logged(
    attack: Attack, token: Token, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "opendata_queue")
    authorization = f"Authorization: {token('*')['Authorization']}"
    asked = head("/v1/claim", authorization, "Content-Length: 13") + b'{"queue":"x"}'
    async with attack(access_log=True, jwt_key=SECRET) as attacked:
        client = await attacked.connect()
        caplog.clear()
        for _ in range(200):
            assert await client.asks(asked) == 404

        assert len(caplog.records) == 200


def test_an_error_repeats_little_of_what_was_sent() -> None:
    body = body_of(QueueNotFoundError("there is no queue " + "x" * 1_000_000))

    assert len(body.message) <= MAX_ERROR_CHARS + 1
    assert body.message.startswith("there is no queue xx")
