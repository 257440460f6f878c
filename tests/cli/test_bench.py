"""``odq bench`` runs, and leaves nothing behind."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import opendata_queue
from opendata_queue import NewMessage, OdqError, System
from opendata_queue.cli.bench import workloads as bench_workloads
from tests.cli.conftest import Odq
from tests.support.broker import PATIENCE_SECONDS, BrokerProcess


def test_a_temporary_root_is_measured_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    told = Odq("").json("bench", "--messages", "25", "--batch", "10", "--size", "5")

    assert [step["step"] for step in told["steps"]] == ["publish", "claim", "ack"]
    assert told["steps"][0]["calls"] == 3
    assert all(step["messages_per_second"] > 0 for step in told["steps"])
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_the_users_gets_its_queue_back(orders: Odq) -> None:
    shown = orders("bench", "--messages", "3", "--batch", "2")

    assert [line.split()[0] for line in shown.splitlines()] == ["step", "publish", "claim", "ack"]
    assert [queue["name"] for queue in orders.json("queues", "list")] == ["orders"]


def test_the_workloads_are_measured_and_every_message_is_accounted_for(orders: Odq) -> None:
    told = orders.json("bench", "--workloads", "all", "--seconds", "0.1", "--size", "20")

    assert [one["workload"] for one in told["workloads"]] == ["W1", "W2", "W3", "W4", "W5", "W7"]
    assert all(one["messages_per_second"] > 0 for one in told["workloads"])
    assert next(one["messages"] for one in told["workloads"] if one["workload"] == "W5") == 50
    assert [queue["name"] for queue in orders.json("queues", "list")] == ["orders"]


def test_an_unknown_workload_is_refused(orders: Odq) -> None:
    assert "no workload 'W9'" in orders("bench", "--workloads", "W2,W9", code=2)


def test_payloads_that_are_too_small_for_a_number_are_refused(orders: Odq) -> None:
    refused = orders("bench", "--workloads", "W2", "--size", "7", code=2)
    told = orders.json("bench", "--workloads", "W2", "--seconds", "0.1", "--size", "8")

    assert "--size is 7" in refused
    assert "use 8 or more" in refused
    assert told["size"] == 8


class _Watched:
    """A system, whose calls somebody else may come before."""

    def __init__(self, system: System) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)


class _LastOfAll(_Watched):
    """Consumers that find nothing wait for an hour, beginning when the last message is acked.

    ``now`` is a clock that stands still besides, or almost.
    """

    def __init__(self, system: System, messages: int) -> None:
        super().__init__(system)
        self._unclaimed = self._left = messages
        self._lock = threading.Lock()
        self._acked_last: int | None = None
        self._waits = threading.Event()
        self._looked = threading.Event()
        self._ticks = itertools.count()
        self._hours = 0

    def now(self) -> float:
        shown = next(self._ticks) * 1e-6 + self._hours * 3_600
        if threading.get_ident() == self._acked_last:
            self._looked.set()
        return shown

    def claim(self, *args: Any, **kwargs: Any) -> Any:
        while self._unclaimed:  # and perhaps not routed yet
            if claimed := self._system.claim(*args, **kwargs):
                with self._lock:
                    self._unclaimed -= len(claimed)
                return claimed
        self._waits.set()
        assert self._looked.wait(PATIENCE_SECONDS)
        with self._lock:
            self._hours += 1
        return []

    def ack(self, queue: str, *messages: Any) -> None:
        self._system.ack(queue, *messages)
        with self._lock:
            self._left -= len(messages)
            last = not self._left
        if last:
            assert self._waits.wait(PATIENCE_SECONDS)
            self._acked_last = threading.get_ident()


def test_the_time_of_consumers_ends_with_the_last_message() -> None:
    with opendata_queue.open("memory:///") as system:
        watched = _LastOfAll(system, 1_000)

        found = bench_workloads.run_workload(
            "W7", cast(System, watched), None, 8, 0.1, now=watched.now
        )

    assert found["messages"] == 1_000
    assert found["messages_per_second"] > 1_000


class _Failing(_Watched):
    """Something happens before the tenth message is published."""

    def __init__(self, system: System, happens: Callable[[], None]) -> None:
        super().__init__(system)
        self._happens = happens
        self._count = itertools.count(1)

    def publish_many(self, messages: list[NewMessage], **kwargs: Any) -> Any:
        if next(self._count) == 10:
            self._happens()
        return self._system.publish_many(messages, **kwargs)


def test_a_publisher_that_fails_ends_the_measurement() -> None:
    def fail() -> None:
        raise OdqError("the disk is full")

    with opendata_queue.open("memory:///") as system:
        failing = cast(System, _Failing(system, fail))
        with pytest.raises(OdqError, match=r"could not publish message \d+: the disk is full"):
            bench_workloads.run_workload("W5", failing, None, 8, 3_600)


def test_a_broker_that_dies_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_workloads, "ANSWER_MS", 500)
    with BrokerProcess("memory:///") as broker, opendata_queue.open(broker.url) as system:
        failing = cast(System, _Failing(system, broker.kill))
        with pytest.raises(OdqError, match=r"could not (publish|claim|ack) message"):
            bench_workloads.run_workload("W5", failing, None, 8, 3_600)


def test_a_broker_is_measured_with_a_token_for_some_namespaces() -> None:
    secret = "a secret that is long enough for HS256"
    with BrokerProcess("memory:///", environment={"ODQ_JWT_SECRET": secret}) as broker:
        odq = Odq(broker.url)
        actions = ("-a", "publish", "-a", "consume", "-a", "admin")
        token = odq("token", "-n", "shop", "-n", "other", *actions, "--secret", secret).strip()
        measure = ["bench", "--token", token, "--messages", "3", "--seconds", "0.1"]

        refused = odq(*measure, code=1)
        odq(*measure, "--namespace", "shop")
        odq(*measure, "--namespace", "shop", "--workloads", "W2,W4")

        assert "no namespace" in refused
        assert odq.json("queues", "list", "--token", token) == []
