"""What operations cost, counted and not timed: requests, commits, rows, bytes, encodings, awaits.

A change that makes something slower by design fails here on any machine. If a figure falls, write
the new one down; if it rises, say in the commit why that is worth it.

The clock stands still, so that nothing happens by itself, and the consumer's name has a fixed
length. ``bytes`` are those of keys and values; ``PUT`` are requests to the S3 server of the tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import pytest

from benchmarks.counting import Counters, Suspensions, counted
from opendata_queue import ClaimedMessage, CommitLimits, Engine, NewMessage, QueueOptions
from opendata_queue.owner_files import DEFAULT_LEASE_MS
from opendata_queue.ownership import Ownership
from opendata_queue.store import active_tier
from opendata_queue.store.batch_writer import Tier
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.s3_server import S3Server

T = TypeVar("T")


NOW_MS: Final = 1_763_000_000_000
HEADERS: Final = {"type": "order.created", "region": "emea"}
PAYLOAD: Final = bytes(256)
QUEUE: Final = "orders"
CONSUMER: Final = "consumer"

# What each message costs to publish: its two rows are encoded once, and never again.
ENCODINGS: Final = (
    "encode_inline_payload",
    "encode_payload_key",
    "encode_metadata_log_key",
    "encode_message_metadata",
)
BATCH_ENCODINGS: Final = (
    "inline_payload_columns",
    "metadata_log_key_columns",
    "message_metadata_columns",
)


def new(count: int) -> list[NewMessage]:
    return [NewMessage(PAYLOAD, headers=HEADERS) for _ in range(count)]


class Costs:
    """An engine whose every step is counted: until all that it has caused is durable."""

    def __init__(self, engine: Engine, counters: Counters, server: S3Server | None) -> None:
        self.engine = engine
        self._counters = counters
        self._server = server
        self.awaits: dict[str, int] = {}
        """How often the commits of the last step had to wait."""

    async def settled(self) -> None:
        await self.engine._tailer.caught_up(self.engine._shard.next_id & 0xFFFF_FFFF)
        await self.engine._queues.all_durable()

    async def of(self, step: Callable[[], Awaitable[T]]) -> tuple[T, dict[str, int]]:
        """What a step returns, and what it has cost."""
        await self.settled()
        self._counters.take()
        if self._server is not None:
            path = self.engine._shard._database.name.partition("/messages/")[0]
            self._server.reset_requests(path_contains=path.rpartition("/")[2] + "/")
        result = await step()
        await self.settled()
        cost = self._counters.take()
        self.awaits = {name: cost.pop(name) for name in list(cost) if name.endswith(".awaits")}
        if self._server is not None:
            requests = self._server.requests()
            del requests["bytes_in"], requests["bytes_out"]
            cost |= {name: count for name, count in requests.items() if count}
        return result, cost

    async def claim(self, count: int) -> list[ClaimedMessage]:
        return await self.engine.claim(QUEUE, count, consumer=CONSUMER)

    async def ack(self, messages: list[ClaimedMessage]) -> None:
        await self.engine.ack(QUEUE, *[one.receipt for one in messages])


@asynccontextmanager
async def costs(
    url: str, server: S3Server | None = None, *, limits: CommitLimits | None = None
) -> AsyncIterator[Costs]:
    with counted() as counters:
        async with await Engine.open(url, clock=ManualClock(NOW_MS), queue_limits=limits) as engine:
            await _stop_looking_for_shards(engine)
            if QUEUE not in await engine.list_queues():
                await engine.create_queue(QUEUE, options=QueueOptions(lease_ms=60_000))
                await engine.publish(b"reserves sequences")
                found = Costs(engine, counters, server)
                await found.settled()
                await found.ack(await found.claim(1))
            yield Costs(engine, counters, server)


async def _stop_looking_for_shards(engine: Engine) -> None:
    """It goes by real time, and asks for lists in the middle of a step."""
    looking = engine._following._discovering
    assert looking is not None
    looking.cancel()
    await asyncio.wait([looking])


def written(database: str, rows: int, size: int) -> dict[str, int]:
    """One commit of a database."""
    return {f"{database}.commits": 1, f"{database}.rows": rows, f"{database}.bytes": size}


def encoded(messages: int) -> dict[str, int]:
    """The encodings of messages that are published one by one."""
    return dict.fromkeys((*ENCODINGS, "encode_headers"), messages)


def encoded_in_batches(messages: int, *, calls: int = 1) -> dict[str, int]:
    """Of messages in batches: headers that those of a call share are encoded once."""
    return {**dict.fromkeys(BATCH_ENCODINGS, messages), "encode_headers": calls}


async def test_the_costs_of_single_messages(new_s3_root: NewRoot, s3_environment: S3Server) -> None:
    async with costs(new_s3_root(), s3_environment) as engine:
        system = engine.engine

        _, publish = await engine.of(lambda: system.publish(PAYLOAD, headers=HEADERS))
        (claimed, *_), claim = await engine.of(lambda: engine.claim(1))
        _, extend = await engine.of(lambda: system.extend(QUEUE, claimed.receipt))
        _, ack = await engine.of(lambda: engine.ack([claimed]))
        await system.publish(PAYLOAD, headers=HEADERS)
        await engine.settled()
        (claimed,) = await engine.claim(1)
        _, release = await engine.of(lambda: system.release(QUEUE, claimed.receipt))
        (claimed,) = await engine.claim(1)
        _, nack = await engine.of(lambda: system.nack(QUEUE, claimed.receipt, error="busy"))

        # Published and routed: one commit of each database, each of them one object.
        assert publish == {
            **encoded(1), **written("messages", 2, 384), **written("queues", 4, 131), "PUT": 2,
        }  # fmt: skip
        assert claim == {**written("queues", 4, 139), "PUT": 1}
        assert extend == {**written("queues", 3, 117), "PUT": 1}
        assert ack == {**written("queues", 4, 137), "PUT": 1}
        assert release == {**written("queues", 3, 117), "PUT": 1}
        assert nack == {**written("queues", 4, 126), "PUT": 1}


async def test_the_costs_of_batches(new_s3_root: NewRoot, s3_environment: S3Server) -> None:
    async with costs(new_s3_root(), s3_environment) as engine:
        system = engine.engine

        _, publish = await engine.of(lambda: system.publish_many(new(100)))
        claimed, claim = await engine.of(lambda: engine.claim(100))
        _, ack = await engine.of(lambda: engine.ack(claimed))

        assert publish == {
            **encoded_in_batches(100), **written("messages", 200, 100 * 384),
            **written("queues", 4, 2_804), "PUT": 2,
        }  # fmt: skip
        assert claim == {**written("queues", 103, 4_990), "PUT": 1}
        assert ack == {**written("queues", 4, 1_919), "PUT": 1}


async def test_callers_at_the_same_time_share_their_commits(
    new_s3_root: NewRoot, s3_environment: S3Server
) -> None:
    async with costs(new_s3_root(), s3_environment) as engine:
        system = engine.engine

        async def publish_all() -> None:
            await asyncio.gather(*(system.publish(PAYLOAD, headers=HEADERS) for _ in range(50)))

        async def claim_all() -> list[list[ClaimedMessage]]:
            return await asyncio.gather(*(engine.claim(1) for _ in range(50)))

        _, publish = await engine.of(publish_all)
        claimed, claim = await engine.of(claim_all)
        _, ack = await engine.of(lambda: asyncio.gather(*map(engine.ack, claimed)))

        assert publish == {
            **encoded(50), **written("messages", 100, 50 * 384),
            **written("queues", 4, 1_454), "PUT": 2,
        }  # fmt: skip
        assert claim == {**written("queues", 53, 2_540), "PUT": 1}
        assert ack == {**written("queues", 4, 1_019), "PUT": 1}


async def test_a_thousand_lives_in_batches_of_a_hundred(
    new_s3_root: NewRoot, s3_environment: S3Server
) -> None:
    """No request but the PUTs of three commits for each batch, and one to route it: no reads."""
    async with costs(new_s3_root(), s3_environment) as engine:

        async def lives() -> None:
            for _ in range(10):
                await engine.engine.publish_many(new(100))
                await engine.settled()
                await engine.ack(await engine.claim(100))

        _, cost = await engine.of(lives)

    assert cost == {
        **encoded_in_batches(1_000, calls=10),
        "messages.commits": 10,
        "messages.rows": 2_000,
        "messages.bytes": 384_000,
        "queues.commits": 30,
        "queues.rows": 1_117,
        "queues.bytes": 106_839,
        "PUT": 40,
    }


async def test_an_idle_minute(new_s3_root: NewRoot, s3_environment: S3Server) -> None:
    """What goes by the clock: heartbeats. Two reads see that nobody else has come."""
    url, clock = new_s3_root(), ManualClock(NOW_MS)
    async with await Engine.open(url, clock=clock) as engine:
        await _stop_looking_for_shards(engine)
        ownership = engine._ownership
        await _until_a_heartbeat_is_awaited(clock, 0, ownership)
        s3_environment.reset_requests(path_contains=f"{url.removeprefix('s3://')}/owners/")

        for count in range(1, 19):
            clock.advance_ms(DEFAULT_LEASE_MS // 3 + 1)
            await _until_a_heartbeat_is_awaited(clock, count, ownership)

        requests = s3_environment.requests()
    assert clock.now_ms() - NOW_MS >= 60_000
    assert {name: n for name, n in requests.items() if n and name.isupper()} == {
        "PUT": 2 * 18,
        "GET": 2 * 36,
    }


async def _until_a_heartbeat_is_awaited(clock: ManualClock, count: int, owner: Ownership) -> None:
    while owner._count < count or not clock._waiting:
        await asyncio.sleep(0)


async def test_an_idle_hour_of_looking_for_what_others_bring(
    new_s3_root: NewRoot, s3_environment: S3Server
) -> None:
    """A look is two lists at most, and there is one a minute."""
    async with costs(new_s3_root(), s3_environment) as engine:
        following = engine.engine._following

        async def look() -> None:
            await following.bulk.look()
            await following.look_for_shards()

        _, cost = await engine.of(look)
        batch = following._store.committer.batch
        looks = 0
        rested_ms = 0
        while rested_ms < 3_600_000:
            rested_ms += following._pace.rest_ms(batch)
            looks += 1

    assert cost["LIST"] == 2
    assert looks == 64


async def test_a_round_of_garbage_collection(
    new_s3_root: NewRoot, s3_environment: S3Server
) -> None:
    """How often there is one is counted in the tests of its pace: none of a root that is idle."""
    async with costs(new_s3_root(), s3_environment) as engine:
        _, cost = await engine.of(engine.engine._shard._database.collect_garbage)

    assert cost["LIST"] == 6
    assert cost.get("PUT", 0) == 0


async def test_what_is_routed_goes_along_with_a_claim(new_memory_root: NewRoot) -> None:
    """Nobody waits for routing, so it makes no commit of its own while others may come."""
    patient = CommitLimits(lazy_ms=3_600_000)
    async with costs(new_memory_root(), limits=patient) as engine:

        async def publish_and_claim() -> None:
            for _ in range(5):
                await engine.engine.publish_many(new(20))
                await engine.engine._tailer.caught_up()
            assert len(await engine.claim(100)) == 100

        _, cost = await engine.of(publish_and_claim)

    assert (cost["messages.commits"], cost["queues.commits"]) == (5, 1)


async def test_a_long_backlog_makes_no_commit_larger(new_memory_root: NewRoot) -> None:
    found: list[list[dict[str, int]]] = []
    for waiting in (2_000, 20_000):
        async with costs(new_memory_root()) as engine:
            for _ in range(0, waiting, 2_000):
                await engine.engine.publish_many(new(2_000))
                await engine.settled()
            steps = []
            for _ in range(3):
                claimed, claim = await engine.of(lambda: engine.claim(100))
                _, ack = await engine.of(lambda: engine.ack(claimed))  # noqa: B023
                steps += [claim, ack]
            found.append(steps)

    short, long = found
    assert [cost["queues.commits"] for cost in long] == [1] * 6
    assert [cost["queues.rows"] for cost in long] == [cost["queues.rows"] for cost in short]
    assert [cost["queues.bytes"] for cost in long] == [cost["queues.bytes"] for cost in short]
    assert max(cost["queues.bytes"] for cost in long) == 15_519


async def test_idle_queues_and_history_make_no_commit_larger(new_memory_root: NewRoot) -> None:
    found = []
    for queues, done in ((0, 0), (50, 2_000)):
        async with costs(new_memory_root()) as engine:
            for number in range(queues):
                await engine.engine.create_queue(f"idle-{number}", filter="type = 'other'")
            for _ in range(0, done, 1_000):
                await engine.engine.publish_many(new(1_000))
                await engine.settled()
                await engine.ack(await engine.claim(1_000))
            _, publish = await engine.of(lambda: engine.engine.publish_many(new(10)))
            claimed, claim = await engine.of(lambda: engine.claim(10))
            _, ack = await engine.of(lambda: engine.ack(claimed))  # noqa: B023
            found.append([cost["queues.rows"] for cost in (publish, claim, ack)])

    assert found[0] == found[1] == [4, 13, 4]


@pytest.mark.skipif(active_tier() is not Tier.compiled, reason="other tiers wait more often")
async def test_a_commit_waits_for_the_store_once(new_memory_root: NewRoot) -> None:
    """Every wait is a turn of the event loop, and a wake-up of its thread."""
    async with costs(new_memory_root()) as engine:
        system = engine.engine
        waits = Counters()

        async def publish() -> list[int]:
            return await Suspensions(system.publish_many(new(100)), waits, "publish")

        async def claim() -> list[ClaimedMessage]:
            return await Suspensions(engine.claim(100), waits, "claim")

        await engine.of(publish)
        commits = engine.awaits
        claimed, _ = await engine.of(claim)
        await Suspensions(engine.ack(claimed), waits, "ack")

    assert commits == {"messages.awaits": 1, "queues.awaits": 1}
    # A claim reads its messages between two waits; its commit may have ended by then.
    assert waits["claim"] <= 2
    assert (waits["publish"], waits["ack"]) == (1, 1)
