"""Rows of a scan: the fast way and the binding's own give the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_queue.store import Database, Objects, Rows, StoreSettings
from opendata_queue.store.db.reads import SCAN_BYTES
from opendata_queue.store.rows import scan as batch_reader
from opendata_queue.store.rows.scan import Row, parse_rows
from opendata_queue.store.rows.writer import Tier


def packed(key: bytes, value: bytes, expires_at: int | None = None) -> bytes:
    tail = b"\x00" if expires_at is None else b"\x01" + struct.pack(">q", expires_at)
    return (
        struct.pack(">i", len(key)) + key + struct.pack(">i", len(value)) + value
        + struct.pack(">Qq", 7, 8) + tail
    )  # fmt: skip


def test_rows_are_taken_out_of_the_bytes_of_the_binding() -> None:
    rows = packed(b"a", b"one") + packed(b"bb", b"", expires_at=9) + packed(b"c", bytes(70_000))

    assert parse_rows(struct.pack(">i", 3) + rows) == [
        (b"a", b"one"),
        (b"bb", b""),
        (b"c", bytes(70_000)),
    ]
    assert parse_rows(struct.pack(">i", 0)) == []


# Few lengths, so that rows are often alike, and often only seem to be.
@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=3), st.binary(max_size=3), st.none() | st.just(9)),
        max_size=8,
    )
)
def test_rows_are_the_same_whether_or_not_they_are_alike(
    rows: list[tuple[bytes, bytes, int | None]],
) -> None:
    data = struct.pack(">i", len(rows)) + b"".join(packed(*row) for row in rows)

    assert parse_rows(data) == [(key, value) for key, value, _ in rows]


def test_bytes_that_are_left_over_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="3 bytes are left"):
        parse_rows(struct.pack(">i", 1) + packed(b"a", b"b") + b"???")


async def scanned(database: Database, limit: int | None) -> list[list[Row]]:
    return [chunk async for chunk in database.scan(b"\x00", b"\xff", limit=limit)]


@pytest.mark.parametrize("limit", [None, 1, 999, 1_000, 1_001, 2_500, 5_000])
async def test_both_ways_return_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    database = await Database.open(Objects.open("memory:///", StoreSettings()), "d")
    rows = Rows()
    for number in range(2_500):
        ttl_ms = 3_600_000 if number % 3 else None
        rows.put(b"k%05d" % number, bytes(number % 300), ttl_ms=ttl_ms)
    await database.commit(rows)

    fast = await scanned(database, limit)
    monkeypatch.setattr(batch_reader, "_reader", lambda: batch_reader._public_reader)
    public = await scanned(database, limit)
    await database.close()

    assert fast == public
    assert sum(map(len, fast)) == min(2_500, limit or 2_500)
    assert {type(part) for chunk in fast for row in chunk for part in row} == {bytes}


# --- rows that are large --------------------------------------------------------------------------

WAYS = ["the helper", "the binding", "the public API"]
LARGE = 1024 * 1024
MOST_ROWS_TOO_MANY = 16


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way in which rows are read; the first one needs the C helper."""
    if request.param != "the helper":
        monkeypatch.setattr(batch_reader, "active_tier", lambda: Tier.public)
        reader = batch_reader._reader.__wrapped__()
        monkeypatch.setattr(batch_reader, "_reader", lambda: reader)
        scan = batch_reader._short_scan.__wrapped__()
        monkeypatch.setattr(batch_reader, "_short_scan", lambda: scan)
    if request.param == "the public API":
        monkeypatch.setattr(batch_reader, "_reader", lambda: batch_reader._public_reader)
    return str(request.param)


