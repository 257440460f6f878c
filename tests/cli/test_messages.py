"""``odq messages`` as a person or a script uses it."""

from __future__ import annotations

from pathlib import Path

from opendata_queue import NewMessage
from tests.cli.conftest import Odq


def publish(odq: Odq, count: int = 1) -> list[str]:
    messages = [NewMessage(b"payload %d" % n, headers={"n": str(n)}) for n in range(count)]
    with odq.system() as system:
        return [str(one) for one in system.publish_many(messages)]


def test_a_message_is_shown_with_its_history_and_payload(orders: Odq) -> None:
    (message_id,) = publish(orders)
    with orders.system() as system:
        (claimed,) = system.claim("orders", wait_ms=60_000, consumer="me")
        system.ack("orders", claimed.receipt)

    told = orders.json("messages", "get", message_id)
    shown = orders("messages", "get", message_id)

    assert (told["message_id"], told["payload"], told["headers"]) == (
        message_id,
        "payload 0",
        {"n": "0"},
    )
    assert told["consumers"] == ["me"]
    (entry,) = told["queues"]
    assert (entry["queue"], entry["state"]) == ("orders", "done")
    for expected in ("header n ", "claimed by    me", "queue orders  done at 2", "\npayload 0\n"):
        assert expected in shown


def test_only_the_payload_is_printed_or_written(orders: Odq, tmp_path: Path) -> None:
    (message_id,) = publish(orders)

    assert orders("messages", "get", message_id, "--payload") == "payload 0"
    orders("messages", "get", message_id, "--output", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == b"payload 0"


def test_nothing_in_a_payload_can_play_tricks_on_a_terminal(orders: Odq) -> None:
    with orders.system() as system:
        message_id = system.publish(b"\x1b[2J\x07\xff", headers={"h": "\x1b]0;x\x07"})

    assert "\x1b" not in orders("messages", "get", str(message_id))
    assert "\\x1b[2J\\x07\\xff" in orders("messages", "get", str(message_id))
    assert "\x1b" not in orders("messages", "peek", "orders")


def test_a_message_that_is_not_there_has_an_exit_code_of_its_own(orders: Odq) -> None:
    assert orders("messages", "get", "77", code=3) == "Error: there is no message 77\n"
    assert "message_id is -1" in orders("messages", "get", "--", "-1", code=2)
    assert "Invalid value" in orders("messages", "get", "x", code=2)


def test_the_next_messages_are_shown_and_stay(orders: Odq) -> None:
    ids = publish(orders, 3)

    for _ in range(2):
        peeked = orders.lines("messages", "peek", "orders", "--count", "2")
        assert [message["message_id"] for message in peeked] == ids[:2]
    assert "n=0" in orders("messages", "peek", "orders")
    assert orders("queues", "purge", "orders", "--yes")
    assert orders("messages", "peek", "orders", code=3) == ""


def test_a_state_is_browsed_page_by_page_or_all_at_once(orders: Odq) -> None:
    ids = publish(orders, 5)

    first = orders.json("messages", "browse", "orders", "available", "--limit", "3")
    second = orders.json(
        "messages", "browse", "orders", "available", "--limit", "3", "--after", first["next"]
    )
    all_of_them = orders.lines("messages", "browse", "orders", "available", "--all")

    assert [entry["message_id"] for entry in first["entries"] + second["entries"]] == ids
    assert second["next"] is None
    assert [entry["message_id"] for entry in all_of_them] == ids
    assert all_of_them[0]["state"] == "available"
    assert "claimed_at_ms" not in all_of_them[0]


def test_each_state_has_its_columns(orders: Odq) -> None:
    publish(orders)
    heads = {
        state: orders("messages", "browse", "orders", state).splitlines()[0].split("  ")[-1].strip()
        for state in ("available", "delayed", "in_flight", "done", "failed")
    }

    assert heads == {
        "available": "expires at",
        "delayed": "expires at",
        "in_flight": "consumer",
        "done": "done at",
        "failed": "error",
    }
    assert "Invalid value" in orders("messages", "browse", "orders", "lost", code=2)
    assert "Error" in orders("messages", "browse", "orders", "done", "--after", "rubbish", code=2)
