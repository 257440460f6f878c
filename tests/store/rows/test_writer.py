"""The three tiers of the batch writer write the same rows and raise the same errors."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import random
import resource
import threading
import tomllib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slatedb.uniffi as slatedb

from odq_encodings import Column, Each, Fixed
from opendata_queue.store.files.durable import WalSync
from opendata_queue.store.native import binding as slatedb_binding
from opendata_queue.store.native import library as native_library
from opendata_queue.store.native.abi import NATIVE_ABI
from opendata_queue.store.rows import writer as batch_writer
from opendata_queue.store.rows.packed import PackedRows
from opendata_queue.store.rows.rows import (
    HEADER,
    MAX_KEY_BYTES,
    MAX_TTL_MS,
    MAX_VALUE_BYTES,
    Op,
    Rows,
)
from opendata_queue.store.rows.writer import (
    BatchWriterUnavailable,
    Tier,
    active_tier,
    commit_rows,
    write_rows,
)

LOGGER = "opendata_queue.store.rows.writer"
HANG_S = 120  # only ever waited for when something is broken

needs_native = pytest.mark.skipif(
    not native_library.NATIVE_LIBRARY.exists(), reason="the C helper was not built"
)
TIERS = [pytest.param(tier, marks=needs_native if tier is Tier.compiled else ()) for tier in Tier]
every_tier = pytest.mark.parametrize("tier", TIERS)

Model = dict[bytes, tuple[bytes, int | None]]


class Store:
    """A place for databases, on which each `open` is a new writer."""

    def __init__(self, url: str, prefix: str) -> None:
        self._object_store = slatedb.ObjectStore.resolve(url)
        self._prefix = prefix

    async def open(self, name: str = "db", **settings: object) -> slatedb.Db:
        chosen = slatedb.Settings.default()
        for key, value in {"flush_interval": None, **settings}.items():
            chosen.set(key, json.dumps(value))
        builder = slatedb.DbBuilder(f"{self._prefix}/{name}", self._object_store)
        builder.with_settings(chosen)
        return await builder.build()


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return Store("memory:///", "root")
    return Store("file:///", str(tmp_path).lstrip("/"))


@pytest.fixture
async def db(store: Store) -> AsyncIterator[slatedb.Db]:
    opened = await store.open()
    yield opened
    # A test that opened a second writer has fenced this one; whether and how its shutdown then
    # fails depends on what it had written and on timing.
    with contextlib.suppress(slatedb.Error.Closed):
        await opened.shutdown()


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tier is chosen anew in the test, and again after it."""
    monkeypatch.delenv(batch_writer.TIER_VARIABLE, raising=False)
    _forget()
    yield
    _forget()


def _forget() -> None:
    batch_writer._default.cache_clear()
    batch_writer._forced.cache_clear()
    batch_writer.native_jobs.cache_clear()


async def contents(db: slatedb.Db) -> Model:
    """Every row: its value, and its TTL as the store has it."""
    everything = slatedb.KeyRange(start=None, start_inclusive=False, end=None, end_inclusive=False)
    found: Model = {}
    iterator = await db.scan(everything)
    while (row := await iterator.next()) is not None:
        ttl_ms = None if row.expire_ts is None else row.expire_ts - row.create_ts
        found[row.key] = (row.value, ttl_ms)
    return found


def rows_of(*puts: tuple[bytes, bytes]) -> Rows:
    rows = Rows()
    rows.put_many(puts)
    return rows


def add_random_rows(rng: random.Random, rows: Rows, model: Model, count: int) -> None:
    for _ in range(count):
        key = b"%03d" % rng.randrange(200)
        if rng.random() < 0.3:
            rows.delete(key)
            model.pop(key, None)
            continue
        value = rng.randbytes(rng.choice([0, 1, 90, 256, 5_000]))
        ttl_ms = rng.choice([None, 3_600_000, rng.randrange(10**7, 10**9)])
        rows.put(key, value, ttl_ms=ttl_ms)
        model[key] = (value, ttl_ms)


# --- the rows arrive ------------------------------------------------------------------------------


