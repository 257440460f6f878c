"""Filling a shard in one go (RFC 0009): the same rows as publishing writes."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from odq_encodings import JOURNAL_STATE_KEY, SeqBlock, encode_headers
from opendata_queue import Engine, InvalidInputError, NewMessage, StoreSettings
from opendata_queue.log.bulk_writer import WRITE_BYTES, BulkResult, BulkShard
from opendata_queue.log.sequences import KEY as SEQ_BLOCK_KEY
from opendata_queue.spark.rows.plain_messages import PlainMessages
from opendata_queue.store import DatabaseReader, Objects
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot

SHARD = 70_000
EVERYTHING = (b"\x00", b"\xff" * 20)

PLAIN = [
    NewMessage(b"one", headers={"type": "a", "wért": "ü"}),
    NewMessage(b"", created_at_ms=5, visible_at_ms=-7),
    NewMessage(bytes(65_535), headers={"n": "1"}, retention_seconds=60),
]
UNUSUAL = [
    NewMessage(b"x" * 70_000, headers={"large": "yes"}, retention_seconds=9),
    NewMessage(payload_uri="s3://elsewhere/object"),
]


@pytest.fixture
def objects(root: str) -> Objects:
    return Objects.open(root, StoreSettings())


async def rows_of(objects: Objects, shard: int) -> dict[bytes, bytes]:
    reader = await DatabaseReader.open(objects, f"messages/{shard:05}")
    try:
        return {key: value async for rows in reader.scan(*EVERYTHING) for key, value in rows}
    finally:
        await reader.close()


def plain(messages: list[NewMessage]) -> PlainMessages:
    headers = [encode_headers(list(one.headers.items())) for one in messages]
    return PlainMessages(
        payloads=pa.array([one.payload or b"" for one in messages], pa.large_binary()),
        headers=pa.array(headers, pa.large_binary()),
        header_counts=pa.array([len(one.headers) for one in messages]),
        created_at_ms=pa.array([one.created_at_ms for one in messages], pa.int64()),
        visible_at_ms=pa.array([one.visible_at_ms for one in messages], pa.int64()),
        retention_seconds=pa.array([one.retention_seconds for one in messages]),
    )


async def test_a_bulk_shard_holds_the_rows_that_publishing_would_have_written(
    objects: Objects, clock: ManualClock
) -> None:
    by_row = await BulkShard.create(objects, SHARD, clock)
    await by_row.add(PLAIN)
    by_column = await BulkShard.create(objects, SHARD + 1, clock)
    await by_column.add_columns(plain(PLAIN))
    results = [await by_row.finish(), await by_column.finish()]
    async with await Engine.open(str(objects.location), clock=clock) as system:
        await system.publish_many(PLAIN)

    published = await rows_of(objects, 0)
    for result, shard in zip(results, (SHARD, SHARD + 1), strict=True):
        assert (result.shard, result.messages, result.next_sequence) == (shard, 3, 3)
        # One expires, and the others stay.
        assert (result.expires_from, result.expires_at) == (clock.now_ms() + 60_000, 0)
        rows = await rows_of(objects, shard)
        assert rows.pop(SEQ_BLOCK_KEY) == SeqBlock(base_sequence=0, block_size=3).encode()
        assert result.bytes >= sum(len(key) + len(value) for key, value in rows.items())
        # The same but for the shard in the ids of keys and values.
        own, none = (shard << 32).to_bytes(8, "big")[:4], bytes(4)
        moved = {
            key.replace(own, none): value.replace(own[::-1], none) for key, value in rows.items()
        }
        # The journal of a live shard leaves a row of its own (RFC 0011).
        not_theirs = (SEQ_BLOCK_KEY, JOURNAL_STATE_KEY)
        assert moved == {k: v for k, v in published.items() if k not in not_theirs}


async def test_a_bulk_shard_says_when_its_first_and_its_last_message_expire(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    objects = Objects.open(new_memory_root(), StoreSettings())
    now_ms = clock.now_ms()

    async def result(shard: int, *seconds: int) -> tuple[int, int]:
        writer = await BulkShard.create(objects, shard, clock)
        given = [NewMessage(b"", retention_seconds=one) for one in seconds]
        await writer.add_columns(plain(given[:2]))
        await writer.add(given[2:])
        found = await writer.finish()
        return found.expires_from, found.expires_at

    assert await result(SHARD, 60, 9, 3_600) == (now_ms + 9_000, now_ms + 3_600_000)
    assert await result(SHARD + 1, 60, 9, 3_600, 0) == (now_ms + 9_000, 0)
    assert await result(SHARD + 2, 0, 60) == (now_ms + 60_000, 0)
    assert await result(SHARD + 3, 0, 0, 0) == (0, 0)


async def test_large_payloads_and_uris_are_stored_as_publishing_does(
    objects: Objects, clock: ManualClock
) -> None:
    shard = await BulkShard.create(objects, SHARD, clock)
    await shard.add(UNUSUAL)
    await shard.finish()

    rows = list((await rows_of(objects, SHARD)).values())
    blobs = await objects.names(f"blobs/{SHARD:05}")
    assert len(blobs) == 1
    assert await objects.read(f"blobs/{SHARD:05}/{blobs[0]}") == UNUSUAL[0].payload
    assert any(blobs[0].encode() in value for value in rows)
    assert any(b"s3://elsewhere/object" in value for value in rows)


async def test_many_messages_keep_their_order_over_several_writes(
    objects: Objects, clock: ManualClock
) -> None:
    count = 2 * WRITE_BYTES // 150 + 17
    shard = await BulkShard.create(objects, SHARD, clock)
    await shard.add([NewMessage(b"first")])
    await shard.add_columns(plain([NewMessage(b"%d" % n) for n in range(count)]))
    await shard.add([NewMessage(b"last")])
    result = await shard.finish()

    assert result.messages == count + 2
    rows = await rows_of(objects, SHARD)
    stored = [value[3:] for key, value in sorted(rows.items()) if len(key) == 10]
    assert stored == [b"first", *(b"%d" % n for n in range(count)), b"last"]


@pytest.mark.parametrize(
    "message",
    [
        NewMessage(),
        NewMessage(b"", headers={"a": "b" * 65_536}),
        NewMessage(b"", idempotency_key="k"),
    ],
)
async def test_what_can_not_be_stored_is_refused(
    objects: Objects, clock: ManualClock, message: NewMessage
) -> None:
    shard = await BulkShard.create(objects, SHARD, clock)
    with pytest.raises(InvalidInputError):
        await shard.add([message])
    await shard.abandon()


@pytest.mark.parametrize("finished", [True, False])
async def test_a_shard_that_was_begun_before_is_refused_and_keeps_its_messages(
    objects: Objects, clock: ManualClock, finished: bool
) -> None:
    first = await BulkShard.create(objects, SHARD, clock)
    await first.add([NewMessage(b"first")])
    if finished:
        await first.finish()

    with pytest.raises(InvalidInputError, match=f"{SHARD} was written before"):
        await BulkShard.create(objects, SHARD, clock)

    if not finished:
        await first.finish()
    assert any(b"first" in value for value in (await rows_of(objects, SHARD)).values())


async def test_rows_are_not_in_a_wal_and_every_file_is_synced(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    objects = Objects.open(f"file://{tmp_path}/root", StoreSettings())
    shard = await BulkShard.create(objects, SHARD, clock)
    await shard.add(PLAIN)
    result = await shard.finish()

    folder = tmp_path / "root" / "messages" / f"{SHARD:05}"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert isinstance(result, BulkResult)
    assert len(list((folder / "wal").iterdir())) == 1  # that of opening it
    assert {str(path) for path in files} <= set(synced)
