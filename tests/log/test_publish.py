"""Publishing and reading back, on every kind of store."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from pathlib import Path

import pytest

from odq_encodings import PayloadKey, decode_any
from opendata_queue import (
    CorruptStoreError,
    Engine,
    InvalidInputError,
    NewMessage,
    PublishOptions,
    StoredMessage,
    StoreSettings,
)
from opendata_queue.log.cache import (
    MESSAGE_OVERHEAD_BYTES,
    CheckedMessage,
    MessageBatch,
    RecentMessages,
)
from opendata_queue.log.payloads import UPLOADS_AT_ONCE, BlobFolder
from opendata_queue.store import Database, Objects
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.log.written_log import log_of
from tests.support.s3_server import S3Server


async def test_a_published_message_is_read_back_whole(system: Engine, clock: ManualClock) -> None:
    now = clock.now_ms()

    message_id = await system.publish(
        b"payload",
        headers={"type": "order.created", "größe": "10 €"},
        created_at_ms=now - 5,
        delay_ms=1_000,
        retention_seconds=60,
    )

    assert await system.read(message_id) == StoredMessage(
        message_id=message_id,
        payload=b"payload",
        payload_uri=None,
        headers=(("type", "order.created"), ("größe", "10 €")),
        created_at_ms=now - 5,
        received_at_ms=now,
        visible_at_ms=now + 1_000,
        retention_seconds=60,
    )


async def test_messages_are_there_after_a_reopen_and_ids_go_on(
    root: str, clock: ManualClock
) -> None:
    async with await Engine.open(root, clock=clock) as system:
        ids = await system.publish_many([NewMessage(b"%d" % n) for n in range(10)])

    async with await Engine.open(root, clock=clock) as system:
        stored = await system.read_many(ids)
        later = await system.publish(b"later")

    assert [message.payload for message in stored if message] == [b"%d" % n for n in range(10)]
    assert ids == sorted(ids)
    assert later > ids[-1]


async def test_the_log_has_every_message_in_the_order_of_ids(system: Engine) -> None:
    ids = []
    for size in (1, 700, 2, 1_500):
        ids += await system.publish_many([NewMessage(b"x", headers={"n": "1"})] * size)

    entries = await log_of(system)

    assert [entry.message_id for entry in entries] == ids
    assert [entry.message_id for entry in await log_of(system, ids[700])] == ids[700:]


@pytest.mark.parametrize(
    "size", [0, 1, 65_535, 65_536, 10_000_000], ids=lambda size: f"{size} bytes"
)
async def test_payloads_of_any_size_come_back_intact(root: str, size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with await Engine.open(root) as system:
        message_id = await system.publish(payload)
        fresh = await system.read(message_id)
    async with await Engine.open(root) as system:
        stored = await system.read(message_id)

    assert fresh is not None
    assert fresh.payload == payload
    assert stored == fresh


async def test_a_uri_of_the_producers_is_handed_on_untouched(system: Engine) -> None:
    message_id = await system.publish(payload_uri="s3://elsewhere/größe?x=1#y")

    stored = await system.read(message_id)

    assert stored is not None
    assert (stored.payload, stored.payload_uri) == (None, "s3://elsewhere/größe?x=1#y")


async def test_an_absolute_time_of_visibility_is_kept(memory_system: Engine) -> None:
    message_id = await memory_system.publish(b"", visible_at_ms=42)

    stored = await memory_system.read(message_id)

    assert stored is not None
    assert stored.visible_at_ms == 42


async def test_reading_keeps_the_order_asked_for_and_skips_nothing(system: Engine) -> None:
    ids = await system.publish_many([NewMessage(b"%d" % n) for n in range(50)])
    asked = [ids[30], ids[3], 999_999, ids[30], *ids[10:20], ids[49]]

    stored = await system.read_many(asked)

    assert [message and message.message_id for message in stored] == [
        ids[30], ids[3], None, ids[30], *ids[10:20], ids[49]
    ]  # fmt: skip


async def test_payloads_are_read_from_the_store_when_they_are_not_recent(
    root: str, clock: ManualClock
) -> None:
    options = PublishOptions(recent_bytes=0)
    async with await Engine.open(root, clock=clock, options=options) as system:
        ids = await system.publish_many([NewMessage(b"%d" % n) for n in range(2_000)])
        asked = [*ids[::300], *ids[100:140], ids[-1]]

        stored = await system.read_many(asked)

    assert [message and message.payload for message in stored] == [
        b"%d" % ids.index(message_id) for message_id in asked
    ]


async def test_recent_payloads_cost_no_read_and_are_bounded(clock: ManualClock) -> None:
    options = PublishOptions(recent_bytes=2 * (MESSAGE_OVERHEAD_BYTES + 43))
    async with await Engine.open("memory:///", clock=clock, options=options) as system:
        first, second, third = [await system.publish(bytes(40)) for _ in range(3)]
        recent = system._shard.recent

        assert recent.get(first) is None
        assert [
            message and message.payload for message in (recent.get(second), recent.get(third))
        ] == [
            bytes(40),
            bytes(40),
        ]
        message = await system.read(first)

    assert message is not None
    assert message.payload == bytes(40)


def test_recent_messages_are_found_in_batches_that_come_and_go() -> None:
    def batch(number: int) -> list[CheckedMessage]:
        return [CheckedMessage(NewMessage(b"%d" % number), 100) for _ in range(number % 3 + 1)]

    recent = RecentMessages(50 * (MESSAGE_OVERHEAD_BYTES + 4))
    first_ids = itertools.count(7, 10)  # gaps as after a crash
    payloads: dict[int, bytes | None] = {}
    for number, first_id in zip(range(5_000), first_ids, strict=False):
        messages = batch(number)
        recent.add_many(first_id, MessageBatch.of(messages), 1)
        payloads |= {first_id + index: m.payload for index, m in enumerate(messages)}

    found = {one: recent.get(one) for one in range(50_100)}
    kept = {one: message.payload for one, message in found.items() if message is not None}

    assert 48 <= len(kept) <= 50
    assert kept == dict(list(payloads.items())[-len(kept) :])


async def test_headers_that_change_after_the_publish_change_nothing(memory_system: Engine) -> None:
    headers = {"type": "a"}
    first = await memory_system.publish(b"x", headers=headers)
    headers["type"] = "b"

    stored = await memory_system.read(first)

    assert stored is not None
    assert stored.headers == (("type", "a"),)


async def test_a_blob_is_found_through_its_path_and_its_reference(
    tmp_path: Path, clock: ManualClock
) -> None:
    root = f"file://{tmp_path}/root"
    options = PublishOptions(inline_bytes=10)
    async with await Engine.open(root, clock=clock, options=options) as system:
        inline, blob = await system.publish_many([NewMessage(b"x" * 10), NewMessage(b"y" * 11)])
    (stored,) = (tmp_path / "root" / "blobs" / "00000").iterdir()
    rows = await rows_of(root)

    assert stored.read_bytes() == b"y" * 11
    assert bytes.fromhex(stored.name)[:6] == clock.now_ms().to_bytes(6, "big")
    by_key = {decode_any(key, value).key: decode_any(key, value).value for key, value in rows}
    assert str(by_key[PayloadKey(message_id=inline)]) == "InlinePayload(data=b'xxxxxxxxxx')"
    check = f"size=11&crc32={zlib.crc32(b'y' * 11):08x}"
    assert str(by_key[PayloadKey(message_id=blob)]) == (
        f"UriPayload(uri='blobs/00000/{stored.name}?{check}')"
    )
    assert any(f"BlobReference(message_id={blob})" == str(value) for value in by_key.values())


class WatchedObjects(Objects):
    """Objects that know how many of them have been written at the same time."""

    at_once = 0
    most_at_once = 0

    async def write(self, path: str, data: bytes, *, sync: bool = True) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await super().write(path, data, sync=sync)
        self.at_once -= 1


async def test_callers_with_blobs_wait_for_one_another_beyond_a_number(clock: ManualClock) -> None:
    objects = WatchedObjects.open("memory:///", StoreSettings())
    assert isinstance(objects, WatchedObjects)
    folder = BlobFolder(objects, 0, clock)

    stored = await asyncio.gather(*(folder.store_blobs([b"%d" % n] * 3) for n in range(100)))

    assert objects.most_at_once == UPLOADS_AT_ONCE
    for n, blobs in enumerate(stored):
        assert [await objects.read(blob.path) for blob in blobs] == [b"%d" % n] * 3


async def test_a_blob_is_one_request_so_that_a_kill_leaves_no_parts_of_it(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    objects = Objects.open(new_s3_root(), StoreSettings())
    s3_environment.reset_requests()

    await objects.write("blobs/00000/00", bytes(10_000_000))

    asked = s3_environment.requests()
    assert (asked["PUT"], asked["POST"]) == (1, 0)


async def test_a_blob_that_is_gone_is_reported_never_replaced(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    async with await Engine.open(root) as system:
        message_id = await system.publish(b"x" * 70_000)
        (blob,) = (tmp_path / "root" / "blobs" / "00000").iterdir()
        blob.unlink()

        with pytest.raises(CorruptStoreError, match=f"payload of message {message_id} is missing"):
            await system.read(message_id)


async def test_every_row_of_a_shard_can_be_decoded_with_the_rfcs_alone(
    new_memory_root: object, tmp_path: Path
) -> None:
    root = f"file://{tmp_path}/root"
    async with await Engine.open(root) as system:
        await system.publish_many(
            [NewMessage(b"x", headers={"a": "b"}, idempotency_key="k"), NewMessage(b"y" * 70_000)]
        )
        await system.publish(payload_uri="https://example.org/x", retention_seconds=60)

    kinds = [decode_any(key, value).kind.title for key, value in await rows_of(root)]

    assert sorted(kinds) == sorted(
        ["payload", "metadata log entry"] * 3
        + ["sequence block", "idempotency key", "blob reference", "blob of a message", "expiry"]
    )


async def rows_of(root: str) -> list[tuple[bytes, bytes]]:
    database = await Database.open(Objects.open(root, StoreSettings()), "messages/00000")
    rows = [row async for chunk in database.scan(b"\x01", b"\xff") for row in chunk]
    await database.close()
    return rows


@pytest.mark.parametrize("count", [1, 6, 100])
async def test_headers_that_are_none_are_refused_in_a_batch_of_any_size(
    memory_system: Engine, count: int
) -> None:
    wrong = NewMessage(b"x", headers=None)  # type: ignore[arg-type]

    with pytest.raises(InvalidInputError, match="headers are NoneType, not a mapping"):
        await memory_system.publish_many([wrong] * count)
