"""Several processes that publish, one that serves the queues: each does its part and no other."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from opendata_queue import Engine, NewMessage, OtherRoleError, OwnedError, StoreSettings
from opendata_queue.root.owner_files import DEFAULT_LEASE_MS, Owner, OwnerFiles, messages_role
from opendata_queue.root.roles import publishing_is_elsewhere
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.runtime.process import ProcessIdentity
from opendata_queue.store import Objects
from opendata_queue.systems.ingest import Ingest
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot

PATIENCE_MS = 60_000


def numbered(first: int, behind: int) -> list[NewMessage]:
    return [NewMessage(payload=str(one).encode()) for one in range(first, behind)]


async def drain(system: Engine, queue: str, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        claimed = await system.claim(queue, min(count, 1_000), wait_ms=PATIENCE_MS)
        if not claimed:
            break
        await system.ack(queue, *(one.receipt for one in claimed))
        found += [int(one.payload or b"") for one in claimed]
    return sorted(found)


async def test_what_several_publishers_publish_is_routed_once(root: str) -> None:
    async with (
        await Engine.open(root, publishes=False) as queues,
        await Ingest.open(root) as one,
        await Ingest.open(root) as two,
    ):
        await queues.create_queue("all")
        await asyncio.gather(one.publish_many(numbered(0, 50)), two.publish_many(numbered(50, 100)))

        assert await drain(queues, "all", 100) == list(range(100))
        assert (one.shard_number, two.shard_number) == (1, 2)
        await one.publish_many(numbered(100, 110))
        assert await drain(queues, "all", 10) == list(range(100, 110))
        assert (await queues.stats("all")).available == 0


async def test_a_system_that_publishes_itself_follows_others_too(root: str) -> None:
    async with await Engine.open(root) as system, await Ingest.open(root) as other:
        await system.create_queue("all")
        ids = [
            *await system.publish_many(numbered(0, 5)),
            *await other.publish_many(numbered(5, 10)),
        ]

        assert await drain(system, "all", 10) == list(range(10))
        found = await system.read_many(ids)
        assert [one.payload for one in found if one is not None] == [
            str(one).encode() for one in range(10)
        ]
        for one in ids:
            history = await system.history(one)
            assert history is not None
            assert [entry.state for entry in history.entries] == ["done"]


async def test_a_queue_gets_what_is_published_after_it_was_made_and_nothing_before(
    root: str,
) -> None:
    async with await Engine.open(root, publishes=False) as queues, await Ingest.open(root) as one:
        await one.publish_many(numbered(0, 5))
        await queues.create_queue("now")
        await queues.create_queue("all", start="beginning")
        await one.publish_many(numbered(5, 10))

        assert await drain(queues, "now", 5) == list(range(5, 10))
        assert await drain(queues, "all", 10) == list(range(10))
        assert (await queues.stats("now")).available == (await queues.stats("all")).available == 0


async def test_a_new_filter_counts_for_nothing_that_was_published_before(
    new_memory_root: NewRoot,
) -> None:
    root = new_memory_root()
    async with await Engine.open(root) as system, await Ingest.open(root) as publisher:
        await system.create_queue("q", filter="kind = 'a'")
        published = [await one.publish(b"", headers={"kind": "a"}) for one in (publisher, system)]

        await system.update_queue("q", filter="kind = 'b'")
        await publisher.publish(b"", headers={"kind": "a"})
        published.append(await publisher.publish(b"", headers={"kind": "b"}))

        await system.all_is_routed()
        claimed = await system.claim("q", 10)
        assert sorted(one.message_id for one in claimed) == sorted(published)


async def test_what_is_published_while_nobody_serves_the_queues_is_routed_later(root: str) -> None:
    async with await Engine.open(root, publishes=False) as queues:
        await queues.create_queue("all")
    for first in (0, 10):
        async with await Ingest.open(root) as one:
            await one.publish_many(numbered(first, first + 10))

    async with await Engine.open(root, publishes=False) as queues:
        assert await drain(queues, "all", 20) == list(range(20))
    async with await Engine.open(root) as queues:
        assert (await queues.stats("all")).available == 0


async def test_a_publisher_that_comes_back_takes_its_shard_again(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    first = await Ingest.open(root)
    second = await Ingest.open(root)
    await first.close()
    async with await Ingest.open(root) as third:
        assert (first.shard_number, second.shard_number, third.shard_number) == (1, 2, 1)
        ids = await third.publish_many(numbered(0, 1))
        assert ids[0] >> 32 == 1
    await second.close()


async def test_many_publishers_that_start_at_once_get_different_shards(root: str) -> None:
    publishers = await asyncio.gather(*(Ingest.open(root) for _ in range(4)))
    try:
        assert sorted(one.shard_number for one in publishers) == [1, 2, 3, 4]
    finally:
        await asyncio.gather(*(one.close() for one in publishers))


async def test_a_publisher_says_where_the_queues_are_served(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with await Ingest.open(root) as one:
        with pytest.raises(OtherRoleError, match="no process serves them"):
            await one.list_queues()
        async with await Engine.open(root, publishes=False, address="http://queues:1"):
            with pytest.raises(OtherRoleError, match="http://queues:1") as caught:
                await one.claim("all")
        assert caught.value.address == "http://queues:1"


async def test_a_server_of_queues_says_where_to_publish(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with await Engine.open(root, publishes=False) as queues:
        with pytest.raises(OtherRoleError, match="--role ingest"):
            await queues.publish_many(numbered(0, 1))
        async with await Ingest.open(root, address="http://publish:1"):
            with pytest.raises(OtherRoleError, match="http://publish:1"):
                await queues.publish_many(numbered(0, 1))


ELSEWHERE = ProcessIdentity(machine="another", pid=17, start="48213")


@pytest.fixture
def objects(new_memory_root: NewRoot) -> Objects:
    return Objects.open(new_memory_root(), StoreSettings())


@pytest.fixture
def killed() -> ProcessIdentity:
    """A process of this machine that has ended without a word."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ProcessIdentity(
        machine=ProcessIdentity.of_this_process().machine, pid=ended.pid, start="1"
    )


