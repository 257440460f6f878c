"""``odq failed`` as a person or a script uses it."""

from __future__ import annotations

import pytest

from opendata_queue import NewMessage
from tests.cli.conftest import Odq


@pytest.fixture
def ids(orders: Odq) -> list[str]:
    """Of three failed messages."""
    with orders.system() as system:
        system.update_queue("orders", max_attempts=1)
        made = system.publish_many([NewMessage(b"x", headers={"n": str(n)}) for n in range(3)])
        for message in system.claim("orders", 3, wait_ms=60_000):
            system.nack("orders", message.receipt, error=f"no\nway {dict(message.headers)['n']}")
    return [str(one) for one in made]


def failed(odq: Odq) -> list[str]:
    return [message["message_id"] for message in odq.json("failed", "list", "orders")]


def test_failed_messages_are_listed_with_why(orders: Odq, ids: list[str]) -> None:
    listed = orders.json("failed", "list", "orders", "--filter", "n > 0", "--limit", "1")

    assert [(m["message_id"], m["error"], m["headers"]) for m in listed] == [
        (ids[1], "no\nway 1", {"n": "1"})
    ]
    assert [
        m["message_id"] for m in orders.json("failed", "list", "orders", "--after", ids[1])
    ] == [ids[2]]
    assert "no way 0" in orders("failed", "list", "orders")


def test_failed_messages_are_replayed_by_id_by_filter_or_all(orders: Odq, ids: list[str]) -> None:
    assert orders.json("failed", "replay", "orders", ids[0], "9999") == {
        "queue": "orders",
        "replayed": [ids[0]],
    }
    assert orders.json("failed", "replay", "orders", "--filter", "n = 2")["replayed"] == [ids[2]]
    assert orders("failed", "replay", "orders", "--all") == "replayed 1 message of queue orders\n"
    assert failed(orders) == []
    assert orders.json("queues", "stats", "orders")[0]["available"] == 3


def test_failed_messages_are_forgotten_after_a_yes(orders: Odq, ids: list[str]) -> None:
    assert "--yes" in orders("failed", "purge", "orders", "--all", code=2)
    assert orders.json("failed", "purge", "orders", ids[1], "--yes")["purged"] == [ids[1]]
    assert failed(orders) == [ids[0], ids[2]]
    orders("failed", "purge", "orders", "--all", "--yes")
    assert failed(orders) == []


@pytest.mark.parametrize("choice", [[], ["1", "--all"], ["--all", "--filter", "n = 1"]])
@pytest.mark.parametrize("command", ["replay", "purge"])
def test_it_must_be_said_which(orders: Odq, command: str, choice: list[str]) -> None:
    assert "say which messages" in orders("failed", command, "orders", *choice, code=2)


def test_a_filter_that_is_wrong_is_pointed_at(orders: Odq) -> None:
    complaint = orders("failed", "list", "orders", "--filter", "n >", code=2)

    assert complaint.splitlines()[-1].strip() == "^"
