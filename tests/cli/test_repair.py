"""``odq doctor --deep`` finds what is damaged, and ``odq repair`` opens with what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import opendata_queue
from opendata_queue import CorruptStoreError, Ingest, NewMessage, OdqError
from opendata_queue.store.objects.control_files import sealed
from tests.cli.conftest import Odq

LARGE = b"x" * 100_000


@pytest.fixture
async def filled(tmp_path: Path) -> tuple[Odq, Path]:
    """A root with messages in SSTs, a blob, and a live shard of an ingest process."""
    root = tmp_path / "root"
    async with await opendata_queue.Engine.open(f"file://{root}") as system:
        await system.create_queue("q")
        await system.publish_many([NewMessage(b"small"), NewMessage(LARGE)])
        await system.stores.shards[0].database.flush_to_files()
        async with await Ingest.open(f"file://{root}") as ingest:
            await ingest.publish(b"ingest")
        await system.all_is_routed()
    return Odq(f"file://{root}"), root


def failing(told: dict[str, Any]) -> str:
    return "\n".join(one["found"] for one in told["checks"] if one["level"] != "ok")


def first(root: Path, pattern: str) -> Path:
    return min(root.glob(pattern))


def payloads(url: str) -> set[bytes | None]:
    with opendata_queue.open(url) as system:
        return {one.payload for one in system.claim("q", 10)}


def test_a_root_that_is_whole_is_well(filled: tuple[Odq, Path]) -> None:
    odq, _ = filled
    told = odq.json("doctor", "--deep")

    assert told["healthy"]
    checks = {one["check"]: one["found"] for one in told["checks"]}
    assert checks["blobs"] == "1 blob are what messages say of them"
    assert checks["entries"] == "3 messages that wait in queues are there"
    assert "3 live databases are there, and whole" in checks["files"]
    assert odq("repair") == "nothing is damaged\n"


def test_ssts_that_are_missing_are_seen_by_every_doctor(filled: tuple[Odq, Path]) -> None:
    odq, root = filled
    sst = first(root, "messages/00000/compacted/*.sst")
    sst.rename(root / "away")

    for how in ([], ["--deep"]):
        told = odq.json("doctor", *how, code=1)
        assert f"compacted/{sst.name} is missing" in failing(told)


def test_what_a_deep_look_finds(filled: tuple[Odq, Path]) -> None:
    odq, root = filled
    damaged = [
        first(root, "messages/00000/compacted/*.sst"),
        first(root, "blobs/00000/*"),
        first(root, "owners/queues/*0001.json"),
        root / "features/checked-blobs.json",
    ]
    for file in damaged:
        content = file.read_bytes()
        file.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    (root / "shards/00001.json").unlink()

    told = odq.json("doctor", "--deep", code=1)

    said = failing(told)
    for file in (*damaged[:1], *damaged[2:], root / "shards/00001.json"):
        assert str(file.relative_to(root)) in said


def test_a_deep_look_is_for_roots(filled: tuple[Odq, Path]) -> None:
    assert "is a server" in Odq("http://localhost:1")("doctor", "--deep", code=2)


def test_a_damaged_blob_and_what_waits_without_a_message_are_found(
    filled: tuple[Odq, Path],
) -> None:
    odq, root = filled
    blob = first(root, "blobs/00000/*")
    blob.write_bytes(b"")
    said = failing(odq.json("doctor", "--deep", code=1))
    assert f"blobs/00000/{blob.name} is damaged: it has 0 bytes, and had 100000" in said
    assert "the payload of message 1" in said
    blob.unlink()
    said = failing(odq.json("doctor", "--deep", code=1))
    assert f"blobs/00000/{blob.name} is missing" in said
    told = odq.json("repair", "--yes")
    assert [one["file"] for one in told["problems"]] == [f"blobs/00000/{blob.name}"]
    assert told["set_aside"] == []


def test_a_root_that_is_served_is_not_repaired(filled: tuple[Odq, Path]) -> None:
    odq, root = filled
    with odq.system():
        (root / "shards/00001.json").unlink()
        assert "stop it first" in odq("repair", "--yes", code=1)
    assert not (root / "shards/00001.json").exists()


def test_somebody_has_to_say_yes(filled: tuple[Odq, Path]) -> None:
    odq, root = filled
    (root / "shards/00001.json").unlink()

    shown = odq("repair", code=2)

    assert "shards/00001.json is missing" in shown
    assert not (root / "shards/00001.json").exists()


def test_an_sst_that_is_damaged_is_set_aside_and_the_rest_opens(
    filled: tuple[Odq, Path],
) -> None:
    odq, root = filled
    sst = first(root, "messages/00000/compacted/*.sst")
    sst.write_bytes(sst.read_bytes()[:30])
    for wal in sorted((root / "messages/00000/wal").iterdir())[:-1]:
        wal.unlink()  # else all of it would come from there
    with pytest.raises(OdqError, match=sst.name):
        payloads(odq.url)

    told = odq.json("repair", "--yes")

    assert any(sst.name in one["file"] for one in told["problems"])
    assert any(one.endswith(f"torn/{sst.name}") for one in told["set_aside"])
    assert payloads(odq.url) >= {b"ingest"}


def test_control_files_are_made_again(filled: tuple[Odq, Path]) -> None:
    odq, root = filled
    descriptor = root / "system.json"
    before = json.loads(descriptor.read_bytes())
    descriptor.write_bytes(descriptor.read_bytes()[:-4])
    (root / "shards/00001.json").write_bytes(b"")
    (root / "features/provable-commits.json").write_bytes(b"[")
    commit = root / "commits/lost.json"
    commit.parent.mkdir(exist_ok=True)
    commit.write_bytes(sealed(b'{"job":"lost","holder":"x","committed_at":1,"shards":[]}')[:-5])
    with pytest.raises(CorruptStoreError, match=r"system\.json"):
        payloads(odq.url)

    told = odq.json("repair", "--yes")

    assert told["made_again"] == [
        "system.json",
        "features/provable-commits.json",
        "shards/00001.json",
    ]
    assert told["set_aside"] == [
        f"{path} → torn/{path}" for path in (*told["made_again"], "commits/lost.json")
    ]
    assert json.loads(descriptor.read_bytes())["secret"] != before["secret"]
    assert odq("repair") == "nothing is damaged\n"
    assert payloads(odq.url) == {b"small", LARGE, b"ingest"}
