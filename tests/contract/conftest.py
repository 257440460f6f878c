"""One system after the other that must keep the same contract."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

import opendata_queue
from opendata_queue import AsyncSystem, Engine, StoreSettings
from opendata_queue.store import forget_memory_root
from tests.conftest import BUCKET
from tests.support.broker import BrokerProcess
from tests.support.s3_server import S3Server

KINDS = [
    f"{where}-{store}" for where in ("embedded", "broker") for store in ("memory", "file", "s3")
]

READ_ONLY_KINDS = [f"read_only-{store}" for store in ("memory", "file", "s3")]

Show = Callable[[], Awaitable[AsyncSystem]]

_numbers = itertools.count()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every kind for every test, and those that only read a root where a test has ``show``."""
    if "url" in metafunc.fixturenames:
        kinds = [*KINDS, *(READ_ONLY_KINDS if "show" in metafunc.fixturenames else ())]
        metafunc.parametrize("url", kinds, indirect=True, scope="session")


def _root(store: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    number = f"contract-{os.getpid()}-{next(_numbers)}"
    if store == "memory":
        return f"memory:///{number}"
    if store == "file":
        return f"file://{tmp_path_factory.mktemp(number)}/root"
    return f"s3://{BUCKET}/{number}"


@pytest.fixture(scope="session")
def url(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    s3_server: S3Server,
) -> Iterator[str]:
    """The URL of a system: a root, or a broker that serves one in a process of its own."""
    where, _, store = request.param.partition("-")
    root = _root(store, tmp_path_factory)
    environment = s3_server.environment() if store == "s3" else {}
    if where == "broker":
        with BrokerProcess(root, environment=environment) as broker:
            yield broker.url
            assert broker.stop() == 0, broker.complaints
            assert "Traceback" not in broker.complaints
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield root
    if store == "memory":
        forget_memory_root(root)


@pytest.fixture
async def system(url: str) -> AsyncIterator[AsyncSystem]:
    # A root that is opened for each test has many small files to compact: on S3 they are looked for
    # every 5 seconds, and some test would wait for that when it closes.
    settings = None if url.startswith("http") else StoreSettings(compaction_poll_ms=500)
    async with await opendata_queue.open_async(url, settings=settings) as system:
        yield system


@pytest.fixture
async def show(
    request: pytest.FixtureRequest, url: str, system: AsyncSystem
) -> AsyncIterator[Show]:
    """Gives a system that shows what ``system`` has done: the same one, or one that only reads.

    The latter is opened when all that was done is durable, so that there is nothing to wait for.
    """
    async with AsyncExitStack() as stack:

        async def shown() -> AsyncSystem:
            if request.node.callspec.params["url"] not in READ_ONLY_KINDS:
                return system
            assert isinstance(system, Engine)
            await system.all_is_routed()
            await system.stores.queues.all_durable()
            return await stack.enter_async_context(
                await opendata_queue.open_async(url, read_only=True)
            )

        yield shown


@pytest.fixture
def new_name() -> Callable[[], str]:
    """Names that no other test uses, for queues and headers: the root is shared."""
    return lambda: f"case-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def name(new_name: Callable[[], str]) -> str:
    return new_name()