@every_tier
async def test_random_puts_deletes_and_ttls_are_stored_as_a_model_says(
    store: Store, db: slatedb.Db, tier: Tier
) -> None:
    rng = random.Random(20)
    model: Model = {}
    for _ in range(20):
        rows = Rows()
        add_random_rows(rng, rows, model, 100)
        await commit_rows(db, rows, tier=tier)
        assert await contents(db) == model
    assert await contents(await store.open()) == model


@every_tier
async def test_a_commit_is_durable_when_it_returns(
    store: Store, db: slatedb.Db, tier: Tier
) -> None:
    await commit_rows(db, rows_of((b"k", b"v")), tier=tier)
    taken_over = await store.open()  # fences the first writer: nothing more can be flushed by it
    assert await taken_over.get(b"k") == b"v"


@every_tier
async def test_a_ttl_is_stored_in_milliseconds(db: slatedb.Db, tier: Tier) -> None:
    rows = Rows()
    rows.put(b"none", b"v")
    rows.put(b"minute", b"v", ttl_ms=60_000)
    rows.put(b"most", b"v", ttl_ms=MAX_TTL_MS)
    await commit_rows(db, rows, tier=tier)
    assert await contents(db) == {
        b"none": (b"v", None),
        b"minute": (b"v", 60_000),
        b"most": (b"v", MAX_TTL_MS),
    }


@every_tier
async def test_values_may_be_empty_or_large_and_keys_of_the_greatest_length(
    db: slatedb.Db, tier: Tier
) -> None:
    large = random.Random(1).randbytes(1_000_000)
    longest = b"k" * MAX_KEY_BYTES
    await commit_rows(db, rows_of((b"empty", b""), (b"\0\xff", large), (longest, b"v")), tier=tier)
    assert await db.get(b"empty") == b""
    assert await db.get(b"\0\xff") == large
    assert await db.get(longest) == b"v"


@every_tier
async def test_the_last_row_of_a_key_wins(db: slatedb.Db, tier: Tier) -> None:
    rows = rows_of((b"put", b"1"), (b"put", b"2"), (b"deleted", b"1"))
    rows.delete(b"deleted")
    rows.delete(b"back")
    rows.put(b"back", b"3")
    await commit_rows(db, rows, tier=tier)
    assert await contents(db) == {b"put": (b"2", None), b"back": (b"3", None)}


@every_tier
async def test_a_big_batch_is_stored_whole(db: slatedb.Db, tier: Tier) -> None:
    puts = [(b"%08d" % number, b"v%d" % number) for number in range(5_000)]
    await commit_rows(db, rows_of(*puts), tier=tier)
    assert await contents(db) == {key: (value, None) for key, value in puts}


@every_tier
async def test_rows_added_during_a_commit_are_not_in_it(db: slatedb.Db, tier: Tier) -> None:
    rows = rows_of((b"a", b"1"))
    commit = asyncio.ensure_future(commit_rows(db, rows, tier=tier))
    await asyncio.sleep(0)
    rows.put(b"b", b"2")
    await commit
    assert await contents(db) == {b"a": (b"1", None)}


# --- writing without a flush, and no rows ---------------------------------------------------------


@every_tier
async def test_written_rows_become_durable_with_an_empty_commit(
    store: Store, db: slatedb.Db, tier: Tier
) -> None:
    for number in range(3):
        await write_rows(db, rows_of((b"%d" % number, b"v")), tier=tier)
    await commit_rows(db, Rows(), tier=tier)
    assert len(await contents(await store.open())) == 3


@every_tier
async def test_rows_that_were_only_written_are_lost_with_their_writer(
    store: Store, db: slatedb.Db, tier: Tier
) -> None:
    await write_rows(db, rows_of((b"k", b"v")), tier=tier)
    assert await db.get(b"k") == b"v"
    assert await (await store.open()).get(b"k") is None


@every_tier
async def test_without_a_wal_a_commit_is_durable_too(store: Store, tier: Tier) -> None:
    writer = await store.open("bulk", wal_enabled=False)
    await commit_rows(writer, rows_of((b"k", b"v")), tier=tier)
    taken_over = await store.open("bulk", wal_enabled=False)
    assert await taken_over.get(b"k") == b"v"


