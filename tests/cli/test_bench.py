"""``odq bench`` runs, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker import BrokerProcess
from tests.cli.conftest import Odq


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
