"""Small attacks over real sockets: states of a connection × what its client does then.

Time is moved by hand: ``later`` sweeps the connections as if so many seconds had gone by.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from opendata_queue import Engine
from opendata_queue.server.connections import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED
from opendata_queue.server.exchange import Broker
from opendata_queue.server.serving import Server
from opendata_queue.server.settings import ServerSettings
from opendata_queue.testing import ManualClock
from tests.server.conftest import SECRET

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
        body = await self._reader.readexactly(int(fields.get(b"content-length", b"0")))
        return int(lines[0].split()[1]), body

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
    await client.send(state.drip * (FLOOD_BYTES // len(state.drip)))


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
    async with attack(jwt_key=SECRET) as attacked:
        for act in ACTS:
            client = await attacked.connect()
            await client.send(state.sent)
            for _ in range(state.answers):
                assert (await client.answer())[0] in (200, 401)

            await act(attacked, client, state)
            attacked.later(state.seconds + 1)

            await until(lambda: not attacked.kept.all)
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


async def test_requests_behind_one_that_is_under_way_are_few(
    attack: Attack, system: Engine
) -> None:
    await system.create_queue("q")
    body = b'{"queue": "q", "wait_ms": 30000}'
    waiting = head("/v1/claim", f"Content-Length: {len(body)}") + body
    async with attack() as attacked:
        client = await attacked.connect()
        await client.send(waiting + HEALTHZ * (MAX_PIPELINED + 1))

        assert await client.is_hung_up_on()  # not answered: the claim's answer comes first
        assert await attacked.is_free()
        await until(lambda: not _under_way(attacked))

        client = await attacked.connect()
        await client.send(HEALTHZ * (MAX_PIPELINED + 1))
        answers = [await client.answer() for _ in range(MAX_PIPELINED + 1)]
    assert {status for status, _ in answers} == {200}


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

        newcomer = await attacked.connect()

        assert await silent.is_hung_up_on()
        assert [await one.asks(HEALTHZ) for one in (idle, newcomer)] == [200, 200]


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
