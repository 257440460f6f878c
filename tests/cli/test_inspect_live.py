"""``odq inspect`` of a root that is in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from odq_encodings import QueueConfigKey
from opendata_queue import System
from tests.cli.conftest import Odq


@pytest.fixture
def owner(orders: Odq) -> Iterator[System]:
    """The root's owner, which goes on all the time."""
    with orders.system() as system:
        yield system


def kinds(rows: list[Any]) -> list[str]:
    return [row["kind"] for row in rows]


def values(rows: list[Any], kind: str) -> dict[str, str]:
    (row,) = (row for row in rows if row["kind"] == kind)
    return {field["name"]: field["value"] for field in row["records"][1]["fields"]}


def test_a_message_is_inspected_while_its_owner_goes_on(orders: Odq, owner: System) -> None:
    message_id = owner.publish(b"hi", headers={"type": "a"})
    (claimed,) = owner.claim("orders", wait_ms=60_000, consumer="me")

    rows = orders.json("inspect", "message", str(message_id))
    shown = orders("inspect", "message", str(message_id))

    assert kinds(rows) == ["metadata log entry", "payload", "attempts"]
    assert [row["database"] for row in rows] == ["messages/00000", "messages/00000", "queues/00000"]
    assert values(rows, "payload")["data"] == b"hi".hex()
    assert "'type'" in shown
    assert owner.ack("orders", claimed.receipt) == ["ok"]  # it was not fenced
    owner.publish(b"more")


def test_a_failed_message_is_inspected_with_its_failure(orders: Odq, owner: System) -> None:
    owner.update_queue("orders", max_attempts=1)
    message_id = owner.publish(b"hi")
    (claimed,) = owner.claim("orders", wait_ms=60_000)
    owner.nack("orders", claimed.receipt, error="no way")

    rows = orders.json("inspect", "message", str(message_id))

    assert kinds(rows)[-1] == "failure"
    assert values(rows, "failure")["error"] == "no way"


def test_a_queue_is_inspected_row_by_row(orders: Odq, owner: System) -> None:
    for _ in range(3):
        owner.publish(b"later", delay_ms=3_600_000)
    owner.publish(b"now")
    owner.stats("orders")

    rows = orders.json("inspect", "queue", "orders", "--limit", "2")

    assert kinds(rows) == [
        "queue configuration",
        "queue options",
        "queue counters",
        "active messages",
        "done messages",
        "failed messages",
        "schedule row",
        "schedule row",
    ]


def test_a_row_is_read_by_its_key(orders: Odq, owner: System) -> None:
    key = QueueConfigKey(queue_id=b"orders").encode().hex()

    (row,) = orders.json("inspect", "row", key)

    assert (row["database"], row["kind"], row["key"]) == (
        "queues/00000",
        "queue configuration",
        key,
    )
    assert "no hex digit" in orders("inspect", "row", "xx", code=2)
    assert "there is no such row" in orders("inspect", "row", "0106ff", code=3)


def test_rows_are_listed_in_the_order_of_their_keys(orders: Odq, owner: System) -> None:
    owner.publish(b"hi")

    rows = orders.json("inspect", "rows", "messages")
    some = orders.json("inspect", "rows", "queues", "--prefix", "0106")

    assert {"payload", "metadata log entry", "sequence block"} <= set(kinds(rows))
    assert [row["key"] for row in rows] == sorted(row["key"] for row in rows)
    assert kinds(some) == ["queue configuration"]
    assert "payload" in orders("inspect", "rows", "messages", "--limit", "1")
    assert "no database" in orders("inspect", "rows", "other", code=2)


def test_what_is_not_there_is_said(orders: Odq, owner: System) -> None:
    assert "there is no queue 'nope'" in orders("inspect", "queue", "nope", code=3)
    assert "there is no such row" in orders("inspect", "message", "99", code=3)
    assert "is a server" in Odq("http://localhost:1")("inspect", "queue", "orders", code=1)
    assert "odq init" in Odq(orders.url + "-typo")("inspect", "queue", "orders", code=1)


def test_a_root_without_databases_has_no_rows(tmp_path: object) -> None:
    empty = Odq(f"file://{tmp_path}/empty")
    empty("init")

    assert empty.json("inspect", "rows", "queues") == []
    assert "there is no queue" in empty("inspect", "queue", "orders", code=3)


@pytest.mark.parametrize(
    "command",
    [
        *(("inspect", kind) for kind in ("row", "rows", "queue", "message")),
        *(("init",), ("compact",), ("spark", "backtest")),
    ],
)
def test_what_is_for_roots_only_offers_no_server(odq: Odq, command: tuple[str, ...]) -> None:
    shown = odq(*command, "--help")

    assert "http://" not in shown
    assert "A server can't be asked for this." in shown
