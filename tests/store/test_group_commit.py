"""Sharing commits, waiting for room, closing, and failing together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from odq_encodings import PayloadKey, SeqBlock
from opendata_queue import (
    ClosedError,
    CommitLimits,
    Engine,
    FencedError,
    NewMessage,
    PublishOptions,
)
from opendata_queue.store import Database, Rows
from opendata_queue.store import group_commit as committer_module
from opendata_queue.store.group_commit import Patience
from opendata_queue.testing import ManualClock
from tests.log.written_log import log_of


async def test_callers_that_arrive_during_a_commit_share_the_next_one(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = watch_commits(monkeypatch)
    async with await Engine.open(root) as system:
        await system.publish(b"reserves the first block of sequences")
        sizes.clear()

        ids = await asyncio.gather(*(system.publish(b"%d" % n) for n in range(64)))

    assert len(set(ids)) == 64
    assert sum(sizes) == 128
    assert len(sizes) <= 3


async def test_callers_who_come_again_and_again_end_up_in_the_same_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = watch_commits(monkeypatch)
    commits = hold_commits(monkeypatch)

    async def publish_ten() -> None:
        for n in range(10):
            await system.publish(b"%d" % n)

    async with await Engine.open("memory:///") as system:
        commits.set()
        await system.publish(b"reserves the first block of sequences")
        commits.clear()
        sizes.clear()
        early = [asyncio.create_task(publish_ten()) for _ in range(4)]
        while system._shard._committer._under_way is None:
            await asyncio.sleep(0)
        late = [asyncio.create_task(publish_ten()) for _ in range(4)]
        while not system._shard._committer.rows:
            await asyncio.sleep(0)
        commits.set()
        await asyncio.gather(*early, *late)

    # Two rows for each: once four alone, then all eight, and at the end the four who came late.
    assert sizes == [8, *[16] * 9, 8]


def test_callers_who_never_come_back_are_waited_for_ever_more_rarely() -> None:
    patience = Patience()

    waits = 0
    for _ in range(1_000):
        if patience.is_worth_it():
            waits += 1
            patience.waited(8, 5)
    assert waits == 4 + 1_000 // 64

    while not patience.is_worth_it():
        pass
    patience.waited(8, 4)  # half of them are back
    assert [patience.is_worth_it() for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("how", ["urgent", "full", "close", "give_up"])
async def test_who_is_in_a_hurry_waits_for_no_callers(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(committer_module, "_LONGEST_WAIT_S", 3_600.0)
    options = PublishOptions(limits=CommitLimits(batch_rows=10))
    async with await Engine.open("memory:///", options=options) as system:
        committer = system._shard._committer
        await asyncio.gather(*(system.publish(b"comes back") for _ in range(4)))
        committer._took_s = 1e9
        committer._gone = 50  # most of which never come back
        waiting = asyncio.create_task(system.publish(b"waits for the others"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()

        async with asyncio.timeout(60):
            if how == "urgent":
                committer.commit(urgent=True)
            elif how == "full":
                await system.publish_many([NewMessage(b"much")] * 5)
            elif how == "close":
                await system.close()
            else:
                committer.give_up(FencedError("it is over"))
            if how == "give_up":
                with pytest.raises(FencedError, match="it is over"):
                    await waiting
            else:
                await waiting


async def test_a_commit_takes_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = watch_commits(monkeypatch)
    options = PublishOptions(limits=CommitLimits(batch_rows=10))
    async with await Engine.open("memory:///", options=options) as system:
        await asyncio.gather(*(system.publish(b"%d" % n) for n in range(64)))

    assert max(sizes) <= 10


async def test_callers_wait_while_too_much_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = hold_commits(monkeypatch)
    options = PublishOptions(limits=CommitLimits(batch_bytes=10_000))
    async with await Engine.open("memory:///", options=options) as system:
        commits.set()
        await system.publish(b"reserves the first block of sequences")
        commits.clear()
        tasks = [asyncio.create_task(system.publish(bytes(1_000))) for _ in range(200)]
        for _ in range(1_000):
            await asyncio.sleep(0)
        pending = system._shard._committer.rows.size_bytes
        commits.set()
        ids = await asyncio.gather(*tasks)

    assert 10_000 <= pending < 12_000
    assert len(set(ids)) == 200


async def test_a_commit_lingers_for_company_until_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = watch_commits(monkeypatch)
    options = PublishOptions(limits=CommitLimits(batch_rows=8, linger_ms=60_000))
    async with await Engine.open("memory:///", options=options) as system:
        # The block of sequences does not linger; no other rows could join it.
        await asyncio.gather(*(system.publish(b"%d" % n) for n in range(4)))

        assert sizes == [1, 8]


async def test_whatever_kills_the_committer_no_caller_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(_: Database, rows: Rows, **options: Any) -> None:
        raise MemoryError("no room")

    system = await Engine.open("memory:///")
    monkeypatch.setattr(Database, "commit", broken)

    results = await asyncio.gather(
        *(system.publish(b"x") for _ in range(5)), return_exceptions=True
    )

    assert {type(result) for result in results} == {ClosedError}
    with pytest.raises(ClosedError, match="stopped by MemoryError"):
        await system.publish(b"x")
    await system.close()


async def test_a_record_that_can_not_be_encoded_stops_everything_and_leaves_no_caller_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: Rows) -> None:
        raise MemoryError("no room")

    async with await Engine.open("memory:///") as system:
        monkeypatch.setattr(system._queues.committer, "_prepare", broken)

        with pytest.raises(ClosedError, match="stopped by MemoryError"):
            await system.create_queue("q")


async def test_giving_up_on_closing_does_not_cancel_a_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = hold_commits(monkeypatch)
    commits.set()
    system = await Engine.open("memory:///")
    await system.publish(b"reserves the first block of sequences")
    commits.clear()
    publishing = asyncio.create_task(system.publish(b"x"))
    while not system._shard._committer.rows:
        await asyncio.sleep(0)
    closing = asyncio.create_task(system.close())
    await asyncio.sleep(0)
    closing.cancel()

    commits.set()

    assert isinstance(await publishing, int)
    await system.close()


def test_a_system_whose_event_loop_is_gone_says_so() -> None:
    system = asyncio.run(Engine.open("memory:///"))

    with pytest.raises(ClosedError, match="stopped by CancelledError"):
        asyncio.run(system.publish(b"x"))
    asyncio.run(system.close())


async def test_an_error_does_not_grow_with_those_who_get_it(root: str) -> None:
    first = await Engine.open(root)
    await first.publish(b"x")
    second = await Engine.open(root, takeover=True)
    with pytest.raises(FencedError):
        await first.publish(b"x")

    depths = []
    for _ in range(50):
        with pytest.raises(FencedError) as caught:
            await first.publish(b"x")
        depths.append(len(caught.traceback))

    assert len(set(depths)) == 1
    await second.close()
    await first.close()


async def test_who_steps_down_ends_the_commit_under_way_and_begins_no_other(
    memory_system: Engine,
) -> None:
    await memory_system.publish(b"before")
    committer = memory_system._shard._committer
    under_way = asyncio.create_task(memory_system.publish(b"under way"))
    while committer._under_way is None:
        await asyncio.sleep(0)
    gathered = asyncio.create_task(memory_system.publish(b"gathered"))
    while not committer.rows:
        await asyncio.sleep(0)
    assert committer._under_way is not None

    memory_system._step_down(FencedError("replaced"))

    with pytest.raises(FencedError, match="replaced"):
        await gathered
    with pytest.raises(FencedError, match="replaced"):
        await memory_system.publish(b"after")
    await under_way
    await committer.at_work()
    assert [entry.message_id for entry in await log_of(memory_system)] == [0, under_way.result()]
    await asyncio.wait([committer._runner])


async def test_a_waiting_publish_that_is_cancelled_passes_its_turn_on(
    memory_system: Engine,
) -> None:
    tasks = [
        asyncio.create_task(memory_system.publish(b"x", idempotency_key="k")) for _ in range(30)
    ]
    await asyncio.sleep(0)
    for task in tasks[1::2]:
        task.cancel()

    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert len({result for result in results if isinstance(result, int)}) == 1
    assert not memory_system._shard._keys._waiting


async def test_nothing_is_uploaded_for_a_publish_that_must_fail(tmp_path: Path) -> None:
    system = await Engine.open(f"file://{tmp_path}/root")
    await system.close()

    with pytest.raises(ClosedError):
        await system.publish(bytes(100_000))

    assert not (tmp_path / "root" / "blobs").exists()


async def test_a_message_past_its_retention_is_gone(
    memory_system: Engine, clock: ManualClock
) -> None:
    message_id = await memory_system.publish(b"x", retention_seconds=60)
    clock.advance_ms(60_000)
    assert await memory_system.read(message_id) is not None

    clock.advance_ms(1)

    assert await memory_system.read(message_id) is None


async def test_closing_commits_what_is_pending(root: str) -> None:
    system = await Engine.open(root)
    tasks = [asyncio.create_task(system.publish(b"%d" % n)) for n in range(10)]
    while not system._shard._committer.rows:
        await asyncio.sleep(0)
    await system._shard._reserve(100)
    await asyncio.sleep(0)

    await system.close()

    results = await asyncio.gather(*tasks, return_exceptions=True)
    async with await Engine.open(root) as system:
        stored = {entry.message_id for entry in await log_of(system)}
    assert {result for result in results if isinstance(result, int)} == stored
    assert all(isinstance(result, int | ClosedError) for result in results)


async def test_a_closed_system_takes_no_more_messages(root: str) -> None:
    system = await Engine.open(root)
    await system.close()

    with pytest.raises(ClosedError, match="is closed"):
        await system.publish(b"late")


async def test_a_publish_larger_than_a_block_of_sequences_is_one_publish(
    memory_system: Engine,
) -> None:
    ids = await memory_system.publish_many([NewMessage(b"x")] * 9_000)

    assert ids == list(range(ids[0], ids[0] + 9_000))


async def test_publishing_nothing_is_nothing(memory_system: Engine) -> None:
    assert await memory_system.publish_many([]) == []
    assert await log_of(memory_system) == []


async def test_the_block_of_a_sequence_is_durable_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    durable_end = 0
    commit = Database.commit

    async def checked(self: Database, rows: Rows, **options: Any) -> None:
        nonlocal durable_end
        if "/messages/" not in self.name:
            await commit(self, rows, **options)
            return
        block = durable_end
        for _, key, value, _ in rows:
            if key == b"\x01\x02":
                block = SeqBlock.decode(value).end
            elif len(key) == 10:
                assert PayloadKey.decode(key).message_id < durable_end
        await commit(self, rows, **options)
        durable_end = block

    monkeypatch.setattr(Database, "commit", checked)
    async with await Engine.open("memory:///") as system:
        for size in (1, 4_095, 5_000, 100, 9_999, 1):
            await system.publish_many([NewMessage(b"x")] * size)


def watch_commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each commit of messages from now on."""
    sizes: list[int] = []
    commit = Database.commit

    async def watched(self: Database, rows: Rows, **options: Any) -> None:
        if "/messages/" in self.name:
            sizes.append(len(rows))
        await commit(self, rows, **options)

    monkeypatch.setattr(Database, "commit", watched)
    return sizes


def hold_commits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Commits of messages wait until the event is set."""
    go = asyncio.Event()
    commit = Database.commit

    async def held(self: Database, rows: Rows, **options: Any) -> None:
        if "/messages/" in self.name:
            await go.wait()
        await commit(self, rows, **options)

    monkeypatch.setattr(Database, "commit", held)
    return go