@every_tier
async def test_no_rows_are_no_error(db: slatedb.Db, tier: Tier) -> None:
    ran: list[bool] = []
    await write_rows(db, Rows(), tier=tier)
    await commit_rows(db, Rows(), tier=tier, after_flush=lambda: ran.append(True))
    assert ran == [True]
    assert await contents(db) == {}


# --- errors ---------------------------------------------------------------------------------------


@every_tier
async def test_a_fenced_writer_is_told_so(store: Store, tier: Tier) -> None:
    fenced = await store.open()
    await store.open()
    for _ in range(2):  # the flush finds out, and from then on the write knows
        with pytest.raises(slatedb.Error.Closed) as caught:
            await commit_rows(fenced, rows_of((b"k", b"v")), tier=tier)
        assert caught.value.reason == slatedb.CloseReason.FENCED
        assert caught.value.message == "Closed error: detected newer DB client"


@every_tier
async def test_a_closed_database_refuses(store: Store, tier: Tier) -> None:
    closed = await store.open()
    await closed.shutdown()
    for write in (commit_rows, write_rows):
        with pytest.raises(slatedb.Error.Closed) as caught:
            await write(closed, rows_of((b"k", b"v")), tier=tier)
        assert caught.value.reason == slatedb.CloseReason.CLEAN


@every_tier
async def test_after_flush_is_not_run_when_the_commit_failed(store: Store, tier: Tier) -> None:
    fenced = await store.open()
    await store.open()
    ran: list[bool] = []
    with pytest.raises(slatedb.Error.Closed):
        await commit_rows(
            fenced, rows_of((b"k", b"v")), tier=tier, after_flush=lambda: ran.append(True)
        )
    assert ran == []


@every_tier
async def test_what_is_no_database_is_refused(tier: Tier) -> None:
    with pytest.raises(TypeError, match=r"slatedb\.Db, not WriteBatch"):
        await commit_rows(slatedb.WriteBatch(), rows_of((b"k", b"v")), tier=tier)


