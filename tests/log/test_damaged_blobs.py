"""Blobs that are damaged: never handed out, and in nobody's way (RFC 0004)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import opendata_queue as odq
from odq_encodings import encode_payload_key
from opendata_queue import (
    CorruptStoreError,
    Engine,
    Ingest,
    NewMessage,
    PublishOptions,
    QueueOptions,
    StoreSettings,
)
from opendata_queue.log.payloads import BlobFolder, BlobPlace
from opendata_queue.store import Objects
from opendata_queue.testing import ManualClock
from tests.root.test_features import VERSION_1

OPTIONS = PublishOptions(inline_bytes=10)
LARGE = bytes(range(256)) * 4
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda _: None,
    "emptied": lambda _: b"",
    "cut": lambda data: data[: len(data) // 2],
    "zeroed": lambda data: bytes(len(data)),
    "appended": lambda data: data + b"\0",
    "flipped": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
}


def damage(file: Path, how: str) -> None:
    left = DAMAGES[how](file.read_bytes())
    file.unlink() if left is None else file.write_bytes(left)


def only_blob(root: Path) -> Path:
    (blob,) = (one for one in (root / "blobs").rglob("*") if one.is_file())
    return blob


@pytest.mark.parametrize("how", DAMAGES)
async def test_a_damaged_blob_is_a_dead_letter_and_all_others_are_handed_out(
    tmp_path: Path, how: str
) -> None:
    clock = ManualClock()
    root = f"file://{tmp_path}"
    async with await Engine.open(root, clock=clock, options=OPTIONS) as system:
        await system.create_queue("q", options=QueueOptions(max_attempts=2))
        await system.publish_many([NewMessage(b"a"), NewMessage(LARGE), NewMessage(b"b")])
    blob = only_blob(tmp_path)
    damage(blob, how)

    async with await Engine.open(root, clock=clock, options=OPTIONS) as system:
        claimed = await system.claim("q", 10)
        assert [one.payload for one in claimed] == [b"a", b"b"]
        await system.ack("q", *claimed)
        clock.advance_ms(10_000)
        assert await system.claim("q", 10) == []
        (failed,) = await system.failed("q")
        assert f"blobs/00000/{blob.name}" in failed.error
        with pytest.raises(CorruptStoreError, match=f"blobs/00000/{blob.name}"):
            await system.read(failed.message_id)
    async with await odq.open_async(root, read_only=True) as look:
        with pytest.raises(CorruptStoreError, match=f"blobs/00000/{blob.name}"):
            await look.read(failed.message_id)


@pytest.mark.parametrize("how", [one for one in DAMAGES if one != "deleted"])
async def test_a_damaged_blob_of_an_ingest_process_is_found(tmp_path: Path, how: str) -> None:
    root = f"file://{tmp_path}"
    await (await Engine.open(root)).close()
    async with await Ingest.open(root, options=OPTIONS) as ingest:
        message_id = await ingest.publish(LARGE)
    assert await read(root, message_id) == LARGE
    damage(only_blob(tmp_path), how)

    with pytest.raises(CorruptStoreError, match=r"blobs/00001/\w+ is damaged"):
        await read(root, message_id)


async def read(root: str, message_id: int) -> bytes | None:
    async with await odq.open_async(root, read_only=True) as look:
        message = await look.read(message_id)
        return None if message is None else message.payload


async def test_blobs_of_0_1_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "system.json").write_bytes(VERSION_1)
    root = f"file://{tmp_path}"
    # An ingest process and a bulk job write what the owner understands, and it may be of 0.1.
    async with await Ingest.open(root, options=OPTIONS) as ingest:
        message_id = await ingest.publish(LARGE)
        row = await ingest.shard.database.get(encode_payload_key(message_id))
        assert row is not None
        assert b"blobs/00001/" in row
        assert b"?" not in row
    only_blob(tmp_path).write_bytes(b"other")

    assert await read(root, message_id) == b"other"


async def test_a_reference_is_as_in_the_rfc() -> None:
    objects = Objects.open("memory:///", StoreSettings())

    (blob,) = await BlobFolder(objects, 0, ManualClock()).store_blobs([b"123456789"])

    assert blob.reference == f"blobs/00000/{blob.blob_id.hex()}?size=9&crc32=cbf43926"
    place = BlobPlace.parse(blob.reference, "it")
    assert (place.path, place.size_bytes, place.crc32) == (blob.path, 9, 0xCBF43926)
    assert BlobPlace.parse(blob.path, "it") == BlobPlace(path=blob.path)


@pytest.mark.parametrize("query", ["", "size=1", "size=-1&crc32=cbf43926", "size=9&crc32=CBF43926"])
def test_a_reference_that_makes_no_sense_is_refused(query: str) -> None:
    with pytest.raises(CorruptStoreError, match="message 7 refers to"):
        BlobPlace.parse(f"blobs/00000/00?{query}", "message 7")
