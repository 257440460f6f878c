"""Retention at its edges, with a clock that is turned by hand (RFC 0010)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

import opendata_queue
from odq_compactor import (
    CompactorOptions,
    RetentionCompactor,
    RetentionReport,
    messages,
    plan_root,
    set_delete_when_done,
)
from odq_compactor.messages import ShardRetention
from odq_compactor.positions import Position
from odq_encodings import ExpiryKey
from opendata_queue import (
    CorruptStoreError,
    Engine,
    MessageExpiredError,
    NewMessage,
    PublishOptions,
    QueueOptions,
    StoreUnavailableError,
)
from opendata_queue.store import Objects
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.retention.rows import (
    ERASING,
    QUICK,
    Routed,
    blobs,
    message_rows,
    opened,
    queue_rows,
)

MINUTE_MS = 60_000
LARGE = bytes(70_000)
DAY_MS = 86_400_000


@pytest.fixture
async def engine(new_memory_root: NewRoot, clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Routed.open(new_memory_root(), clock=clock) as engine:
        yield engine


@pytest.fixture
def compactor(engine: Engine) -> RetentionCompactor:
    return RetentionCompactor(engine, QUICK)


@pytest.fixture
def eraser(engine: Engine) -> RetentionCompactor:
    return RetentionCompactor(engine, ERASING)


def short(payload: bytes = b"x", **more: object) -> NewMessage:
    return NewMessage(payload, retention_seconds=60, **more)  # type: ignore[arg-type]


# --- messages -------------------------------------------------------------------------------------


async def test_at_the_exact_deadline_everything_is_there_and_a_millisecond_later_it_is_gone(
    engine: Engine, clock: ManualClock, eraser: RetentionCompactor
) -> None:
    await engine.create_queue("q")
    (one,) = await engine.publish_many([short()])

    clock.advance_ms(MINUTE_MS)
    assert (await eraser.run_once()).is_empty
    assert await engine.read(one) is not None
    assert (await engine.stats("q")).available == 1

    clock.advance_ms(1)
    assert await engine.read(one) is None
    report = await eraser.run_once()
    assert report.total("expired messages") == 1
    assert not await message_rows(engine)
    stats = await engine.stats("q")
    assert (stats.available, stats.expired) == (0, 1)


async def test_what_never_expires_stays(
    engine: Engine, clock: ManualClock, eraser: RetentionCompactor
) -> None:
    ids = await engine.publish_many([short(), NewMessage(b"stays"), short()])
    clock.advance_ms(1_000 * DAY_MS)

    report = await eraser.run_once(thorough=True)

    assert report.total("expired messages") == 2
    (left,) = [one for one in await engine.read_many(ids) if one is not None]
    assert left.payload == b"stays"
    assert await message_rows(engine) == {"payload": 1, "metadata log entry": 1}


async def test_without_erasing_the_rows_wait_for_slatedb_and_only_what_it_cannot_know_goes(
    engine: Engine, clock: ManualClock, compactor: RetentionCompactor
) -> None:
    await engine.create_queue("q")
    await engine.publish_many([short(), short(LARGE)])
    (claimed,) = await engine.claim("q")
    await engine.ack("q", claimed.receipt)
    clock.advance_ms(MINUTE_MS + 1)

    report = await compactor.run_once()

    assert report.total("expired messages") == 2
    assert report.total("blobs") == 1
    assert await blobs(engine) == []
    # The message with the blob went whole; the other's rows carry a time-to-live.
    assert await message_rows(engine) == {"payload": 1, "metadata log entry": 1}
    database = engine.stores.shards[0].database
    handle = database._db
    rows = [row async for chunk in database.scan(b"\x01\x01", b"\x01\x02") for row in chunk]
    for key, _ in rows:
        found = await handle.get_key_value(key)
        assert found is not None
        assert found.expire_ts is not None
        assert found.expire_ts - found.create_ts == MINUTE_MS + 3_600_000
    attempts = await engine.stores.queues.database._db.get_key_value(
        b"\x01\x05" + claimed.message_id.to_bytes(8, "big")
    )
    assert attempts is not None
    assert attempts.expire_ts is not None


async def test_a_second_pass_removes_nothing(
    engine: Engine, clock: ManualClock, eraser: RetentionCompactor
) -> None:
    await engine.create_queue("q", options=QueueOptions(window=2, done_retention_seconds=1))
    await engine.publish_many([short(), short(LARGE), NewMessage(b"y"), *[short()] * 10])
    (one,) = await engine.claim("q")
    await engine.ack("q", one.receipt)
    clock.advance_ms(MINUTE_MS + 1)

    assert not (await eraser.run_once(thorough=True)).is_empty
    assert (await eraser.run_once(thorough=True)).is_empty


async def test_entries_leave_the_window_and_the_backlog_wherever_they_are(
    engine: Engine, clock: ManualClock, compactor: RetentionCompactor
) -> None:
    await engine.create_queue("q", options=QueueOptions(window=3))
    messages = [
        NewMessage(b"x", headers={"priority": str(n % 3)}, retention_seconds=60 if n % 4 else 0)
        for n in range(200)
    ]
    ids = await engine.publish_many(messages)
    await engine.all_is_routed()
    clock.advance_ms(MINUTE_MS + 1)

    report = await compactor.run_once()

    assert report.removed["expired entries", "q"] == 150
    stats = await engine.stats("q")
    assert (stats.available, stats.expired) == (50, 150)
    await engine.stores.queues.all_durable()
    claimed = await engine.claim("q", 100)
    wanted = sorted((n % 3, one) for n, one in enumerate(ids) if n % 4 == 0)
    assert [(one.priority, one.message_id) for one in claimed] == wanted
    assert (await queue_rows(engine))["backlog row"] == 0


async def test_what_waits_is_still_right_after_a_reopen(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    url = new_memory_root()
    async with opened(url, clock) as (engine, compactor):
        await engine.create_queue("q", options=QueueOptions(window=2))
        ids = await engine.publish_many([short() if n % 2 else NewMessage(b"x") for n in range(50)])
        await engine.all_is_routed()
        clock.advance_ms(MINUTE_MS + 1)
        await compactor.run_once()
    async with await Engine.open(url, clock=clock) as engine:
        assert [one.message_id for one in await engine.claim("q", 100)] == ids[::2]
        assert (await engine.stats("q")).available == 0


async def test_a_message_expires_in_all_of_its_queues(
    engine: Engine, clock: ManualClock, compactor: RetentionCompactor
) -> None:
    for name in ("a", "b", "c"):
        await engine.create_queue(name, options=QueueOptions(window=1))
    await engine.publish_many([short()] * 5)
    (held,) = await engine.claim("b")
    await engine.ack("b", held.receipt)
    clock.advance_ms(MINUTE_MS + 1)

    report = await compactor.run_once()

    assert report.removed["expired entries", "a"] == report.removed["expired entries", "c"] == 5
    assert report.removed["expired entries", "b"] == 4
    assert report.total("expired messages") == 5
    assert (await engine.stats("b")).done == 1


async def test_who_holds_an_expired_message_may_acknowledge_it(
    engine: Engine, clock: ManualClock, eraser: RetentionCompactor
) -> None:
    await engine.create_queue("q", options=QueueOptions(lease_ms=10 * MINUTE_MS))
    await engine.publish_many([short(LARGE)])
    (held,) = await engine.claim("q")
    clock.advance_ms(MINUTE_MS + 1)

    await eraser.run_once()

    assert not await message_rows(engine)
    assert (await engine.stats("q")).in_flight == 1
    assert await engine.ack("q", held.receipt) == ["ok"]
    assert (await engine.stats("q")).done == 1


@pytest.mark.parametrize("how", ["nack", "lease"])
async def test_an_expired_message_that_comes_back_is_not_delivered_again(
    engine: Engine, clock: ManualClock, eraser: RetentionCompactor, how: str
) -> None:
    await engine.create_queue("q", options=QueueOptions(lease_ms=2 * MINUTE_MS))
    await engine.publish_many([short()])
    (held,) = await engine.claim("q")
    clock.advance_ms(MINUTE_MS + 1)
    await eraser.run_once()

    if how == "nack":
        await engine.nack("q", held.receipt)
    else:
        clock.advance_ms(2 * MINUTE_MS)

    assert await engine.claim("q") == []
    stats = await engine.stats("q")
    assert (stats.in_flight, stats.delayed, stats.expired) == (0, 0, 1)


async def test_a_delay_that_outlives_the_message_ends_with_it(
    engine: Engine, clock: ManualClock
) -> None:
    await engine.create_queue("q")
    (one,) = await engine.publish_many([short(delay_ms=DAY_MS)])
    assert (await engine.stats("q")).delayed == 1
    history = await engine.history(one)
    assert history is not None
    assert history.entries[0].state == "delayed"

    clock.advance_ms(MINUTE_MS + 1)
    await engine.stores.queues.sweeper.caught_up()

    stats = await engine.stats("q")
    assert (stats.delayed, stats.expired) == (0, 1)
    assert (await queue_rows(engine))["schedule row"] == 0


async def test_a_message_that_expired_before_it_was_routed_is_passed_over_and_counted(
    new_memory_root: NewRoot, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_memory_root()
    async with opened(url, clock, ERASING) as (engine, eraser):
        await engine.create_queue("q")
        tailer = engine.parts.tailer
        monkeypatch.setattr(type(tailer), "_route_what_is_there", _never)
        await engine.stores.shards[0].publish_many([short()] * 3)
        clock.advance_ms(MINUTE_MS + 1)

        assert (await eraser.run_once()).is_empty, "not before it was routed"

        assert (await message_rows(engine))["metadata log entry"] == 3
        tailer._task.cancel()
    monkeypatch.undo()
    async with opened(url, clock, ERASING) as (engine, eraser):
        await engine.all_is_routed()
        assert (await engine.stats("q")).expired == 3
        assert (await eraser.run_once()).total("expired messages") == 3
        assert not await message_rows(engine)


async def _never(self: object) -> None:
    """A tailer that does not get to it."""


# --- done and failed ------------------------------------------------------------------------------


async def finish(engine: Engine, count: int, *, ack: bool = True) -> list[int]:
    ids = await engine.publish_many([NewMessage(b"x")] * count)
    for one in await engine.claim("q", count):
        await (engine.ack if ack else engine.nack)("q", one.receipt)
    return ids


@pytest.mark.parametrize("state", ["done", "failed"])
async def test_entries_go_exactly_when_their_retention_is_over_in_buckets_and_out_of_them(
    engine: Engine, clock: ManualClock, compactor: RetentionCompactor, state: str
) -> None:
    options = QueueOptions(
        bucket=4, max_attempts=1, done_retention_seconds=60, failed_retention_seconds=60
    )
    await engine.create_queue("q", options=options)
    ids = []
    for _ in range(5):  # ten seconds apart, buckets of 4 that mix them
        ids.append(await finish(engine, 3, ack=state == "done"))
        clock.advance_ms(10_000)
    clock.advance_ms(10_000)  # the first ones are at their deadline now

    kind = f"{state} entries"
    for gone in range(5):
        report = await compactor.run_once()
        assert report.total(kind) == (3 if gone else 0)  # type: ignore[arg-type]
        left = sorted(one for some in ids[gone:] for one in some)
        page = await engine.browse("q", state, limit=100)  # type: ignore[arg-type]
        assert sorted(entry.message_id for entry in page.entries) == left
        assert getattr(await engine.stats("q"), state) == len(left)
        clock.advance_ms(1)
        page = await engine.browse("q", state, limit=100)  # type: ignore[arg-type]
        assert len(page.entries) == len(left) - 3, "hidden before any pass"
        clock.advance_ms(9_999)
    await compactor.run_once()
    rows = await queue_rows(engine)
    assert rows["sealed done messages"] == rows["sealed failed messages"] == rows["failure"] == 0


async def test_a_retention_of_0_is_for_ever(
    engine: Engine, clock: ManualClock, compactor: RetentionCompactor
) -> None:
    await engine.create_queue("q", options=QueueOptions(bucket=2, done_retention_seconds=0))
    await finish(engine, 5)
    clock.advance_ms(10_000 * DAY_MS)

    assert (await compactor.run_once(thorough=True)).is_empty
    assert len((await engine.browse("q", "done")).entries) == 5


async def test_a_retention_that_is_changed_counts_for_what_is_there(
    engine: Engine, clock: ManualClock, compactor: RetentionCompactor
) -> None:
    await engine.create_queue("q", options=QueueOptions(bucket=2, done_retention_seconds=60))
    await finish(engine, 5)
    clock.advance_ms(50_000)
    assert (await compactor.run_once()).is_empty

    await engine.update_queue("q", done_retention_seconds=3_600)
    clock.advance_ms(50_000)
    assert (await compactor.run_once()).is_empty, "a longer one keeps them"

    await engine.update_queue("q", done_retention_seconds=90)
    assert (await compactor.run_once()).total("done entries") == 5, "a shorter one takes them"


async def test_a_failed_entry_outlives_its_message_and_says_so_when_it_is_replayed(
    engine: Engine, clock: ManualClock, eraser: RetentionCompactor
) -> None:
    await engine.create_queue("q", options=QueueOptions(max_attempts=1))
    (one,) = await engine.publish_many([short(LARGE)])
    (held,) = await engine.claim("q")
    await engine.nack("q", held.receipt, error="broken")
    clock.advance_ms(MINUTE_MS + 1)
    await eraser.run_once()

    with pytest.raises(MessageExpiredError, match=f"message {one} .* can't be replayed"):
        await engine.replay("q", one)

    (failed,) = await engine.failed("q")
    assert (failed.message_id, failed.error) == (one, "broken")
    assert await engine.purge_failed("q", one) == [one]


async def test_a_deleted_queue_takes_its_entries_and_leaves_its_messages_to_their_own_time(
    engine: Engine, clock: ManualClock, eraser: RetentionCompactor
) -> None:
    await engine.create_queue("q", options=QueueOptions(bucket=2, done_retention_seconds=1))
    await finish(engine, 5)
    clock.advance_ms(1_001)
    await eraser.run_once()  # leaves a floor behind
    (kept,) = await engine.publish_many([short()])
    await engine.delete_queue("q")

    assert (await queue_rows(engine))["retention floor"] == 0
    assert await engine.read(kept) is not None
    clock.advance_ms(MINUTE_MS + 1)
    assert (await eraser.run_once()).total("expired messages") == 1
    await engine.create_queue("q", options=QueueOptions(bucket=2, done_retention_seconds=1))
    await finish(engine, 4)
    clock.advance_ms(1_001)
    assert (await eraser.run_once()).total("done entries") == 4


# --- what is gone costs nothing -------------------------------------------------------------------


@pytest.fixture
def begun_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From which deadlines on expiry rows were looked for."""
    begun: list[int] = []
    next_runs = messages.next_runs

    async def noting(database: Any, start: bytes, *more: int) -> Any:
        begun.append(ExpiryKey.decode(start).deadline)
        return await next_runs(database, start, *more)

    monkeypatch.setattr(messages, "next_runs", noting)
    return begun