@needs_native
@pytest.mark.parametrize("cut", [1, 15, 16, 18, 20])
async def test_the_c_helper_refuses_rows_that_are_cut_short_and_writes_none(
    db: slatedb.Db, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    whole = rows_of((b"first", b"value")).packed()
    last = rows_of((b"key", b"value")).packed()
    monkeypatch.setattr(Rows, "packed", lambda _: whole + last[:cut])
    with pytest.raises(AssertionError, match="returned 2"):
        await commit_rows(db, Rows(), tier=Tier.compiled)
    assert await contents(db) == {}


@needs_native
async def test_the_c_helper_does_not_read_beyond_the_rows(
    db: slatedb.Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length that reaches far past all mapped memory: reading it would end the process."""
    header = HEADER.pack(Op.PUT, 3, 2**32 - 1, 0)
    monkeypatch.setattr(Rows, "packed", lambda _: header + b"key")
    with pytest.raises(AssertionError, match="returned 2"):
        await commit_rows(db, Rows(), tier=Tier.compiled)
    assert await contents(db) == {}


@needs_native
@pytest.mark.parametrize("op", [0, 4, 255])
async def test_the_c_helper_refuses_an_unknown_operation_and_writes_nothing(
    db: slatedb.Db, monkeypatch: pytest.MonkeyPatch, op: int
) -> None:
    packed = rows_of((b"key", b"value")).packed()
    monkeypatch.setattr(Rows, "packed", lambda _: packed + bytes([op]) + packed[1:])
    with pytest.raises(AssertionError, match="returned 2"):
        await commit_rows(db, Rows(), tier=Tier.compiled)
    assert await contents(db) == {}


# --- after_flush, threads, cancellation, loops ----------------------------------------------------


@every_tier
async def test_after_flush_runs_off_the_event_loop(db: slatedb.Db, tier: Tier) -> None:
    threads: list[int] = []
    await commit_rows(
        db,
        rows_of((b"k", b"v")),
        tier=tier,
        after_flush=lambda: threads.append(threading.get_ident()),
    )
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@every_tier
@pytest.mark.parametrize(("raised", "seen"), [(OSError, OSError), (StopIteration, RuntimeError)])
async def test_an_error_of_after_flush_reaches_the_caller(
    db: slatedb.Db, tier: Tier, raised: type[Exception], seen: type[Exception]
) -> None:
    def fail() -> None:
        raise raised("no space left")

    with pytest.raises(seen):
        await asyncio.wait_for(
            commit_rows(db, rows_of((b"k", b"v")), tier=tier, after_flush=fail), HANG_S
        )
    assert await db.get(b"k") == b"v"


async def opened(folder: Path) -> tuple[slatedb.Db, WalSync]:
    """A database in the folder ``d``, and what syncs its WAL."""
    db = await Store("file:///", str(folder).lstrip("/")).open("d")
    return db, WalSync(folder / "d")


@every_tier
async def test_the_wal_is_synced_up_to_the_file_of_the_commit(tmp_path: Path, tier: Tier) -> None:
    db, sync = await opened(tmp_path)
    for number in range(5):
        await commit_rows(db, rows_of((b"%d" % number, b"v")), tier=tier, after_flush=sync)
        newest = max(int(path.stem) for path in (tmp_path / "d" / "wal").glob("*.sst"))
        assert sync.next_number == newest + 1
    sync.close()
    await db.shutdown()


@every_tier
async def test_a_commit_that_has_made_no_wal_file_is_no_success(tmp_path: Path, tier: Tier) -> None:
    db, sync = await opened(tmp_path)
    sync.next_number += 1

    with pytest.raises(OSError, match="a commit has made no WAL file"):
        await commit_rows(db, rows_of((b"k", b"v")), tier=tier, after_flush=sync)
    sync.close()
    await db.shutdown()


@every_tier
async def test_a_wal_that_can_not_be_synced_is_no_success(tmp_path: Path, tier: Tier) -> None:
    db, sync = await opened(tmp_path)
    real, sync.descriptor = sync.descriptor, 1_000_000

    with pytest.raises(OSError, match="Bad file descriptor"):
        await commit_rows(db, rows_of((b"k", b"v")), tier=tier, after_flush=sync)
    sync.descriptor = real
    sync.close()
    await db.shutdown()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@every_tier
async def test_a_wal_file_that_can_not_be_opened_is_synced_when_there_are_descriptors_again(
    tmp_path: Path, tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    in_memory = await Store("memory:///", f"root-{tier}").open()  # it needs no descriptors itself
    folder = tmp_path / "wal"
    folder.mkdir()
    sync = WalSync(tmp_path)
    warm_up = rows_of((b"a", b"v"))
    await commit_rows(in_memory, warm_up, tier=tier)  # what the event loop needs is open then
    waited = "synced as soon as they can be opened"

    for first in (
        1,
        3,
        5,
        7,
        9,
    ):  # a thread of another test may close a file, and leave a descriptor
        for number in (first, first + 1):
            (folder / f"{number:020}.sst").write_bytes(b"x")
        with no_descriptors():
            commit = asyncio.ensure_future(
                commit_rows(in_memory, rows_of((b"k", b"v")), tier=tier, after_flush=sync)
            )
            while waited not in caplog.text and not commit.done():
                await asyncio.sleep(0)
        await asyncio.wait_for(commit, HANG_S)
        assert sync.next_number == first + 2
        if waited in caplog.text:
            break

    assert waited in caplog.text
    sync.close()
    await in_memory.shutdown()


@every_tier
async def test_it_is_told_when_a_commit_has_begun(db: slatedb.Db, tier: Tier) -> None:
    begun = asyncio.Event()
    commit = asyncio.ensure_future(
        commit_rows(db, rows_of((b"k", b"v")), tier=tier, on_start=begun.set)
    )
    await asyncio.wait_for(begun.wait(), HANG_S)
    await commit
    assert await db.get(b"k") == b"v"


@every_tier
async def test_a_cancelled_commit_goes_on_to_its_end(
    store: Store, db: slatedb.Db, tier: Tier
) -> None:
    finished = threading.Event()
    commit = asyncio.ensure_future(
        commit_rows(db, rows_of((b"k", b"v")), tier=tier, after_flush=finished.set)
    )
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert await asyncio.to_thread(finished.wait, HANG_S)
    assert await (await store.open()).get(b"k") == b"v"


@every_tier
async def test_a_cancelled_commit_lets_go_of_nothing_that_it_still_uses(
    store: Store, tier: Tier
) -> None:
    finished = threading.Event()
    writer = await store.open()
    rows = rows_of(*[(b"%d" % number, bytes(1_000)) for number in range(500)])
    commit = asyncio.ensure_future(commit_rows(writer, rows, tier=tier, after_flush=finished.set))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    del writer, rows, commit
    assert await asyncio.to_thread(finished.wait, HANG_S)
    assert len(await contents(await store.open())) == 500


@needs_native
async def test_a_failure_that_no_task_awaits_is_logged(
    db: slatedb.Db, caplog: pytest.LogCaptureFixture
) -> None:
    started, may_fail = threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        may_fail.wait(HANG_S)
        raise OSError("no space left")

    commit = asyncio.ensure_future(
        commit_rows(db, rows_of((b"k", b"v")), tier=Tier.compiled, after_flush=fail)
    )
    assert await asyncio.to_thread(started.wait, HANG_S)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    may_fail.set()
    async with asyncio.timeout(HANG_S):
        while not caplog.messages:
            await asyncio.to_thread(lambda: None)
    assert caplog.messages == [
        "a commit failed after its caller had gone: OSError('no space left')"
    ]


@every_tier
async def test_databases_commit_at_the_same_time(store: Store, tier: Tier) -> None:
    writers = [await store.open(f"db{number}") for number in range(4)]
    for turn in range(10):
        rows = rows_of((b"%d" % turn, b"v"))
        await asyncio.gather(*(commit_rows(writer, rows, tier=tier) for writer in writers))
    for writer in writers:
        assert len(await contents(writer)) == 10


@every_tier
async def test_commits_to_one_database_may_overlap(db: slatedb.Db, tier: Tier) -> None:
    rows = [rows_of((b"%03d" % number, b"v")) for number in range(100)]
    await asyncio.gather(*(commit_rows(db, some, tier=tier) for some in rows))
    assert len(await contents(db)) == 100


def _uvloop() -> asyncio.AbstractEventLoop:
    return pytest.importorskip("uvloop").new_event_loop()  # type: ignore[no-any-return]


@every_tier
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, _uvloop])
def test_one_database_can_be_used_from_several_event_loops(
    store: Store, tier: Tier, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def commit(writer: slatedb.Db | None, number: int) -> slatedb.Db:
        writer = writer or await store.open()
        await commit_rows(writer, rows_of((b"%d" % number, b"v")), tier=tier)
        return writer

    writer = None
    for number in range(3):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            writer = runner.run(commit(writer, number))
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert len(runner.run(contents(writer))) == 3


@needs_native
def test_a_commit_outlives_its_event_loop(store: Store) -> None:
    flushed, loop_closed, finished = (threading.Event() for _ in range(3))

    def after_flush() -> None:
        flushed.set()
        loop_closed.wait(HANG_S)
        finished.set()

    async def abandon() -> None:
        writer = await store.open()
        rows = rows_of((b"k", b"v"))
        commit = asyncio.ensure_future(
            commit_rows(writer, rows, tier=Tier.compiled, after_flush=after_flush)
        )
        assert await asyncio.to_thread(flushed.wait, HANG_S)
        commit.cancel()

    async def read() -> bytes | None:
        value: bytes | None = await (await store.open()).get(b"k")
        return value

    asyncio.run(abandon())
    loop_closed.set()
    assert finished.wait(HANG_S)
    assert asyncio.run(read()) == b"v"


@needs_native
def test_event_loops_that_were_closed_with_jobs_under_way_are_let_go(store: Store) -> None:
    async def abandon() -> None:
        rows = rows_of(*((b"%05d" % number, bytes(200)) for number in range(5_000)))
        writer = await store.open()
        commit = asyncio.ensure_future(commit_rows(writer, rows, tier=Tier.compiled))
        await asyncio.sleep(0)
        commit.cancel()

    loops = []
    for _ in range(6):
        loop = asyncio.new_event_loop()
        loops.append(weakref.ref(loop))
        loop.run_until_complete(abandon())
        loop.close()
    del loop
    gc.collect()

    assert sum(one() is not None for one in loops) <= 1  # it goes with the next one


# --- choosing a tier ------------------------------------------------------------------------------


@needs_native
@pytest.mark.usefixtures("fresh_choice")
def test_the_compiled_tier_is_chosen_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert active_tier() is Tier.compiled
    assert caplog.messages == []


def _assume(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    monkeypatch.setattr(slatedb_binding, name, value)


def test_the_release_of_slatedb_that_was_tested_is_the_one_that_is_installed() -> None:
    """Any other would be written through its public API, many times slower, with one warning.

    Its symbols alone do not tell whether the fast tiers may use it: records that they pack
    themselves can change without another checksum.
    """
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    (pinned,) = [one for one in project["project"]["dependencies"] if one.startswith("slatedb")]

    assert pinned == f"slatedb=={slatedb_binding.SLATEDB_VERSION}"


BROKEN: list[tuple[str, Any, str]] = [
    ("SLATEDB_VERSION", "0.16.0", "slatedb is 0.17.0, not 0.16.0"),
    ("CONTRACT_VERSION", 29, "the uniffi contract version is 30, not 29"),
    ("CHECKSUMS", {"method_db_flush": 1}, "the API checksum of method_db_flush is 42157, not 1"),
    ("SYMBOLS", ("no_such_symbol",), "no_such_symbol"),
]


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize(("name", "value", "reason"), BROKEN)
def test_an_unknown_binding_is_written_through_its_public_api_and_said_so_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: object,
    reason: str,
) -> None:
    _assume(monkeypatch, name, value)
    assert [active_tier(), active_tier()] == [Tier.public] * 2
    assert len(caplog.records) == 1
    assert (caplog.records[0].name, caplog.records[0].levelno) == (LOGGER, logging.WARNING)
    assert reason in caplog.messages[0]


@pytest.mark.usefixtures("fresh_choice")
def test_another_layout_of_a_structure_steps_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(ctypes.Structure):
        _fields_ = (("len", ctypes.c_uint64), ("data", ctypes.c_void_p))

    _assume(monkeypatch, "RustBuffer", Other)
    assert active_tier() is Tier.public
    assert "_UniffiRustBuffer has the layout" in caplog.messages[0]


@pytest.mark.usefixtures("fresh_choice")
def test_without_the_c_helper_the_ctypes_tier_is_used_and_said_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_library, "NATIVE_LIBRARY", tmp_path / "_batch_writer.so")
    assert [active_tier(), active_tier()] == [Tier.ctypes] * 2
    assert caplog.messages == [
        "batch writer steps down to tier ctypes (compiled cannot be used: _batch_writer.so was not "
        "built at installation (no C compiler?))"
    ]


@pytest.mark.usefixtures("fresh_choice")
def test_a_c_helper_that_cannot_be_loaded_steps_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "_batch_writer.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(native_library, "NATIVE_LIBRARY", broken)
    assert active_tier() is Tier.ctypes
    assert "cannot be loaded" in caplog.messages[0]


@needs_native
@pytest.mark.usefixtures("fresh_choice")
def test_a_c_helper_of_another_version_steps_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_library, "NATIVE_ABI", NATIVE_ABI + 1)
    assert active_tier() is Tier.ctypes
    assert "rebuild" in caplog.messages[0]


@pytest.mark.usefixtures("fresh_choice")
@every_tier
def test_the_environment_forces_a_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tier: Tier
) -> None:
    monkeypatch.setenv(batch_writer.TIER_VARIABLE, tier.value)
    assert active_tier() is tier
    assert caplog.messages == []


@pytest.mark.usefixtures("fresh_choice")
def test_a_forced_tier_that_cannot_work_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_library, "NATIVE_LIBRARY", tmp_path / "_batch_writer.so")
    monkeypatch.setenv(batch_writer.TIER_VARIABLE, "compiled")
    with pytest.raises(BatchWriterUnavailable, match=r"compiled cannot be used: .* was not built"):
        active_tier()


@pytest.mark.usefixtures("fresh_choice")
async def test_a_tier_asked_for_in_the_call_never_steps_down(
    monkeypatch: pytest.MonkeyPatch, db: slatedb.Db
) -> None:
    _assume(monkeypatch, "SLATEDB_VERSION", "0.16.0")
    for tier in (Tier.compiled, Tier.ctypes):
        with pytest.raises(BatchWriterUnavailable, match=r"slatedb is 0\.17\.0"):
            await commit_rows(db, rows_of((b"k", b"v")), tier=tier)


@pytest.mark.usefixtures("fresh_choice")
def test_an_unknown_tier_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(batch_writer.TIER_VARIABLE, "fastest")
    with pytest.raises(BatchWriterUnavailable, match="'fastest', which is none of compiled, "):
        active_tier()


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_packed_as_documented() -> None:
    rows = rows_of((b"key", b"value"))
    rows.put(b"k", b"", ttl_ms=0x0102)
    rows.delete(b"gone")
    assert rows.packed() == (
        b"\x01\0\x03\0\x05\0\0\0" + bytes(8) + b"keyvalue"
        b"\x02\0\x01\0\0\0\0\0" + b"\x02\x01" + bytes(6) + b"k"
        b"\x03\0\x04\0\0\0\0\0" + bytes(8) + b"gone"
    )
    assert len(rows) == 3
    assert rows.size_bytes == 8 + 1 + 4


KEYS: list[Column] = [b"k", Fixed(b"123", 1)]


def test_rows_that_are_given_by_column_are_packed_like_any_others() -> None:
    values = [b"one", b"three", b"two"]
    by_column, one_by_one = Rows(), Rows()

    by_column.put_columns(3, KEYS, [b"value"])
    by_column.put_columns(3, KEYS, [b"soon"], ttl_ms=5)
    by_column.put_columns(3, KEYS, [b"=", Each.of(values)])
    by_column.put_columns(3, KEYS, [Each.of(values), b"", Each.of(values[::-1])], ttl_ms=7)
    by_column.put_columns(0, [b"k", Fixed(b"", 1)], [Each.of([])])
    by_column.delete_columns(3, KEYS)
    by_column.delete_columns(0, [b"k", Fixed(b"", 1)])
    keys = [b"k1", b"k2", b"k3"]
    for key in keys:
        one_by_one.put(key, b"value")
    for key in keys:
        one_by_one.put(key, b"soon", ttl_ms=5)
    for key, value in zip(keys, values, strict=True):
        one_by_one.put(key, b"=" + value)
    for key, value, other in zip(keys, values, values[::-1], strict=True):
        one_by_one.put(key, value + other, ttl_ms=7)
    for key in keys:
        one_by_one.delete(key)

    assert by_column.packed() == one_by_one.packed()
    assert list(by_column) == list(one_by_one)
    assert (len(by_column), by_column.size_bytes) == (len(one_by_one), one_by_one.size_bytes)


@pytest.mark.parametrize(
    "keys", [[Each.of([b"a", b"bb"])], [b""], [b"k", Fixed(b"123", 1)], [Each([b"a"], [1])]]
)
def test_keys_by_column_that_do_not_fit_are_refused_and_change_nothing(keys: list[Column]) -> None:
    rows = Rows()

    with pytest.raises(ValueError, match=r"keys are not|key is empty|items for 2 rows"):
        rows.put_columns(2, keys, [b"value"])
    with pytest.raises(ValueError, match=r"keys are not|key is empty|items for 2 rows"):
        rows.delete_columns(2, keys)

    assert not len(rows)
    assert rows.packed() == b""


@pytest.mark.parametrize(
    ("values", "ttl_ms"),
    [
        ([Each.of([b"1", b"2", b"3"])], None),
        ([Fixed(b"12345", 2)], None),
        ([Each([b"1", b"22"], [2, 2])], None),
        ([b"1"], 0),
    ],
)
def test_values_by_column_that_do_not_fit_are_refused_and_change_nothing(
    values: list[Column], ttl_ms: int | None
) -> None:
    rows = Rows()

    with pytest.raises(ValueError, match=r"items for 2 rows|not what the columns hold|ttl_ms is 0"):
        rows.put_columns(2, [b"k", Fixed(b"12", 1)], values, ttl_ms=ttl_ms)

    assert rows.packed() == b""


def test_extended_rows_keep_their_order_and_leave_the_other_as_it_was() -> None:
    first, second = rows_of((b"a", b"1")), rows_of((b"b", b"22"))
    expected = first.packed() + second.packed()
    first.extend(second)
    assert (first.packed(), len(first), first.size_bytes) == (expected, 2, 5)
    assert (len(second), second.size_bytes) == (1, 3)


@pytest.mark.parametrize(
    ("key", "value", "ttl_ms", "message"),
    [
        (b"", b"v", None, "key is empty"),
        (b"k" * (MAX_KEY_BYTES + 1), b"v", None, "key has 65536 bytes"),
        (b"k", bytes(MAX_VALUE_BYTES + 1), None, "value has 2147483644 bytes"),
        (b"k", b"v", 0, "ttl_ms is 0"),
        (b"k", b"v", -1, "ttl_ms is -1"),
        (b"k", b"v", MAX_TTL_MS + 1, "ttl_ms is 4611686018427387905"),
    ],
    ids=["empty key", "long key", "large value", "zero ttl", "negative ttl", "endless ttl"],
)
def test_a_put_outside_the_limits_is_refused_and_changes_nothing(
    key: bytes, value: bytes, ttl_ms: int | None, message: str
) -> None:
    rows = rows_of((b"a", b"1"))
    before = rows.packed()
    with pytest.raises(ValueError, match=message):
        rows.put(key, value, ttl_ms=ttl_ms)
    with pytest.raises(ValueError, match=message):
        rows.put_many([(b"b", b"2"), (key, value)], ttl_ms=ttl_ms)
    assert (rows.packed(), len(rows), rows.size_bytes) == (before, 1, 2)


@pytest.mark.parametrize("key", [b"", b"k" * (MAX_KEY_BYTES + 1)], ids=["empty", "long"])
def test_a_delete_outside_the_limits_is_refused(key: bytes) -> None:
    rows = Rows()
    with pytest.raises(ValueError, match="key"):
        rows.delete(key)
    assert len(rows) == 0


@pytest.mark.parametrize("wrong", ["text", bytearray(b"k"), memoryview(b"k"), None])
def test_only_bytes_are_taken(wrong: Any) -> None:
    rows = Rows()
    with pytest.raises(TypeError, match="must be bytes"):
        rows.put(wrong, b"v")
    with pytest.raises(TypeError, match="must be bytes"):
        rows.put(b"k", wrong)
    with pytest.raises(TypeError, match="must be bytes"):
        rows.delete(wrong)
    assert len(rows) == 0


@every_tier
async def test_packed_rows_are_written_like_others(db: slatedb.Db, tier: Tier) -> None:
    rows = Rows()
    rows.put(b"a", b"1")
    rows.put(b"b", b"", ttl_ms=3_600_000)
    packed = PackedRows(rows.packed(), len(rows))

    await write_rows(db, packed, tier=tier)

    assert list(packed) == list(rows)
    assert (len(packed), packed.size_bytes) == (len(rows), rows.size_bytes)
    assert (await db.get(b"a"), await db.get(b"b")) == (b"1", b"")


def test_packed_rows_that_are_cut_off_are_refused() -> None:
    rows = Rows()
    rows.put(b"key", b"value")

    with pytest.raises(ValueError, match="ends at byte 24, and there are 23"):
        list(PackedRows(rows.packed()[:-1], 1))
