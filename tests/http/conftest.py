"""A broker in this process, reached without a network."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import jwt
import pytest

from opendata_queue import Engine
from opendata_queue.http.requests.exchange import Broker
from opendata_queue.http.server.app import make_app
from opendata_queue.http.settings import ServerSettings
from opendata_queue.model.clock import Clock, SystemClock
from opendata_queue.systems.ingest import Ingest
from opendata_queue.testing import ManualClock

SECRET = "a secret that is long enough for HS256"
HOUR = 3_600
BROKER_URL = "http://127.0.0.1"

Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@contextlib.asynccontextmanager
async def served(
    system: Engine | Ingest, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a broker of a system."""
    app = make_app(Broker(system, ServerSettings(**settings), clock or SystemClock()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=BROKER_URL) as client:
        yield client


@pytest.fixture
async def system(clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open("memory:///", clock=clock) as system:
        yield system


@pytest.fixture
def serving(system: Engine, clock: ManualClock) -> Serving:
    """Makes brokers of one system, and clients of them: ``async with serving(…) as client``."""
    return functools.partial(served, system, clock)


@pytest.fixture
async def client(serving: Serving) -> AsyncIterator[httpx.AsyncClient]:
    """Of a broker that asks for no tokens."""
    async with serving() as client:
        yield client


@pytest.fixture
async def guarded(serving: Serving) -> AsyncIterator[httpx.AsyncClient]:
    """Of a broker that asks for tokens."""
    async with serving(jwt_key=SECRET) as client:
        yield client


@pytest.fixture
def token(clock: ManualClock) -> Callable[..., dict[str, str]]:
    """Makes headers with tokens: ``token("payments", actions=["publish"])``."""

    def make(
        *namespaces: str,
        actions: tuple[str, ...] = ("publish", "consume", "admin"),
        key: Any = SECRET,
        algorithm: str = "HS256",
        **claims: Any,
    ) -> dict[str, str]:
        body = {
            "namespaces": list(namespaces),
            "actions": list(actions),
            "exp": clock.now_ms() // 1000 + HOUR,
            **claims,
        }
        made = jwt.encode({k: v for k, v in body.items() if v is not None}, key, algorithm)
        return {"Authorization": f"Bearer {made}"}

    return make
