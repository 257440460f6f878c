"""What operations cost, counted and not timed: requests, commits, bytes, encodings, syncs, awaits.

A change that makes something slower by design fails here on any machine. If a figure falls, write
the new one down; if it rises, say in the commit why that is worth it.

The clock stands still, so that nothing happens by itself, and the consumer's name has a fixed
length. ``bytes`` are those of keys and values; ``PUT`` are requests to the S3 server of the tests.
Names of records, such as ``InFlightMessage``, are entries that were packed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import aiohttp
import pytest

from benchmarks.counting import Counters, Suspensions, counted
from opendata_queue import (
    ClaimedMessage,
    CommitLimits,
    Engine,
    NewMessage,
    QueueOptions,
    StoreSettings,
)
from opendata_queue.http.client import RemoteSystem
from opendata_queue.root.owner_files import DEFAULT_LEASE_MS
from opendata_queue.root.ownership import Ownership
from opendata_queue.store import active_tier
from opendata_queue.store.rows.writer import Tier
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.support.broker import BrokerProcess
from tests.support.s3_server import S3Server

T = TypeVar("T")


NOW_MS: Final = 1_763_000_000_000
HOUR_MS: Final = 3_600_000
HEADERS: Final = {"type": "order.created", "region": "emea"}
PAYLOAD: Final = bytes(256)
QUEUE: Final = "orders"
CONSUMER: Final = "consumer"
PATIENT: Final = CommitLimits(lazy_ms=HOUR_MS)
"""What nobody waits for is not committed by itself."""

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
        cost = {name: n for name, n in cost.items() if not name.endswith((".awaits", ".turns"))}
        if self._server is not None:
            requests = self._server.requests()
            del requests["bytes_in"], requests["bytes_out"]
            cost |= {name: count for name, count in requests.items() if count}
        return result, cost

    async def waits_of(self, step: Awaitable[T]) -> tuple[T, dict[str, int]]:
        """What a step returns, and how often it waited, its commits, and those who made them.

        Nothing is waited for but the step, as that would make other commits.
        """
        await self.settled()
        self._counters.take()
        result = await Suspensions(step, self._counters, "caller")
        cost = self._counters.take()
        waits = ("caller", "messages.awaits", "messages.turns", "queues.awaits", "queues.turns")
        return result, {name: cost[name] for name in waits if name in cost}

    async def claim(self, count: int) -> list[ClaimedMessage]:
        return await self.engine.claim(QUEUE, count, consumer=CONSUMER)

    async def ack(self, messages: list[ClaimedMessage]) -> None:
        await self.engine.ack(QUEUE, *[one.receipt for one in messages])


@asynccontextmanager
async def costs(
    url: str, server: S3Server | None = None, *, limits: CommitLimits | None = None
) -> AsyncIterator[Costs]:
    settings = StoreSettings(journal_ms=HOUR_MS)
    opening = Engine.open(url, clock=ManualClock(NOW_MS), settings=settings, queue_limits=limits)
    with counted(in_detail=True) as counters:
        async with await opening as engine:
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


def written(database: str, rows: int, size: int, *, commits: int = 1) -> dict[str, int]:
    """The commits of a database, most often one."""
    return {f"{database}.commits": commits, f"{database}.rows": rows, f"{database}.bytes": size}


def encoded(messages: int) -> dict[str, int]:
    """The encodings of messages that are published one by one."""
    return dict.fromkeys((*ENCODINGS, "encode_headers"), messages)


def encoded_in_batches(messages: int, *, calls: int = 1) -> dict[str, int]:
    """Of messages in batches: headers and a payload that those of a call share, only once."""
    shared = dict.fromkeys(("encode_headers", "encode_inline_payload"), calls)
    return {**dict.fromkeys(BATCH_ENCODINGS, messages), **shared}


# The steps of a life, wherever it is stored: of one message, and of a hundred with a call for each
# step. To publish is to route, too: one commit of each database.
LIVES: Final[dict[int, dict[str, dict[str, int]]]] = {
    1: {
        "publish": {
            **encoded(1), "AvailableMessage": 1,
            **written("messages", 2, 384), **written("queues", 4, 131),
        },
        "claim": {"InFlightMessage": 1, **written("queues", 4, 139)},
        "ack": {"DoneMessage": 1, **written("queues", 4, 137)},
    },
    100: {
        "publish": {
            **encoded_in_batches(100), "AvailableMessage": 100,
            **written("messages", 200, 100 * 384), **written("queues", 4, 2_804),
        },
        "claim": {"InFlightMessage": 100, **written("queues", 103, 4_990)},
        "ack": {"DoneMessage": 100, **written("queues", 4, 1_919)},
    },
}  # fmt: skip


def on_s3(cost: dict[str, int]) -> dict[str, int]:
    """Each commit is flushed, and is one object."""
    commits = of_both(cost, "commits")
    return {**cost, "slatedb.flushes": commits, "PUT": commits}


def on_files(cost: dict[str, int]) -> dict[str, int]:
    """Each commit is one record of a journal, synced once; SlateDB is told to flush later."""
    commits = of_both(cost, "commits")
    size = 72 * commits + 16 * of_both(cost, "rows") + of_both(cost, "bytes")
    return {**cost, "journal.appends": commits, "journal.bytes": size, "journal.syncs": commits}


def of_both(cost: dict[str, int], what: str) -> int:
    """The count of both databases."""
    return sum(cost.get(f"{database}.{what}", 0) for database in ("messages", "queues"))


async def life(engine: Costs, count: int) -> dict[str, dict[str, int]]:
    """What each step of a life costs."""

    async def publish() -> None:
        if count == 1:
            await engine.engine.publish(PAYLOAD, headers=HEADERS)
        else:
            await engine.engine.publish_many(new(count))

    _, published = await engine.of(publish)
    claimed, claim = await engine.of(lambda: engine.claim(count))
    assert len(claimed) == count
    _, ack = await engine.of(lambda: engine.ack(claimed))
    return {"publish": published, "claim": claim, "ack": ack}


@pytest.mark.parametrize("count", LIVES)
async def test_the_costs_of_a_life_on_s3(
    new_s3_root: NewRoot, s3_environment: S3Server, count: int
) -> None:
    async with costs(new_s3_root(), s3_environment) as engine:
        found = await life(engine, count)

    assert found == {step: on_s3(cost) for step, cost in LIVES[count].items()}


@pytest.mark.parametrize("count", LIVES)
async def test_the_costs_of_a_life_on_files(tmp_path: Path, count: int) -> None:
    async with costs(tmp_path.as_uri()) as engine:
        found = await life(engine, count)

    assert found == {step: on_files(cost) for step, cost in LIVES[count].items()}


async def test_the_costs_of_what_else_is_done_with_a_claim(
    new_s3_root: NewRoot, s3_environment: S3Server
) -> None:
    async with costs(new_s3_root(), s3_environment) as engine:
        system = engine.engine
        await system.publish(PAYLOAD, headers=HEADERS)
        await engine.settled()

        (claimed,) = await engine.claim(1)
        _, extend = await engine.of(lambda: system.extend(QUEUE, claimed.receipt))
        _, release = await engine.of(lambda: system.release(QUEUE, claimed.receipt))
        (claimed,) = await engine.claim(1)
        _, nack = await engine.of(lambda: system.nack(QUEUE, claimed.receipt, error="busy"))

    assert extend == on_s3({"InFlightMessage": 1, **written("queues", 3, 117)})
    assert release == on_s3({"AvailableMessage": 1, **written("queues", 3, 117)})
    assert nack == on_s3(written("queues", 4, 126))


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

    assert publish == on_s3({
        **encoded(50), "AvailableMessage": 50,
        **written("messages", 100, 50 * 384), **written("queues", 4, 1_454),
    })  # fmt: skip
    assert claim == on_s3({"InFlightMessage": 50, **written("queues", 53, 2_540)})
    assert ack == on_s3({"DoneMessage": 50, **written("queues", 4, 1_019)})


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

    assert cost == on_s3({
        **encoded_in_batches(1_000, calls=10),
        **dict.fromkeys(("AvailableMessage", "InFlightMessage", "DoneMessage"), 1_000),
        **written("messages", 2_000, 384_000, commits=10),
        **written("queues", 1_117, 106_839, commits=30),
    })  # fmt: skip


async def test_an_idle_minute(new_s3_root: NewRoot, s3_environment: S3Server) -> None:
    """What goes by the clock: heartbeats. Two reads see that nobody else has come."""
    url, clock = new_s3_root(), ManualClock(NOW_MS)
    async with await Engine.open(url, clock=clock) as engine:
        await _stop_looking_for_shards(engine)
        ownership = engine._ownership
        await _until_a_heartbeat_is_awaited(clock, 1, ownership)  # it says that it is open
        s3_environment.reset_requests(path_contains=f"{url.removeprefix('s3://')}/owners/")

        for count in range(2, 20):
            clock.advance_ms(DEFAULT_LEASE_MS // 3 + 1)
            await _until_a_heartbeat_is_awaited(clock, count, ownership)

        requests = s3_environment.requests()
    assert clock.now_ms() - NOW_MS >= 60_000
    assert {name: n for name, n in requests.items() if n and name.isupper()} == {
        "PUT": 2 * 18,
        "GET": 2 * 36,
    }


async def _until_a_heartbeat_is_awaited(clock: ManualClock, count: int, owner: Ownership) -> None:
    while owner.heartbeats < count or not clock.waits_ms:
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
    async with costs(new_memory_root(), limits=PATIENT) as engine:

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
@pytest.mark.parametrize("store", ["memory", "file"])
async def test_how_often_one_caller_and_its_commit_wait(
    new_memory_root: NewRoot, tmp_path: Path, store: str
) -> None:
    """Every wait is a turn of the event loop, and many of them are a wake-up of its thread.

    A committer waits to be asked for a commit, a turn for others to join, and for the store: once,
    whether that is SlateDB or a journal.
    """
    url = tmp_path.as_uri() if store == "file" else new_memory_root()
    of_messages = {"messages.awaits": 1, "messages.turns": 3}
    of_queues = {"queues.awaits": 1, "queues.turns": 3}
    async with costs(url, limits=PATIENT) as engine:
        system = engine.engine

        _, publish = await engine.waits_of(system.publish(PAYLOAD, headers=HEADERS))
        _, publish_many = await engine.waits_of(system.publish_many(new(99)))
        claimed, claim = await engine.waits_of(engine.claim(100))
        _, ack = await engine.waits_of(engine.ack(claimed))

    assert publish == publish_many == {"caller": 1, **of_messages}
    # It reads its messages between two waits; its commit may have ended by then.
    assert claim.pop("caller") <= 2
    assert claim == of_queues
    assert ack == {"caller": 1, **of_queues}


# One request for each step, and the bytes of its body and of that of the answer. What differs from
# run to run, times, receipts and keys, always has as many bytes.
OVER_HTTP: Final[dict[int, dict[str, dict[str, int]]]] = {
    1: {
        "publish": {"/v1/publish": 1, "sent": 340, "received": 15},
        "claim": {"/v1/claim": 1, "sent": 43, "received": 590},
        "ack": {"/v1/ack": 1, "sent": 110, "received": 14},
    },
    100: {
        "publish": {"/v1/publish": 1, "sent": 30_834, "received": 116},
        "claim": {"/v1/claim": 1, "sent": 50, "received": 57_913},
        "ack": {"/v1/ack": 1, "sent": 8_626, "received": 313},
    },
}


async def test_the_costs_of_a_life_over_http() -> None:
    with BrokerProcess("memory:///") as broker:
        async with await RemoteSystem.open(broker.url) as system:
            await system.create_queue(QUEUE)
            counters = Counters()
            system.calls.session.trace_configs.append(_tracing(counters))
            found: dict[int, dict[str, dict[str, int]]] = {}
            for count in OVER_HTTP:
                steps = found[count] = {}
                await system.publish_many(new(count))
                steps["publish"] = counters.take()
                claimed = await system.claim(QUEUE, count, consumer=CONSUMER, wait_ms=10_000)
                steps["claim"] = counters.take()
                await system.ack(QUEUE, *claimed)
                steps["ack"] = counters.take()
                assert len(claimed) == count

    assert found == OVER_HTTP


def _tracing(counters: Counters) -> aiohttp.TraceConfig:
    """Counts requests by their paths, and the bytes of bodies."""
    tracing = aiohttp.TraceConfig()

    async def asked(_: object, __: object, request: aiohttp.TraceRequestStartParams) -> None:
        counters.add(request.url.path)

    async def sent(_: object, __: object, part: aiohttp.TraceRequestChunkSentParams) -> None:
        counters.add("sent", len(part.chunk))

    async def received(
        _: object, __: object, part: aiohttp.TraceResponseChunkReceivedParams
    ) -> None:
        counters.add("received", len(part.chunk))

    tracing.on_request_start.append(asked)
    tracing.on_request_chunk_sent.append(sent)
    tracing.on_response_chunk_received.append(received)
    tracing.freeze()
    return tracing
