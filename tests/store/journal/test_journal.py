"""The journal of a database on files (RFC 0011).

A copy of the folder is what a process that is killed at that moment leaves behind.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import slatedb.uniffi as slatedb

from odq_encodings import JournalRecord, read_journal_records
from opendata_queue import (
    ClosedError,
    CorruptStoreError,
    Engine,
    FencedError,
    NewMessage,
    StoreSettings,
    StoreUnavailableError,
)
from opendata_queue.store import AnyRows, Database, DatabaseReader, Objects, Rows, Tier, has_journal
from opendata_queue.store.db import database as database_module
from opendata_queue.store.files import durable as durable_files
from opendata_queue.store.files.durable import WalSync, is_on_network
from opendata_queue.store.journal import journal as journal_module
from opendata_queue.store.journal import layout
from opendata_queue.store.journal import writes as journaled_writes
from opendata_queue.store.journal.contents import unflushed
from opendata_queue.store.journal.journal import Journal
from opendata_queue.store.native.jobs import NotWritten, not_written
from opendata_queue.store.rows.writer import commit_rows, write_rows

# Nothing is flushed in these tests that they do not ask for.
NEVER_MS = 24 * 3_600_000
SETTINGS = StoreSettings(journal_ms=NEVER_MS, fsync=False)
SYNCED = StoreSettings(journal_ms=NEVER_MS)


def objects_in(folder: Path, settings: StoreSettings = SETTINGS) -> Objects:
    return Objects.open(folder.as_uri(), settings)


async def opened(folder: Path, settings: StoreSettings = SETTINGS) -> Database:
    return await Database.open(objects_in(folder, settings), "db", journaled=True)


def rows_of(*pairs: tuple[bytes, bytes]) -> Rows:
    rows = Rows()
    rows.put_many(pairs)
    return rows


def journals(folder: Path) -> list[Path]:
    return sorted((folder / "db" / "journal").glob("*"))


def closing_records(folder: Path) -> list[bool]:
    """For each journal, whether it is nothing but a record that says that it was closed."""
    found = []
    for path in journals(folder):
        (record,) = read_journal_records(path.read_bytes())
        found.append(record.mark is not None and record.mark.is_closed)
        assert path.stat().st_size == record.size
    return found


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Path]:
    """Where copies go, each with a name of its own."""
    folder = tmp_path / "copies"
    folder.mkdir()
    return iter(folder / str(number) for number in count())


@pytest.mark.parametrize("settings", [SETTINGS, SYNCED], ids=["no fsync", "fsync"])
async def test_a_commit_survives_a_kill_before_slatedb_has_it(
    tmp_path: Path, settings: StoreSettings
) -> None:
    database = await opened(tmp_path / "root", settings)
    wal = set((tmp_path / "root" / "db" / "wal").iterdir())
    await database.commit(rows_of((b"a", b"1"), (b"b", b"2")))
    deleted = Rows()
    deleted.delete(b"a")
    deleted.put(b"c", b"3", ttl_ms=1_000_000)
    await database.commit(deleted)

    assert set((tmp_path / "root" / "db" / "wal").iterdir()) == wal, "SlateDB has written nothing"
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    after = await opened(tmp_path / "copy", settings)

    assert await after.get_many([b"a", b"b", b"c"]) == [None, b"2", b"3"]
    assert [one.name for one in journals(tmp_path / "copy")] == [f"{2:020}.journal"]
    await after.close()
    await database.close()


@pytest.mark.parametrize("tier", Tier)
async def test_what_is_durable_can_be_read_at_once(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "active_tier", lambda: tier)
    database = await opened(tmp_path)

    for number in range(50):
        await database.commit(rows_of((b"%02d" % number, b"v")))
        reads = (
            database.get(b"%02d" % number),
            database.last(b"00", b"99"),
            _scanned(database),
        )
        one, last, all_of_them = await asyncio.gather(*reads)
        assert one == b"v"
        assert last == (b"%02d" % number, b"v")
        assert len(all_of_them) == number + 1
        snapshot = await database.snapshot()
        assert await snapshot.get(b"%02d" % number) == b"v"
    await database.close()


async def _scanned(database: Database) -> list[bytes]:
    return [key async for chunk in database.scan(b"00", b"99") for key, _ in chunk]


async def test_a_reader_that_is_cancelled_does_not_stop_the_write_that_it_waits_for(
    tmp_path: Path,
) -> None:
    database = await opened(tmp_path)
    await database.commit(rows_of((b"a", b"1")))

    reading = asyncio.create_task(database.get(b"a"))
    await asyncio.sleep(0)
    reading.cancel()
    await database.commit(rows_of((b"a", b"2")))

    assert await database.get(b"a") == b"2"
    await database.close()


@pytest.mark.parametrize("leave_no_trace", [False, True])
async def test_a_reader_shows_all_that_was_durable_when_it_was_opened(
    tmp_path: Path, leave_no_trace: bool, caplog: pytest.LogCaptureFixture
) -> None:
    database = await opened(tmp_path, StoreSettings(fsync=False))
    for number in range(20):
        await database.commit(rows_of((b"a", b"%d" % number)))
        reader = await DatabaseReader.open(
            objects_in(tmp_path), "db", leave_no_trace=leave_no_trace
        )
        assert await reader.get(b"a") == b"%d" % number
        await reader.close()
    assert not caplog.records
    await database.close()


async def test_a_reader_does_not_wait_for_an_owner_that_is_gone_and_says_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = await opened(tmp_path / "root")
    await database.commit(rows_of((b"a", b"1")))
    await database.show_others()
    await database.commit(rows_of((b"a", b"2")))
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    await database.close()

    reader = await DatabaseReader.open(objects_in(tmp_path / "copy", StoreSettings()), "db")

    assert await reader.get(b"a") == b"1"
    assert "the last commits of" in caplog.text
    assert "are in its journal" in caplog.text
    await reader.close()


async def test_a_commit_is_flushed_without_being_asked(tmp_path: Path) -> None:
    database = await opened(tmp_path, StoreSettings(journal_ms=1, fsync=False))
    await database.commit(rows_of((b"a", b"1")))
    reader = await DatabaseReader.open(objects_in(tmp_path), "db", poll_interval_ms=1)
    async with asyncio.timeout(30):
        while await reader.get(b"a") is None:
            await asyncio.sleep(0)
    await reader.close()
    await database.close()


async def test_a_clean_close_leaves_a_record_that_says_so(tmp_path: Path) -> None:
    database = await opened(tmp_path)
    await database.commit(rows_of((b"a", b"1")))
    assert len(journals(tmp_path)) == 1
    await database.close()

    assert closing_records(tmp_path) == [True]
    assert not has_journal(objects_in(tmp_path), "db")
    with pytest.raises(ClosedError, match="it is closed"):
        await database.commit(rows_of((b"a", b"2")))
    reader = await DatabaseReader.open(objects_in(tmp_path), "db")
    assert await reader.get(b"a") == b"1"
    await reader.close()


@pytest.mark.parametrize("tier", [Tier.compiled, Tier.public])
async def test_who_is_replaced_can_acknowledge_nothing_and_loses_nothing(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "active_tier", lambda: tier)
    first = await opened(tmp_path)
    await first.commit(rows_of((b"a", b"1")))

    second = await opened(tmp_path)

    with pytest.raises(FencedError, match="another process has taken over"):
        await first.commit(rows_of((b"a", b"2")))
    with pytest.raises(FencedError):
        await first.commit(rows_of((b"a", b"3")))
    assert await second.get(b"a") == b"1"
    await second.commit(rows_of((b"b", b"1")))
    await first.close()
    assert await second.get_many([b"a", b"b"]) == [b"1", b"1"]
    await second.close()


@pytest.mark.parametrize("tier", [Tier.compiled, Tier.public])
async def test_an_owner_finds_out_that_it_was_replaced_by_one_that_is_gone_too(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "active_tier", lambda: tier)
    first = await opened(tmp_path)
    await first.commit(rows_of((b"a", b"1")))
    second = await opened(tmp_path)
    await second.commit(rows_of((b"a", b"2")))
    third = await opened(tmp_path)
    await third.close()
    assert [one.name for one in journals(tmp_path)] == [f"{3:020}.journal"]

    with pytest.raises(FencedError):
        await first.commit(rows_of((b"a", b"3")))

    fourth = await opened(tmp_path)
    assert await fourth.get(b"a") == b"2"
    for database in (first, second, fourth):
        await database.close()


async def test_a_journal_is_brought_in_by_an_owner_that_has_none(tmp_path: Path) -> None:
    first = await opened(tmp_path / "root")
    await first.commit(rows_of((b"a", b"1")))
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    await first.close()

    second = await Database.open(objects_in(tmp_path / "copy"), "db")

    assert await second.get(b"a") == b"1"
    assert closing_records(tmp_path / "copy") == [True]
    await second.close()


async def test_who_is_killed_while_bringing_in_a_journal_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await opened(tmp_path / "root")
    await first.commit(rows_of((b"a", b"1")))
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    await first.close()
    removed: list[Path] = []

    def killed(left: journal_module.LeftJournals, *, sync: bool) -> None:
        # SlateDB has everything by now, the journals are still there, and so is the new one.
        removed.extend(left.folder.iterdir())
        shutil.copytree(tmp_path / "copy", tmp_path / "again")

    with monkeypatch.context() as patched:
        patched.setattr(journal_module.LeftJournals, "remove", killed)
        second = await opened(tmp_path / "copy")
        await second.close()
    assert len(removed) == 2

    third = await opened(tmp_path / "again")
    assert await third.get(b"a") == b"1"
    assert [one.name for one in journals(tmp_path / "again")] == [f"{3:020}.journal"]
    await third.close()


async def test_a_large_commit_is_not_undone_by_what_is_left_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_RECORD_BYTES", 100)
    database = await opened(tmp_path / "root")
    await database.commit(rows_of((b"a", b"old"), (b"b", b"1")))

    await database.commit(rows_of((b"a", b"new" * 100)))

    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    after = await opened(tmp_path / "copy")
    assert await after.get_many([b"a", b"b"]) == [b"new" * 100, b"1"]
    await after.close()
    await database.close()


async def test_a_journal_that_is_full_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 1_000)
    database = await opened(tmp_path / "root")
    for number in range(100):
        await database.commit(rows_of((b"%03d" % number, b"v" * 50)))

    (file,) = journals(tmp_path / "root")
    assert file.stat().st_size <= 2_000
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    after = await opened(tmp_path / "copy")
    assert len([key async for chunk in after.scan(b"0", b"9") for key in chunk]) == 100
    await after.close()
    await database.close()


@pytest.mark.parametrize("seed", range(4))
async def test_a_kill_at_any_moment_loses_nothing_and_undoes_nothing(
    tmp_path: Path, copies: Iterator[Path], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Commits of all sizes, flushes and reads by chance, in regions that are soon full."""
    monkeypatch.setattr(layout, "REGION_BYTES", 1_500)
    monkeypatch.setattr(layout, "MAX_RECORD_BYTES", 600)
    chance = random.Random(seed)
    expected: dict[bytes, bytes] = {}
    folder = next(copies)
    database = await opened(folder)
    for number in range(150):
        rows = Rows()
        for key in chance.sample(range(8), chance.randint(1, 4)):
            name = b"%d" % key
            if chance.random() < 0.2:
                rows.delete(name)
                expected.pop(name, None)
            else:
                expected[name] = b"%d:" % number + b"x" * chance.choice((0, 10, 100, 300, 800))
                rows.put(name, expected[name])
        await database.commit(rows)
        if chance.random() < 0.2:
            await database.show_others()
        if chance.random() < 0.2:
            assert await _contents(database) == expected
        if chance.random() < 0.1:
            killed, folder = folder, next(copies)
            shutil.copytree(killed, folder)
            await database.close()
            database = await opened(folder)
            assert await _contents(database) == expected
    await database.close()


