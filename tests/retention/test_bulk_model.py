"""Random histories of bulk jobs, and of queues that come and go: shards go whole, and in time.

What must be there is told from the calls alone. Passes are killed in any of their writes, and the
owner with them: the next one opens the root anew.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from odq_compactor import CompactorOptions, RetentionCompactor, plan_root, set_delete_when_done
from odq_encodings import Attempts, AttemptsKey
from opendata_queue import (
    Engine,
    NewMessage,
    OdqError,
    QueueOptions,
    StoreUnavailableError,
)
from opendata_queue.log.bulk_writer import BulkShard
from opendata_queue.model.values import BrowsedState, Start
from opendata_queue.root.commit_files import CommitFiles, CommittedShard
from opendata_queue.root.shard_files import COMMITTED_WITHIN_MS, ShardFiles, earliest_bulk_shard
from opendata_queue.store import Database, Objects, StoreSettings
from opendata_queue.testing import ManualClock
from tests.retention.rows import decoded, queue_rows
from tests.support.bulk_jobs import commit

SETTINGS = StoreSettings(fsync=False)
START_MS = 1_790_000_000_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
KEPT_MS = 7 * DAY_MS
RETENTIONS_S = [0, 0, 60, 60, 3_600, 8 * 86_400]
LARGE_BYTES = 70_000
FAILED_RETENTION_S = 3 * 3_600
OPTIONS = QueueOptions(
    window=2,
    bucket=3,
    max_attempts=1,
    lease_ms=HOUR_MS // 2,
    failed_retention_seconds=FAILED_RETENTION_S,
)
FILTERS = {"all": "", "even": "even = 'yes'"}
NAMES = tuple(FILTERS)
COMPACTOR = CompactorOptions(work_share=1.0, erase=True, space=False, batch_messages=4)


class Append(NamedTuple):
    """A job; what its shards hold, by the retentions of their messages."""

    shards: list[list[int]]
    large: bool
    told: bool
    """Whether the commit says when they expire: those of older releases do not."""
    commit: bool


class CommitLate(NamedTuple):
    """All jobs that are not committed and still may be."""


class Claim(NamedTuple):
    queue: str
    at_most: int


class Settle(NamedTuple):
    queue: str
    ack: bool
    at_most: int


class Advance(NamedTuple):
    milliseconds: int


class MakeQueue(NamedTuple):
    name: str
    start: Start


class DeleteQueue(NamedTuple):
    name: str


class DeleteWhenDone(NamedTuple):
    wanted: bool


class Pass(NamedTuple):
    killed_at: int | None
    """In which of its writes it is killed; none if it is not."""

    before: bool
    """Whether that write has done nothing, or all of its work."""


QUEUES = st.sampled_from(NAMES)
STEPS: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        Append,
        st.lists(st.lists(st.sampled_from(RETENTIONS_S), max_size=5), min_size=1, max_size=3),
        st.booleans(),
        st.booleans(),
        st.sampled_from([True, True, True, False]),
    ),
    st.builds(CommitLate),
    st.builds(Claim, QUEUES, st.integers(1, 10)),
    st.builds(Settle, QUEUES, st.booleans(), st.integers(1, 10)),
    st.builds(
        Advance,
        st.sampled_from([1, 60_000, 60_001, HOUR_MS, 3 * HOUR_MS, 5 * DAY_MS, KEPT_MS]),
    ),
    st.builds(MakeQueue, QUEUES, st.sampled_from(["now", "beginning"])),
    st.builds(DeleteQueue, QUEUES),
    st.builds(DeleteWhenDone, st.booleans()),
    st.builds(Pass, st.one_of(st.none(), st.integers(0, 7)), st.booleans()),
)


@dataclass
class Shard:
    """One shard of a job, as its writer knows it."""

    job: str
    committed: CommittedShard
    deadlines: dict[int, int]
    blob_bytes: int
    reserved_at: int
    committed_at: int | None = None
    gone: bool = False

    @property
    def number(self) -> int:
        return self.committed.shard

    def alive(self, now: int) -> set[int]:
        """Messages that somebody may see."""
        if self.committed_at is None or self.gone:
            return set()
        return {one for one, deadline in self.deadlines.items() if not 0 < deadline < now}

    def expires_later(self, now: int) -> bool:
        return any(deadline >= now for deadline in self.deadlines.values())


@dataclass
class Queue:
    """What a queue was given and is not done with, and what consumers hold of it."""

    open: set[int] = field(default_factory=set)
    receipts: list[tuple[int, str]] = field(default_factory=list)
    failed_at: dict[int, int] = field(default_factory=dict)


class System:
    """A root, its owner, and what must be there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = ManualClock(START_MS)
        self.engine: Engine
        self.compactor: RetentionCompactor
        self.shards: list[Shard] = []
        self.waiting: list[Shard] = []
        """Committed, and not routed yet."""
        self.queues: dict[str, Queue] = {}
        self.when_done = False
        self.going: set[int] = set()
        """What a pass that was killed may have left of what goes."""

    async def open(self) -> None:
        self.engine = await Engine.open(self.url, settings=SETTINGS, clock=self.clock)
        self.compactor = RetentionCompactor(self.engine, COMPACTOR)
        # Who comes after another is some milliseconds ahead of the machine.
        self.clock.advance_ms(self.engine.stores.queues.clock.now_ms() - self.now)

    @property
    def objects(self) -> Objects:
        return self.engine.stores.objects

    @property
    def now(self) -> int:
        return self.clock.now_ms()

    def alive(self) -> set[int]:
        return {one for shard in self.shards for one in shard.alive(self.now)}

    # --- what happens -----------------------------------------------------------------------------

    async def take(self, step: Any) -> None:
        if not isinstance(step, Advance | Append):
            await self._route()
        match step:
            case Append():
                await self._append(step)
            case CommitLate():
                await self._commit_late()
            case MakeQueue(name, start) if name not in self.queues:
                await self._make_queue(name, start)
            case DeleteQueue(name) if name in self.queues:
                await self.engine.delete_queue(name)
                del self.queues[name]
            case DeleteWhenDone(wanted):
                self.when_done = wanted
                await set_delete_when_done(self.engine.stores.queues, wanted)
            case Claim(name, at_most) if name in self.queues:
                queue = self.queues[name]
                for one in await self.engine.claim(name, at_most):
                    assert one.message_id in queue.open & self.alive()
                    queue.receipts.append((one.message_id, one.receipt))
            case Settle(name, ack, at_most) if name in self.queues:
                await self._settle(name, ack, at_most)
            case Advance(milliseconds):
                self.clock.advance_ms(milliseconds)
                await self.engine.stores.queues.sweeper.caught_up()
            case Pass():
                await self._pass(step)

    async def _append(self, step: Append) -> None:
        job = f"job-{len(self.shards)}"
        shards = [await self._write(job, retentions, step) for retentions in step.shards]
        self.shards += shards
        if step.commit:
            await self._commit(shards)

    async def _write(self, job: str, retentions: list[int], step: Append) -> Shard:
        objects = Objects.open(self.url, SETTINGS)
        reserved = await ShardFiles(objects).reserve_bulk(job=job, now_ms=self.now)
        writer = await BulkShard.create(objects, reserved.shard, self.clock)
        payload = bytes(LARGE_BYTES if step.large else 1)
        await writer.add(
            NewMessage(
                payload,
                headers={"even": "no" if number % 2 else "yes"},
                retention_seconds=seconds,
            )
            for number, seconds in enumerate(retentions)
        )
        written = CommittedShard(**asdict(await writer.finish()))
        if not step.told:
            written = CommittedShard(**written.model_dump(exclude={"expires_from", "expires_at"}))
        deadlines = {
            reserved.shard << 32 | number: self.now + seconds * 1_000 if seconds else 0
            for number, seconds in enumerate(retentions)
        }
        blob_bytes = LARGE_BYTES * len(retentions) if step.large else 0
        return Shard(job, written, deadlines, blob_bytes, self.now)

    async def _commit(self, shards: list[Shard]) -> None:
        await commit(self.url, shards[0].job, [one.committed for one in shards], now_ms=self.now)
        for one in shards:
            one.committed_at = self.now
        self.waiting += shards

    async def _commit_late(self) -> None:
        jobs: dict[str, list[Shard]] = {}
        for one in self.shards:
            if one.committed_at is None and self.now - one.reserved_at < COMMITTED_WITHIN_MS:
                jobs.setdefault(one.job, []).append(one)
        for shards in jobs.values():
            await self._commit(shards)
        await self._route()

    async def _route(self) -> None:
        """Have all that is committed in its queues."""
        await self.engine.all_is_routed()
        await self.engine.parts.following.bulk.finished()
        for shard in self.waiting:
            for name, queue in self.queues.items():
                queue.open |= self._matching(shard, name)
        self.waiting = []

    def _matching(self, shard: Shard, name: str) -> set[int]:
        return {one for one in shard.alive(self.now) if name == "all" or one % 2 == 0}

    async def _make_queue(self, name: str, start: Start) -> None:
        await self.engine.create_queue(name, filter=FILTERS[name], options=OPTIONS, start=start)
        await self.engine.parts.replay.finished()
        queue = self.queues[name] = Queue()
        if start == "beginning":
            for shard in self.shards:
                queue.open |= self._matching(shard, name)

    async def _settle(self, name: str, ack: bool, at_most: int) -> None:
        queue = self.queues[name]
        some, queue.receipts = queue.receipts[:at_most], queue.receipts[at_most:]
        for message_id, receipt in some:
            call = self.engine.ack if ack else self.engine.nack
            if (await call(name, receipt)) == ["ok"] and ack:
                queue.open.discard(message_id)

    # --- what must be there -----------------------------------------------------------------------

    async def nothing_is_gone_too_early(self) -> None:
        """Every message and every entry that is not past its time is there, once."""
        alive = self.alive()
        # An owner looks for commits by itself, too, and may have been faster.
        on_their_way = {one for shard in self.waiting for one in shard.deadlines}
        visible = alive - on_their_way
        ids = sorted(one for shard in self.shards for one in shard.deadlines)
        found = await self.engine.read_many(ids)
        there = {one.message_id for one in found if one is not None}
        assert visible <= there <= alive | self.going
        for name, queue in self.queues.items():
            entries = await self._entries(name)
            assert len(entries) == len(set(entries)), "an entry is there twice"
            self._forget_failed(queue)
            assert alive & queue.open <= set(entries) <= queue.open | on_their_way

    async def _entries(self, name: str, *states: BrowsedState) -> list[int]:
        """What waits in a queue, is held or has failed."""
        queue = self.queues[name]
        entries: list[int] = []
        for state in states or ("available", "delayed", "in_flight", "failed"):
            page = await self.engine.browse(name, state, limit=1_000)
            entries += [one.message_id for one in page.entries]
            if state == "failed":
                queue.failed_at |= {one.message_id: one.finished_at_ms or 0 for one in page.entries}
        return entries

    def _forget_failed(self, queue: Queue) -> None:
        since = self.now - FAILED_RETENTION_S * 1_000
        queue.open -= {one for one, at in queue.failed_at.items() if at < since}

    # --- passes -----------------------------------------------------------------------------------

    async def _pass(self, step: Pass) -> None:
        await self.engine.stores.queues.sweeper.caught_up()
        before = self.alive()
        for shard in self.shards:
            shard.gone = shard.gone or await self._is_removable(shard)
        self.going = before - self.alive()
        if step.killed_at is not None:
            with _killed(step.killed_at, before=step.before) as was_killed:
                with suppress(StoreUnavailableError):
                    await self.compactor.run_once(thorough=True)
                if was_killed():
                    with suppress(OdqError):
                        await self.engine.close()
            if was_killed():
                await self.open()
                await self._route()
            await self.nothing_is_gone_too_early()
        await self._full_pass()
        self.going = set()

    async def _is_removable(self, shard: Shard) -> bool:
        """Whether a pass now has to leave nothing of a shard."""
        if shard.committed_at is None:
            return shard.number < earliest_bulk_shard(self.now - KEPT_MS)
        alive = shard.alive(self.now)
        if not alive and all(shard.deadlines.values()):
            return True
        if not self.when_done or not self.queues:
            return False
        # Failed entries and those in flight do not say when their messages expire.
        wanted = {
            one for name in self.queues for one in await self._entries(name, "in_flight", "failed")
        }
        for name in self.queues:
            wanted |= alive & set(await self._entries(name, "available", "delayed"))
        return wanted.isdisjoint(shard.deadlines)

    async def _full_pass(self) -> None:
        """It leaves exactly what must be there, and a second one finds nothing."""
        planned = await plan_root(self.url, options=COMPACTOR, clock=self.clock)
        report = await self.compactor.run_once(thorough=True)
        assert dict(planned.removed) == dict(report.removed)
        assert (planned.row_bytes, planned.blob_bytes) == (report.row_bytes, report.blob_bytes)
        await self._is_all_there_must_be()
        rows = await queue_rows(self.engine)
        again = await self.compactor.run_once(thorough=True)
        assert again.is_empty, again.removed
        assert await queue_rows(self.engine) == rows

    async def _is_all_there_must_be(self) -> None:
        kept = [one for one in self.shards if not one.gone]
        for shard in self.shards:
            rows_bytes = await self.objects.size_bytes(f"messages/{shard.number:05}")
            assert (rows_bytes > 0) is (shard in kept)
            blob_bytes = await self.objects.size_bytes(f"blobs/{shard.number:05}")
            assert blob_bytes == (shard.blob_bytes if shard in kept else 0)
        registered = [one for one in kept if one.committed_at is not None]
        rows = await queue_rows(self.engine)
        assert rows["bulk shard"] == len(registered)
        assert rows["cursor"] - len(registered) in (0, 1)  # the owner may have one, too
        assert rows["bulk expiry"] == sum(one.expires_later(self.now) for one in registered)
        assert rows["expired entries"] <= len(registered)
        first = earliest_bulk_shard(self.now - KEPT_MS)
        reserved = await ShardFiles(self.objects).bulk_shards()
        assert reserved == sorted(one.number for one in self.shards if one.number >= first)
        since = self.now - KEPT_MS
        jobs = {one.job for one in self.shards if (one.committed_at or 0) >= since}
        assert set(await CommitFiles(self.objects).jobs()) == jobs
        await self._queues_hold_nothing_else(rows["failure"])

    async def _queues_hold_nothing_else(self, failures: int) -> None:
        alive = self.alive()
        for name in self.queues:
            for state in ("available", "delayed"):
                entries = await self._entries(name, state)
                assert set(entries) <= alive
                assert getattr(await self.engine.stats(name), state) == len(entries)
        failed = [one for name in self.queues for one in await self._entries(name, "failed")]
        assert failures == len(failed)
        tried = {
            key.message_id
            for _, key, value in await decoded(self.engine.stores.queues.database)
            if isinstance(key, AttemptsKey) and isinstance(value, Attempts)
        }
        assert tried <= alive


