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
from opendata_queue.log.bulk_writer import BulkShard
from opendata_queue.log.cache import CheckedMessage
from opendata_queue.log.writer import MAX_MESSAGES_AT_ONCE
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.messages import MAX_HEADERS_BYTES
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import Objects, StoreSettings
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
    "headers that are too large together": (
        NewMessage(b"x", headers={str(n): "v" * 60_000 for n in range(10, 28)}),
        "headers have 1080036 bytes in all, over the limit of 1048576",
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


async def test_headers_that_are_too_large_are_refused_in_a_batch_of_plain_messages(
    memory_system: Engine,
) -> None:
    large = NewMessage(b"x", headers={str(n): "v" * 60_000 for n in range(10, 28)})

    with pytest.raises(InvalidInputError, match=r"^message 7: headers have 1080036 bytes"):
        await memory_system.publish_many([NewMessage(b"good")] * 7 + [large])

    assert await log_of(memory_system) == []


@pytest.mark.parametrize("count", [1, 10])
async def test_headers_of_exactly_the_limit_are_stored(memory_system: Engine, count: int) -> None:
    """Keys and values count as UTF-8, and nothing else does."""
    headers = {f"{n:04}": "ü" * 32_766 for n in range(15)}
    left = MAX_HEADERS_BYTES - 15 * 65_536
    headers["last"] = "v" * (left - 4)

    ids = await memory_system.publish_many([NewMessage(b"x", headers=headers)] * count)

    read = await memory_system.read_many(ids)
    assert [dict(one.headers) for one in read if one is not None] == [headers] * count
    headers["last"] += "v"
    with pytest.raises(InvalidInputError, match="headers have 1048577 bytes in all"):
        await memory_system.publish_many([NewMessage(b"x", headers=headers)] * count)


async def test_a_message_stored_with_larger_headers_is_still_read_found_and_claimed(
    root: str,
) -> None:
    """Earlier releases had no limit for all headers of a message together."""
    headers = {str(n): "v" * 60_000 for n in range(10, 60)}
    job = Commit.new("load", [await _shard_of_an_earlier_release(root, headers)], now_ms=1)
    async with await Engine.open(root) as system:
        await system.create_queue("q", filter='"10" IS NOT NULL')
        await CommitFiles(Objects.open(root, StoreSettings())).create(job)
        (claimed,) = await system.claim("q", wait_ms=60_000)

        assert dict(claimed.headers) == headers
        page = await system.find("q", "in_flight")
        assert [dict(one.headers) for one in page.entries] == [headers]
        read = await system.read(claimed.message_id)
        assert read is not None
        assert dict(read.headers) == headers


async def _shard_of_an_earlier_release(root: str, headers: dict[str, str]) -> CommittedShard:
    objects = Objects.open(root, StoreSettings())
    reserved = await ShardFiles(objects).reserve_bulk(job="load", now_ms=1)
    writer = await BulkShard.create(objects, reserved.shard, SystemClock())
    # What is checked already is not checked again.
    await writer.add_checked([CheckedMessage(NewMessage(b"x", headers=headers), 65_535)])
    written = await writer.finish()
    return CommittedShard(
        shard=written.shard,
        messages=written.messages,
        next_sequence=written.next_sequence,
        bytes=written.bytes,
    )


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
