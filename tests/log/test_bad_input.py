"""What can't be stored is refused by name, and nothing is written."""

from __future__ import annotations

import pytest

from opendata_queue import (
    CommitLimits,
    Engine,
    InvalidInputError,
    NewMessage,
    PublishOptions,
)
from opendata_queue.log.writer import MAX_MESSAGES_AT_ONCE
from tests.log.written_log import log_of

BAD_MESSAGES = {
    "256 headers": (
        NewMessage(b"x", headers={str(n): "v" for n in range(256)}),
        "256 headers are over the limit of 255",
    ),
    "a 70 kB header": (
        NewMessage(b"x", headers={"ok": "v", "big": "v" * 70_000}),
        "the value of header 'big': 70000 bytes of UTF-8 are over the limit of 65535",
    ),
    "a header that is no text": (
        NewMessage(b"x", headers={"n": 5}),  # type: ignore[dict-item]
        "the value of header 'n': 5 is no text",
    ),
    "a header whose name is no text": (
        NewMessage(b"x", headers={5: "n"}),  # type: ignore[dict-item]
        "the name of header 5: 5 is no text",
    ),
    "a header without UTF-8": (NewMessage(b"x", headers={"\ud800": ""}), "has no UTF-8"),
    "text as payload": (NewMessage("text"), "payload is str, not bytes"),  # type: ignore[arg-type]
    "no payload": (NewMessage(), "payload is NoneType, not bytes, and there is no payload_uri"),
    "payload and URI": (NewMessage(b"x", payload_uri="s3://b/k"), "exclude each other"),
    "a URI without scheme": (NewMessage(payload_uri="blobs/00000/00"), "has no scheme"),
    "an empty URI": (NewMessage(payload_uri=""), "has no scheme"),
    "a URI too long": (NewMessage(payload_uri="s3://" + "x" * 65_535), "over the limit of 65535"),
    "a negative delay": (NewMessage(b"x", delay_ms=-1), "delay_ms is -1"),
    "a fractional delay": (NewMessage(b"x", delay_ms=0.5), r"delay_ms is 0\.5"),  # type: ignore[arg-type]
    "two times": (NewMessage(b"x", delay_ms=1, visible_at_ms=1), "exclude each other"),
    "a time out of range": (NewMessage(b"x", visible_at_ms=2**63), "visible_at_ms is"),
    "a creation out of range": (NewMessage(b"x", created_at_ms=2**63), "created_at_ms is"),
    "negative retention": (NewMessage(b"x", retention_seconds=-1), "retention_seconds is -1"),
    "endless retention": (NewMessage(b"x", retention_seconds=2**32), "retention_seconds is"),
    "no retention": (NewMessage(b"x", retention_seconds=None), "retention_seconds is None"),  # type: ignore[arg-type]
    "headers as a list": (
        NewMessage(b"x", headers=[("a", "b")]),  # type: ignore[arg-type]
        "headers are list, not a mapping",
    ),
    "no message": (b"bytes", "is bytes, not a NewMessage"),
    "an empty key": (NewMessage(b"x", idempotency_key=""), "has 0 bytes, not 1 to 512"),
    "a long key": (NewMessage(b"x", idempotency_key="ü" * 257), "has 514 bytes"),
    "a key without UTF-8": (NewMessage(b"x", idempotency_key="\ud800"), "has no UTF-8"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_a_message_that_can_not_be_stored_is_refused_and_nothing_is_written(
    memory_system: Engine, name: str
) -> None:
    bad, complaint = BAD_MESSAGES[name]

    with pytest.raises(InvalidInputError, match=rf"^message 1: .*{complaint}"):
        await memory_system.publish_many([NewMessage(b"good"), bad])  # type: ignore[list-item]

    assert await log_of(memory_system) == []


async def test_too_many_messages_at_once_are_refused(memory_system: Engine) -> None:
    with pytest.raises(InvalidInputError, match="10001 messages are over the limit of 10000"):
        await memory_system.publish_many([NewMessage(b"x")] * (MAX_MESSAGES_AT_ONCE + 1))


async def test_too_many_bytes_at_once_are_refused(memory_system: Engine) -> None:
    with pytest.raises(InvalidInputError, match="bytes are over the limit of 67108864 in one call"):
        await memory_system.publish_many([NewMessage(bytes(60_000))] * 1_200)


async def test_messages_that_are_no_list_are_refused(memory_system: Engine) -> None:
    with pytest.raises(InvalidInputError, match="messages are generator, not a list"):
        await memory_system.publish_many(NewMessage(b"x") for _ in range(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("message_id", [-1, 2**63, "1", None])
async def test_an_id_that_is_none_is_refused(memory_system: Engine, message_id: int) -> None:
    with pytest.raises(InvalidInputError, match="message_id is"):
        await memory_system.read(message_id)


async def test_a_sequence_before_the_first_is_refused(memory_system: Engine) -> None:
    with pytest.raises(InvalidInputError, match="from_sequence is -1"):
        memory_system.scan_log(-1)


@pytest.mark.parametrize(
    "bad", [{"batch_rows": 0}, {"batch_bytes": 0}, {"linger_ms": -1}, {"lazy_ms": -1}]
)
def test_limits_that_make_no_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="a limit that is too small"):
        CommitLimits(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"inline_bytes": 65_536},
        {"recent_bytes": -1},
        {"idempotency_window_seconds": -1},
        {"idempotency_window_seconds": 2**32},
    ],
)
def test_options_that_make_no_sense_are_refused(bad: dict[str, int]) -> None:
    name, value = next(iter(bad.items()))
    with pytest.raises(InvalidInputError, match=f"{name} is {value}, not within 0 to"):
        PublishOptions(**bad)  # type: ignore[arg-type]