async def test_a_pass_begins_where_the_last_one_ended_also_after_a_restart(
    new_memory_root: NewRoot, clock: ManualClock, begun_at: list[int]
) -> None:
    url = new_memory_root()
    async with opened(url, clock) as (engine, compactor):
        await engine.create_queue("q")
        for _ in range(4):  # weeks of history
            await engine.publish_many([short()] * 3)
            clock.advance_ms(7 * DAY_MS)
            begun_at.clear()
            assert (await compactor.run_once()).total("expired messages") == 3
        assert min(begun_at) >= clock.now_ms() - 8 * DAY_MS
        begun_at.clear()
        assert (await compactor.run_once()).is_empty
        assert min(begun_at) >= clock.now_ms() - DAY_MS
    clock.advance_ms(1)
    async with opened(url, clock) as (engine, compactor):
        await engine.publish_many([short()])
        clock.advance_ms(MINUTE_MS + 1)
        begun_at.clear()
        assert (await compactor.run_once()).total("expired messages") == 1
        assert min(begun_at) >= clock.now_ms() - 9 * DAY_MS


async def test_what_could_not_go_yet_is_found_by_a_later_pass(
    engine: Engine, clock: ManualClock
) -> None:
    shard = engine.stores.shards[0]
    position = await Position.load(shard)
    retention = ShardRetention(
        shard, engine.stores.queues, position, number=0, options=CompactorOptions(work_share=1.0)
    )
    await engine.publish_many([short()] * 2)
    removed = []
    for routed_up_to in (0, 0, 2):
        clock.advance_ms(30 * DAY_MS)
        await engine.publish_many([short()])
        report = RetentionReport(now_ms=clock.now_ms())
        await retention.expire(report, routed_up_to=routed_up_to, before=clock.now_ms())
        removed.append(report.total("expired messages"))

    assert removed == [0, 0, 2]