async def _contents(database: Database) -> dict[bytes, bytes]:
    return dict([row async for chunk in database.scan(b"0", b"9") for row in chunk])


def records_of(folder: Path) -> tuple[bytes, list[int]]:
    """The bytes of the one journal, and where its records end."""
    (file,) = journals(folder)
    whole, ends = file.read_bytes(), [0]
    for record in read_journal_records(whole):
        ends.append(ends[-1] + len(record.encode()))
    return whole, ends


async def test_a_journal_of_which_the_last_records_were_not_written_gives_whole_commits_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 2_000)
    database = await opened(tmp_path / "root")
    for number in range(5):
        await database.commit(rows_of((b"n", b"%d" % number), (b"%d" % number, b"v")))
    whole, ends = records_of(tmp_path / "root")
    before = len(ends) - 1 - 5  # without rows: of the open

    for size in range(ends[before], ends[-1] + 1):
        cut = tmp_path / "cut"
        cut.write_bytes(whole[:size] + bytes(len(whole) - size))
        found = [one.rows for one in unflushed(cut) if one.rows]
        assert len(found) == sum(end <= size for end in ends[before + 1 :])
    await database.close()


async def test_a_journal_that_is_cut_anywhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 2_000)
    database = await opened(tmp_path / "root")
    for number in range(5):
        await database.commit(rows_of((b"n", b"%d" % number), (b"%d" % number, b"v")))
    whole, ends = records_of(tmp_path / "root")

    for size in range(ends[1], len(whole), 7):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(CorruptStoreError, match=rf"cut has {size:,} bytes instead of 4,000"):
            unflushed(tmp_path / "cut")
    await database.close()


