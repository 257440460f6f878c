"""Stores to run tests on: all real."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from opendata_queue import Engine
from opendata_queue.store import forget_memory_root
from opendata_queue.testing import ManualClock
from tests.support import other_s3
from tests.support.s3_server import S3Server

# No timing is asserted in tests, and every run of one tree tries the same examples: what fails was
# broken by the change. ``make explore`` tries others.
settings.register_profile(
    "odq",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("odq"), derandomize=False)
settings.load_profile(os.environ.get("ODQ_EXAMPLES", "odq"))

BUCKET = other_s3.bucket()
_numbers = itertools.count()

NewRoot = Callable[[], str]

# What takes a minute must not begin when all else is done.
LONG: Final = (
    "spark/test_sink.py",
    "log/test_outages.py",
    "log/test_crash.py",
    "spark/test_source.py",
    "test_benchmarks.py",
    "retention/",
    "test_examples.py",
    "contract/",
    "format/test_properties.py",
    "spark/",
    "queues/test_queues_model.py",
    "queues/test_shards_model.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order within a file stays. On another S3, only what is about S3."""
    if other_s3.ENDPOINT:
        items[:] = [one for one in items if other_s3.is_on_s3(one)]
    folder = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(folder).as_posix()
        return next((n for n, long in enumerate(LONG) if path.startswith(long)), len(LONG))

    items.sort(key=place)


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Commands that run in this process silence a logger, for their process."""
    logger = logging.getLogger("opendata_queue.store.rows.writer")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server for the whole run; faults are healed after each test that sets some."""
    with other_s3.OtherS3() if other_s3.ENDPOINT else S3Server() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The environment that clients of the S3 server need."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    yield s3_server
    s3_server.heal()


def _memory_roots() -> Iterator[NewRoot]:
    made: list[str] = []

    def new_root() -> str:
        made.append(f"memory:///test-{os.getpid()}-{next(_numbers)}")
        return made[-1]

    yield new_root
    for url in made:
        forget_memory_root(url)


@pytest.fixture
def new_memory_root() -> Iterator[NewRoot]:
    yield from _memory_roots()


@pytest.fixture
def new_s3_root(s3_environment: S3Server) -> NewRoot:
    return lambda: f"s3://{BUCKET}/root-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(params=["memory", "file", "s3"])
def new_root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewRoot]:
    """Makes URLs of fresh roots, on each kind of store in turn."""
    if request.param == "memory":
        yield from _memory_roots()
    elif request.param == "file":
        yield lambda: f"file://{tmp_path}/root-{next(_numbers)}"
    else:
        yield request.getfixturevalue("new_s3_root")


@pytest.fixture
def root(new_root: NewRoot) -> str:
    """The URL of one fresh root, on each kind of store in turn."""
    return new_root()


@pytest.fixture
def clock() -> ManualClock:
    """A clock that is turned by hand."""
    return ManualClock()


@pytest.fixture
async def system(root: str, clock: ManualClock) -> AsyncIterator[Engine]:
    """A system that owns a fresh root, on each kind of store in turn."""
    async with await Engine.open(root, clock=clock) as system:
        yield system


@pytest.fixture
async def memory_system(clock: ManualClock) -> AsyncIterator[Engine]:
    """A system in memory, with a clock that is turned by hand."""
    async with await Engine.open("memory:///", clock=clock) as system:
        yield system
