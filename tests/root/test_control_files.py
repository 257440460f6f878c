"""Reserving shards and committing bulk jobs: files that are created once (RFC 0008, RFC 0009)."""

from __future__ import annotations

import asyncio
import json
import zlib

import pytest

from opendata_queue import InvalidInputError, StoreSettings, StoreUnavailableError
from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.model.ids import FIRST_BULK_SHARD, LAST_SHARD
from opendata_queue.root import shard_files
from opendata_queue.root.commit_files import (
    MAX_COMMITTED_SHARDS,
    Commit,
    CommitFiles,
    CommittedShard,
)
from opendata_queue.root.shard_files import ShardFiles, ShardKind, earliest_bulk_shard
from opendata_queue.store import Objects
from tests.conftest import NewRoot
from tests.support.s3_server import METHODS, S3Server

NOW = 1_790_000_000_000
DAY = 24 * 3_600_000


@pytest.fixture
def objects(root: str) -> Objects:
    return Objects.open(root, StoreSettings())


@pytest.fixture
def in_memory(new_memory_root: NewRoot) -> Objects:
    return Objects.open(new_memory_root(), StoreSettings())


def shard(number: int = FIRST_BULK_SHARD, *, messages: int = 1) -> CommittedShard:
    return CommittedShard(shard=number, messages=messages, next_sequence=messages, bytes=10)


# --- live shards ----------------------------------------------------------------------------------


async def test_live_shards_get_the_lowest_free_numbers(objects: Objects) -> None:
    files = ShardFiles(objects)

    reserved = [await files.reserve_live(now_ms=NOW) for _ in range(3)]
    await files.remove(2)
    again = await files.reserve_live(now_ms=NOW)

    assert [one.shard for one in reserved] == [1, 2, 3]
    assert again.shard == 2
    assert await files.live_shards() == [1, 2, 3]
    assert await files.read(2) == again
    assert again.kind is ShardKind.LIVE


async def test_of_many_that_reserve_at_once_each_gets_a_shard_of_its_own(
    objects: Objects,
) -> None:
    files = ShardFiles(objects)

    reserved = await asyncio.gather(*(files.reserve_live(now_ms=NOW) for _ in range(5)))

    assert sorted(one.shard for one in reserved) == [1, 2, 3, 4, 5]
    assert len({one.holder for one in reserved}) == 5


async def test_a_shard_that_nobody_reserved_has_no_file(in_memory: Objects) -> None:
    assert await ShardFiles(in_memory).read(1) is None
    assert await ShardFiles(in_memory).live_shards() == []


async def test_a_damaged_reservation_is_named(in_memory: Objects) -> None:
    await in_memory.create("shards/00001.json", b"{}")

    with pytest.raises(CorruptStoreError, match=r"00001\.json"):
        await ShardFiles(in_memory).read(1)


async def test_a_reservation_of_a_later_release_can_be_read(in_memory: Objects) -> None:
    content = {"shard": 1, "kind": "live", "holder": "x", "reserved_at": 1, "colour": "blue"}
    await in_memory.create("shards/00001.json", json.dumps(content).encode())

    found = await ShardFiles(in_memory).read(1)

    assert found is not None
    assert found.holder == "x"


# --- bulk shards ----------------------------------------------------------------------------------


async def test_bulk_shards_are_apart_from_live_ones(objects: Objects) -> None:
    files = ShardFiles(objects)
    await files.reserve_live(now_ms=NOW)

    reserved = await files.reserve_bulk(job="load", now_ms=NOW)

    assert reserved.kind is ShardKind.BULK
    assert reserved.job == "load"
    assert await files.live_shards() == [1]
    assert await files.bulk_shards() == [reserved.shard]
    assert await files.read(reserved.shard) == reserved


async def test_bulk_shards_are_listed_in_pages_in_the_order_of_their_numbers(
    objects: Objects,
) -> None:
    files = ShardFiles(objects)
    reserved = [await files.reserve_bulk(job="load", now_ms=NOW) for _ in range(7)]
    numbers = sorted(one.shard for one in reserved)

    first = await files.bulk_shards(limit=3)
    second = await files.bulk_shards(after=first[-1], limit=3)
    third = await files.bulk_shards(after=second[-1], limit=3)

    assert [first, second, third] == [numbers[:3], numbers[3:6], numbers[6:]]


async def test_a_bulk_reservation_is_one_request_however_many_there_are(
    new_s3_root: NewRoot, s3_server: S3Server
) -> None:
    files = ShardFiles(Objects.open(new_s3_root(), StoreSettings()))
    for _ in range(20):
        await files.reserve_bulk(job="load", now_ms=NOW)

    s3_server.reset_requests(path_contains="shards/")
    await files.reserve_bulk(job="load", now_ms=NOW + DAY)

    assert sum(s3_server.requests()[one] for one in METHODS) == 1


async def test_a_crowd_draws_from_more_and_more_numbers(in_memory: Objects) -> None:
    files = ShardFiles(in_memory)

    reserved = [await files.reserve_bulk(job="load", now_ms=NOW) for _ in range(2_000)]

    assert len({one.shard for one in reserved}) == 2_000


def test_numbers_of_bulk_shards_grow_with_time_and_last_for_a_hundred_years() -> None:
    assert earliest_bulk_shard(0) == FIRST_BULK_SHARD
    assert earliest_bulk_shard(NOW) < earliest_bulk_shard(NOW + 1_500)
    in_a_hundred_years = NOW + 100 * 365 * DAY
    assert earliest_bulk_shard(in_a_hundred_years - 1_500) < earliest_bulk_shard(in_a_hundred_years)
    assert earliest_bulk_shard(1 << 62) <= LAST_SHARD


