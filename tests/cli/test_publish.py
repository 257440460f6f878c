"""``odq publish`` as a person or a script uses it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Odq


def payloads(odq: Odq, count: int = 100) -> list[bytes | None]:
    with odq.system() as system:
        return [message.payload for message in system.peek("orders", count)]


def test_a_payload_comes_from_an_argument_standard_input_or_a_file(
    orders: Odq, tmp_path: Path
) -> None:
    photo = tmp_path / "photo"
    photo.write_bytes(b"\xff\x00\n")

    first = orders("publish", "hello")
    second = orders.json("publish", input=b"from\nstdin\xff")
    orders("publish", "-", input=b"")
    orders("publish", "--file", str(photo))

    assert int(second["message_id"]) > int(first)
    assert payloads(orders) == [b"hello", b"from\nstdin\xff", b"", b"\xff\x00\n"]


def test_everything_that_a_message_has_can_be_said(orders: Odq) -> None:
    published = orders.json(
        *("publish", "hi", "--header", "type=a", "-H", "sum=x=y", "--delay", "1h"),
        *("--retention", "2d", "--idempotency-key", "k1"),
    )
    again = orders.json("publish", "other", "--idempotency-key", "k1")

    assert again == published
    with orders.system() as system:
        message = system.read(int(published["message_id"]))
    assert message is not None
    assert dict(message.headers) == {"type": "a", "sum": "x=y"}
    assert message.visible_at_ms - message.received_at_ms == 3_600_000
    assert message.retention_seconds == 2 * 86_400


def test_a_uri_is_published_instead_of_a_payload(orders: Odq) -> None:
    orders("publish", "--uri", "s3://elsewhere/photo.jpg")

    with orders.system() as system:
        (message,) = system.peek("orders")
    assert (message.payload, message.payload_uri) == (None, "s3://elsewhere/photo.jpg")


def test_a_file_of_json_lines_is_published_in_order(orders: Odq, tmp_path: Path) -> None:
    file = tmp_path / "messages.jsonl"
    lines = [
        {"payload": "ä", "headers": {"type": "b"}},
        {"payload_base64": base64.b64encode(b"\xff").decode(), "delay_ms": 0},
        {"payload": "last", "created_at_ms": 5, "retention_seconds": 9, "idempotency_key": "k"},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))

    told = orders.lines("publish", "--jsonl", str(file), "--header", "type=a", "--batch", "2")

    assert [line["line"] for line in told] == [1, 3, 5]
    with orders.system() as system:
        messages = system.peek("orders", 10)
    assert [str(message.message_id) for message in messages] == [t["message_id"] for t in told]
    assert [message.payload for message in messages] == ["ä".encode(), b"\xff", b"last"]
    assert [dict(message.headers) for message in messages] == [
        {"type": "b"},
        {"type": "a"},
        {"type": "a"},
    ]
    assert (messages[2].created_at_ms, messages[2].retention_seconds) == (5, 9)


def test_each_line_of_a_text_is_published(orders: Odq) -> None:
    assert orders("publish", "--lines", "-", input=b"a\r\n\nb") == "published 2 messages\n"
    assert payloads(orders) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"{", "is no JSON: Expecting property name enclosed in double quotes at column 2"),
        (b"\xff", "is no UTF-8"),
        (b"5", "is a number, not an object"),
        (b"{}", "needs one of payload, payload_base64 and payload_uri"),
        (b'{"payload": 5}', "payload is a number, not text"),
        (b'{"payload": "a", "payload_base64": "YQ=="}', "needs one of"),
        (b'{"payload_base64": "a"}', "payload_base64 is no base64"),
        (b'{"payload": "\\ud800"}', "surrogate"),
        (b'{"payload": "a", "header": {}}', "'header' is no property of a message"),
        (b'{"payload": "a", "headers": {"n": 1}}', "header 'n' is a number, not text"),
        (b'{"payload": "a", "headers": null}', "headers are null, not an object"),
        (b'{"payload": "a", "delay_ms": true}', "delay_ms is true, not a whole number"),
        (b'{"payload": "a", "delay_ms": -1}', "delay_ms is -1, not an integer within"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_those_before_it_are_published(
    orders: Odq, bad: bytes, said: str
) -> None:
    good = b'{"payload": "1"}\n{"payload": "2"}\n'

    complaint = orders("publish", "--jsonl", "-", input=good + bad + b"\n" + good, code=2)

    assert complaint.startswith("Error: line 3: ")
    assert said in complaint
    assert "2 messages published before it" in complaint
    assert "--from-line 3" in complaint
    assert payloads(orders) == [b"1", b"2"]


def test_of_several_lines_that_are_wrong_the_first_is_named(orders: Odq) -> None:
    text = b'{"payload": "1"}\n{"payload": "2", "delay_ms": -1}\n{'

    complaint = orders("publish", "--jsonl", "-", input=text, code=2)

    assert complaint.startswith("Error: line 2: delay_ms is -1")
    assert "1 message published before it" in complaint
    assert payloads(orders) == [b"1"]


def test_publishing_goes_on_from_a_line(orders: Odq) -> None:
    text = b"a\nb\nc\n"

    orders("publish", "--lines", "-", "--from-line", "3", input=text)

    assert payloads(orders) == [b"c"]


def test_what_excludes_each_other_is_refused_before_anything_is_done(orders: Odq) -> None:
    assert "PAYLOAD and --file exclude" in orders("publish", "a", "--file", "b", code=2)
    assert "would keep only the first" in orders(
        "publish", "--lines", "-", "--idempotency-key", "k", input=b"a", code=2
    )
    assert "has no =" in orders("publish", "a", "--header", "type", code=2)
    assert "given twice" in orders("publish", "a", "-H", "a=1", "-H", "a=2", code=2)
    assert orders("publish", "--file", "/nope", code=1) == (
        "Error: /nope: No such file or directory\n"
    )
    assert payloads(orders) == []


def test_what_the_store_refuses_is_told_without_a_number(orders: Odq) -> None:
    complaint = orders("publish", "a", "--idempotency-key", "", code=2)

    assert complaint == "Error: idempotency_key has 0 bytes, not 1 to 512\n"
