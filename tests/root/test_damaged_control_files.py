"""Control files that are cut, emptied or have a flipped bit are not believed, and are named."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from opendata_queue import CorruptStoreError, StoreSettings
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.descriptor import SystemDescriptor, open_root, read_root
from opendata_queue.root.owner_files import Heartbeat, Owner, OwnerFiles
from opendata_queue.root.shard_files import Reservation, ShardFiles, ShardKind
from opendata_queue.store import Objects
from opendata_queue.store.objects.control_files import parsed, sealed_model
from opendata_queue.testing import ManualClock

HOLDER = "5f0c6b7e8d3a4c1f9e2b7a6d5c4b3a21"
NOW_MS = 1_763_251_200_000
SHARD = 15_248_962

RESERVATION = Reservation(shard=1, kind=ShardKind.LIVE, holder=HOLDER, reserved_at=NOW_MS)
COMMIT = Commit(
    job="orders",
    holder=HOLDER,
    committed_at=NOW_MS,
    shards=(CommittedShard(shard=SHARD, messages=123, next_sequence=123, bytes=45_678),),
)
OWNER = Owner(
    holder=HOLDER,
    name="orders-0",
    host="orders-0",
    machine=None,
    pid=17,
    process_start="48213",
    address=None,
    lease_ms=10_000,
    taken_at=NOW_MS,
)
HEARTBEAT = Heartbeat(holder=HOLDER, count=3, at=NOW_MS)

# As the examples of the RFCs.
GOLDEN = {
    b'{"shard":1,"kind":"live","holder":"5f0c6b7e8d3a4c1f9e2b7a6d5c4b3a21",'
    b'"reserved_at":1763251200000,"check":"b333255c"}': RESERVATION,
    b'{"job":"orders","holder":"5f0c6b7e8d3a4c1f9e2b7a6d5c4b3a21","committed_at":1763251200000,'
    b'"shards":[{"shard":15248962,"messages":123,"next_sequence":123,"bytes":45678}],'
    b'"check":"4ab7eeab"}': COMMIT,
    b'{"holder":"5f0c6b7e8d3a4c1f9e2b7a6d5c4b3a21","count":3,"at":1763251200000,'
    b'"check":"e478e0f2"}': HEARTBEAT,
}


async def read_commit(objects: Objects) -> object:
    return await CommitFiles(objects).read("orders")


async def read_reservation(objects: Objects) -> object:
    return await ShardFiles(objects).read(1)


async def read_owner(objects: Objects) -> object:
    tenure = await OwnerFiles(objects, "queues").newest()
    assert tenure is not None
    return tenure.owner


Read = Callable[[Objects], Awaitable[object]]
FILES: dict[str, tuple[bytes, Read]] = {
    "system.json": (sealed_model(SystemDescriptor.new(ManualClock())), read_root),
    "shards/00001.json": (sealed_model(RESERVATION), read_reservation),
    "commits/orders.json": (sealed_model(COMMIT), read_commit),
    "owners/queues/00000000000000000001.json": (sealed_model(OWNER), read_owner),
}


async def found_by(read: Read, objects: Objects) -> tuple[object, str]:
    """What a reader finds, or what it says instead."""
    try:
        return await read(objects), ""
    except CorruptStoreError as error:
        return None, str(error)


def damaged(content: bytes) -> Iterator[bytes]:
    """A flipped bit in every place, and what else happens to files."""
    for place in range(len(content)):
        for bit in (0, 3, 5):
            flipped = bytes([content[place] ^ (1 << bit)])
            yield content[:place] + flipped + content[place + 1 :]
    yield from (content[:size] for size in range(len(content)))
    yield bytes(len(content))
    yield content + b"\0" * 7
    yield content + content


@pytest.mark.parametrize("golden", GOLDEN)
def test_checked_files_are_as_in_the_rfcs(golden: bytes) -> None:
    model: Any = GOLDEN[golden]

    assert sealed_model(model) == golden
    assert parsed(type(model), golden, "x", "is nothing") == model


@pytest.mark.parametrize("path", FILES)
async def test_nothing_that_is_damaged_is_believed(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    content, read = FILES[path]
    objects = Objects.open("memory:///", StoreSettings())
    await objects.write(path, content)
    whole = await read(objects)
    assert whole is not None
    for bad in damaged(content):
        await objects.write(path, bad)
        caplog.clear()
        found, said = await found_by(read, objects)
        if said:
            assert path in said
            continue
        if found is None:  # of owners: that its file can't be read must not lose a root
            assert path.startswith("owners/")
            assert [path in one.message for one in caplog.records] == [True]
            assert caplog.records[0].levelno == logging.WARNING
        else:
            assert found == whole  # the name of the checksum itself is damaged, and nothing else
            assert b'"check":' not in bad


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("depth", [100, 1_000, 200_000])
async def test_files_that_are_nested_deeply_are_damaged_ones(path: str, depth: int) -> None:
    _, read = FILES[path]
    for content in (b"[" * depth, b'{"format_version":1,"x":' + b'{"a":' * depth):
        objects = Objects.open("memory:///", StoreSettings())
        await objects.write(path, content)
        if path.startswith("owners/"):
            assert await read(objects) is None
            continue
        with pytest.raises(CorruptStoreError, match=path):
            await read(objects)


async def test_files_of_0_1_have_no_checksum_and_are_read_as_they_are() -> None:
    objects = Objects.open("memory:///", StoreSettings())
    await objects.write("commits/orders.json", COMMIT.model_dump_json().encode())
    await objects.write("shards/00001.json", RESERVATION.model_dump_json().encode())
    version_1 = SystemDescriptor.new(ManualClock()).model_copy(update={"format_version": 1})
    await objects.write("system.json", version_1.model_dump_json().encode())

    assert await read_commit(objects) == COMMIT
    assert await read_reservation(objects) == RESERVATION
    assert await open_root(objects, ManualClock()) == version_1


async def test_a_root_of_version_2_has_a_checksum() -> None:
    objects = Objects.open("memory:///", StoreSettings())
    content = SystemDescriptor.new(ManualClock()).model_dump_json().encode()
    await objects.write("system.json", content)

    with pytest.raises(CorruptStoreError, match=r"system\.json is damaged: its checksum is m"):
        await read_root(objects)