# --- blobs ----------------------------------------------------------------------------------------


async def test_a_blob_without_a_message_goes_when_it_is_a_day_old(
    engine: Engine, clock: ManualClock, compactor: RetentionCompactor
) -> None:
    shard = engine.stores.shards[0]
    (orphan,) = await shard.payloads.store_blobs([LARGE])
    (kept,) = await engine.publish_many([NewMessage(LARGE)])
    clock.advance_ms(DAY_MS)
    assert (await compactor.run_once(thorough=True)).is_empty
    clock.advance_ms(1)

    report = await compactor.run_once(thorough=True)

    assert report.total("orphaned blobs") == 1
    assert report.blob_bytes == len(LARGE)
    (left,) = await blobs(engine)
    assert left != orphan.blob_id.hex()
    assert (await engine.read(kept)) is not None


@pytest.mark.parametrize("names", [["0", "README.md", "zz"], [f"a{n:031x}" for n in range(3)]])
async def test_what_is_not_ours_among_the_blobs_is_passed_over_and_left_alone(
    engine: Engine,
    clock: ManualClock,
    compactor: RetentionCompactor,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
) -> None:
    # Lists are so short that some hold nothing of ours.
    monkeypatch.setattr(messages, "BLOBS_AT_ONCE", 2)
    shard, objects = engine.stores.shards[0], engine.stores.objects
    foreign = [f"{name.upper()}{end}" for name in names for end in ("", ".tmp", " x", "/nested")]
    await shard.payloads.store_blobs([LARGE] * 3)
    clock.advance_ms(DAY_MS + 1)
    await shard.payloads.store_blobs([LARGE])
    for name in foreign:
        await objects.write(f"blobs/00000/{name}", b"not ours")
    planned = await plan_root(str(objects.location), options=QUICK, clock=clock)

    report = await compactor.run_once(thorough=True)

    assert report.total("orphaned blobs") == planned.total("orphaned blobs") == 3
    left = [name for name in await blobs(engine) if name not in foreign]
    assert len(left) == 1
    for name in foreign:
        assert await objects.read(f"blobs/00000/{name}") == b"not ours"
    assert (await compactor.run_once(thorough=True)).is_empty


