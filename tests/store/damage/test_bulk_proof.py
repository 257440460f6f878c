"""A bulk shard is as its writer left it, or opening it names the file that is not."""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path

import pytest

from opendata_queue import CorruptStoreError, Engine, NewMessage, StoreSettings
from opendata_queue.log.bulk_writer import BulkShard
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import DatabaseReader, Objects
from opendata_queue.store.damage.bulk_proof import BulkProof
from opendata_queue.store.objects.control_files import sealed_model
from opendata_queue.testing import ManualClock

MESSAGES = 50


async def written(root: str) -> CommittedShard:
    objects = Objects.open(root, StoreSettings())
    clock = ManualClock()
    reserved = await ShardFiles(objects).reserve_bulk(job="job", now_ms=clock.now_ms())
    shard = await BulkShard.create(objects, reserved.shard, clock)
    await shard.add([NewMessage(b"%d" % n) for n in range(MESSAGES)])
    result = await shard.finish()
    return CommittedShard(
        shard=result.shard, messages=MESSAGES, next_sequence=MESSAGES, bytes=result.bytes
    )


async def opened(root: str, shard: int) -> None:
    reader = await DatabaseReader.open(
        Objects.open(root, StoreSettings()), f"messages/{shard:05}", complete=True
    )
    await reader.close()


def newest_manifest(folder: Path) -> Path:
    return max((folder / "manifest").iterdir())


async def test_the_writer_leaves_a_proof_as_in_the_rfc(tmp_path: Path) -> None:
    shard = await written(f"file://{tmp_path}")
    folder = tmp_path / f"messages/{shard.shard:05}"
    manifest = newest_manifest(folder)

    content = (folder / "complete.json").read_bytes()
    assert json.loads(content) == {
        "manifest": int(manifest.stem),
        "size": manifest.stat().st_size,
        "crc32": f"{zlib.crc32(manifest.read_bytes()):08x}",
        "check": f"{zlib.crc32(content[:-20]):08x}",
    }
    await opened(f"file://{tmp_path}", shard.shard)
    assert sealed_model(BulkProof(manifest=4, size=1324, crc32="cbf43926")) == (
        b'{"manifest":4,"size":1324,"crc32":"cbf43926","check":"b1a73c3e"}'
    )


async def test_any_damage_to_its_manifest_is_found_when_it_is_opened(tmp_path: Path) -> None:
    root = f"file://{tmp_path}"
    shard = await written(root)
    manifest = newest_manifest(tmp_path / f"messages/{shard.shard:05}")
    content = manifest.read_bytes()
    flipped = [
        content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
        for place in range(0, len(content), 13)
    ]
    for bad in [*flipped, b"", content[:-9], bytes(len(content)), content + b"\0"]:
        manifest.write_bytes(bad)
        with pytest.raises(CorruptStoreError, match=f"manifest/{manifest.name} is damaged"):
            await opened(root, shard.shard)
    manifest.unlink()
    with pytest.raises(CorruptStoreError, match=f"manifest/{manifest.name} is missing"):
        await opened(root, shard.shard)
    manifest.write_bytes(content)
    await opened(root, shard.shard)


async def test_an_sst_that_is_cut_is_found_when_it_is_opened(tmp_path: Path) -> None:
    root = f"file://{tmp_path}"
    shard = await written(root)
    (sst,) = (tmp_path / f"messages/{shard.shard:05}/compacted").iterdir()
    sst.write_bytes(sst.read_bytes()[:50])

    with pytest.raises(CorruptStoreError, match=f"compacted/{sst.name} is cut off"):
        await opened(root, shard.shard)


async def test_a_damaged_proof_is_named_and_one_of_0_1_is_not_missed(tmp_path: Path) -> None:
    root = f"file://{tmp_path}"
    shard = await written(root)
    proof = tmp_path / f"messages/{shard.shard:05}/complete.json"
    content = proof.read_bytes()
    for bad in (b"", content[:-5], content.replace(b'"size"', b'"sizf"'), b"[" * 9_999):
        proof.write_bytes(bad)
        with pytest.raises(CorruptStoreError, match=r"complete\.json.*odq repair"):
            await opened(root, shard.shard)

    proof.unlink()
    await opened(root, shard.shard)


async def test_the_messages_of_a_damaged_shard_wait_and_all_others_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = f"file://{tmp_path}"
    clock = ManualClock()
    caplog.set_level(logging.WARNING)
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("q")
        bad, good = await written(root), await written(root)
        manifest = newest_manifest(tmp_path / f"messages/{bad.shard:05}")
        content = manifest.read_bytes()
        manifest.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
        commits = CommitFiles(Objects.open(root, StoreSettings()))
        await commits.create(Commit.new("job", [bad, good], now_ms=clock.now_ms()))
        await system._following.bulk.look()
        await system._following.bulk.tried()

        claimed = await system.claim("q", 200)
        assert {one.message_id >> 32 for one in claimed} == {good.shard}
        assert len(claimed) == MESSAGES
        assert f"manifest/{manifest.name} is damaged" in caplog.text

        manifest.write_bytes(content)
        clock.advance_ms(60_000)
        await system._following.bulk.finished()
        assert len(await system.claim("q", 200)) == MESSAGES