# --- commits --------------------------------------------------------------------------------------


async def test_a_commit_can_be_read_back(objects: Objects) -> None:
    files = CommitFiles(objects)
    commit = Commit.new("load-1", [shard(), shard(FIRST_BULK_SHARD + 1)], now_ms=NOW)

    assert await files.create(commit) == commit
    assert await files.read("load-1") == commit
    assert await files.read("load-2") is None
    assert await files.jobs() == ["load-1"]


async def test_the_second_commit_of_a_job_gets_the_first_one(objects: Objects) -> None:
    files = CommitFiles(objects)
    first, second = (Commit.new("load", [shard(FIRST_BULK_SHARD + i)], now_ms=NOW) for i in (1, 2))

    assert await files.create(first) == first
    assert await files.create(second) == first
    assert await files.create(first) == first


async def test_a_commit_is_a_file_as_the_rfc_describes(in_memory: Objects) -> None:
    ending = CommittedShard(
        shard=FIRST_BULK_SHARD + 1,
        messages=2,
        next_sequence=2,
        bytes=7,
        expires_from=NOW + 60_000,
        expires_at=0,
    )
    commit = Commit.new("load", [shard(messages=3), ending], now_ms=NOW)

    await CommitFiles(in_memory).create(commit)

    data = await in_memory.read("commits/load.json")
    assert data is not None
    assert json.loads(data) == {
        "check": f"{zlib.crc32(data[:-20]):08x}",
        "job": "load",
        "holder": commit.holder,
        "committed_at": NOW,
        "shards": [
            # As an earlier release wrote it, and as this one does.
            {"shard": FIRST_BULK_SHARD, "messages": 3, "next_sequence": 3, "bytes": 10},
            {
                "shard": FIRST_BULK_SHARD + 1,
                "messages": 2,
                "next_sequence": 2,
                "bytes": 7,
                "expires_from": NOW + 60_000,
                "expires_at": 0,
            },
        ],
    }
    assert len(commit.holder) == 32


async def test_a_commit_whose_answer_was_lost_is_settled_by_reading_it_back(
    new_s3_root: NewRoot, s3_server: S3Server
) -> None:
    files = CommitFiles(Objects.open(new_s3_root(), StoreSettings()))
    commit = Commit.new("load", [shard()], now_ms=NOW)
    s3_server.drop_after(times=1, methods=["PUT"], path_contains="commits/load")

    assert await files.create(commit) == commit
    assert await files.read("load") == commit


async def test_a_commit_that_could_not_be_made_can_be_tried_again(
    new_s3_root: NewRoot, s3_server: S3Server
) -> None:
    root = new_s3_root()
    impatient = CommitFiles(Objects.open(root, StoreSettings(outage_timeout_ms=500)))
    commit = Commit.new("load", [shard()], now_ms=NOW)
    s3_server.fail(path_contains="commits/")

    with pytest.raises(StoreUnavailableError):
        await impatient.create(commit)
    s3_server.heal()

    assert await CommitFiles(Objects.open(root, StoreSettings())).create(commit) == commit


@pytest.mark.parametrize("job", ["", "a/b", "ä", "x" * 201, "a b", "../x"])
async def test_a_job_that_is_no_file_name_is_refused(in_memory: Objects, job: str) -> None:
    with pytest.raises(InvalidInputError, match="job"):
        Commit.new(job, [], now_ms=NOW)
    with pytest.raises(InvalidInputError, match="job"):
        await CommitFiles(in_memory).read(job)


def test_more_shards_than_one_batch_can_register_are_refused() -> None:
    shards = [shard(FIRST_BULK_SHARD + i) for i in range(MAX_COMMITTED_SHARDS + 1)]

    with pytest.raises(InvalidInputError, match="fewer partitions"):
        Commit.new("load", shards, now_ms=NOW)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"job":"load"}',
        b'{"job":"other","holder":"h","committed_at":1,"shards":[]}',
        b'{"job":"load","holder":"h","committed_at":1,"shards":[{"shard":1,"messages":1,'
        b'"next_sequence":1,"bytes":1}]}',
    ],
    ids=["nothing", "no object", "no shards", "another job", "a live shard"],
)
async def test_a_damaged_commit_is_named(in_memory: Objects, content: bytes) -> None:
    await in_memory.create("commits/load.json", content)

    with pytest.raises(CorruptStoreError, match=r"load\.json"):
        await CommitFiles(in_memory).read("load")


async def test_what_is_no_commit_is_not_listed(in_memory: Objects) -> None:
    await in_memory.create("commits/notes.txt", b"")
    await in_memory.create("commits/sub/load.json", b"")

    assert await CommitFiles(in_memory).jobs() == []


async def test_who_finds_no_number_for_a_bulk_shard_is_told_what_to_do(
    in_memory: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "_FIRST_CHOICE", 1)
    monkeypatch.setattr(shard_files, "_LAST_CHOICE", 1)
    files = ShardFiles(in_memory)
    await files.reserve_bulk(job="one", now_ms=0)

    with pytest.raises(
        StoreUnavailableError, match=r"no number is left .* two: .*57,600.*coalesce"
    ):
        await files.reserve_bulk(job="two", now_ms=0)