@contextmanager
def _killed(at: int, *, before: bool) -> Iterator[Any]:
    """Let a process die in a write: from then on, nothing that it tries happens."""
    left = at

    def dying(write: Any) -> Any:
        async def tried(*given: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < -1 or (left == -1 and before):
                raise StoreUnavailableError("killed")
            done = await write(*given, **more)
            if left == -1:
                raise StoreUnavailableError("killed")
            return done

        return tried

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "commit", dying(Database.commit))
        patch.setattr(Objects, "delete", dying(Objects.delete))
        patch.setattr(Objects, "delete_under", dying(Objects.delete_under))
        yield lambda: left < 0


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, max_size=20))
@example(
    steps=[
        MakeQueue("all", "now"),
        DeleteWhenDone(True),
        Append([[0, 60, 0], [0]], True, True, True),
        Claim("all", 10),
        Settle("all", True, 3),
        Pass(1, True),
        Settle("all", True, 1),
        Pass(2, False),
        MakeQueue("even", "beginning"),
    ]
)
def test_shards_go_whole_in_time_and_nothing_before(steps: list[Any]) -> None:
    asyncio.run(_live_through(steps))


async def _live_through(steps: list[Any]) -> None:
    numbers = random.Random(0)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # Shards are numbered by chance; here it is the same one each time.
        patch.setattr(secrets, "randbelow", numbers.randrange)
        system = System(f"file://{folder}/root")
        await system.open()
        try:
            for step in [*steps, Advance(60_001), Pass(None, True)]:
                await system.take(step)
                await system.nothing_is_gone_too_early()
        finally:
            await system.engine.close()