async def test_a_record_that_is_damaged_with_others_behind_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 2_000)
    database = await opened(tmp_path / "root")
    for number in range(5):
        await database.commit(rows_of((b"n", b"%d" % number), (b"%d" % number, b"v")))
    whole, ends = records_of(tmp_path / "root")

    for place in range(ends[1], ends[-2], 5):
        damaged = bytearray(whole)
        damaged[place] ^= 0x40
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(CorruptStoreError, match="damaged is damaged at byte"):
            unflushed(tmp_path / "damaged")
    await database.close()


@pytest.mark.parametrize("damage", ["deleted", "emptied", "zeroed"])
async def test_a_journal_that_is_gone_is_missed_by_the_database(
    tmp_path: Path, damage: str
) -> None:
    database = await opened(tmp_path / "root")
    await database.commit(rows_of((b"a", b"1")))
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    await database.close()
    (file,) = journals(tmp_path / "copy")
    if damage == "deleted":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "emptied" else bytes(file.stat().st_size))

    for _ in range(2):  # and not only the first time
        with pytest.raises(CorruptStoreError, match=r"0001\.journal .*its owner has not closed it"):
            await opened(tmp_path / "copy")


@pytest.mark.parametrize("damage", ["deleted", "emptied", "zeroed", "cut"])
async def test_what_becomes_of_a_journal_that_was_closed_does_not_matter(
    tmp_path: Path, damage: str
) -> None:
    database = await opened(tmp_path)
    await database.commit(rows_of((b"a", b"1")))
    await database.close()
    (file,) = journals(tmp_path)
    if damage == "deleted":
        file.unlink()
    else:
        kept = {"emptied": 0, "zeroed": 0, "cut": 20}[damage]
        file.write_bytes(file.read_bytes()[:kept] + bytes(72 if damage == "zeroed" else 0))

    after = await opened(tmp_path)

    assert await after.get(b"a") == b"1"
    assert [one.name for one in journals(tmp_path)] == [f"{2:020}.journal"]
    await after.close()


