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


def test_messages_are_found_by_what_is_known_of_them(orders: Odq) -> None:
    with orders.system() as system:
        system.update_queue("orders", max_attempts=1)
        ids = [str(system.publish(b"", headers={"n": str(n)})) for n in range(5)]
        for message in system.claim("orders", 4, consumer="worker-7", wait_ms=60_000):
            error = "timeout" if str(message.message_id) in ids[:2] else "no such host"
            system.nack("orders", message, error=error)

    found = orders.json("messages", "find", "orders", "--error", "time", "--filter", "n >= 1")
    page = orders.json("messages", "find", "orders", "-n", "3", "--consumer", "worker-7")
    rest = orders.json("messages", "find", "orders", "-n", "3", "--after", page["next"])
    recent = orders.json("messages", "find", "orders", "--since", "1h")
    waiting = orders.json("messages", "find", "orders", "--state", "available")

    assert [(one["message_id"], one["headers"]) for one in found["entries"]] == [
        (ids[1], {"n": "1"})
    ]
    assert (found["next"], found["examined"]) == (None, 4)
    assert [one["message_id"] for one in page["entries"] + rest["entries"]] == ids[:4]
    assert rest["next"] is None
    assert len(recent["entries"]) == 4
    assert [one["message_id"] for one in waiting["entries"]] == [ids[4]]


def test_what_is_found_is_shown_as_a_table_with_headers(orders: Odq) -> None:
    ids = publish(orders, 3)

    shown = orders("messages", "find", "orders", "--state", "available", "--limit", "2")

    assert shown.splitlines()[0].split()[-1] == "headers"
    assert shown.splitlines()[1].split()[0] == ids[0]
    assert len(shown.splitlines()) == 3


def test_a_search_that_finds_nothing_or_makes_no_sense_says_so(orders: Odq) -> None:
    assert orders("messages", "find", "orders", code=3) == ""
    assert orders.json("messages", "find", "orders", "--until", "1", code=3) == {
        "entries": [],
        "next": None,
        "examined": 0,
    }
    complaint = orders("messages", "find", "orders", "--state", "done", "--error", "x", code=2)
    assert "it is a condition for failed ones" in complaint
    assert "no duration" in orders("messages", "find", "orders", "--since", "soon", code=2)
