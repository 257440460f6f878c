"""How fast messages go through queues: claimed, acknowledged, routed; and what waiting ones cost.

    python benchmarks/lifecycle.py [--quick] [--no-fsync] [--only depth,cycle] [--depth 1000000]

256-byte payloads with two headers, on a local disk. Rates are medians of rounds in which the
contenders take turns; ± is by how much rounds differ. Two contenders are compared round by round,
and the middle one of these ratios counts, because a disk's speed drifts. With fsync (the default)
whatever was acknowledged survives a power cut. Every message that is consumed is checked: its
payload, its headers, and that each one comes once and none is missing. The parts, for ``--only``:

depth     claim and ack in batches of 1, 10 and 100, with 5,000 and with 1,000,000 messages waiting.
          Of each slice of 1,000 messages, as many are published again while the watch stands still,
          so that the backlog stays as it is. Redis Streams do the same with XREADGROUP and XACK,
          ``appendfsync always`` and 5,000 messages waiting. In batches of 100 also by four
          consumers at once, tasks of ours and threads with a connection each for Redis. "At once"
          means that a consumer acks its last batch and claims the next one together: two calls
          that share a commit, or XACK and XREADGROUP in one pipeline. Then the deep root is opened
          by fresh processes: how long until a message is in hand, how much memory, how fast from
          there.
cycle     publish_many(100), claim(100), ack(100); by one task, and by four. The limit next to it is
          three puts for each message: the payload's row and the metadata's row as publishing
          writes them, and a row of 100 bytes for all that a queue has to remember. The 300 rows of
          100 messages are encoded anew, written as one batch by the compiled batch writer, and
          flushed once. (A life cycle waits for three commits: publish, claim, ack.) Four tasks
          share commits, so the limit of 400 messages at once is there to compare, too.
latency   500 publish() calls a second and four consumers that wait. From when a publish was due:
          "published" when it returns, "routed" when the message can be handed out, "claimed" when
          a consumer has it in hand, the commit of the claim included.
routing   Messages are handed to the tailer as publishing does it, without being published, and
          timed until the last commit of routing is durable.
memory    A fresh process with many idle queues, and one with an empty root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from benchmarks.common import HEADERS, PAYLOAD, percentile, ratio, redis_server, run_loop, spread
from odq_encodings import (
    encode_headers,
    encode_inline_payload,
    encode_message_metadata,
    encode_metadata_log_key,
    encode_payload_key,
)
from opendata_queue import ClaimedMessage, Engine, NewMessage, QueueOptions, StoreSettings
from opendata_queue.model.messages import Published
from opendata_queue.runtime.turns import Turn
from opendata_queue.store import Database, Objects, Rows, active_tier

PARTS = ("depth", "cycle", "latency", "routing", "memory")
SHALLOW = 5_000
CONSUMERS = 4
BATCHES = (1, 10, 100)
SLICE = 1_000
BULK = 5_000
MESSAGES_PER_SECOND = 500
QUEUE = "q"
# Nothing may come back in the middle of a measurement.
OPTIONS = QueueOptions(lease_ms=3_600_000)
FRESH_PROCESS = Path(__file__).with_name("fresh_process.py")


@dataclass(kw_only=True)
class Report:
    """What was found; printed at once, the targets again at the end."""

    console: Console
    targets: Table = field(default_factory=lambda: Table(title="Targets"))

    def __post_init__(self) -> None:
        for column in ("", "target", "measured", ""):
            self.targets.add_column(column)

    def target(self, what: str, target: str, measured: str, met: bool) -> None:
        self.targets.add_row(what, target, measured, "met" if met else "[bold]not met[/bold]")


@dataclass(kw_only=True, frozen=True)
class Run:
    """What all parts need to know."""

    root: Path
    fsync: bool
    seconds: float
    rounds: int
    depth: int
    queue_counts: tuple[int, ...]
    report: Report

    @property
    def shallow(self) -> int:
        return min(SHALLOW, self.depth)

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.root)) / "root"

    def settings(self) -> StoreSettings:
        return StoreSettings(fsync=self.fsync)

    async def open(self, folder: Path) -> Engine:
        return await Engine.open(f"file://{folder}", settings=self.settings())

    def say(self, text: str) -> None:
        self.report.console.print(f"[dim]{text}[/dim]")


# --- messages that all differ ---------------------------------------------------------------------


def payload_of(number: int) -> bytes:
    return number.to_bytes(8, "big") + PAYLOAD[8:]


def number_of(payload: bytes | None) -> int:
    assert payload is not None
    assert len(payload) == len(PAYLOAD)
    assert payload[8:] == PAYLOAD[8:]
    return int.from_bytes(payload[:8], "big")


def numbers_of(messages: Sequence[ClaimedMessage]) -> list[int]:
    assert all(dict(message.headers) == HEADERS for message in messages)
    return [number_of(message.payload) for message in messages]


def new_messages(numbers: Iterator[int], count: int) -> list[NewMessage]:
    return [
        NewMessage(payload_of(number), headers=HEADERS)
        for number in itertools.islice(numbers, count)
    ]


async def routed(system: Engine) -> None:
    """Wait until everything that was published is in its queues, and durable there."""
    await system._tailer.caught_up()
    committer = system._queues.committer
    await committer.wait(committer.commit())


async def calm(run: Run) -> None:
    """Wait until the store has tidied up behind a bulk load, so that it does not disturb others."""
    for _ in range(60):
        before = time.process_time()
        await asyncio.sleep(0.5)
        if time.process_time() - before < 0.05:
            return
    run.say("the store is still busy in the background")


# --- claim and ack --------------------------------------------------------------------------------


class Backlog:
    """A queue with messages waiting, consumed in the order in which they were published."""

    def __init__(self, system: Engine) -> None:
        self.system = system
        self._published = itertools.count()
        self._consumed = itertools.count()

    async def fill(self, count: int) -> None:
        for done in range(0, count, BULK):
            await self.system.publish_many(new_messages(self._published, min(BULK, count - done)))
            await self.system._tailer.caught_up()
        await routed(self.system)

    async def claim(self, batch: int) -> list[ClaimedMessage]:
        return await self.system.claim(QUEUE, batch)

    async def ack(self, messages: list[ClaimedMessage]) -> None:
        await self.system.ack(QUEUE, *messages)

    async def ack_and_claim(
        self, messages: list[ClaimedMessage], batch: int
    ) -> list[ClaimedMessage]:
        _, claimed = await asyncio.gather(self.ack(messages), self.claim(batch))
        return claimed

    def check(self, consumed: list[ClaimedMessage]) -> None:
        self.check_numbers(numbers_of(consumed))

    def check_numbers(self, numbers: list[int]) -> None:
        # Of several consumers, each gets its own in order.
        assert sorted(numbers) == list(itertools.islice(self._consumed, len(numbers)))


class RedisBacklog:
    """A stream with entries waiting for a consumer group, as a durable Redis serves Python."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._published = itertools.count()
        self._consumed = itertools.count()
        client.xgroup_create("stream", "group", mkstream=True)

    async def fill(self, count: int) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for number in itertools.islice(self._published, count):
            fields: dict[Any, Any] = {"payload": payload_of(number)}
            pipeline.xadd("stream", fields | HEADERS)
        pipeline.execute()

    async def claim(self, batch: int) -> list[Any]:
        claimed: list[Any] = await self._do(self._claim, batch)
        return claimed

    async def ack(self, entries: list[Any]) -> None:
        await self._do(self._ack, entries)

    async def ack_and_claim(self, entries: list[Any], batch: int) -> list[Any]:
        claimed: list[Any] = await self._do(self._ack_and_claim, entries, batch)
        return claimed

    async def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)

    def _claim(self, batch: int) -> list[Any]:
        return _entries(self._client.xreadgroup("group", "me", {"stream": ">"}, count=batch))

    def _ack(self, entries: list[Any]) -> None:
        self._client.xack("stream", "group", *[entry_id for entry_id, _ in entries])

    def _ack_and_claim(self, entries: list[Any], batch: int) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.xack("stream", "group", *[entry_id for entry_id, _ in entries])
        pipeline.xreadgroup("group", "me", {"stream": ">"}, count=batch)
        return _entries(pipeline.execute()[1])

    def check(self, consumed: list[Any]) -> None:
        numbers = [number_of(fields.pop(b"payload")) for _, fields in consumed]
        assert sorted(numbers) == list(itertools.islice(self._consumed, len(numbers)))
        for _, fields in consumed:
            assert {k.decode(): v.decode() for k, v in fields.items()} == HEADERS