@pytest.mark.parametrize("place", [0, 4, 8, 12, 16, 24, 32, 40])
def test_a_record_with_a_byte_that_has_changed_is_none(place: int) -> None:
    record = bytearray(JournalRecord(salt=5, sequence=7, flushed=3, rows=b"some rows").encode())
    record[place] ^= 0x10

    assert list(read_journal_records(bytes(record))) == []


async def test_a_journal_that_lacks_a_record_in_the_middle_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 1_000)
    monkeypatch.setattr(journal_module.Journal, "is_flushed", lambda *_: None)
    database = await opened(tmp_path / "root")
    await database.commit(rows_of((b"a", b"1")))
    await database.show_others()  # from now on in the other region
    await database.commit(rows_of((b"b", b"1")))
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    await database.close()
    (file,) = journals(tmp_path / "copy")
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)

    with pytest.raises(CorruptStoreError, match=r"0001\.journal is damaged.*record 4, and not 3"):
        await opened(tmp_path / "copy")

    assert file in journals(tmp_path / "copy")


def test_two_that_open_at_the_same_moment_get_journals_of_their_own(tmp_path: Path) -> None:
    one, other = (journal_module.LeftJournals(tmp_path) for _ in range(2))

    first, second = (left.take_over(sync=True, name="it") for left in (one, other))

    assert first.path != second.path
    first.close()
    second.close()


