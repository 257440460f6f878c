"""The names of queues come in pages: there may be 100,000."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

import opendata_queue
from opendata_queue import AsyncSystem, Engine, InvalidInputError
from tests.http.conftest import SECRET, Serving
from tests.support.broker import BrokerProcess

Token = Callable[..., dict[str, str]]

NAMES = ["a-b/1", "a/1", "a/2", "a/b/3", "b/1", "b/2", "c"]


@pytest.fixture
async def named(system: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A system with these queues, of which a broker lists two at once."""
    for name in reversed(NAMES):
        await system.create_queue(name)
    monkeypatch.setattr("opendata_queue.http.wire.MAX_BATCH", 2)
    return system


@contextlib.asynccontextmanager
async def opened(way: str, tmp_path: Path) -> AsyncIterator[AsyncSystem]:
    root = f"file://{tmp_path}/root"
    async with await opendata_queue.open_async(root) as owner:
        for name in reversed(NAMES):
            await owner.create_queue(name)
        if way == "engine":
            assert await owner.list_queues() == NAMES
            await owner.delete_queue("a/1")
            await owner.create_queue("a/1")
            yield owner
            return
    if way == "read-only":
        async with await opendata_queue.open_async(root, read_only=True) as reader:
            yield reader
    else:
        with BrokerProcess(root) as broker:
            async with await opendata_queue.connect_async(broker.url) as client:
                yield client


@pytest.mark.parametrize("way", ["engine", "read-only", "client"])
async def test_names_are_listed_by_prefix_and_by_pages(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(way, tmp_path) as system:
        monkeypatch.setattr("opendata_queue.http.wire.MAX_BATCH", 2)  # of a page of the client's
        assert await system.list_queues() == NAMES
        assert await system.list_queues(limit=3) == NAMES[:3]
        assert await system.list_queues(after="a/1", limit=3) == NAMES[2:5]
        assert await system.list_queues(after="a/11") == NAMES[2:]
        assert await system.list_queues(prefix="a/") == ["a/1", "a/2", "a/b/3"]
        assert await system.list_queues(prefix="a/", after="a/2", limit=1) == ["a/b/3"]
        assert await system.list_queues(prefix="b/", after="a/1") == ["b/1", "b/2"]
        assert await system.list_queues(prefix="b/", after="c") == []
        assert await system.list_queues(prefix="d", limit=1_000_000) == []
        for limit in (0, -1, True, "1"):
            with pytest.raises(InvalidInputError):
                await system.list_queues(limit=limit)  # type: ignore[arg-type]


async def names(client: httpx.AsyncClient, **asked: object) -> list[str]:
    """All pages, one after the other."""
    found: list[str] = []
    while True:
        after = {"after": found[-1]} if found else {}
        answer = await client.post("/v1/list_queues", json={"limit": 1, **asked, **after})
        page = answer.json()
        found += page["queues"]
        if not page.get("more", False):
            return found


async def test_a_broker_gives_all_names_or_says_that_they_are_too_many(
    named: Engine, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as client:
        too_many = await client.post("/v1/list_queues", json={})
        page = (await client.post("/v1/list_queues", json={"limit": 2})).json()
        every = await names(client)
        too_long = await client.post("/v1/list_queues", json={"limit": 10_001})
        monkeypatch.setattr("opendata_queue.http.wire.MAX_BATCH", len(NAMES))
        whole = (await client.post("/v1/list_queues", json={})).json()

    assert too_many.status_code == 400
    assert "ask for pages" in too_many.json()["message"]
    assert page == {"queues": NAMES[:2], "more": True}
    assert every == NAMES
    assert too_long.status_code == 400
    assert whole == {"queues": NAMES}  # as in 0.1


async def test_a_token_lists_the_queues_of_its_namespaces_alone(
    named: Engine, serving: Serving, token: Token
) -> None:
    async with serving(jwt_key=SECRET) as client:

        async def seen(*namespaces: str, **asked: object) -> list[str]:
            client.headers = httpx.Headers(token(*namespaces))
            return await names(client, **asked)

        assert await seen("a", "a-b") == NAMES[:4]
        assert await seen("b", "a-b") == ["a-b/1", "b/1", "b/2"]
        assert await seen("a", prefix="a/b/") == ["a/b/3"]
        assert await seen("a", "b", prefix="b") == ["b/1", "b/2"]
        assert await seen("a", prefix="b/") == []
        assert await seen("a/b") == []
        assert await seen("") == []
