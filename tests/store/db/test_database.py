"""The store seam on every kind of store."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import slatedb.uniffi as slatedb

from odq_encodings import SeqBlock
from opendata_queue import (
    ClosedError,
    CorruptStoreError,
    FencedError,
    InvalidInputError,
    StoreAccessError,
    StoreSettings,
    StoreUnavailableError,
)
from opendata_queue.store import Database, DatabaseReader, Objects, Rows
from opendata_queue.store.db import database as database_module
from opendata_queue.store.db import reads as reads_module
from opendata_queue.store.db.replay_length import FLUSHED_AFTER
from opendata_queue.store.errors import translated
from opendata_queue.store.files.durable import TreeSync
from opendata_queue.store.journal.journal import LeftJournals
from opendata_queue.store.rows.writer import write_rows
from tests.conftest import NewRoot
from tests.support.s3_server import S3Server

SETTINGS = StoreSettings()


def rows_of(*pairs: tuple[bytes, bytes]) -> Rows:
    rows = Rows()
    rows.put_many(pairs)
    return rows


async def collect(database: Database | DatabaseReader, start: bytes, end: bytes) -> list[bytes]:
    return [key async for chunk in database.scan(start, end) for key, _ in chunk]


async def test_of_many_that_make_a_database_at_once_none_takes_it_for_damaged(
    new_memory_root: NewRoot,
) -> None:
    for _ in range(5):
        objects = Objects.open(new_memory_root(), SETTINGS)
        opening = (Database.open(objects, "db") for _ in range(6))

        found = await asyncio.gather(*opening, return_exceptions=True)

        opened = [one for one in found if isinstance(one, Database)]
        assert all(isinstance(one, FencedError) for one in found if one not in opened)
        assert opened
        for one in opened:
            await one.close()


async def test_committed_rows_are_there_after_a_reopen(root: str) -> None:
    objects = Objects.open(root, SETTINGS)
    database = await Database.open(objects, "db")
    await database.commit(rows_of((b"a", b"1"), (b"b", b"2")))
    deleted = Rows()
    deleted.delete(b"b")
    await database.commit(deleted)
    await database.close()

    again = await Database.open(objects, "db")

    assert await again.get_many([b"b", b"a", b"missing"]) == [None, b"1", None]
    await again.close()


async def test_a_scan_keeps_to_its_bounds_its_limit_and_its_chunks(root: str) -> None:
    database = await Database.open(Objects.open(root, SETTINGS), "db")
    keys = [number.to_bytes(2, "big") for number in range(2_500)]
    await database.commit(rows_of(*((key, b"v") for key in keys)))

    sizes = [len(chunk) async for chunk in database.scan(keys[10], keys[2_400])]
    limited = [len(chunk) async for chunk in database.scan(keys[0], keys[-1], limit=1_200)]

    assert await collect(database, keys[10], keys[2_400]) == keys[10:2_400]
    assert sizes == [1_000, 1_000, 390]
    assert limited == [1_000, 200]
    assert await collect(database, keys[5], keys[5]) == []
    await database.close()


async def test_a_reader_sees_what_is_durable(root: str) -> None:
    objects = Objects.open(root, SETTINGS)
    database = await Database.open(objects, "db")
    await database.commit(rows_of((b"a", b"1")))

    reader = await DatabaseReader.open(objects, "db")

    assert await reader.get(b"a") == b"1"
    assert await collect(reader, b"a", b"z") == [b"a"]
    await reader.close()
    await database.close()


async def test_a_second_writer_fences_the_first(root: str) -> None:
    objects = Objects.open(root, SETTINGS)
    first = await Database.open(objects, "db")
    await first.commit(rows_of((b"a", b"1")))

    second = await Database.open(objects, "db")

    with pytest.raises(FencedError, match="another process has taken over"):
        await first.commit(rows_of((b"a", b"2")))
    assert await second.get(b"a") == b"1"
    await second.close()
    await first.close()


async def test_a_closed_database_says_so_and_closes_twice(root: str) -> None:
    database = await Database.open(Objects.open(root, SETTINGS), "db")
    await database.close()
    await database.close()

    with pytest.raises(ClosedError, match="it is closed"):
        await database.get(b"a")


async def test_garbage_is_collected_while_the_database_is_open(tmp_path: Path) -> None:
    settings = StoreSettings(garbage_interval_ms=1, garbage_age_ms=0)
    database = await Database.open(Objects.open(f"file://{tmp_path}", settings), "db")
    wal = tmp_path / "db" / "wal"
    for number in range(20):
        await database.commit(rows_of((b"%d" % number, b"v")))
    # SlateDB drops a WAL file when its rows are in an SST and a later one exists.
    await database.flush_to_files()
    await database.commit(rows_of((b"last", b"v")))

    async with asyncio.timeout(120):
        while len(os.listdir(wal)) > 10:
            await asyncio.sleep(0)

    assert await database.get(b"7") == b"v"
    await database.close()


async def test_what_replaces_garbage_is_synced_before_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for owner, name in (
        (slatedb.Admin, "read_manifest"),
        (slatedb.Admin, "run_gc_once"),
        (TreeSync, "sync_new_files"),
    ):
        note_calls(monkeypatch, owner, name, steps)
    settings = StoreSettings(garbage_interval_ms=1)
    database = await Database.open(Objects.open(f"file://{tmp_path}", settings), "db")
    steps.clear()

    async with asyncio.timeout(120):
        while "sync_new_files" not in steps[3:]:
            await asyncio.sleep(0)

    assert steps[:5] == [
        "read_manifest", "sync_new_files", "read_manifest", "run_gc_once", "sync_new_files"
    ]  # fmt: skip
    await database.close()


def note_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, steps: list[str]) -> None:
    real = getattr(owner, name)

    def noted(*arguments: object) -> object:
        steps.append(name)
        return real(*arguments)

    monkeypatch.setattr(owner, name, noted)


@pytest.mark.parametrize("folder", ["manifest", "compactions"])
async def test_a_newest_file_that_a_power_cut_has_emptied_is_set_aside(
    tmp_path: Path, folder: str
) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    database = await Database.open(objects, "db")
    await database.commit(rows_of((b"a", b"1")))
    await database.close()
    newest = max((tmp_path / "db" / folder).iterdir())
    newest.write_bytes(b"")

    again = await Database.open(objects, "db")

    assert await again.get(b"a") == b"1"
    assert (tmp_path / "db" / "torn" / newest.name).exists()
    await again.close()


async def test_garbage_that_can_not_be_collected_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = 0

    def fail(_: TreeSync) -> None:
        nonlocal failures
        failures += 1
        raise OSError("a disk that hiccups")

    settings = StoreSettings(garbage_interval_ms=1)
    database = await Database.open(Objects.open(f"file://{tmp_path}", settings), "db")
    monkeypatch.setattr(TreeSync, "sync_new_files", fail)
    async with asyncio.timeout(120):
        while failures < 2:
            await asyncio.sleep(0)

    await database.commit(rows_of((b"a", b"1")))
    await database.close()

    assert "a disk that hiccups" in caplog.text


async def test_a_disk_without_room_for_a_commit_is_named(tmp_path: Path) -> None:
    database = await Database.open(Objects.open(f"file://{tmp_path}", SETTINGS), "db")
    database._outage_timeout_ms = 100  # SlateDB would try for ever

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(StoreUnavailableError, match=r"no answer .*; could not write .*large"):
            await database.commit(rows_of((b"a", bytes(2_000_000))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    database._outage_timeout_ms = SETTINGS.outage_timeout_ms
    await database.close()


async def test_rows_that_are_not_durable_are_not_shown(root: str) -> None:
    database = await Database.open(Objects.open(root, SETTINGS), "db")
    await write_rows(database._db, rows_of((b"a", b"1")))

    assert await database.get(b"a") is None
    assert await collect(database, b"a", b"z") == []

    await database.commit(rows_of((b"b", b"2")))
    assert await database.get(b"a") == b"1"
    await database.close()


async def test_a_disk_cache_serves_reads_of_s3(new_s3_root: NewRoot, tmp_path: Path) -> None:
    settings = StoreSettings(disk_cache_folder=tmp_path / "cache", block_cache_bytes=0)
    objects = Objects.open(new_s3_root(), settings)
    database = await Database.open(objects, "db")
    await database.commit(rows_of((b"a", b"1")))
    await database.close()
    again = await Database.open(objects, "db")

    assert await again.get(b"a") == b"1"

    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    await again.close()


async def test_closing_at_the_same_time_is_closing_once(root: str) -> None:
    database = await Database.open(Objects.open(root, SETTINGS), "db")

    await asyncio.gather(database.close(), database.close())

    with pytest.raises(ClosedError):
        await database.get(b"a")


@pytest.mark.parametrize(
    "bad", [{"block_cache_bytes": -1}, {"outage_timeout_ms": 0}, {"memtable_bytes": 0}]
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match=r"_bytes|timeouts"):
        StoreSettings(**bad)  # type: ignore[arg-type]


async def test_a_value_that_can_not_be_decoded_is_named_by_its_key(root: str) -> None:
    database = await Database.open(Objects.open(root, SETTINGS), "db")

    with pytest.raises(CorruptStoreError, match=r"SeqBlock\.base_sequence .*\(key 0102\)"):
        database.decode(SeqBlock.decode, b"\x01\x02", b"short")
    await database.close()


async def test_a_database_that_is_not_there_can_not_be_read(root: str) -> None:
    with pytest.raises(StoreAccessError, match=r"could not read .*/nothing: there is no database"):
        await DatabaseReader.open(Objects.open(root, SETTINGS), "nothing")


async def test_a_damaged_manifest_is_reported_not_guessed(tmp_path: Path) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    await (await Database.open(objects, "db")).close()
    for manifest in (tmp_path / "db" / "manifest").iterdir():
        manifest.write_bytes(b"junk")

    with pytest.raises(CorruptStoreError, match=r"could not open file:///.*/db"):
        await Database.open(objects, "db")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    third = len(content) // 3
    content[third : third + 50] = bytes(0xFF ^ byte for byte in content[third : third + 50])
    path.write_bytes(content)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


async def write_file(objects: Objects, folder: Path) -> Path:
    """The one SST of a database that was closed; the WAL of the same rows was collected."""
    database = await Database.open(objects, "db")
    await database.commit(
        rows_of(*((b"%04d" % number, os.urandom(500)) for number in range(1_000)))
    )
    await database.close()
    for wal in (folder / "db" / "wal").iterdir():
        wal.unlink()
    (file,) = (folder / "db" / "compacted").iterdir()
    return file


@pytest.mark.parametrize("harm", [damage, halve])
async def test_a_newest_manifest_that_is_damaged_is_corrupt(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    await write_file(objects, tmp_path)
    harm(max((tmp_path / "db" / "manifest").iterdir()))

    with pytest.raises(CorruptStoreError, match=r"could not open file:///.*/db"):
        await Database.open(objects, "db")
    with pytest.raises(CorruptStoreError, match=r"could not read file:///.*/db"):
        await DatabaseReader.open(objects, "db")


@pytest.mark.parametrize("harm", [empty, halve])
async def test_a_file_that_is_cut_off_is_corrupt_and_named(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    file = await write_file(objects, tmp_path)
    database = await Database.open(objects, "db")
    harm(file)
    reader = await DatabaseReader.open(objects, "db")

    for reads in (database, reader):
        reads._outage_timeout_ms = 50  # SlateDB would ask for ever
        cut_off = rf"{file} is cut off; what may be lost: .*; restore it .* \(key 30303037\)"
        with pytest.raises(CorruptStoreError, match=cut_off):
            await reads.get(b"0007")
        with pytest.raises(CorruptStoreError, match=f"{file} is cut off"):
            await anext(aiter(reads.scan(b"0", b"9", limit=10)))
        with pytest.raises(CorruptStoreError, match=f"{file} is cut off"):
            await anext(aiter(reads.scan(b"0", b"9")))
        reads._outage_timeout_ms = SETTINGS.outage_timeout_ms
    await reader.close()
    await database.close()


@pytest.mark.parametrize("harm", [empty, halve, Path.unlink])
async def test_a_file_that_is_missing_or_cut_off_is_named_when_it_is_opened(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    file = await write_file(objects, tmp_path)
    harm(file)

    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=f"{file.name} is missing or cut off"):
            await Database.open(objects, "db")


async def test_where_a_file_is_cut_off_no_second_read_waits_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    file = await write_file(objects, tmp_path)
    database = await Database.open(objects, "db")
    halve(file)
    database._outage_timeout_ms = 50
    with pytest.raises(CorruptStoreError):
        await database.get(b"0007")
    database._outage_timeout_ms = SETTINGS.outage_timeout_ms
    monkeypatch.setattr(reads_module, "_DAMAGED_TIMEOUT_MS", 60)

    with pytest.raises(CorruptStoreError) as caught:
        await database.get(b"0008")

    assert "no answer within 60 ms" in str(caught.value.__cause__)
    await database.close()


async def test_files_that_are_whole_are_not_blamed_for_a_slow_store(tmp_path: Path) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    await write_file(objects, tmp_path)
    database = await Database.open(objects, "db")
    database._outage_timeout_ms = 0

    with pytest.raises(StoreUnavailableError, match="no answer within 0 ms"):
        await database.get(b"0007")

    database._outage_timeout_ms = SETTINGS.outage_timeout_ms
    await database.close()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (slatedb.Error.Unavailable("timed out"), StoreUnavailableError),
        (slatedb.Error.Unavailable("NoSuchBucket"), StoreAccessError),
        (slatedb.Error.Invalid("bad"), InvalidInputError),
        (slatedb.Error.Data("bad checksum"), CorruptStoreError),
        (slatedb.Error.Internal("panic"), StoreUnavailableError),
        (slatedb.Error.Closed(slatedb.CloseReason.FENCED, "x"), FencedError),
        (slatedb.Error.Closed(slatedb.CloseReason.CLEAN, "x"), ClosedError),
        (slatedb.Error.Closed(slatedb.CloseReason.PANIC, "x"), StoreUnavailableError),
        (PermissionError(13, "Permission denied"), StoreAccessError),
    ],
)
def test_their_errors_become_ours(theirs: Exception, ours: type[Exception]) -> None:
    with pytest.raises(ours, match="could not try"), translated("try"):
        raise theirs


def test_a_machine_that_may_not_ask_for_a_role_has_no_credentials() -> None:
    said = "GET http://169.254.169.254/latest/api/token: 403 Forbidden"
    with pytest.raises(StoreAccessError, match="no credentials were found"), translated("try"):
        raise slatedb.Error.Unavailable(said)


@pytest.mark.parametrize("what", ["WalSync", "take_over"])
async def test_what_a_cancelled_open_has_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    await (await Database.open(objects, "db", journaled=True)).close()
    owner = database_module if what == "WalSync" else LeftJournals
    real = getattr(owner, what)
    loop = asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), threading.Event()
    closed: list[str] = []
    all_closed = asyncio.Event()

    def made(*args: Any, **options: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(60)
        return Closing(real(*args, **options))

    class Closing:
        def __init__(self, thing: Any) -> None:
            self.thing = thing

        def close(self) -> None:
            self.thing.close()
            closed.append(type(self.thing).__name__)
            all_closed.set()

    monkeypatch.setattr(owner, what, made)
    opening = asyncio.create_task(Database.open(objects, "db", journaled=True))
    await begun.wait()
    opening.cancel()
    await asyncio.wait([opening])
    go_on.set()

    async with asyncio.timeout(60):
        await all_closed.wait()
    assert opening.cancelled()
    assert closed == ["WalSync" if what == "WalSync" else "Journal"]


async def test_an_open_does_not_wait_for_a_compaction(tmp_path: Path) -> None:
    # Of one that was killed, a compaction is under way for long after its end: none comes here.
    quiet = StoreSettings(
        memtable_bytes=64 * 1024, compaction_poll_ms=600_000, fsync=False, outage_timeout_ms=5_000
    )
    url = f"file://{tmp_path}/root"
    killed = await Database.open(Objects.open(url, quiet), "db")
    for number in range(32):  # as many files as there may be
        await killed.commit(rows_of((b"%d" % number, b"x" * 1_000)))
        await killed.flush_to_files()
    for number in range(7):
        await killed.commit(rows_of((b"w%d" % number, os.urandom(60 * 1024))))

    # And more to replay than what may be in memory.
    small = replace(quiet, memtable_bytes=32 * 1024)
    again = await Database.open(Objects.open(url, small), "db")

    assert len(await again.get(b"w6") or b"") == 60 * 1024
    await again.close()


async def heads_and_gets_of_an_open(server: S3Server, url: str) -> tuple[Database, int]:
    server.reset_requests(path_contains=url.removeprefix("s3://") + "/")
    database = await Database.open(Objects.open(url, SETTINGS), "db")
    requests = server.requests()
    return database, requests["HEAD"] + requests["GET"]


async def test_what_an_open_on_s3_reads_does_not_grow_with_the_commits_since_a_kill(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    url = new_s3_root()
    commits = 4_000 if os.environ.get("ODQ_EXAMPLES") == "explore" else 300
    killed = await Database.open(Objects.open(url, SETTINGS), "db")
    for number in range(commits):
        await killed.commit(rows_of((b"%d" % number, b"x")))
    while killed._shortening is not None:
        await asyncio.sleep(0)

    again, requests = await heads_and_gets_of_an_open(s3_environment, url)

    # Two for each WAL object, of which there are four times as many where files come too fast.
    assert requests < 2 * FLUSHED_AFTER * (1 if commits < 1_000 else 4) + 100
    assert await again.get(b"%d" % (commits - 1)) == b"x"
    await again.close()


async def test_what_an_open_on_s3_reads_does_not_grow_with_the_number_of_kills(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    url = new_s3_root()
    killed: list[Database] = []
    read: list[int] = []
    for number in range(6):
        database, requests = await heads_and_gets_of_an_open(s3_environment, url)
        read.append(requests)
        killed.append(database)
        for other in range(FLUSHED_AFTER // 2):
            await database.commit(rows_of((b"%d-%d" % (number, other), b"x")))
        while database._shortening is not None:
            await asyncio.sleep(0)

    assert max(read) < 3 * FLUSHED_AFTER + 60
    assert len(await collect(killed[-1], b"0", b"9")) == 6 * FLUSHED_AFTER // 2


async def test_a_commit_that_may_not_be_synced_yet_is_not_said_to_be_durable(
    tmp_path: Path,
) -> None:
    settings = StoreSettings(journal_ms=0)
    database = await Database.open(Objects.open(tmp_path.as_uri(), settings), "db")
    await database.commit(rows_of((b"a", b"1")))
    assert database.durable_sequence() == 1
    said: list[int] = []

    await database.commit(rows_of((b"b", b"2")), on_start=lambda: said.append(ask(database)))

    assert said == [1]
    assert database._durable == 2  # noted when it was synced: under load there may be no pause
    await database.close()
    assert database.durable_sequence() == 2


def ask(database: Database) -> int:
    """Asks after SlateDB has made the file: whatever it says by then, no sync is known of."""
    while database._db.status().durable_seq < 2:
        time.sleep(0.001)  # SlateDB works in threads of its own
    return database.durable_sequence()


@pytest.mark.parametrize("settings", [StoreSettings(fsync=False, journal_ms=0), StoreSettings()])
async def test_nothing_is_said_to_be_durable_without_a_sync_or_with_a_journal(
    tmp_path: Path, settings: StoreSettings
) -> None:
    objects = Objects.open(tmp_path.as_uri(), settings)
    database = await Database.open(objects, "db", journaled=True)
    await database.commit(rows_of((b"a", b"1")))

    assert database.durable_sequence() == 0

    await database.close()
