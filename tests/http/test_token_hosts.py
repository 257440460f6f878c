"""Where a client takes its token when a root or a broker says that it is served elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

import opendata_queue
from opendata_queue import InvalidInputError, OtherRoleError, StoreAccessError
from opendata_queue.http.client import RemoteSystem
from opendata_queue.http.client_options import ClientOptions
from opendata_queue.http.errors import body_of
from opendata_queue.http.token_hosts import TokenHosts
from opendata_queue.http.wire import MSGPACK, OPERATIONS
from opendata_queue.model.clock import SystemClock
from opendata_queue.testing import ManualClock
from tests.cli.conftest import Odq
from tests.conftest import NewRoot
from tests.support.s3_server import S3Server

TOKEN = "very-secret-token"
ELSEWHERE = "http://192.0.2.7:8080"  # reserved for documents: nobody is there
TWICE = ClientOptions(attempts=2, backoff_ms=1)


class Listener:
    """Something that is no broker, on another loopback address: it keeps what is sent to it."""

    def __init__(self, host: str, refusal: bytes = b"") -> None:
        self._host = host
        self._refusal = refusal
        self.heard: list[bytes] = []
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Listener]:
        server = await asyncio.start_server(self._answer, self._host, 0)
        self.url = f"http://{self._host}:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard.append(await reader.readuntil(b"\r\n\r\n"))
        head = f"HTTP/1.1 421 Elsewhere\r\nContent-Type: {MSGPACK}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(self._refusal)}\r\n\r\n".encode())
        writer.write(self._refusal)
        await writer.drain()
        writer.close()


def elsewhere(address: str) -> bytes:
    return msgspec.msgpack.encode(body_of(OtherRoleError("not here", address=address)))


async def test_a_broker_can_not_send_the_token_to_another_host() -> None:
    async with (
        Listener("127.0.0.2").listening() as thief,
        Listener("127.0.0.1", elsewhere(thief.url)).listening() as broker,
    ):
        with pytest.raises(StoreAccessError, match=r"the token is not for that host.*--hosts"):
            await opendata_queue.connect_async(broker.url, token=TOKEN, options=TWICE)
        assert TOKEN.encode() in broker.heard[0]
        assert thief.heard == []

        with pytest.raises(StoreAccessError, match="answered with status 421"):
            await opendata_queue.connect_async(
                broker.url, token=TOKEN, hosts=["127.0.0.2"], options=TWICE
            )
        assert TOKEN.encode() in thief.heard[0]


async def test_the_same_host_on_another_port_is_the_brokers_own() -> None:
    async with (
        Listener("127.0.0.1").listening() as other,
        Listener("127.0.0.1", elsewhere(other.url)).listening() as broker,
    ):
        with pytest.raises(StoreAccessError, match="answered with status 421"):
            await opendata_queue.connect_async(broker.url, token=TOKEN, options=TWICE)
        assert TOKEN.encode() in other.heard[0]


async def test_a_root_can_not_send_the_token_anywhere(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    async with await opendata_queue.open_async(root, address=ELSEWHERE):
        with pytest.raises(StoreAccessError, match=r'name it with hosts=\["192.0.2.7"\]'):
            await opendata_queue.connect_async(root, token=TOKEN, options=TWICE)
        publish = partial(Odq(root), "publish", "x", "--token", TOKEN, code=1)
        assert "the token is not for that host" in await asyncio.to_thread(publish)


async def test_a_root_that_this_machine_serves_needs_no_hosts(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    async with (
        Listener("127.0.0.1").listening() as broker,
        await opendata_queue.open_async(root, address=broker.url),
    ):
        with pytest.raises(StoreAccessError, match="answered with status 421"):
            await opendata_queue.connect_async(root, token=TOKEN, options=TWICE)
    assert TOKEN.encode() in broker.heard[0]


@pytest.mark.parametrize("hosts", [None, ["*"]])
@pytest.mark.parametrize("token", [None, TOKEN])
async def test_a_client_that_came_by_https_does_not_go_on_by_http(
    token: str | None, hosts: list[str] | None
) -> None:
    options = ClientOptions(token=token, hosts=hosts)
    system = RemoteSystem("https://broker.example.com", options, SystemClock())
    try:
        for address in ("http://broker.example.com", "http://localhost:8080"):
            with pytest.raises(StoreAccessError, match="does not go on by http"):
                system.addresses.send_on(OPERATIONS["publish"], address)
        assert system.addresses.send_on(OPERATIONS["publish"], "https://broker.example.com:8443")
    finally:
        await system.close()


async def test_a_root_that_was_served_by_https_is_not_followed_to_http() -> None:
    addresses = ["https://a.example.com", "http://a.example.com"]

    async def find() -> str:
        return addresses.pop(0)

    clock = ManualClock()
    system = RemoteSystem("s3://bucket/root", ClientOptions(), clock, find)
    try:
        await system.addresses.find_again()
        clock.advance_ms(1_000)
        with pytest.raises(StoreAccessError, match="does not go on by http"):
            await system.addresses.find_again()
        assert system.url == "https://a.example.com"
    finally:
        await system.close()


@pytest.mark.parametrize(
    ("hosts", "address", "trusted"),
    [
        (["10.0.0.0/8"], "http://10.0.0.7:8080", True),
        (["10.0.0.0/8"], "http://11.0.0.7:8080", False),
        (["10.0.0.7"], "http://10.0.0.7", True),
        (["*.example.com"], "http://a.b.example.com", True),
        (["*.example.com"], "http://example.com", False),
        (["*.example.com"], "http://evil-example.com", False),
        (["broker.example.com"], "http://BROKER.example.com.:80/", True),
        (["broker.example.com"], "http://broker.example.com.evil.org", False),
        (["broker:8080"], "http://broker:8080", True),
        (["broker:8080"], "http://broker:8081", False),
        (["broker:443"], "https://broker", True),
        (["https://broker"], "http://broker", False),
        (["https://broker"], "https://broker:8443", True),
        (["[::1]"], "http://[::1]:8080", True),
        (["fd00::/8"], "http://[fd00::7]:8080", True),
        (["*"], "http://anywhere", True),
        ([], "http://127.0.0.1:8080", False),
        (None, "http://127.0.0.1:8080", True),
        (None, "http://0.0.0.0:8080", True),
        (None, "http://localhost:8080", True),
        (None, "http://[::1]:8080", True),
        (None, "http://10.0.0.7:8080", False),
        (None, "http://localhost.evil.org", False),
    ],
)
def test_hosts_are_names_addresses_and_networks(
    hosts: list[str] | None, address: str, trusted: bool
) -> None:
    found = TokenHosts(hosts, broker=None, token=True)
    if trusted:
        found.check(address, said_by="s3://bucket/root")
        return
    with pytest.raises(StoreAccessError, match="the token is not for that host"):
        found.check(address, said_by="s3://bucket/root")


@pytest.mark.parametrize(
    "address",
    [
        "http://good@evil.org",
        "http://good:8080\\@evil.org",
        "http://good#@evil.org",
        "http://good\r\nX: y",
        "http://gооd",  # two letters are Cyrillic
        "ftp://good",
        "http://",
        "//good",
        "http://good?x",
    ],
)
def test_an_address_that_could_be_read_in_two_ways_is_refused(address: str) -> None:
    with pytest.raises(StoreAccessError, match="which is no plain URL"):
        TokenHosts(["*"], broker=None, token=False).check(address, said_by="s3://bucket/root")


@pytest.mark.parametrize("hosts", ["10.0.0.7", ["http://a b"], ["10.0.0.0/99"], [5], ["a/b"]])
def test_hosts_that_are_none_are_refused(hosts: list[str]) -> None:
    with pytest.raises(InvalidInputError):
        TokenHosts(hosts, broker=None, token=True)


def test_the_command_line_says_where_a_token_may_go(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    with opendata_queue.open(root, address="http://127.0.0.1:9"):
        arguments = ("publish", "x", "--token", TOKEN)
        refused = Odq(root)(*arguments, "--hosts", "10.0.0.0/8,b", code=1)
        assert "the token is not for that host" in refused
        assert "is served by" in Odq(root)(*arguments, "--hosts", "127.0.0.1", code=1)


async def test_who_connects_reads_nothing_but_owners(
    new_s3_root: NewRoot, s3_environment: S3Server
) -> None:
    """As docs/operations.md says it; with roles apart, too."""
    root = new_s3_root()
    async with (
        Listener("127.0.0.1").listening() as broker,
        await opendata_queue.open_async(root, address=broker.url),
    ):
        pass
    counts = []
    for address in (broker.url, None):
        async with await opendata_queue.open_async(root, address=address, owner_lease_ms=600_000):
            for path_contains in ("", "/owners/"):
                s3_environment.reset_requests(path_contains=path_contains)
                with pytest.raises(opendata_queue.OdqError):
                    await opendata_queue.connect_async(root, options=TWICE)
                asked = s3_environment.requests()
                counts.append(asked["GET"] + asked["LIST"] + asked["HEAD"])

    assert counts[0] == counts[1] > 0
    assert counts[2] == counts[3] > 0