async def publisher(objects: Objects, shard: int, process: ProcessIdentity, sign_at: int) -> str:
    """Let somebody write a shard who gave a sign of life then; returns where it serves."""
    if shard:
        await ShardFiles(objects).reserve_live(now_ms=sign_at)
    owner = Owner(
        holder=f"{shard:032x}",
        name="someone",
        host="somewhere",
        machine=process.machine,
        pid=process.pid,
        process_start=process.start,
        address=f"http://publish:{shard}",
        lease_ms=DEFAULT_LEASE_MS,
        taken_at=sign_at,
    )
    assert await OwnerFiles(objects, messages_role(shard)).create(1, owner)
    return f"http://publish:{shard}"


async def test_nobody_is_sent_to_a_publisher_that_was_killed_while_another_one_lives(
    objects: Objects, killed: ProcessIdentity
) -> None:
    clock = ManualClock()
    gone = [await publisher(objects, shard, killed, clock.now_ms()) for shard in (0, 1)]
    alone = await publishing_is_elsewhere(objects, clock)
    alive = await publisher(objects, 2, ELSEWHERE, clock.now_ms())

    # Without another one whoever asks waits until it is started again.
    assert alone.address == gone[0]
    assert (await publishing_is_elsewhere(objects, clock)).address == alive


async def test_a_publisher_elsewhere_that_is_silent_for_its_lease_comes_after_one_that_is_not(
    objects: Objects,
) -> None:
    clock = ManualClock()
    first = await publisher(objects, 1, ELSEWHERE, clock.now_ms())
    clock.advance_ms(DEFAULT_LEASE_MS)
    second = await publisher(objects, 2, ELSEWHERE, clock.now_ms())
    # The same one each time: it knows the keys of what is published again.
    before = [(await publishing_is_elsewhere(objects, clock)).address for _ in range(3)]

    clock.advance_ms(1)

    assert before == [first] * 3
    assert (await publishing_is_elsewhere(objects, clock)).address == second


async def test_publishers_of_which_nothing_is_known_take_turns(
    objects: Objects, killed: ProcessIdentity
) -> None:
    clock = ManualClock()
    await publisher(objects, 1, killed, clock.now_ms())
    silent = [await publisher(objects, shard, ELSEWHERE, 1_000) for shard in (2, 3)]

    named = [(await publishing_is_elsewhere(objects, clock)).address for _ in range(2)]

    assert sorted(filter(None, named)) == silent


async def test_queues_have_one_owner(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with await Engine.open(root, publishes=False):
        with pytest.raises(OwnedError):
            await Engine.open(root)
        with pytest.raises(OwnedError):
            await Engine.open(root, publishes=False)


async def test_a_publisher_reads_back_its_own_messages_alone(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with await Ingest.open(root) as one, await Ingest.open(root) as two:
        (mine,) = await one.publish_many(numbered(1, 2))
        (other,) = await two.publish_many(numbered(2, 3))

        found = await one.read_many([mine, other])

        assert found[0] is not None
        assert found[0].payload == b"1"
        assert found[1] is None


async def test_an_idempotency_key_is_known_to_its_shard(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    clock = ManualClock()
    message = NewMessage(payload=b"once", idempotency_key="key")
    async with await Ingest.open(root, clock=clock) as one, await Ingest.open(root) as two:
        first = await one.publish_many([message])

        assert await one.publish_many([message]) == first
        assert await two.publish_many([message]) != first
    async with await Ingest.open(root, clock=clock) as again:
        assert again.shard_number == 1
        assert await again.publish_many([message]) == first
