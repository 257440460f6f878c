"""Looking at a root that another one serves: all is seen, and nothing is disturbed or written."""

from __future__ import annotations

import inspect
import os
from dataclasses import asdict
from pathlib import Path

import pytest

import opendata_queue
from opendata_queue import (
    AsyncSystem,
    ClosedError,
    Engine,
    InvalidInputError,
    NewMessage,
    QueueNotFoundError,
    QueueOptions,
    StoreAccessError,
    System,
    WrongContextError,
)
from opendata_queue.api.system import OPERATIONS
from opendata_queue.log.bulk_writer import BulkResult, BulkShard
from opendata_queue.root.commit_files import Commit, CommitFiles, CommittedShard
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.support.s3_server import S3Server

SMALL = QueueOptions(window=4, bucket=4, max_attempts=1)


async def fill(owner: AsyncSystem) -> dict[str, int]:
    """Messages in every state, some of them behind the window and in sealed buckets."""
    await owner.create_queue("orders", filter="type = 'order'", options=SMALL)
    await owner.create_queue("all", options=SMALL)
    await owner.create_queue("gone")
    await owner.delete_queue("gone")
    ids = [await owner.publish(b"%d" % n, headers={"type": "order"}) for n in range(30)]
    large = await owner.publish(b"x" * 70_000, headers={"type": "other"})
    later = await owner.publish(b"later", headers={"type": "order"}, delay_ms=60_000)
    await owner.history(later)
    claimed = await owner.claim("orders", 12, consumer="me")
    await owner.ack("orders", *(one.receipt for one in claimed[:9]))
    await owner.nack("orders", *(one.receipt for one in claimed[9:11]), error="no")
    return {
        "done": ids[0],
        "failed": ids[9],
        "in_flight": ids[11],
        "available": ids[12],
        "backlog": ids[29],
        "later": later,
        "large": large,
    }


async def test_everything_is_seen_as_its_owner_sees_it(root: str) -> None:
    clock = ManualClock()
    async with await Engine.open(root, clock=clock) as owner:
        known = await fill(owner)

        async with await opendata_queue.open_async(root, read_only=True, clock=clock) as looker:
            assert await looker.list_queues() == ["all", "orders"]
            assert await looker.get_queue("orders") == await owner.get_queue("orders")
            for name in ("orders", "all"):
                assert await looker.stats(name) == await owner.stats(name)
            assert await looker.peek("orders", 30) == await owner.peek("orders", 30)
            for state in ("available", "delayed", "done", "failed"):
                seen = await looker.browse("orders", state, limit=100)
                assert seen == await owner.browse("orders", state, limit=100)
                assert seen.entries
            (held,) = (await looker.browse("orders", "in_flight")).entries
            assert held.message_id == known["in_flight"]
            assert await looker.failed("orders") == await owner.failed("orders")
            assert await looker.failed("orders", filter="type = 'no'") == []
            for one in known.values():
                assert await looker.read(one) == await owner.read(one)
                seen_history, told = await looker.history(one), await owner.history(one)
                assert seen_history is not None
                assert told is not None
                assert seen_history.consumers == told.consumers
                assert {(entry.queue, entry.state) for entry in seen_history.entries} == {
                    (entry.queue, entry.state) for entry in told.entries
                }
            assert await looker.history(12345) is None
            assert await looker.read(7 << 32) is None