async def test_a_descriptor_that_is_closed_meanwhile_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"precious")
    journal = Journal(tmp_path, 1, sync=False, name="it")
    appending = asyncio.create_task(journal.append(b"rows"))
    await asyncio.sleep(0)
    journal.close()
    with (tmp_path / "other").open("r+b"):
        await appending

    assert (tmp_path / "other").read_bytes() == b"precious"
    assert [one.rows for one in unflushed(journal.path)] == [b"rows"]


async def test_who_serves_queues_alone_routes_what_a_killed_owner_of_all_had_acknowledged(
    tmp_path: Path,
) -> None:
    settings = StoreSettings(journal_ms=NEVER_MS)
    owner = await Engine.open((tmp_path / "root").as_uri(), settings=settings)
    await owner.create_queue("all")
    ids = await owner.publish_many([NewMessage(b"%d" % number) for number in range(10)])
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    await owner.close()
    for tenures in (tmp_path / "copy" / "owners").iterdir():
        shutil.rmtree(tenures)  # its owner is gone

    async with await Engine.open((tmp_path / "copy").as_uri(), publishes=False) as queues:
        claimed = [message.message_id for message in await queues.claim("all", 10, wait_ms=30_000)]

    assert claimed == ids


async def test_a_record_that_is_written_over_half_way_was_flushed_and_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 1_000)
    journal = Journal(tmp_path, 1, sync=False, name="it")
    await journal.append(b"first")
    flushed = await journal.switch()
    await journal.append(b"second")  # before the first one is flushed: it does not say so
    journal.is_flushed(flushed)
    await journal.switch()
    with journal.path.open("r+b") as file:
        file.write(bytes(10))  # of the next record, when the process is killed

    assert [one.rows for one in unflushed(journal.path) if one.rows] == [b"second"]
    journal.close()


MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
40 22 0:35 / /mnt/share rw - nfs4 server:/export rw
41 40 254:1 / /mnt/share/local rw - xfs /dev/vdb rw
42 22 0:36 / /mnt/with\040space rw - fuse.sshfs host: rw
43 22 0:37 / /mnt/host rw - 9p host rw
44 22 0:38 / /mnt/memory rw - tmpfs tmpfs rw
""".strip()


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/var/queue", False),
        ("/mnt/share", True),
        ("/mnt/share/root/queues", True),
        ("/mnt/share/local/root", False),
        ("/mnt/shared", False),
        ("/mnt/with space/root", True),
        ("/mnt/host", True),
        ("/mnt/memory/root", False),
    ],
)
def test_a_file_system_over_a_network_is_known_by_its_kind(folder: str, expected: bool) -> None:
    assert is_on_network(Path(folder), MOUNTS) is expected


async def test_on_a_file_system_over_a_network_there_is_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "_MOUNTS", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text(f"22 1 0:1 / {tmp_path} rw - nfs4 server:/ rw")
    database = await opened(tmp_path)
    await database.commit(rows_of((b"a", b"1")))

    assert journals(tmp_path) == []
    reader = await DatabaseReader.open(objects_in(tmp_path), "db")
    assert await reader.get(b"a") == b"1"
    await reader.close()
    await database.close()


# --- who is replaced, and when --------------------------------------------------------------------


async def test_who_stood_still_and_is_closed_later_does_no_harm_to_those_who_came_after(
    tmp_path: Path,
) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    idle = await opened(root)
    await idle.commit(rows_of((b"a", b"1")))
    await idle.show_others()
    second = await opened(root)
    await second.close()
    third = await opened(root)
    await third.commit(rows_of((b"a", b"3")))

    await idle.close()

    await third.commit(rows_of((b"b", b"3")))
    shutil.copytree(root, copy)
    await third.close()
    after = await opened(copy)
    assert await after.get_many([b"a", b"b"]) == [b"3", b"3"]
    await after.close()


@pytest.mark.parametrize("journal_ms", [NEVER_MS, 0])
async def test_who_is_replaced_before_it_has_a_journal_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal_ms: int
) -> None:
    stands_still, goes_on = asyncio.Event(), asyncio.Event()
    start = Database._start_journal

    async def stop_before(database: Database, folder: Path, *, wanted: bool) -> None:
        if not stands_still.is_set():
            stands_still.set()
            await goes_on.wait()
        await start(database, folder, wanted=wanted)

    monkeypatch.setattr(Database, "_start_journal", stop_before)
    slow = asyncio.create_task(opened(tmp_path))
    await stands_still.wait()
    second = await opened(tmp_path, StoreSettings(journal_ms=journal_ms, fsync=False))
    await second.commit(rows_of((b"a", b"second")))
    goes_on.set()

    with pytest.raises(FencedError):
        await slow

    third = await opened(tmp_path)
    assert await third.get(b"a") == b"second"
    await third.close()
    await second.close()


async def test_an_open_that_fails_leaves_the_owner_before_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await opened(tmp_path)
    await first.commit(rows_of((b"a", b"1")))

    async def failing(*_: object) -> None:
        raise OSError("the disk is on fire")

    with monkeypatch.context() as patched:
        patched.setattr(database_module, "bring_in", failing)
        with pytest.raises(StoreUnavailableError, match="on fire"):
            await opened(tmp_path)

    with pytest.raises(FencedError):
        await first.commit(rows_of((b"b", b"1")))  # which may come to be there all the same
    third = await opened(tmp_path)
    assert await third.get(b"a") == b"1"
    await third.close()
    await first.close()


# --- what happens at the same time ----------------------------------------------------------------


async def test_a_record_that_is_written_while_others_are_flushed_does_not_say_that_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "REGION_BYTES", 1_000)
    journal = Journal(tmp_path, 1, sync=False, name="it")
    await journal.append(b"first")
    flushed = await journal.switch()
    appending = asyncio.create_task(journal.append(b"second"))
    await asyncio.sleep(0)
    journal.is_flushed(flushed)  # after its head was made, before it is on the disk
    await appending

    await journal.switch()
    with journal.path.open("r+b") as file:
        file.write(bytes(10))

    assert [one.rows for one in unflushed(journal.path) if one.rows] == [b"second"]
    journal.close()


async def test_what_is_acknowledged_while_it_is_closed_is_kept(tmp_path: Path) -> None:
    database = await opened(tmp_path, StoreSettings(fsync=False, journal_ms=1))
    acknowledged = 0

    async def commit_on() -> None:
        nonlocal acknowledged
        for number in range(100_000):
            await database.commit(rows_of((b"%06d" % number, b"v")))
            acknowledged = number + 1

    committing = asyncio.create_task(commit_on())
    while acknowledged < 50:
        await asyncio.sleep(0)
    await database.close()
    with pytest.raises(ClosedError):
        await committing

    after = await opened(tmp_path)
    assert len([key async for chunk in after.scan(b"0", b"9") for key in chunk]) == acknowledged
    await after.close()


async def test_a_large_commit_is_not_seen_before_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_RECORD_BYTES", 100)
    database = await opened(tmp_path)
    await database.commit(rows_of((b"a", b"1")))
    written, durable = asyncio.Event(), asyncio.Event()

    async def commit_slowly(db: Any, rows: AnyRows, **options: Any) -> None:
        if b"large" in rows.packed():
            await write_rows(db, rows)
            written.set()
            await durable.wait()
        await commit_rows(db, rows, **options)

    monkeypatch.setattr(journaled_writes, "commit_rows", commit_slowly)
    committing = asyncio.create_task(database.commit(rows_of((b"a", b"large" * 100))))
    await written.wait()
    reading = asyncio.create_task(database.get(b"a"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not reading.done()
    durable.set()

    assert await reading == b"large" * 100
    await committing
    await database.close()


async def test_a_large_commit_that_fails_is_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_RECORD_BYTES", 100)
    database = await opened(tmp_path)
    await database.commit(rows_of((b"a", b"1")))

    async def fail(db: Any, rows: AnyRows, **options: Any) -> None:
        if b"large" in rows.packed():
            await write_rows(db, rows)
            raise OSError("the disk is on fire")
        await commit_rows(db, rows, **options)

    monkeypatch.setattr(journaled_writes, "commit_rows", fail)
    with pytest.raises(StoreUnavailableError, match="on fire"):
        await database.commit(rows_of((b"a", b"large" * 100)))

    with pytest.raises(StoreUnavailableError, match="on fire"):
        await database.get(b"a")
    await database.close()


# --- a store in trouble ---------------------------------------------------------------------------


async def test_a_commit_waits_for_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_TRY_AGAIN_MS", 1)
    database = await opened(tmp_path)
    write, refusals = Journal._write, [errno.ENOSPC, errno.EMFILE, errno.EDQUOT]

    async def write_if_there_is_room(journal: Journal, *record: Any) -> bool:
        if refusals:
            raise not_written(refusals.pop())
        return await write(journal, *record)

    monkeypatch.setattr(Journal, "_write", write_if_there_is_room)
    await database.commit(rows_of((b"a", b"1")))

    assert refusals == []
    assert await database.get(b"a") == b"1"
    await database.close()


@pytest.mark.parametrize("tier", [Tier.compiled, Tier.public])
async def test_a_record_that_is_not_written_is_told_from_one_that_is_not_synced(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "active_tier", lambda: tier)
    journal = Journal(tmp_path, 1, sync=True, name="it")
    good = journal._descriptor
    reader, writer = os.pipe()
    read_only = os.open(journal.path, os.O_RDONLY)
    try:
        for descriptor in (-1, read_only, writer):
            journal._descriptor = descriptor
            with pytest.raises(NotWritten):
                await journal.append(b"rows")
    finally:
        for one in (reader, writer, read_only, good):
            os.close(one)


async def test_a_record_that_can_not_be_synced_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await opened(tmp_path)

    async def broken(*_: Any, **__: Any) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_write", broken)
        with pytest.raises(StoreUnavailableError, match="Input/output error") as caught:
            await database.commit(rows_of((b"a", b"1")))
    assert caught.value.in_doubt

    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        await database.commit(rows_of((b"a", b"2")))
    await database.close()


async def test_closing_does_not_wait_for_ever_for_a_store_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await opened(tmp_path, StoreSettings(journal_ms=NEVER_MS, fsync=False))
    database._outage_timeout_ms = 50  # not for the open, which takes longer on a busy machine
    await database.commit(rows_of((b"a", b"1")))

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(journaled_writes, "commit_rows", never)
        patched.setattr(slatedb.Db, "shutdown", never)
        async with asyncio.timeout(30):
            await database.close()

    after = await opened(tmp_path)
    assert await after.get(b"a") == b"1"
    await after.close()


async def test_opening_does_not_wait_for_ever_for_a_store_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await opened(tmp_path / "root")
    await first.commit(rows_of((b"a", b"1")))
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    await first.close()
    settings = StoreSettings(journal_ms=NEVER_MS, fsync=False, outage_timeout_ms=50)

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:  # as SlateDB does when the disk is full
        patched.setattr(journaled_writes, "commit_rows", never)
        patched.setattr(slatedb.Db, "shutdown", never)
        with pytest.raises(StoreUnavailableError, match=r"could not open .*: no answer within 50"):
            async with asyncio.timeout(30):
                await opened(tmp_path / "copy", settings)

    after = await opened(tmp_path / "copy")
    assert await after.get(b"a") == b"1"
    await after.close()


async def test_an_open_that_fails_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = []

    async def failing(_: Any, __: Any, ___: Any, wal_sync: WalSync, ____: str) -> None:
        descriptors.append(wal_sync.descriptor)
        raise OSError("the disk is on fire")

    monkeypatch.setattr(database_module, "bring_in", failing)
    with pytest.raises(StoreUnavailableError, match="on fire"):
        await opened(tmp_path, SYNCED)

    (descriptor,) = descriptors
    assert not _is_open_on(descriptor, tmp_path / "db" / "wal")


async def test_a_close_that_is_given_up_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await opened(tmp_path, SYNCED)
    assert database._wal_sync is not None
    descriptor, closing_now = database._wal_sync.descriptor, asyncio.Event()

    async def never(*_: Any, **__: Any) -> None:
        closing_now.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(slatedb.Db, "shutdown", never)
    closing = asyncio.create_task(database.close())
    await closing_now.wait()
    closing.cancel()
    await asyncio.wait([closing])

    assert not _is_open_on(descriptor, tmp_path / "db" / "wal")


def _is_open_on(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@pytest.mark.parametrize("large_commits", range(1, 6))
async def test_old_rows_do_not_come_back_after_large_commits_and_a_torn_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_commits: int
) -> None:
    monkeypatch.setattr(layout, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(layout, "REGION_BYTES", 1_000)
    database = await opened(tmp_path / "root")
    await database.commit(rows_of((b"a", b"old")))
    await database.show_others()
    await database.show_others()  # which has the disk know
    for number in range(large_commits):
        await database.commit(rows_of((b"a", b"%d" % number * 200)))
    assert database._journaled is not None
    journal = database._journaled._journal
    offset = journal._region * 1_000 + journal._used[journal._region]
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    (file,) = journals(tmp_path / "copy")
    with file.open("r+b") as torn:  # the next record, when the process is killed
        torn.seek(offset)
        torn.write(bytes(12))

    after = await opened(tmp_path / "copy")
    assert await after.get(b"a") == b"%d" % (large_commits - 1) * 200
    await after.close()
    await database.close()


async def test_a_read_that_is_under_way_outlives_a_large_commit_that_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_RECORD_BYTES", 100)
    database = await opened(tmp_path)
    assert database._journaled is not None
    going, done = asyncio.Event(), asyncio.Event()

    async def read() -> bytes:
        going.set()
        await done.wait()
        return b"read"

    reading = asyncio.create_task(database._journaled.read(read))
    await going.wait()
    committing = asyncio.create_task(database.commit(rows_of((b"a", b"1" * 200))))
    while database._journaled._no_reads is None:
        await asyncio.sleep(0)
    committing.cancel()
    await asyncio.wait([committing])
    done.set()

    assert await reading == b"read"
    await database.close()


async def test_who_gives_up_waiting_to_be_seen_does_not_stop_commits(tmp_path: Path) -> None:
    database = await opened(tmp_path)
    await database.commit(rows_of((b"a", b"1")))
    showing = asyncio.create_task(database.show_others())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    showing.cancel()
    await asyncio.wait([showing])

    await database.commit(rows_of((b"a", b"2")))

    assert await database.get(b"a") == b"2"
    await database.close()


# --- what release 0.1 has left --------------------------------------------------------------------


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_journal_of_release_0_1_is_brought_in_whether_it_was_closed_or_not(
    tmp_path: Path, is_closed: bool
) -> None:
    database = await Database.open(objects_in(tmp_path), "db")  # has no row for its journal
    await database.commit(rows_of((b"a", b"1"), (b"b", b"1")))
    await database.close()
    file = tmp_path / "db" / "journal" / f"{7:020}.journal"
    file.parent.mkdir()
    records = [
        JournalRecord(salt=5, sequence=one, flushed=0, rows=rows_of((b"a", b"%d" % one)).packed())
        for one in (1, 2)
    ]
    file.write_bytes(b"" if is_closed else b"".join(one.encode() for one in records))

    for _ in range(2):
        after = await opened(tmp_path)
        assert await after.get_many([b"a", b"b"]) == [b"1" if is_closed else b"2", b"1"]
        await after.close()
    assert [one.name for one in journals(tmp_path)] == [f"{9:020}.journal"]