class ThreadedRedisBacklog(RedisBacklog):
    """The same for several consumers."""

    async def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(call, *arguments)


def _entries(found: Any) -> list[Any]:
    if not found:
        return []
    ((_, entries),) = found
    return list(entries)


@dataclass(kw_only=True)
class Consuming:
    """One contender: a backlog, and how it is consumed."""

    name: str
    backlog: Backlog | RedisBacklog
    batch: int
    consumers: int = 1
    at_once: bool = False
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    async def turn(self, seconds: float) -> None:
        count, timed = 0, 0.0
        while timed < seconds:
            consumed: list[Any] = []
            start = time.perf_counter()
            end = start + seconds - timed
            consuming = [self._consume(consumed, end) for _ in range(self.consumers)]
            await asyncio.gather(*consuming)
            timed += time.perf_counter() - start
            count += len(consumed)
            self.backlog.check(consumed)
            await self.backlog.fill(len(consumed))
        self.rates.append(count / timed)

    async def _consume(self, consumed: list[Any], end: float) -> None:
        held: list[Any] = []
        while len(consumed) < SLICE and (not consumed or time.perf_counter() < end):
            if held and self.at_once:
                acked, held = held, await self.backlog.ack_and_claim(held, self.batch)
                consumed += acked
                continue
            held = await self.backlog.claim(self.batch)
            if not self.at_once:
                await self.backlog.ack(held)
                consumed += held
        if held and self.at_once:
            await self.backlog.ack(held)
            consumed += held


