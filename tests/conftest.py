"""Stores to run tests on: all real."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from opendata_queue.store import forget_memory_root
from tests.s3_server import S3Server

settings.register_profile("odq", deadline=None)  # no timing is asserted in tests
settings.load_profile("odq")

BUCKET = "odq-tests"
_numbers = itertools.count()

NewRoot = Callable[[], str]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server for the whole run; faults are healed after each test that sets some."""
    with S3Server() as server:
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
