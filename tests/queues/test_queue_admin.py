"""Making, changing, emptying and deleting queues, and losing the memory in the middle of it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from odq_encodings import (
    ActiveMessages,
    ActiveMessagesKey,
    BacklogEntry,
    QueueCounters,
    QueueOptionsRecord,
    Replay,
    Row,
    ScheduleEntry,
    decode_any,
)
from opendata_queue import (
    ClosedError,
    Engine,
    FencedError,
    FilterError,
    InvalidInputError,
    NewMessage,
    QueueExistsError,
    QueueNotFoundError,
    QueueOptions,
    StoreUnavailableError,
)
from opendata_queue.log.writer import MessageShard, PublishOptions
from opendata_queue.model.ids import OWNERS_SHARD
from opendata_queue.queues import removal as queue_removal
from opendata_queue.queues.lanes import Past
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.removal import delete_rows
from opendata_queue.queues.state import Claim, QueueState
from opendata_queue.queues.store import admin
from opendata_queue.queues.store.refill import Refills
from opendata_queue.routing import replay as log_replay
from opendata_queue.store import Objects, Rows, StoreSettings, forget_memory_root
from opendata_queue.testing import ManualClock

_numbers = itertools.count()

SMALL = QueueOptions(window=4, bucket=2, max_attempts=1, lease_ms=1_000)


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/root"
        return
    url = f"memory:///admin-{next(_numbers)}"
    yield url
    forget_memory_root(url)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_removal, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(log_replay, "ENTRIES_AT_ONCE", 7)


async def settled(system: Engine) -> None:
    """Wait until everything is routed, and durable."""
    await system._tailer.caught_up()
    committer = system._queues.committer
    await committer.wait(committer.commit())


async def publish(system: Engine, count: int, **message: Any) -> list[int]:
    """Publish, and wait until it is in the queues."""
    ids = await system.publish_many([NewMessage(b"%d" % n, **message) for n in range(count)])
    await settled(system)
    return ids


async def rows_of(system: Engine, name: str) -> list[Row]:
    """All rows of a queue that are in the store, after everything under way is."""
    await settled(system)
    found = []
    async for chunk in system._queues.database.scan(b"\x01", b"\xff"):
        for key, value in chunk:
            row = decode_any(key, value)
            if getattr(row.key, "queue_id", None) == name.encode():
                found.append(row)
    return found


async def check_counters(system: Engine, name: str) -> None:
    """The counters of a queue say what its rows are, and the window comes before the backlog."""
    values = [row.value for row in await rows_of(system, name)]
    (active,) = [value for value in values if isinstance(value, ActiveMessages)]
    (counters,) = [value for value in values if isinstance(value, QueueCounters)]
    backlog = sum(isinstance(value, BacklogEntry) for value in values)
    scheduled = sum(isinstance(value, ScheduleEntry) for value in values)
    assert sum(count.rows for count in counters.backlog) == backlog
    assert counters.scheduled == scheduled
    stats = await system.stats(name)
    assert (stats.available, stats.delayed) == (len(active.available) + backlog, scheduled)


async def drain(system: Engine, name: str, at_once: int = 100) -> list[int]:
    """Claim and finish all that is available; the ids in the order of claiming."""
    ids: list[int] = []
    while claimed := await system.claim(name, at_once):
        outcomes = await system.ack(name, *(message.receipt for message in claimed))
        assert set(outcomes) == {"ok"}
        ids += [message.message_id for message in claimed]
    return ids


async def commits(system: Engine, count: int) -> None:
    """Let so many batches of the queue store become durable."""
    committer = system._queues.committer
    wanted = committer.durable_batch + count
    while committer.durable_batch < wanted:
        await asyncio.sleep(0)


def lose_after(system: Engine, batches: int) -> None:
    """Let the process be lost when so many further batches of the queue store are durable."""
    database = system._queues.database
    commit = database.commit
    left = iter(range(batches))

    async def commit_or_be_lost(rows: Rows, **options: Any) -> None:
        if next(left, None) is None:
            raise FencedError("it was killed")
        await commit(rows, **options)

    database.commit = commit_or_be_lost  # type: ignore[method-assign]


# --- purging --------------------------------------------------------------------------------------


async def fill_every_place(system: Engine, clock: ManualClock, name: str) -> list[str]:
    """Two in flight, three done, three failed, and more in window, backlog and schedule."""
    await publish(system, 20)
    await publish(system, 9, delay_ms=60_000)
    claimed = await system.claim(name, 8)
    receipts = [message.receipt for message in claimed]
    await system.ack(name, *receipts[:3])
    await system.nack(name, *receipts[3:6], error="e")
    return receipts[6:]


async def test_a_purge_drops_what_waits_and_nothing_else(root: str, clock: ManualClock) -> None:
    async with await Engine.open(root, clock=clock) as system:
        await system.create_queue("q", options=SMALL)
        await system.create_queue("other", options=SMALL)
        held = await fill_every_place(system, clock, "q")

        assert await system.purge_queue("q") == 12 + 9
        assert await system.purge_queue("q") == 0

        stats = await system.stats("q")
        assert (stats.available, stats.delayed) == (0, 0)
        assert (stats.in_flight, stats.done, stats.failed) == (2, 3, 3)
        assert (await system.stats("other")).available == 20
        await check_counters(system, "q")
    async with await Engine.open(root, clock=clock) as system:
        assert await system.stats("q") == stats
        assert await system.ack("q", *held) == ["ok", "ok"]
        assert await system.claim("q") == []
        (new,) = await publish(system, 1)
        assert await drain(system, "q") == [new]


async def test_thousands_of_rows_are_purged_in_batches(
    system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_removal, "ROWS_AT_ONCE", 400)
    await system.create_queue("q", options=QueueOptions(window=16))
    for priority in ("1", "5", "1"):
        await publish(system, 1_500, headers={"priority": priority})
    await publish(system, 1_500, delay_ms=5)
    before = system._queues.committer.durable_batch

    assert await system.purge_queue("q") == 6_000

    assert system._queues.committer.durable_batch - before >= 6_000 // 400
    await check_counters(system, "q")
    assert not [row for row in await rows_of(system, "q") if isinstance(row.value, BacklogEntry)]


async def test_a_batch_of_a_purge_is_small_enough_for_one_step_on_the_loop(
    system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await system.create_queue("q", options=QueueOptions(window=16))
    await publish(system, 1_500)
    await publish(system, 1_500, delay_ms=5)
    drops: dict[str, list[int]] = {"drop_backlog": [], "drop_scheduled": []}

    def noted(name: str) -> Callable[[QueueState, Sequence[Any]], Any]:
        drop = getattr(QueueState, name)

        def dropped(state: QueueState, rows: Sequence[Any]) -> Any:
            drops[name].append(len(rows))
            return drop(state, rows)

        return dropped

    for name in drops:
        monkeypatch.setattr(QueueState, name, noted(name))

    assert await system.purge_queue("q") == 3_000
    assert max(drops["drop_scheduled"]) == max(drops["drop_backlog"]) == 500


@pytest.mark.parametrize("batches", [1, 2, 5])
async def test_a_purge_that_is_cut_off_leaves_a_valid_queue(
    root: str, clock: ManualClock, small_steps: None, batches: int
) -> None:
    lost = await Engine.open(root, clock=clock)
    await lost.create_queue("q", options=SMALL)
    ids = await publish(lost, 50)
    delayed = await publish(lost, 20, delay_ms=1_000)
    lose_after(lost, batches)
    with pytest.raises(FencedError):
        await lost.purge_queue("q")

    async with await Engine.open(root, clock=clock, takeover=True) as system:
        await lost.close()
        await check_counters(system, "q")
        stats = await system.stats("q")
        assert 0 < stats.available + stats.delayed < 70
        clock.advance_ms(1_000)
        left = await drain(system, "q")

    assert len(left) == len(set(left)) == stats.available + stats.delayed
    assert set(left) <= {*ids, *delayed}


async def test_what_is_published_during_a_purge_stays_and_the_purge_ends(
    system: Engine, small_steps: None
) -> None:
    await system.create_queue("q", options=SMALL)
    old = await publish(system, 300)
    old += await publish(system, 100, delay_ms=1)
    purge = asyncio.create_task(system.purge_queue("q"))
    new: list[int] = []
    await commits(system, 1)
    while not purge.done():
        # Some outrank all that is there, so that window and backlog change places.
        new += await system.publish_many(
            [NewMessage(b"x", headers={"priority": p}) for p in ("0", "128", "200")]
        )
    assert await purge == len(old)
    await system._tailer.caught_up()

    assert new
    await check_counters(system, "q")
    assert sorted(await drain(system, "q")) == new


async def test_claims_go_on_during_a_purge(
    system: Engine, clock: ManualClock, small_steps: None
) -> None:
    await system.create_queue("q", options=SMALL)
    ids = await publish(system, 400)
    delayed = await publish(system, 50, delay_ms=10)
    purge = asyncio.create_task(system.purge_queue("q"))
    claimed: list[int] = []

    async def consume() -> None:
        while not purge.done():
            for message in await system.claim("q", 3):
                claimed.append(message.message_id)
                give_back = message.message_id % 2 and message.attempts < 3
                await (system.release if give_back else system.ack)("q", message.receipt)
                clock.advance_ms(1)

    await asyncio.gather(consume(), consume())

    dropped = await purge
    stats = await system.stats("q")
    assert claimed
    assert dropped + stats.done + stats.available + stats.delayed == len(ids) + len(delayed)
    await check_counters(system, "q")


async def test_what_was_published_right_before_is_purged_too(memory_system: Engine) -> None:
    await memory_system.create_queue("q")
    await memory_system.publish_many([NewMessage(b"x")] * 500)

    assert await memory_system.purge_queue("q") == 500


async def test_a_queue_that_is_deleted_while_it_is_purged(
    memory_system: Engine, small_steps: None
) -> None:
    await memory_system.create_queue("q", options=SMALL)
    await publish(memory_system, 100)
    purge = asyncio.create_task(memory_system.purge_queue("q"))
    await commits(memory_system, 2)

    await memory_system.delete_queue("q")

    with pytest.raises(QueueNotFoundError, match="'q' any more: it was deleted"):
        await purge
    assert await rows_of(memory_system, "q") == []


# --- deleting -------------------------------------------------------------------------------------


async def test_a_deleted_queue_leaves_no_row(
    system: Engine, clock: ManualClock, small_steps: None
) -> None:
    for name in ("q", "q/a", "q.b", "p"):
        await system.create_queue(name, options=SMALL)
    await fill_every_place(system, clock, "q")
    await system._replay.close()
    await system.create_queue("q/late", options=SMALL, start="beginning")
    others = {name: await rows_of(system, name) for name in ("q/a", "q.b", "p")}
    kinds = {row.kind.title for row in await rows_of(system, "q")}
    assert kinds == {
        "active messages", "done messages", "failed messages", "queue configuration",
        "queue options", "queue counters", "backlog row", "schedule row", "failure",
        "sealed done messages", "sealed failed messages",
    }  # fmt: skip
    assert "replay" in {row.kind.title for row in await rows_of(system, "q/late")}

    await asyncio.gather(system.delete_queue("q"), system.delete_queue("q/late"))

    assert await rows_of(system, "q") == []
    assert await rows_of(system, "q/late") == []
    assert {name: await rows_of(system, name) for name in others} == others


async def test_there_is_no_queue_from_the_call_on(system: Engine, small_steps: None) -> None:
    await system.create_queue("q", options=SMALL)
    await publish(system, 100)
    (message,) = await system.claim("q")
    deletion = asyncio.create_task(system.delete_queue("q"))
    await commits(system, 1)
    assert not deletion.done()

    assert await system.list_queues() == []
    for call in (
        system.claim("q"),
        system.ack("q", message.receipt),
        system.nack("q", message.receipt),
        system.release("q", message.receipt),
        system.extend("q", message.receipt),
        system.stats("q"),
        system.get_queue("q"),
        system.update_queue("q", paused=True),
        system.purge_queue("q"),
        system.failed("q"),
    ):
        with pytest.raises(QueueNotFoundError, match="'q'"):
            await call
    with pytest.raises(QueueExistsError, match="'q' is being deleted"):
        await system.create_queue("q")
    await publish(system, 5)
    await deletion

    assert await rows_of(system, "q") == []
    with pytest.raises(QueueNotFoundError, match="there is no queue 'q'"):
        await system.delete_queue("q")


async def test_those_who_wait_are_told_that_the_queue_is_gone(memory_system: Engine) -> None:
    await memory_system.create_queue("q")
    waiting = [asyncio.create_task(memory_system.claim("q", wait_ms=3_600_000)) for _ in range(3)]
    while len(memory_system._queues.queue("q").waiters) < 3:
        await asyncio.sleep(0)

    await memory_system.delete_queue("q")

    for one in waiting:
        with pytest.raises(QueueNotFoundError, match="'q' any more: it was deleted"):
            await one


@pytest.mark.parametrize("batches", [1, 2, 6])
async def test_a_deletion_that_is_cut_off_goes_on_at_the_next_open(
    root: str,
    clock: ManualClock,
    small_steps: None,
    batches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = await Engine.open(root, clock=clock)
    await lost.create_queue("q", options=SMALL)
    await fill_every_place(lost, clock, "q")
    await publish(lost, 100)
    lose_after(lost, batches)
    with pytest.raises(FencedError):
        await lost.delete_queue("q")

    go_on = asyncio.Event()

    async def delete_later(*rows: Any, **options: Any) -> None:
        await go_on.wait()
        await delete_rows(*rows, **options)

    monkeypatch.setattr(admin, "delete_rows", delete_later)
    async with await Engine.open(root, clock=clock, takeover=True) as system:
        await lost.close()
        assert await system.list_queues() == []
        with pytest.raises(QueueExistsError, match="is being deleted"):
            await system.create_queue("q")
        go_on.set()
        await system.delete_queue("q")
        assert await rows_of(system, "q") == []
        await system.create_queue("q", options=SMALL)
        (message_id,) = await publish(system, 1)
        assert await drain(system, "q") == [message_id]


async def test_a_marked_queue_is_taken_up_without_anybody_asking(
    root: str, clock: ManualClock, small_steps: None
) -> None:
    lost = await Engine.open(root, clock=clock)
    await lost.create_queue("q", options=SMALL)
    await publish(lost, 100)
    deletion = asyncio.create_task(lost.delete_queue("q"))
    await commits(lost, 1)
    await lost.close()
    with pytest.raises(ClosedError, match="the next owner deletes 'q'"):
        await deletion

    async with await Engine.open(root, clock=clock) as system:
        options = [r.value for r in await rows_of(system, "q")][-1:]
        assert all(value.flags == 4 for value in options if isinstance(value, QueueOptionsRecord))
        while system._queues.admin.being_deleted:
            await asyncio.sleep(0)
        assert await rows_of(system, "q") == []


async def test_a_caller_that_is_cancelled_does_not_stop_the_deletion(
    memory_system: Engine, small_steps: None
) -> None:
    await memory_system.create_queue("q", options=SMALL)
    await publish(memory_system, 100)
    deletion = asyncio.create_task(memory_system.delete_queue("q"))
    await commits(memory_system, 1)

    deletion.cancel()
    await asyncio.wait([deletion])
    await memory_system.delete_queue("q")  # waits for the end

    assert await rows_of(memory_system, "q") == []


async def test_a_deletion_that_could_not_read_is_taken_up_by_the_next_call(
    memory_system: Engine, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(*_: object, **__: object) -> None:
        raise StoreUnavailableError("no answer")

    await memory_system.create_queue("q", options=SMALL)
    await publish(memory_system, 100)
    with monkeypatch.context() as broken:
        broken.setattr(memory_system._queues.database, "scan", no_answer)
        with pytest.raises(StoreUnavailableError, match="no answer"):
            await memory_system.delete_queue("q")
    with pytest.raises(QueueExistsError, match="is being deleted"):
        await memory_system.create_queue("q")

    await memory_system.delete_queue("q")

    assert await rows_of(memory_system, "q") == []


async def test_what_is_under_way_when_a_queue_is_deleted_leaves_nothing_behind(
    system: Engine, clock: ManualClock
) -> None:
    for name, moment in itertools.product(("q", "r"), range(6)):
        await system.create_queue(name, options=SMALL)
        await fill_every_place(system, clock, name)
        held = await system.claim(name, 2)
        failed = [one.message_id for one in await system.failed(name)]
        clock.advance_ms(60_000)  # leases are over, and what was delayed is due

        async def delete(name: str = name, moment: int = moment) -> None:
            for _ in range(moment):
                await system._queues.database.get(b"\x01\x10")
            await system.delete_queue(name)

        results = await asyncio.gather(
            system.claim(name, 20),
            system.claim(name, 5, wait_ms=3_600_000),
            system.nack(name, *(message.receipt for message in held)),
            system.replay(name, *failed),
            system.purge_failed(name, *failed),
            system.purge_queue(name),
            system.publish_many([NewMessage(b"x")] * 50),
            delete(),
            return_exceptions=True,
        )

        errors = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, QueueNotFoundError) for error in errors), errors
        await system._tailer.caught_up()
        assert await rows_of(system, name) == []


@pytest.mark.parametrize("reopened", [False, True])
async def test_receipts_of_a_deleted_queue_are_void_even_if_the_clock_stands_still(
    root: str, clock: ManualClock, reopened: bool
) -> None:
    system = await Engine.open(root, clock=clock)
    made = [(await system.create_queue("q")).created_at_ms]
    await publish(system, 1)
    (message,) = await system.claim("q")
    receipts = [message.receipt]
    for _ in range(3):
        await system.delete_queue("q")
        if reopened:
            await system.close()
            system = await Engine.open(root, clock=clock)
        made.append((await system.create_queue("q", start="beginning")).created_at_ms)
        await system._replay.finished()
        (again,) = await system.claim("q")
        assert (again.message_id, again.attempts) == (message.message_id, message.attempts)

        lost = ["lease_lost"] * len(receipts)
        assert await system.ack("q", *receipts) == lost
        assert await system.nack("q", *receipts) == lost
        assert await system.extend("q", *receipts) == [None] * len(receipts)
        assert (await system.stats("q")).in_flight == 1
        receipts.append(again.receipt)

    assert await system.ack("q", *receipts) == ["lease_lost"] * 3 + ["ok"]
    assert made == sorted(set(made))
    await system.close()


# --- beginning in the past ------------------------------------------------------------------------


async def test_a_queue_may_begin_with_all_that_was_ever_published(
    system: Engine, clock: ManualClock
) -> None:
    await system.create_queue("a", filter="kind = 'a'")
    first = await publish(system, 3, headers={"kind": "a"})
    await publish(system, 3, headers={"kind": "b"})
    await publish(system, 2, headers={"kind": "a"}, retention_seconds=1)
    later = await publish(system, 2, headers={"kind": "a"}, delay_ms=5_000)
    clock.advance_ms(2_000)

    info = await system.create_queue("a2", filter="kind='a' PRIORITY 7", start="beginning")
    await system._replay.finished()

    assert info.filter == "kind = 'a' PRIORITY 7"
    stats = await system.stats("a2")
    assert (stats.available, stats.delayed, stats.expired, stats.replaying) == (3, 2, 2, 0)
    claimed = await system.claim("a2", 10)
    assert [(m.message_id, m.priority, m.attempts) for m in claimed] == [
        (one, 7, 1) for one in first
    ]
    clock.advance_ms(3_000)
    assert await drain(system, "a2") == later
    assert not [row for row in await rows_of(system, "a2") if isinstance(row.value, Replay)]


async def test_the_first_queue_may_begin_in_the_past(root: str, clock: ManualClock) -> None:
    async with await Engine.open(root, clock=clock) as system:
        ids = await publish(system, 30)
    async with await Engine.open(root, clock=clock) as system:
        ids += await publish(system, 30)
        await system.create_queue("q", start="beginning")
        ids += await publish(system, 30)
        await system._replay.finished()

        assert await drain(system, "q") == ids


async def test_what_was_routed_is_not_replayed_too(
    root: str, clock: ManualClock, small_steps: None
) -> None:
    async with await Engine.open(root, clock=clock) as system:
        ids = await publish(system, 2)
    async with await Engine.open(root, clock=clock) as system:
        ids += await publish(system, 3)  # behind a gap: a new owner takes a new block
        await system._replay.close()
        await system.create_queue("q", options=SMALL, start="beginning")
        ids += await publish(system, 10)
    async with await Engine.open(root, clock=clock) as system:
        await system._replay.finished()

        assert await drain(system, "q") == ids


async def test_a_queue_of_an_empty_log_has_nothing_to_replay(memory_system: Engine) -> None:
    await memory_system.create_queue("q", start="beginning")
    assert (await memory_system.stats("q")).replaying == 0

    (message_id,) = await publish(memory_system, 1)

    assert await drain(memory_system, "q") == [message_id]


async def test_a_queue_may_begin_at_a_time(root: str, clock: ManualClock) -> None:
    async with await Engine.open(root, clock=clock) as system:
        await publish(system, 10)
        clock.advance_ms(1)
        start = clock.now_ms()
        ids = await publish(system, 10)
        clock.advance_ms(60_000)
        ids += await publish(system, 10)
        await system.create_queue("q", start=start)
        await system.create_queue("last", start=clock.now_ms())
        ids += await publish(system, 10)
        await system._replay.finished()

        assert await drain(system, "q") == ids
        assert await drain(system, "last") == ids[10:]


async def test_a_time_is_found_without_reading_all_that_came_before(
    system: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(30):
        await publish(system, 100)
        clock.advance_ms(log_replay.CLOCK_SLACK_MS)
    start = clock.now_ms()
    ids = await publish(system, 3)
    decode = system._shard.log._decode
    decoded = []

    def counting(key: bytes, value: bytes) -> Any:
        decoded.append(key)
        return decode(key, value)

    monkeypatch.setattr(system._shard.log, "_decode", counting)
    await system.create_queue("q", start=start)
    await system._replay.finished()

    assert await drain(system, "q") == ids
    assert len(decoded) < 200


async def test_a_clock_that_was_behind_hides_nothing(root: str) -> None:
    ahead = ManualClock()
    ids = []
    async with await Engine.open(root, clock=ahead) as system:
        await publish(system, 20)
        ahead.advance_ms(10_000)
        start = ahead.now_ms()
        ids += await publish(system, 20)
    # Owners of 0.1 did not go by the time of the root.
    behind = ManualClock(start - 9_000)
    shard = await MessageShard.open(
        Objects.open(root, StoreSettings()),
        OWNERS_SHARD,
        clock=behind,
        options=PublishOptions(),
        journaled=True,
    )
    await shard.publish_many([NewMessage(b"x")] * 20)  # received before ``start``, by this clock
    behind.advance_ms(9_000)
    ids += await shard.publish_many([NewMessage(b"x")] * 20)
    await shard.close()
    async with await Engine.open(root, clock=ahead) as system:
        await system.create_queue("q", start=start)
        await system._replay.finished()

        assert await drain(system, "q") == ids


async def test_a_replay_that_is_cut_off_again_and_again_brings_everything_once(
    root: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_replay, "ENTRIES_AT_ONCE", 10)
    system = await Engine.open(root, clock=clock)
    ids = await publish(system, 6_000)
    await system.create_queue("q", options=QueueOptions(window=8), start="beginning")
    left = [(await system.stats("q")).replaying]
    done: list[int] = []
    for _ in range(6):
        ids += await publish(system, 5)
        done += [m.message_id for m in await _claim_and_ack(system, 10)]
        lose_after(system, 3)
        with pytest.raises(FencedError):
            await system._replay.finished()
        lost = system
        system = await Engine.open(root, clock=clock, takeover=True)
        await lost.close()
        left.append((await system.stats("q")).replaying)
    await system._tailer.caught_up()
    await system._replay.finished()

    assert left == sorted(left, reverse=True)
    assert 6_000 >= left[0] > left[-1] > 0
    await check_counters(system, "q")
    done += await drain(system, "q", 1_000)
    assert sorted(done) == ids
    await system.close()


async def _claim_and_ack(system: Engine, count: int) -> list[Any]:
    claimed = await system.claim("q", count)
    await system.ack("q", *(message.receipt for message in claimed))
    return claimed


async def test_queues_that_are_made_while_others_publish_miss_nothing_and_get_nothing_twice(
    system: Engine, small_steps: None
) -> None:
    ids: list[int] = []
    going = True

    async def publish_on() -> None:
        while going:
            ids.extend(await system.publish_many([NewMessage(b"x")] * 11))

    tasks = [asyncio.create_task(publish_on()) for _ in range(3)]
    for number in range(6):
        while len(ids) < number * 60:
            await asyncio.sleep(0)
        await system.create_queue(f"q{number}", options=SMALL, start="beginning")
    going = False
    await asyncio.gather(*tasks)
    await system._tailer.caught_up()
    await system._replay.finished()

    for number in range(6):
        assert Counter(await drain(system, f"q{number}")) == Counter(ids)


async def test_a_queue_is_used_while_it_is_replayed(system: Engine, small_steps: None) -> None:
    old = await publish(system, 500)
    await system.create_queue("q", options=SMALL, start="beginning")
    new = await publish(system, 5)
    got: list[int] = []
    while (await system.stats("q")).replaying:
        got += [message.message_id for message in await _claim_and_ack(system, 3)]

    assert got
    got += await drain(system, "q")
    assert sorted(got) == old + new


async def test_a_queue_can_be_deleted_while_it_is_replayed(
    system: Engine, small_steps: None
) -> None:
    await publish(system, 300)
    await system.create_queue("q", options=SMALL, start="beginning")
    await system.create_queue("r", options=SMALL, start="beginning")
    await commits(system, 2)

    await system.delete_queue("q")
    await system._replay.finished()

    assert await rows_of(system, "q") == []
    assert len(await drain(system, "r")) == 300


async def test_a_replay_that_stopped_is_told_to_consumers(
    memory_system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room")

    await publish(memory_system, 1)
    monkeypatch.setattr(memory_system._replay, "_route", broken)
    await memory_system.create_queue("q", start="beginning")

    with pytest.raises(MemoryError):
        await memory_system._replay.finished()
    with pytest.raises(MemoryError):
        await memory_system.claim("q")


# --- settings -------------------------------------------------------------------------------------


async def test_a_queue_is_paused_and_resumed(memory_system: Engine) -> None:
    await memory_system.create_queue("q")
    await publish(memory_system, 1)

    assert (await memory_system.pause_queue("q")).options.paused
    assert await memory_system.claim("q") == []
    assert not (await memory_system.resume_queue("q")).options.paused

    assert len(await memory_system.claim("q")) == 1


async def test_updates_at_the_same_time_do_not_undo_each_other(memory_system: Engine) -> None:
    await memory_system.create_queue("q")

    await asyncio.gather(
        memory_system.pause_queue("q"),
        memory_system.update_queue("q", max_attempts=9),
        memory_system.update_queue("q", filter="a = 1"),
        memory_system.update_queue("q", window=3),
    )

    info = await memory_system.get_queue("q")
    assert (info.options.paused, info.options.max_attempts) == (True, 9)
    assert (info.filter, info.options.window) == ("a = 1", 3)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("leese_ms", 5, "leese_ms is no option of a queue; there are backoff_factor, backoff_ji"),
        ("window", 2.5, "window is 2.5, not a whole number"),
        ("window", "9", "window is '9', not a whole number"),
        ("window", True, "window is True, not a whole number"),
        ("backoff_factor", "2", "backoff_factor is '2', not a number"),
        ("backoff_jitter", float("nan"), "backoff_jitter is nan, not within 0 to 1"),
        ("max_attempts", -1, "max_attempts is -1, not within 0 to 65535"),
        ("paused", "yes", "paused is 'yes', not true or false"),
        ("relaxed_claims", 1, "relaxed_claims is 1, not true or false"),
        ("lease_ms", None, "lease_ms is None, not a whole number"),
        ("filter", 5, "a filter is text, not int"),
        ("filter", "a = ", "column 4: expected a literal"),
    ],
)
async def test_a_bad_option_is_named_and_changes_nothing(
    memory_system: Engine, option: str, value: object, message: str
) -> None:
    before = await memory_system.create_queue("q")

    with pytest.raises(InvalidInputError) as raised:
        await memory_system.update_queue("q", **{option: value})  # type: ignore[arg-type]

    assert message in str(raised.value)
    assert await memory_system.get_queue("q") == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda now: {"start": "yesterday"}, "start is 'yesterday', not 'now', 'beginning' or a"),
        (lambda now: {"start": None}, "start is None, not"),
        (lambda now: {"start": True}, "start is True, not"),
        (lambda now: {"start": 1.5}, "start is 1.5, not"),
        (lambda now: {"start": now + 1}, "which is no time of the past; now is"),
        (lambda now: {"start": -(1 << 63) - 1}, "which is no time of the past"),
        (lambda now: {"options": {"window": 3}}, "options are {'window': 3}, not QueueOptions"),
        (lambda now: {"filter": None}, "a filter is text, not NoneType"),
        (lambda now: {"filter": "a = 1 PRIORITY 900"}, "900"),
    ],
)
async def test_a_queue_that_can_not_be_made_is_not_made(
    memory_system: Engine,
    clock: ManualClock,
    arguments: Callable[[int], dict[str, Any]],
    message: str,
) -> None:
    with pytest.raises(InvalidInputError) as raised:
        await memory_system.create_queue("q", **arguments(clock.now_ms()))

    assert message in str(raised.value)
    assert await memory_system.list_queues() == []


async def test_a_filter_error_points_at_the_place(memory_system: Engine) -> None:
    with pytest.raises(FilterError) as raised:
        await memory_system.create_queue("q", filter="a = 1 AND")

    assert raised.value.column == 10


# --- claims and others ----------------------------------------------------------------------------


async def test_a_claim_that_finds_nothing_gives_way_to_others(memory_system: Engine) -> None:
    await memory_system.create_queue("q")
    publishing = asyncio.create_task(memory_system.publish(b"x"))

    while not (claimed := await memory_system.claim("q")):
        pass

    assert claimed[0].message_id == await publishing


async def test_what_comes_back_while_a_refill_waits_for_room_is_not_overtaken(
    memory_system: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The refill that a claim starts would be done before ours begins.
    monkeypatch.setattr(Refills, "in_background", lambda *_: None)
    await memory_system.create_queue("q", options=QueueOptions(window=2))
    ids = await publish(memory_system, 12)
    first = await memory_system.claim("q", 2)
    store = memory_system._queues
    queue = store.queue("q")
    assert not queue.state.ready.window()
    store.committer._room.clear()

    refill = asyncio.create_task(store.refills.refill(queue))
    for _ in range(50):
        await store.database.get(b"\x01\x10")  # it has read by now, if it does so first
    queue.state.release(_claim(first[0].message_id, queue), store.clock.now_ms())
    queue.changed()
    store.committer._room.set()
    await refill

    again = await memory_system.claim("q", 12)
    assert [message.message_id for message in again] == [ids[0], *ids[2:]]


def _claim(message_id: int, queue: StoredQueue) -> Claim:
    (held,) = [one for one in queue.state.in_flight.held() if one.message_id == message_id]
    return Claim(held.message_id, held.attempts, held.claimed_at)


async def test_a_window_that_is_made_smaller_gives_the_rest_to_the_backlog(
    memory_system: Engine,
) -> None:
    await memory_system.create_queue("q", options=QueueOptions(window=50))
    ids = await memory_system.publish_many([NewMessage(b"x")] * 80)
    await memory_system._tailer.caught_up()

    await memory_system.update_queue("q", window=2)

    value = await memory_system._queues.database.get(ActiveMessagesKey(queue_id=b"q").encode())
    assert value is not None
    assert len(ActiveMessages.decode(value).available) == 2
    assert (await memory_system.stats("q")).available == 80
    assert [m.message_id for m in await memory_system.claim("q", 100)] == ids


async def test_a_refill_of_a_deleted_queue_touches_no_row(memory_system: Engine) -> None:
    await memory_system.create_queue("q", options=QueueOptions(window=2))
    await memory_system.publish_many([NewMessage(b"x")] * 20)
    await memory_system._tailer.caught_up()
    store = memory_system._queues
    old = store.queue("q")
    async with old.reading():
        refill = asyncio.create_task(store.refills.refill(old))
        old.state.drop_window(Past({0: 1_000}))
        await asyncio.sleep(0)
        await memory_system.delete_queue("q")
        await memory_system.create_queue("q", options=QueueOptions(window=2), start="beginning")

    with pytest.raises(QueueNotFoundError):
        await refill
    while (await memory_system.stats("q")).replaying:
        await asyncio.sleep(0)
    claimed = [m for _ in range(10) for m in await memory_system.claim("q", 2)]
    assert len({m.message_id for m in claimed}) == 20