async def filled(run: Run, folder: Path, depth: int) -> Backlog:
    system = await run.open(folder)
    await system.create_queue(QUEUE, options=OPTIONS)
    backlog = Backlog(system)
    start = time.perf_counter()
    step = max(SLICE, depth // 10)
    for done in range(0, depth, step):
        await backlog.fill(min(step, depth - done))
        if depth > SHALLOW:
            took = time.perf_counter() - start
            run.say(f"{min(done + step, depth):,} of {depth:,} waiting after {took:.0f} s")
    assert (await system.stats(QUEUE)).available == depth
    return backlog


async def measure_depth(run: Run) -> None:
    shallow_folder, deep_folder = run.folder(), run.folder()
    deep = await filled(run, deep_folder, run.depth)
    shallow = await filled(run, shallow_folder, run.shallow)
    with contextlib.ExitStack() as stack:
        contenders = [
            Consuming(name=f"{name} waiting", backlog=backlog, batch=batch)
            for batch in BATCHES
            for name, backlog in ((f"{run.shallow:,}", shallow), (f"{run.depth:,}", deep))
        ]
        contenders += beside_redis(f"{run.shallow:,} waiting", shallow, shallow)[1:]
        if run.fsync and shutil.which("redis-server"):
            streams = [
                kind(stack.enter_context(redis_server(run.folder())))
                for kind in (RedisBacklog, ThreadedRedisBacklog)
            ]
            for stream in streams:
                await stream.fill(run.shallow)
            contenders += beside_redis("Redis Streams", *streams)
        await calm(run)
        for turn in itertools.chain.from_iterable([contenders] * run.rounds):
            await turn.turn(run.seconds)
    for backlog, depth in ((shallow, run.shallow), (deep, run.depth)):
        stats = await backlog.system.stats(QUEUE)
        assert (stats.available, stats.in_flight) == (depth, 0), stats
        await backlog.system.close()
    report_depth(run, contenders)
    report_fresh(
        run, [(shallow, shallow_folder, f"{run.shallow:,}"), (deep, deep_folder, f"{run.depth:,}")]
    )


def beside_redis(
    name: str, of_one: Backlog | RedisBacklog, of_many: Backlog | RedisBacklog
) -> list[Consuming]:
    """The ways to consume batches of 100 in which we compare with Redis."""
    many = f"{name}, {CONSUMERS} consumers"
    return [
        Consuming(name=name, backlog=of_one, batch=100),
        Consuming(name=f"{name}, at once", backlog=of_one, batch=100, at_once=True),
        Consuming(name=many, backlog=of_many, batch=100, consumers=CONSUMERS),
        Consuming(
            name=f"{many}, at once",
            backlog=of_many,
            batch=100,
            consumers=CONSUMERS,
            at_once=True,
        ),
    ]


def report_depth(run: Run, contenders: list[Consuming]) -> None:
    table = Table(title="Claim and ack, messages/s")
    for column in ("batches of", "", "messages/s", "spread", "µs per message"):
        table.add_column(column, justify="left" if column == "" else "right")
    for one in contenders:
        table.add_row(
            str(one.batch), one.name, f"{one.rate:,.0f}", spread(one.rates), f"{1e6 / one.rate:.1f}"
        )
    run.report.console.print(table)
    by_name = {(c.batch, c.name): c for c in contenders}
    for batch in BATCHES:
        shallow = by_name[batch, f"{run.shallow:,} waiting"]
        deep = by_name[batch, f"{run.depth:,} waiting"]
        cost = ratio(shallow.rates, deep.rates)
        run.report.target(
            f"claim+ack x{batch}, {run.depth:,} waiting", f"≤ 1.3 × the cost with {run.shallow:,}",
            f"{cost:.2f} ×", cost <= 1.3,
        )  # fmt: skip
    redis_name = "Redis Streams"
    for theirs in [c for c in contenders if c.name.startswith(redis_name)]:
        way = theirs.name.removeprefix(redis_name)
        ours = by_name[100, f"{run.shallow:,} waiting{way}"]
        ahead = ratio(ours.rates, theirs.rates)
        run.report.target(
            f"claim+ack x100{way or ', 1 consumer'}", f"ahead of {theirs.name}",
            f"{ahead:.2f} ×", ahead > 1,
        )  # fmt: skip


# --- a fresh process ------------------------------------------------------------------------------


def fresh_process(run: Run, folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(FRESH_PROCESS), f"file://{folder}", *arguments]
    if not run.fsync:
        command.append("--no-fsync")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def report_fresh(run: Run, roots: list[tuple[Backlog, Path, str]]) -> None:
    table = Table(title="Opened by a fresh process")
    for column in ("waiting", "first message after ms", "memory MiB", "claim+ack x100, messages/s"):
        table.add_column(column, justify="right")
    # However often it is opened, less than half of the shallow one is consumed.
    consume = min(2_000, run.shallow // 2 // run.rounds // 100 * 100)
    for backlog, folder, name in roots:
        found = []
        for _ in range(run.rounds):
            found.append(fresh_process(run, folder, "--queue", QUEUE, "--consume", str(consume)))
            payloads = [bytes.fromhex(payload) for payload in found[-1]["payloads"]]
            backlog.check_numbers([number_of(payload) for payload in payloads])
        seconds = statistics.median(one["open_seconds"] for one in found)
        memory = statistics.median(one["resident_mib"] for one in found)
        rate = statistics.median(consume / one["consume_seconds"] for one in found)
        table.add_row(name, f"{seconds * 1e3:,.0f}", f"{memory:.0f}", f"{rate:,.0f}")
    run.report.console.print(table)
    run.report.target(
        f"reopen with {run.depth:,} waiting", "< 3 s", f"{seconds:.2f} s", seconds < 3
    )


async def measure_memory(run: Run) -> None:
    table = Table(title="Memory of a fresh process, MiB")
    table.add_column("")
    table.add_column("MiB", justify="right")
    most = run.queue_counts[-1]
    empty, idle = run.folder(), run.folder()
    async with await run.open(empty):
        pass
    async with await Engine.open(f"file://{idle}", settings=StoreSettings(fsync=False)) as system:
        await create_tenants(run, system, most, most)
    for name, folder in (("empty root", empty), (f"{most:,} idle queues", idle)):
        memory = statistics.median(
            fresh_process(run, folder)["resident_mib"] for _ in range(run.rounds)
        )
        table.add_row(name, f"{memory:.0f}")
    run.report.console.print(table)


# --- the whole life -------------------------------------------------------------------------------

Step = Callable[[], Awaitable[int]]
"""Takes some messages through their life, and says how many."""


@dataclass(kw_only=True)
class Cycle:
    name: str
    steps: Callable[[Path], contextlib.AbstractAsyncContextManager[Step]]
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    async def turn(self, folder: Path, seconds: float) -> None:
        async with self.steps(folder) as step:
            for _ in range(3):
                await step()  # the first ones open files and reserve sequences
            count, start = 0, time.perf_counter()
            while time.perf_counter() < start + seconds:
                count += await step()
            self.rates.append(count / (time.perf_counter() - start))


def three_puts(run: Run, size: int) -> Cycle:
    headers = encode_headers(HEADERS.items())
    queue_row = bytes(90)

    @contextlib.asynccontextmanager
    async def steps(folder: Path) -> AsyncIterator[Step]:
        database = await Database.open(Objects.open(f"file://{folder}", run.settings()), "raw")
        numbers = itertools.count()

        async def step() -> int:
            rows = Rows()
            for number in itertools.islice(numbers, size):
                key = encode_payload_key(number)
                rows.put(key, encode_inline_payload(PAYLOAD))
                rows.put(
                    encode_metadata_log_key(number),
                    encode_message_metadata(number, 1, 1, 1, 0, 2, headers),
                )
                rows.put(b"\x02" + key[1:], queue_row)
            await database.commit(rows)
            return size

        yield step
        await database.close()

    return Cycle(name=f"three puts x{size}, tier {active_tier()}", steps=steps)


def life_cycle(run: Run, tasks: int) -> Cycle:
    @contextlib.asynccontextmanager
    async def steps(folder: Path) -> AsyncIterator[Step]:
        numbers = itertools.count()
        consumed: list[ClaimedMessage] = []
        async with await run.open(folder) as system:
            await system.create_queue(QUEUE, options=OPTIONS)

            async def one() -> None:
                await system.publish_many(new_messages(numbers, 100))
                wanted = 100
                while wanted:  # other tasks may have taken some of ours, and left us theirs
                    messages = await system.claim(QUEUE, wanted, wait_ms=10_000)
                    await system.ack(QUEUE, *messages)
                    wanted -= len(messages)
                    consumed.extend(messages)

            async def step() -> int:
                if tasks == 1:
                    await one()
                else:
                    await asyncio.gather(*(one() for _ in range(tasks)))
                return tasks * 100

            yield step
            assert sorted(numbers_of(consumed)) == list(range(next(numbers)))
            stats = await system.stats(QUEUE)
            assert (stats.done, stats.available) == (len(consumed), 0), stats

    name = f"life cycle x100, {tasks} task{'s' if tasks > 1 else ''}"
    return Cycle(name=name, steps=steps)


async def measure_cycle(run: Run) -> None:
    contenders = [
        three_puts(run, 100),
        life_cycle(run, 1),
        life_cycle(run, 4),
        three_puts(run, 400),
    ]
    for contender in itertools.chain.from_iterable([contenders] * run.rounds):
        await contender.turn(run.folder(), run.seconds)
    table = Table(title="From publish to ack, in batches of 100")
    for column in ("", "messages/s", "spread", "µs per message", "of the limit"):
        table.add_column(column, justify="left" if column == "" else "right")
    limit, *cycles, _ = contenders
    for one in contenders:
        table.add_row(
            one.name, f"{one.rate:,.0f}", spread(one.rates), f"{1e6 / one.rate:.1f}",
            f"{ratio(one.rates, limit.rates):.0%}",
        )  # fmt: skip
    run.report.console.print(table)
    for one in cycles:
        part = ratio(one.rates, limit.rates)
        run.report.target(one.name, "≥ 40 % of three puts", f"{part:.0%}", part >= 0.4)


# --- latency --------------------------------------------------------------------------------------


class Stopwatch:
    """When each message was called for, published, routed and claimed."""

    def __init__(self, system: Engine) -> None:
        self.called: dict[int, float] = {}
        self.published: dict[int, float] = {}
        self.routed: dict[int, float] = {}
        self.claimed: dict[int, float] = {}
        router = system._tailer.router
        self._route = router._route
        router._route = self._note_routed  # type: ignore[method-assign]

    def _note_routed(self, messages: Sequence[Published], turn: Turn, first: int) -> int:
        behind = self._route(messages, turn, first)
        now = time.perf_counter()
        self.routed.update((message.message_id, now) for message in messages[first:behind])
        return behind

    def milliseconds(self, times: dict[int, float]) -> list[float]:
        assert times.keys() == self.called.keys()
        return [(times[message_id] - start) * 1e3 for message_id, start in self.called.items()]


async def publish_paced(system: Engine, watch: Stopwatch, seconds: float) -> int:
    """Publish at an even pace, however long a single publish takes."""

    async def one(number: int, due: float) -> None:
        # From when it was due: a publish that could not even begin in time is late, too.
        message_id = await system.publish(payload_of(number), headers=HEADERS)
        watch.called[message_id] = due
        watch.published[message_id] = time.perf_counter()

    count = int(seconds * MESSAGES_PER_SECOND)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            due = start + number / MESSAGES_PER_SECOND
            await asyncio.sleep(max(0, due - time.perf_counter()))
            tasks.create_task(one(number, due))
    return count


async def consume_waiting(
    system: Engine, watch: Stopwatch, numbers: list[int], done: asyncio.Event
) -> None:
    while True:
        messages = await system.claim(QUEUE, 100, wait_ms=200)
        now = time.perf_counter()
        if not messages and done.is_set():
            return
        if messages:
            watch.claimed.update((message.message_id, now) for message in messages)
            numbers += numbers_of(messages)
            await system.ack(QUEUE, *messages)


async def measure_latency(run: Run) -> None:
    async with await run.open(run.folder()) as system:
        await system.create_queue(QUEUE, options=OPTIONS)
        await system.publish(b"opens the shard")
        (first,) = await system.claim(QUEUE, 1, wait_ms=10_000)
        await system.ack(QUEUE, first)
        watch, done, numbers = Stopwatch(system), asyncio.Event(), list[int]()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(consume_waiting(system, watch, numbers, done))
            count = await publish_paced(system, watch, run.seconds * run.rounds)
            await routed(system)
            done.set()
        assert sorted(numbers) == list(range(count))
    table = Table(title=f"Milliseconds since publish() was due, {MESSAGES_PER_SECOND} a second")
    for column in ("", "p50", "p99", "most"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name in ("published", "routed", "claimed"):
        values = watch.milliseconds(getattr(watch, name))
        p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
        table.add_row(name, f"{p50:.2f}", f"{p99:.2f}", f"{max(values):.2f}")
        if name == "routed":
            run.report.target("publish → claimable, p50", "< 5 ms", f"{p50:.2f} ms", p50 < 5)
    run.report.console.print(table)


# --- routing --------------------------------------------------------------------------------------


async def create_tenants(run: Run, system: Engine, queues: int, tenants: int) -> None:
    if queues >= 10_000:
        run.say(f"making {queues:,} queues")
    for number in range(queues):
        await system.create_queue(f"q{number}", filter=f"tenant = 't{number % tenants}'")


class Routing:
    """Hands messages to a tailer that were not published."""

    def __init__(self, system: Engine, tenants: int) -> None:
        self._system = system
        self._headers = itertools.cycle(
            [{"type": "order.created", "tenant": f"t{number}"} for number in range(tenants)]
        )
        self.rates: list[float] = []

    async def turn(self, seconds: float) -> None:
        # The same number every time: the fuller queues are, the more there is to write for each.
        timed, times = 0.0, max(1, round(2 * seconds))
        for _ in range(times):
            chunks = [self._made(first) for first in range(0, 10_000, SLICE)]
            start = time.perf_counter()
            for chunk in chunks:
                self._system._tailer.hand_over(chunk[-1].message_id, chunk.copy)
            await routed(self._system)
            timed += time.perf_counter() - start
        self.rates.append(times * 10_000 / timed)

    def _made(self, first: int) -> list[Published]:
        cursor = self._system._tailer.cursor
        ids = range(cursor + first, cursor + first + SLICE)
        return [Published(one, 1, 1, 1, 0, next(self._headers)) for one in ids]


async def measure_routing(run: Run) -> None:
    table = Table(title="Messages routed per second")
    for column in ("queues", "matches per message", "messages/s", "spread", "queue entries/s"):
        table.add_column(column, justify="right")
    per_match = [(count, 1) for count in run.queue_counts] + [(run.queue_counts[-2], 10)]
    async with contextlib.AsyncExitStack() as stack:
        contenders = []
        for queues, matches in per_match:
            folder, tenants = run.folder(), queues // matches
            # Making them is not what is timed here.
            fast = StoreSettings(fsync=False)
            async with await Engine.open(f"file://{folder}", settings=fast) as system:
                await create_tenants(run, system, queues, tenants)
            system = await stack.enter_async_context(await run.open(folder))
            contenders.append(Routing(system, tenants))
        for routing in itertools.chain.from_iterable([contenders] * run.rounds):
            await routing.turn(run.seconds)
        for (queues, matches), routing in zip(per_match, contenders, strict=True):
            rate = statistics.median(routing.rates)
            table.add_row(
                f"{queues:,}", str(matches), f"{rate:,.0f}", spread(routing.rates),
                f"{rate * matches:,.0f}",
            )  # fmt: skip
    run.report.console.print(table)


# --- all of it ------------------------------------------------------------------------------------

MEASURE = {
    "depth": measure_depth,
    "cycle": measure_cycle,
    "latency": measure_latency,
    "routing": measure_routing,
    "memory": measure_memory,
}


async def run_all(arguments: argparse.Namespace) -> None:
    report = Report(console=Console(width=120))
    load, _, _ = os.getloadavg()
    if load > 0.5:
        report.console.print(f"The load average is {load:.1f} before we begin: expect less.")
    # Removed at the end, not in between: ext4 makes new files slowly for a minute after many
    # were deleted.
    with tempfile.TemporaryDirectory(dir=arguments.root) as root:
        run = Run(
            root=Path(root),
            fsync=not arguments.no_fsync,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            depth=arguments.depth,
            queue_counts=(10, 100, 1_000) if arguments.quick else (10, 1_000, 10_000),
            report=report,
        )
        for part in arguments.only:
            await MEASURE[part](run)
    report.console.print(report.targets)


def parts(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, for a first look")
    parser.add_argument("--seconds", type=float, help="length of one round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--depth", type=int, help="messages waiting in the deep queue")
    parser.add_argument("--no-fsync", action="store_true")
    parser.add_argument("--only", type=parts, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--uvloop", action="store_true")
    arguments = parser.parse_args()
    usual = (0.5, 1, 100_000) if arguments.quick else (1.0, 5, 1_000_000)
    for name, value in zip(("seconds", "rounds", "depth"), usual, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    run_loop(run_all(arguments), uvloop=arguments.uvloop)


if __name__ == "__main__":
    main()