async def test_blobs_are_looked_at_once_in_their_life(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    url = new_memory_root()
    async with opened(url, clock) as (engine, compactor):
        await engine.publish_many([NewMessage(LARGE)] * 3)
        clock.advance_ms(DAY_MS + 1)
        await compactor.run_once(thorough=True)
    async with opened(url, clock) as (engine, compactor):
        # As if somebody had deleted the references: nobody looks, or these would be orphans.
        for name in await blobs(engine):
            rows = type(engine.stores.queues.committer.rows)()
            rows.delete(b"\x01\x08" + bytes.fromhex(name))
            await engine.stores.shards[0].commit(rows)
        assert (await compactor.run_once(thorough=True)).is_empty


@pytest.mark.parametrize("reader", ["owner", "others"])
async def test_a_blob_that_goes_while_it_is_read_is_gone_and_not_lost(
    new_memory_root: NewRoot, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    url = new_memory_root()
    async with await Engine.open(
        url, clock=clock, options=PublishOptions(recent_bytes=0)
    ) as engine:
        await set_delete_when_done(engine.stores.queues, True)
        await engine.create_queue("none", filter="kind = 'none'")
        (one,) = await engine.publish_many([NewMessage(LARGE)])
        await engine.all_is_routed()
        system = await opendata_queue.open_async(url, clock=clock, read_only=True)
        reads = engine if reader == "owner" else system
        assert await reads.read(one) is not None
        read, compactor = Objects.read, RetentionCompactor(engine, QUICK)

        async def too_late(objects: Objects, path: str, **options: Any) -> bytes | None:
            """The rows that lead to the blob have been read: now it goes."""
            if path.startswith("blobs/"):
                await compactor.run_once(thorough=True)
            return await read(objects, path, **options)

        monkeypatch.setattr(Objects, "read", too_late)

        assert await reads.read(one) is None
        assert compactor.totals.removed["blobs", None] == 1
        await system.close()


async def test_what_a_pass_has_removed_before_it_failed_is_in_the_figures(
    engine: Engine,
    clock: ManualClock,
    compactor: RetentionCompactor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await engine.create_queue("q")
    await engine.publish_many([short()] * 3)
    clock.advance_ms(MINUTE_MS + 1)

    async def refuse(*_: object) -> None:
        raise StoreUnavailableError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(ShardRetention, "collect_orphans", refuse)
        with pytest.raises(StoreUnavailableError):
            await compactor.run_once()
    assert compactor.totals.passes == 0
    assert compactor.totals.last_pass_at_ms is None
    await compactor.run_once()

    assert compactor.totals.passes == 1
    assert compactor.totals.removed == {
        ("expired messages", None): 3,
        ("expired entries", "q"): 3,
    }


async def test_a_blob_that_is_lost_is_said_to_be(engine: Engine) -> None:
    (one,) = await engine.publish_many([NewMessage(LARGE)])
    engine.stores.shards[0].recent.forget([one])
    (name,) = await blobs(engine)
    await engine.stores.objects.delete(f"blobs/00000/{name}")

    with pytest.raises(CorruptStoreError, match=rf"payload of message {one} is missing"):
        await engine.read(one)


# --- delete when done -----------------------------------------------------------------------------


async def test_a_system_may_delete_what_all_queues_have_finished_with(
    engine: Engine, clock: ManualClock, compactor: RetentionCompactor
) -> None:
    await set_delete_when_done(engine.stores.queues, True)
    options = QueueOptions(window=2, bucket=2, max_attempts=1)
    await engine.create_queue("all", options=options)
    await engine.create_queue("red", filter="colour = 'red'", options=options)
    colours = ["red", "blue"] * 10
    ids = await engine.publish_many(
        [NewMessage(os.urandom(8), headers={"colour": one}) for one in colours]
        + [NewMessage(LARGE, headers={"colour": "blue"})]
    )
    for one in await engine.claim("all", 8):  # four red and four blue
        await engine.ack("all", one.receipt)
    (failing,) = await engine.claim("red")
    await engine.nack("red", failing.receipt)
    (held,) = await engine.claim("red")
    await engine.ack("red", held.receipt)

    report = await compactor.run_once(thorough=True)

    # Done in "all": 0 to 7. Of these 0 has failed in "red", 2 is done there, 4 and 6 wait.
    assert report.total("finished messages") == 5
    left = [n for n, one in enumerate(await engine.read_many(ids)) if one is not None]
    assert left == [0, 4, 6, *range(8, 21)]
    assert (await engine.stats("all")).done == 8
    for one in await engine.claim("all", 100):
        await engine.ack("all", one.receipt)
    for one in await engine.claim("red", 100):
        await engine.ack("red", one.receipt)
    await engine.replay("red", ids[0])
    report = await compactor.run_once(thorough=True)
    assert report.total("finished messages") == 15
    assert report.total("blobs") == 1
    assert await blobs(engine) == []
    assert [one for one in await engine.read_many(ids) if one is not None] != []
    for one in await engine.claim("red"):
        await engine.ack("red", one.receipt)
    assert (await compactor.run_once(thorough=True)).total("finished messages") == 1
    assert not await message_rows(engine)
    assert (await queue_rows(engine))["attempts"] == 0


async def test_what_only_a_failed_entry_held_back_goes_in_the_pass_that_forgets_the_entry(
    engine: Engine, clock: ManualClock, compactor: RetentionCompactor
) -> None:
    await set_delete_when_done(engine.stores.queues, True)
    options = QueueOptions(max_attempts=1, bucket=2, failed_retention_seconds=60)
    await engine.create_queue("q", options=options)
    await engine.publish_many([NewMessage(b"x")] * 5)
    for one in await engine.claim("q", 5):
        await engine.nack("q", one.receipt)
    assert (await compactor.run_once(thorough=True)).is_empty
    clock.advance_ms(MINUTE_MS + 1)
    url = str(engine.stores.objects.location)
    planned = await plan_root(url, options=QUICK, clock=clock)

    report = await compactor.run_once(thorough=True)

    assert report.removed == {("failed entries", "q"): 5, ("finished messages", None): 5}
    assert planned.removed == report.removed
    assert (await compactor.run_once(thorough=True)).is_empty


@pytest.mark.parametrize("options", [QUICK, ERASING])
async def test_a_finished_message_is_not_counted_again_when_it_would_have_expired(
    engine: Engine, clock: ManualClock, options: CompactorOptions
) -> None:
    compactor = RetentionCompactor(engine, options)
    await set_delete_when_done(engine.stores.queues, True)
    await engine.create_queue("q")
    ids = await engine.publish_many([short(LARGE), *[short()] * 5])
    held = await engine.claim("q", 3)
    await engine.ack("q", held[0].receipt, held[2].receipt)

    report = await compactor.run_once(thorough=True)

    assert report.total("finished messages") == 2
    assert (report.total("blobs"), report.blob_bytes) == (1, len(LARGE))
    assert (await message_rows(engine))["expiry"] == 2  # of message 1, and of 3 to 5
    clock.advance_ms(MINUTE_MS + 1)
    report = await compactor.run_once(thorough=True)
    assert report.total("expired messages") == 4
    # They were in the log, and in no queue: but they had expired.
    assert not report.total("finished messages")
    assert (await compactor.run_once(thorough=True)).is_empty
    assert [one for one in await engine.read_many(ids) if one is not None] == []


async def test_without_queues_nothing_is_finished(
    engine: Engine, compactor: RetentionCompactor
) -> None:
    await set_delete_when_done(engine.stores.queues, True)
    ids = await engine.publish_many([NewMessage(b"x")] * 3)

    assert (await compactor.run_once(thorough=True)).is_empty
    assert None not in await engine.read_many(ids)


async def test_what_no_queue_wanted_is_finished_and_a_new_queue_gets_what_is_left(
    engine: Engine, compactor: RetentionCompactor
) -> None:
    await set_delete_when_done(engine.stores.queues, True)
    await engine.create_queue("red", filter="colour = 'red'")
    ids = await engine.publish_many(
        [NewMessage(b"x", headers={"colour": one}) for one in ("red", "blue", "red")]
    )
    assert (await compactor.run_once(thorough=True)).total("finished messages") == 1

    await engine.create_queue("all", start="beginning")
    await engine.parts.replay.finished()

    assert [one.message_id for one in await engine.claim("all", 10)] == [ids[0], ids[2]]


# --- beside an owner ------------------------------------------------------------------------------


async def test_an_owner_removes_what_is_past_its_time_once_a_minute(
    new_memory_root: NewRoot, clock: ManualClock
) -> None:
    async with await Engine.open(new_memory_root(), clock=clock) as engine:
        compactor = RetentionCompactor(engine, ERASING)
        engine.run_beside(compactor.run_for_ever())
        await engine.publish_many([short()] * 3)
        clock.advance_ms(MINUTE_MS + 1)
        while not compactor.totals.passes:
            await asyncio.sleep(0)
        assert compactor.totals.removed["expired messages", None] == 3
        assert not await message_rows(engine)