async def database_of(sizes_bytes: list[int]) -> Database:
    database = await Database.open(Objects.open("memory:///", StoreSettings()), "d")
    for number, size_bytes in enumerate(sizes_bytes):
        rows = Rows()
        rows.put(b"k%05d" % number, number.to_bytes(4, "big") * (size_bytes // 4))
        await database.commit(rows)
    return database


def bytes_of(chunk: list[Row]) -> int:
    return sum(len(key) + len(value) for key, value in chunk)


async def packed_chunks(database: Database, limit: int | None) -> list[list[Row]]:
    scan = database.scan_packed(b"\x00", b"\xff", limit=limit)
    return [chunk.rows() async for chunk in scan if len(chunk)]


@pytest.mark.parametrize("scan", [scanned, packed_chunks])
@pytest.mark.parametrize("limit", [None, 10, 22, 5_000])
async def test_large_rows_come_in_chunks_of_bounded_bytes(
    way: str,
    scan: Callable[[Database, int | None], Awaitable[list[list[Row]]]],
    limit: int | None,
) -> None:
    database = await database_of([LARGE] * 22)

    chunks = await scan(database, limit)
    await database.close()

    assert [len(chunk) for chunk in chunks[:-1]] == [4] * (len(chunks) - 1)
    assert max(map(bytes_of, chunks)) < SCAN_BYTES + LARGE
    rows = [row for chunk in chunks for row in chunk]
    assert [key for key, _ in rows] == [b"k%05d" % number for number in range(limit or 22)][:22]
    assert all(value == int(key[1:]).to_bytes(4, "big") * (LARGE // 4) for key, value in rows)


@pytest.mark.parametrize("limit", [None, 4_000])
async def test_a_chunk_ends_soon_when_large_rows_follow_small_ones(
    way: str, limit: int | None
) -> None:
    sizes_bytes = [8] * 100 + [LARGE] * 20 + [8] * 100
    database = await database_of(sizes_bytes)

    for chunks in (await scanned(database, limit), await packed_chunks(database, limit)):
        assert max(map(bytes_of, chunks)) < SCAN_BYTES + MOST_ROWS_TOO_MANY * (LARGE + 6)
        assert [len(value) for chunk in chunks for _, value in chunk] == sizes_bytes
    await database.close()


async def test_a_scan_that_is_full_by_bytes_goes_on_with_the_state_that_it_began_with(
    way: str,
) -> None:
    database = await database_of([LARGE] * 9)
    scan = database.scan(b"\x00", b"\xff", limit=10)
    found = await anext(scan)

    later = Rows()
    later.delete(b"k00008")
    later.put(b"k00009", b"new")
    await database.commit(later)
    found += [row async for chunk in scan for row in chunk]
    await database.close()

    assert [key for key, _ in found] == [b"k%05d" % number for number in range(9)]


async def test_a_scan_that_ends_where_a_chunk_is_full_has_no_empty_chunk(way: str) -> None:
    database = await database_of([LARGE] * 8)

    for limit in (None, 8, 100):
        assert [len(chunk) for chunk in await scanned(database, limit)] == [4, 4]
    await database.close()


async def test_another_binding_is_read_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_reader, "NEXT_BATCH_CHECKSUM", 1)

    with caplog.at_level(logging.WARNING):
        reader = batch_reader._reader.__wrapped__()

    assert reader is batch_reader._public_reader
    assert "the API checksum of next_batch is" in caplog.text


# --- scans that get no answer --------------------------------------------------------------------

MORE_THAN_THERE_ARE_THREADS = 70
HANG_S = 60


@contextlib.asynccontextmanager
async def stuck_database(folder: Path) -> AsyncIterator[Database]:
    """One whose rows are in a file that was cut off, which SlateDB tries to read for ever."""
    objects = Objects.open(f"file://{folder}", StoreSettings())
    first = await Database.open(objects, "stuck")
    rows = Rows()
    rows.put_many([(b"k%05d" % number, os.urandom(500)) for number in range(1_000)])
    await first.commit(rows)
    await first.close()
    database = await Database.open(objects, "stuck")
    (file,) = (folder / "stuck" / "compacted").iterdir()
    os.truncate(file, file.stat().st_size // 2)  # an open would find it
    yield database
    await database.close()


async def healthy_database() -> Database:
    database = await Database.open(Objects.open("memory:///", StoreSettings()), "healthy")
    await commit_one(database)
    return database


async def commit_one(database: Database) -> None:
    rows = Rows()
    rows.put(b"k", b"v")
    await database.commit(rows)


def begin_scans(database: Database) -> list[asyncio.Task[list[list[Row]]]]:
    return [asyncio.create_task(scanned(database, 100)) for _ in range(MORE_THAN_THERE_ARE_THREADS)]


async def end(tasks: list[asyncio.Task[list[list[Row]]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_commits_do_not_wait_for_scans_that_get_no_answer(tmp_path: Path) -> None:
    async with stuck_database(tmp_path) as stuck:
        healthy = await healthy_database()
        scans = begin_scans(stuck)
        await asyncio.sleep(0)

        async with asyncio.timeout(HANG_S):
            await commit_one(stuck)
            await commit_one(healthy)

        await end(scans)
        await healthy.close()


async def test_scans_that_were_given_up_leave_their_threads_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stuck_database(tmp_path) as stuck:
        healthy = await healthy_database()
        for _ in range(2):
            scans = begin_scans(stuck)
            await asyncio.sleep(0)
            await end(scans)

        async with asyncio.timeout(HANG_S):
            assert await scanned(healthy, 10) == [[(b"k", b"v")]]

        await healthy.close()
    assert caplog.messages == []
