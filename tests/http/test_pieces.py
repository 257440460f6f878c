"""Answers made in pieces: the same bytes, and no more of them at hand than was reserved."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.http.mqueue import LeasedItem
from opendata_queue.http.requests.exchange import Broker
from opendata_queue.http.requests.pieces import PIECE_BYTES, Pieces
from opendata_queue.http.server.app import Shortcut, make_app
from opendata_queue.http.settings import ServerSettings
from opendata_queue.http.wire import (
    JSON,
    MSGPACK,
    ClaimedMessages,
    FailedMessages,
    FoundHistory,
    MessageIds,
    QueueNames,
    StoredMessages,
    to_json,
)
from opendata_queue.model.allowance import PIECES_BYTES
from opendata_queue.model.messages import ClaimedMessage, StoredMessage
from opendata_queue.model.values import (
    FailedMessage,
    FoundEntry,
    FoundPage,
    MessageHistory,
    QueueEntry,
    QueuePage,
)
from opendata_queue.testing import ManualClock

MIB = 1024 * 1024
CONTROL = "\x01"
"""Six bytes in JSON."""


def stored(size: int = 0, **headers: str) -> StoredMessage:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    return StoredMessage(7, payload, None, tuple(headers.items()), 1, 2, 3, 4)


def claimed(size: int, **headers: str) -> ClaimedMessage:
    payload = bytes(size)
    return ClaimedMessage(7, payload, None, tuple(headers.items()), 1, 2, 3, 4, "q", 5, 6, 7, "r")


def failed(**headers: str) -> FailedMessage:
    return FailedMessage(
        message_id=7,
        failed_at_ms=1,
        attempts=2,
        priority=3,
        consumer="c",
        error=CONTROL * 4_000,
        headers=tuple(headers.items()),
    )


ENTRY = QueueEntry(queue="q", message_id=1 << 60, state="failed", error='"\\é\U0001f600' * 1_000)
FOUND = FoundEntry(
    queue="q", message_id=1 << 60, state="done", headers=(("h", CONTROL * 3_000), ("i", "é"))
)
HISTORY = MessageHistory(
    message_id=1,
    headers=(("h", CONTROL * 60_000), ("i", "é" * 30_000)),
    created_at_ms=1,
    received_at_ms=2,
    visible_at_ms=3,
    retention_seconds=4,
    consumers=("a", "b"),
    entries=(ENTRY,) * 50,
    queues_left_out=0,
)

ANSWERS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: StoredMessages(messages=[]),
    "small ones": lambda: StoredMessages(messages=[stored(10, a="b")] * 20),
    "many, and some are missing": lambda: StoredMessages(messages=[stored(9, a="b"), None] * 9_000),
    "very many": lambda: MessageIds(message_ids=[*range(70_000)]),
    "one of each size": lambda: StoredMessages(
        messages=[stored(n, h="x" * n) for n in (0, 255, 256, 20_000, 49_151, 49_153, 65_535)]
    ),
    "a large payload": lambda: ClaimedMessages(messages=[claimed(3 * MIB, a=CONTROL * 40_000)]),
    "a URI": lambda: StoredMessages(
        messages=[StoredMessage(1, None, "s3://" + '"' * 60_000, (), 1, 2, 3, 4)]
    ),
    "failed ones": lambda: FailedMessages(messages=[failed(a="b"), failed(c="d" * 20_000)]),
    "failed ones, and more": lambda: FailedMessages(messages=[failed()] * 40, more=True),
    "a page": lambda: QueuePage(entries=(ENTRY,) * 100, next="n"),
    "a page that was found": lambda: FoundPage(entries=(FOUND,) * 50, next=None, examined=9),
    "a history": lambda: FoundHistory(history=HISTORY),
    "no history": lambda: FoundHistory(history=None),
    "names": lambda: QueueNames(queues=[f"q{n}" for n in range(20_000)]),
    "leased ones": lambda: [
        LeasedItem(id=1, payload=bytes(size), lease_expires_at="t", receipt=receipt)
        for size in (1, 100_000)
        for receipt in (None, "r")
    ],
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("as_msgpack", [True, False], ids=[MSGPACK, JSON])
async def test_the_pieces_of_an_answer_are_what_it_would_be_at_once(
    name: str, as_msgpack: bool
) -> None:
    encode = msgspec.msgpack.encode if as_msgpack else to_json
    whole = encode(ANSWERS[name]())
    made = Pieces(ANSWERS[name](), as_msgpack=as_msgpack)
    length = await made.count()

    pieces = [*made]

    assert b"".join(pieces) == whole
    assert length == len(whole)
    assert all(PIECE_BYTES <= len(one) <= PIECES_BYTES for one in pieces[:-1])
    assert len(pieces[-1]) <= PIECES_BYTES


class Asked:
    """One request to a broker whose answer is thrown away piece by piece, and what was held."""

    def __init__(self, system: Engine, clock: ManualClock) -> None:
        self._broker = Broker(system, ServerSettings(), clock)
        self._app = Shortcut(make_app(self._broker))
        self.sent_bytes = 0
        self.longest_bytes = 0
        self.reserved_bytes = 0
        self.turns = 0

    async def ask(self, path: str, accept: str, method: str = "POST", **asked: Any) -> int:
        """How many bytes were held at most, beside what was there before."""
        body = msgspec.json.encode(asked)
        query = "&".join(f"{name}={value}" for name, value in asked.items()).encode()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "http_version": "1.1",
            "query_string": query if method == "GET" else b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", JSON.encode()),
                (b"accept", accept.encode()),
            ],
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body if method == "POST" else b""}

        async def send(message: Any) -> None:
            size = len(message.get("body", b""))
            self.sent_bytes += size
            self.longest_bytes = max(self.longest_bytes, size)
            self.reserved_bytes = max(self.reserved_bytes, self._broker.answers.taken_bytes)
            if message["type"] == "http.response.start":
                assert message["status"] == 200

        turning = asyncio.create_task(self._count_turns())
        tracemalloc.start()
        try:
            await self._app(scope, receive, send)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            turning.cancel()
        await asyncio.sleep(0)
        assert self._broker.answers.taken_bytes == 0
        return peak_bytes

    async def _count_turns(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


TEXTS = {"h": CONTROL * 60_000, "i": CONTROL * 60_000}


@pytest.mark.parametrize("accept", [JSON, MSGPACK])
@pytest.mark.parametrize("kind", ["texts", "payloads", "one payload", "small ones"])
@pytest.mark.parametrize("operation", ["read", "claim", "peek", "failed", "dequeue"])
async def test_no_more_is_held_of_an_answer_than_was_reserved(
    system: Engine, clock: ManualClock, operation: str, kind: str, accept: str
) -> None:
    messages = {
        "texts": [NewMessage(b"", headers=TEXTS) for _ in range(40)],
        "payloads": [NewMessage(bytes(60_000)) for _ in range(80)],
        "one payload": [NewMessage(bytes(12 * MIB))],
        "small ones": [NewMessage(b"x" * 100, headers={"a": "b"}) for _ in range(900)],
    }[kind]
    await system.create_queue("n/t", options=QueueOptions(max_attempts=1))
    ids = await system.publish_many(messages)
    asked = Asked(system, clock)
    if operation == "failed":
        receipts = await system.claim("n/t", 1_000)
        await system.nack("n/t", *receipts, error=CONTROL * 4_000)
        del receipts
    requests: dict[str, dict[str, Any]] = {
        "read": {"message_ids": ids},
        "failed": {"queue": "n/t", "limit": 1_000},
        "dequeue": {"namespace": "n", "topic": "t", "limit": 1_000},
    }
    request = requests.get(operation, {"queue": "n/t", "count": 1_000})
    path, method = ("/dequeue", "GET") if operation == "dequeue" else (f"/v1/{operation}", "POST")

    held_bytes = await asked.ask(path, accept, method, **request)

    assert asked.sent_bytes > 0
    assert asked.longest_bytes <= PIECES_BYTES
    # The transient copies of one piece, and what the engine needs for itself.
    assert held_bytes <= asked.reserved_bytes * 1.2 + 2 * MIB
    assert asked.turns >= asked.sent_bytes // (2 * PIECES_BYTES)


async def test_uris_count_in_answers(system: Engine, clock: ManualClock) -> None:
    await system.create_queue("q")
    uri = "s3://bucket/" + "x" * 60_000
    await system.publish_many([NewMessage(payload_uri=uri) for _ in range(20)])
    transport = httpx.ASGITransport(
        make_app(Broker(system, ServerSettings(max_answer_bytes=200_000), clock))
    )

    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.post("/v1/claim", json={"queue": "q", "count": 20})

    assert len(answer.json()["messages"]) == 3