async def test_pages_go_on_where_the_one_before_has_ended(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with await Engine.open(root) as owner:
        await fill(owner)
        async with await opendata_queue.open_async(root, read_only=True) as looker:
            seen = []
            after = None
            while True:
                page = await looker.browse("all", "available", after=after, limit=7)
                seen += [entry.message_id for entry in page.entries]
                if (after := page.next) is None:
                    break

        whole = await owner.browse("all", "available", limit=100)
        assert seen == [entry.message_id for entry in whole.entries]


async def test_nothing_is_written_and_the_owner_goes_on(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    root = new_s3_root()
    # Its heartbeats are writes too, and none falls into the test.
    async with await Engine.open(root, owner_lease_ms=600_000) as owner:
        known = await fill(owner)
        s3_environment.reset_requests(path_contains=root.rpartition("/")[2])

        async with await opendata_queue.open_async(root, read_only=True) as looker:
            await looker.stats("orders")
            await looker.peek("orders", 5)
            await looker.history(known["failed"])

        counts = s3_environment.requests()
        assert not counts["PUT"] + counts["POST"] + counts["DELETE"]
        assert counts["GET"]
        assert await owner.publish(b"still mine") > 0


async def test_what_happens_meanwhile_is_seen_soon(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    async with await Engine.open(root) as owner:
        await owner.create_queue("orders")
        async with await opendata_queue.open_async(root, read_only=True) as looker:
            assert (await looker.stats("orders")).available == 0
            message_id = await owner.publish(b"new")
            await owner.history(message_id)

            while not (await looker.stats("orders")).available:
                pass  # until the reader has followed
            (seen,) = await looker.peek("orders")
            assert seen.payload == b"new"


async def test_a_look_at_a_folder_touches_no_file_of_it(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    async with await Engine.open(root) as owner:
        await fill(owner)
    before = snapshot(tmp_path)

    async with await opendata_queue.open_async(root, read_only=True) as looker:
        assert (await looker.stats("orders")).available == 18

    assert snapshot(tmp_path) == before


def snapshot(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


async def test_a_file_that_is_collected_under_way_is_survived(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    root = new_s3_root()
    async with await Engine.open(root) as owner:
        await fill(owner)
    async with await opendata_queue.open_async(root, read_only=True) as looker:
        s3_environment.fail(methods={"GET"}, path_contains=".sst", status=404, times=1)

        assert (await looker.stats("orders")).available == 18


async def test_a_root_that_nobody_has_used_has_no_queues(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    (tmp_path / "root").mkdir()
    with pytest.raises(StoreAccessError, match="there is no root at"):
        await opendata_queue.open_async(root, read_only=True)
    async with await Engine.open(root):
        pass
    for folder in ("messages", "queues"):
        os.rename(tmp_path / "root" / folder, tmp_path / folder)

    async with await opendata_queue.open_async(root, read_only=True) as looker:
        assert await looker.list_queues() == []
        assert await looker.read(0) is None
        with pytest.raises(QueueNotFoundError):
            await looker.stats("orders")


async def test_looking_makes_no_root(tmp_path: Path) -> None:
    with pytest.raises(StoreAccessError, match="there is no root at"):
        await opendata_queue.open_async(f"file://{tmp_path}/typo", read_only=True)

    assert not (tmp_path / "typo").exists()


def test_what_would_change_something_is_refused(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    with opendata_queue.open(root) as owner:
        owner.create_queue("orders")
        looker = opendata_queue.open(root, read_only=True)
        for change in (
            lambda system: system.publish(b"x"),
            lambda system: system.create_queue("more"),
            lambda system: system.pause_queue("orders"),
            lambda system: system.purge_queue("orders"),
            lambda system: system.delete_queue("orders"),
            lambda system: system.claim("orders"),
            lambda system: system.ack("orders", "x"),
            lambda system: system.nack("orders", "x"),
            lambda system: system.release("orders", "x"),
            lambda system: system.extend("orders", "x"),
            lambda system: system.replay("orders", all=True),
            lambda system: system.purge_failed("orders", all=True),
        ):
            refuses(looker, change)
        looker.close()
        with pytest.raises(ClosedError):
            looker.list_queues()
    with pytest.raises(InvalidInputError, match="takeover is for owners"):
        opendata_queue.open(root, read_only=True, takeover=True)


async def test_every_operation_that_does_not_only_read_is_refused(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with (
        await Engine.open(root),
        await opendata_queue.open_async(root, read_only=True) as reader,
    ):
        changing = [one for one in OPERATIONS.values() if one.action != "view"]
        assert len(changing) == 12
        for declared in changing:
            operation = getattr(reader, declared.method.__name__)
            needed = [
                one
                for one in inspect.signature(operation).parameters.values()
                if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
            ]
            with pytest.raises(
                WrongContextError, match=f"can't {declared.doing}: .*read_only=True"
            ):
                await operation(*("x" for _ in needed))


def refuses(system: System, change: object) -> None:
    with pytest.raises(WrongContextError, match="opened with read_only=True"):
        change(system)  # type: ignore[operator]


async def bulk_messages(owner: Engine, clock: ManualClock, *messages: NewMessage) -> BulkResult:
    """A bulk shard that is written to its end, and not committed."""
    objects = owner.stores.objects
    reserved = await ShardFiles(objects).reserve_bulk(job="job", now_ms=clock.now_ms())
    writer = await BulkShard.create(objects, reserved.shard, clock)
    await writer.add(messages)
    return await writer.finish()


async def test_messages_in_bulk_are_seen_when_their_owner_shows_them(root: str) -> None:
    clock = ManualClock()
    async with await Engine.open(root, clock=clock) as owner:
        await owner.create_queue("orders")
        written = await bulk_messages(owner, clock, NewMessage(b"bulk"), NewMessage(b"more"))
        first = written.shard << 32
        async with await opendata_queue.open_async(root, read_only=True, clock=clock) as reader:
            for system in (owner, reader):
                assert await system.read_many([first, first + 1]) == [None, None]
                assert await system.history(first) is None

        shard = CommittedShard.model_validate(asdict(written))
        await CommitFiles(owner.stores.objects).create(
            Commit.new("job", [shard], now_ms=clock.now_ms())
        )
        await owner.all_is_routed()
        await owner.stores.queues.all_durable()

        async with await opendata_queue.open_async(root, read_only=True, clock=clock) as reader:
            seen = await reader.read_many([first, 7, first + 1])
            assert [one and one.payload for one in seen] == [b"bulk", None, b"more"]
            assert seen == await owner.read_many([first, 7, first + 1])
            assert await reader.history(first) is not None


async def test_a_message_that_ends_before_it_is_due_is_found_where_it_is_scheduled(
    root: str,
) -> None:
    clock = ManualClock()
    async with await Engine.open(root, clock=clock) as owner:
        await owner.create_queue("orders", filter="type = 'order'")
        many = [
            NewMessage(b"x", headers={"type": "order"}, delay_ms=1_000 + number)
            for number in range(1_001)
        ]
        await owner.publish_many(many)  # more than are searched through
        message_id = await owner.publish(
            b"x", headers={"type": "order"}, delay_ms=7_200_000, retention_seconds=3_600
        )
        told = await owner.history(message_id)

        async with await opendata_queue.open_async(root, read_only=True, clock=clock) as reader:
            seen = await reader.history(message_id)

    assert told is not None
    assert [entry.state for entry in told.entries] == ["delayed"]
    assert seen == told
