"""Random histories: nothing goes before its time, and everything goes after it, in one pass."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from odq_compactor import (
    CompactorOptions,
    RetentionCompactor,
    plan_root,
    set_delete_when_done,
)
from odq_encodings import (
    AttemptsKey,
    Expiry,
    ExpiryKey,
    MetadataLogKey,
    PayloadKey,
)
from opendata_queue import (
    Engine,
    NewMessage,
    PublishOptions,
    QueueOptions,
    Start,
    StoreUnavailableError,
)
from opendata_queue.store import forget_memory_root
from opendata_queue.testing import ManualClock
from tests.retention.rows import blobs, decoded, queue_rows

INLINE_BYTES = 16
RETENTIONS_S = [0, 1, 5, 5, 30]
DONE_RETENTION_S = 7
FAILED_RETENTION_S = 11
LEASE_MS = 4_000
OPTIONS = QueueOptions(
    window=2,
    bucket=3,
    max_attempts=2,
    lease_ms=LEASE_MS,
    backoff_ms=500,
    backoff_jitter=0,
    done_retention_seconds=DONE_RETENTION_S,
    failed_retention_seconds=FAILED_RETENTION_S,
)
FILTERS = {"all": "", "even": "even = 'yes'", "odd": "even = 'no'"}
NAMES = tuple(FILTERS)
COMPACTOR = CompactorOptions(work_share=1.0, erase=True, space=False, batch_messages=4)


class Publish(NamedTuple):
    retentions: list[int]
    large: bool
    delay_ms: int


class Claim(NamedTuple):
    queue: str
    at_most: int


class Settle(NamedTuple):
    queue: str
    ack: bool


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
    fails_at: int | None
    """Which of its commits or deletes fails; none if nothing does."""

    before: bool
    """Whether it fails before it has done anything, or after."""


QUEUES = st.sampled_from(NAMES)
STEPS: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        Publish,
        st.lists(st.sampled_from(RETENTIONS_S), min_size=1, max_size=8),
        st.booleans(),
        st.sampled_from([0, 0, 0, 2_000, 20_000]),
    ),
    st.builds(Claim, QUEUES, st.integers(1, 6)),
    st.builds(Settle, QUEUES, st.booleans()),
    st.builds(Advance, st.sampled_from([1, 500, 999, 1_000, 1_001, 4_001, 5_000, 7_001, 12_000])),
    st.builds(MakeQueue, QUEUES, st.sampled_from(["now", "beginning"])),
    st.builds(DeleteQueue, QUEUES),
    st.builds(DeleteWhenDone, st.booleans()),
    st.builds(Pass, st.one_of(st.none(), st.integers(0, 9)), st.booleans()),
)


@dataclass
class Model:
    """What must be there, told from the calls alone."""

    deadlines: dict[int, int] = field(default_factory=dict)
    when_done: bool = False
    finished: set[int] = field(default_factory=set)
    """What was deleted since all queues were done with it."""
    cut_off: set[int] = field(default_factory=set)
    """Finished messages with blobs, in passes that were cut off: what says when they expire may be
    there until then."""
    large: set[int] = field(default_factory=set)
    even: set[int] = field(default_factory=set)
    open: dict[str, set[int]] = field(default_factory=dict)
    """What each queue was given, and is not done with."""
    failed_at: dict[str, dict[int, int]] = field(
        default_factory=lambda: {name: {} for name in NAMES}
    )
    done: dict[str, list[tuple[int, int]]] = field(
        default_factory=lambda: {name: [] for name in NAMES}
    )
    receipts: dict[str, list[tuple[int, str]]] = field(
        default_factory=lambda: {name: [] for name in NAMES}
    )

    def alive(self, now: int) -> set[int]:
        alive = {one for one, deadline in self.deadlines.items() if not 0 < deadline < now}
        return alive - self.finished

    def wanted_by(self, name: str, ids: set[int]) -> set[int]:
        """Those that satisfy the filter of a queue."""
        return {"all": ids, "even": ids & self.even, "odd": ids - self.even}[name]

    def needed(self, now: int) -> set[int]:
        """What a queue is not done with; a failed entry past its time holds nothing back."""
        since = now - FAILED_RETENTION_S * 1_000
        for name, entries in self.open.items():
            entries -= {one for one, at in self.failed_at[name].items() if at < since}
        return set().union(*self.open.values())

    def still_done(self, name: str, now: int) -> list[int]:
        since = now - DONE_RETENTION_S * 1_000
        return sorted(one for one, at in self.done[name] if at >= since)


class Interrupted:
    """Makes one of the compactor's writes fail, as a kill in that moment would."""

    def __init__(self, engine: Engine, step: Pass, patch: pytest.MonkeyPatch) -> None:
        self.left = step.fails_at
        self._before = step.before
        stores = engine.stores
        patch.setattr(stores.shards[0], "commit", self._wrapped(stores.shards[0].commit))
        patch.setattr(type(stores.objects), "delete", self._deleting(type(stores.objects).delete))

    def _wrapped(self, write: Any) -> Any:
        async def failing(*given: Any) -> None:
            await self._run(lambda: write(*given))

        return failing

    def _deleting(self, delete: Any) -> Any:
        async def failing(this: Any, path: str) -> None:
            await self._run(lambda: delete(this, path))

        return failing

    async def _run(self, work: Any) -> None:
        fails = self.left == 0
        if self.left is not None:
            self.left -= 1
        if not (fails and self._before):
            await work()
        if fails:
            raise StoreUnavailableError("killed")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, max_size=25))
@example(
    steps=[Publish([1, 5, 1], True, 0), Advance(1_000), Pass(None, True), Advance(1), Pass(2, True)]
)
@example(steps=[DeleteWhenDone(True), DeleteQueue("all"), Publish([0, 0], True, 0), Pass(1, False)])
@example(
    steps=[
        DeleteWhenDone(True),
        DeleteQueue("even"),
        Publish([0, 5, 5], False, 0),
        *[Claim("all", 3), *3 * [Settle("all", True)]],
        Pass(0, False),
    ]
)
@example(steps=[Publish([5], False, 20_000), Advance(5_000), Advance(1), Pass(None, False)])
@example(
    steps=[
        DeleteWhenDone(True),
        DeleteQueue("even"),
        Publish([0, 0, 0, 0], True, 0),
        *2 * [Claim("all", 4), *4 * [Settle("all", False)], Advance(500)],
        Advance(12_000),
        Pass(None, True),
    ]
)
def test_nothing_is_removed_before_its_time_and_everything_after_one_full_pass(
    steps: list[Any],
) -> None:
    asyncio.run(_live_through(steps))


async def _live_through(steps: list[Any]) -> None:
    url = "memory:///retention-model"
    forget_memory_root(url)
    clock = ManualClock()
    model = Model()
    options = PublishOptions(inline_bytes=INLINE_BYTES)
    async with await Engine.open(url, clock=clock, options=options) as engine:
        for name in ("all", "even"):
            await _take(MakeQueue(name, "now"), engine, clock, model, None)
        compactor = RetentionCompactor(engine, COMPACTOR)
        for step in [*steps, Advance(1_000), Pass(None, True)]:
            await _take(step, engine, clock, model, compactor)
            await _nothing_is_gone_too_early(engine, clock, model)
    forget_memory_root(url)


async def _take(
    step: Any,
    engine: Engine,
    clock: ManualClock,
    model: Model,
    compactor: RetentionCompactor | None,
) -> None:
    match step:
        case Publish(retentions, large, delay_ms):
            await _publish(engine, clock, model, retentions, large, delay_ms)
        case MakeQueue(name, start) if name not in await engine.list_queues():
            await engine.create_queue(name, filter=FILTERS[name], options=OPTIONS, start=start)
            past = model.alive(clock.now_ms()) if start == "beginning" else set()
            model.open[name] = model.wanted_by(name, past)
        case DeleteQueue(name) if name in await engine.list_queues():
            await engine.delete_queue(name)
            model.done[name], model.receipts[name], model.failed_at[name] = [], [], {}
            del model.open[name]
        case DeleteWhenDone(wanted):
            model.when_done = wanted
            await set_delete_when_done(engine.stores.queues, wanted)
        case Claim(name, at_most) if name in await engine.list_queues():
            await engine.parts.replay.finished()
            for held in await engine.claim(name, at_most):
                assert held.message_id not in model.finished
                deadline = model.deadlines[held.message_id]
                assert not 0 < deadline < clock.now_ms()
                model.receipts[name].append((held.message_id, held.receipt))
        case Settle(name, ack):
            if model.receipts[name]:
                message_id, receipt = model.receipts[name].pop(0)
                call = engine.ack if ack else engine.nack
                if (await call(name, receipt)) == ["ok"] and ack:
                    model.done[name].append((message_id, clock.now_ms()))
                    model.open[name].discard(message_id)
        case Advance(milliseconds):
            clock.advance_ms(milliseconds)
            await engine.stores.queues.sweeper.caught_up()
        case Pass(fails_at, _):
            await engine.all_is_routed()
            await engine.parts.replay.finished()
            await engine.stores.queues.sweeper.caught_up()
            now = clock.now_ms()
            if model.when_done and model.open:
                # From here on any of it may go, and after a pass that is not cut off, all of it.
                model.finished |= model.alive(now) - model.needed(now)
            assert compactor is not None
            if fails_at is not None:
                with pytest.MonkeyPatch.context() as patch:
                    interrupted = Interrupted(engine, step, patch)
                    try:
                        await compactor.run_once(thorough=True)
                    except StoreUnavailableError:
                        # Blobs are deleted some at a time: others may follow the one that failed.
                        assert interrupted.left is not None
                        assert interrupted.left < 0
                        model.cut_off |= model.finished & model.large
                await _nothing_is_gone_too_early(engine, clock, model)
                await _no_entry_is_gone_too_early(engine, clock, model)
                compactor = RetentionCompactor(engine, COMPACTOR)  # it has forgotten everything
            await _pass(engine, clock, model, compactor)
            await _no_entry_is_gone_too_early(engine, clock, model)


async def _publish(
    engine: Engine,
    clock: ManualClock,
    model: Model,
    retentions: list[int],
    large: bool,
    delay_ms: int,
) -> None:
    payload = bytes(INLINE_BYTES + 1 if large else 1)
    ids = await engine.publish_many(
        [
            NewMessage(
                payload,
                headers={"even": "yes" if number % 2 else "no"},
                retention_seconds=seconds,
                delay_ms=delay_ms or None,
            )
            for number, seconds in enumerate(retentions)
        ]
    )
    for one, seconds in zip(ids, retentions, strict=True):
        model.deadlines[one] = clock.now_ms() + seconds * 1_000 if seconds else 0
    if large:
        model.large.update(ids)
    model.even.update(ids[1::2])
    for name, entries in model.open.items():
        entries |= model.wanted_by(name, set(ids))


async def _pass(
    engine: Engine, clock: ManualClock, model: Model, compactor: RetentionCompactor
) -> None:
    """A full pass leaves exactly what must be there, and a second one finds nothing."""
    planned = await plan_root(engine_url(engine), options=COMPACTOR, clock=clock)
    report = await compactor.run_once(thorough=True)
    assert dict(planned.removed) == dict(report.removed)
    assert planned.total("finished messages") == report.total("finished messages")
    now = clock.now_ms()
    alive = model.alive(now)
    payloads: set[int] = set()
    log: set[int] = set()
    expiring: set[int] = set()
    for _, key, value in await decoded(engine.stores.shards[0].database):
        if isinstance(key, PayloadKey):
            payloads.add(key.message_id)
        elif isinstance(key, MetadataLogKey):
            log.add(key.sequence)
        elif isinstance(key, ExpiryKey) and isinstance(value, Expiry):
            expiring.update(range(key.message_id, key.message_id + value.messages))
    assert payloads == log == alive
    to_come = {one for one in alive if model.deadlines[one]}
    assert to_come <= expiring <= to_come | model.cut_off
    assert len(await blobs(engine)) == len(alive & model.large)
    rows = await queue_rows(engine)
    names = await engine.list_queues()
    for name in names:
        stats = await engine.stats(name)
        assert stats.done == len(model.still_done(name, now))
        failed = await engine.browse(name, "failed", limit=1_000)
        assert stats.failed == len(failed.entries)
        for state in ("available", "delayed"):
            page = await engine.browse(name, state, limit=1_000)
            assert all(entry.message_id in alive for entry in page.entries)
            assert getattr(stats, state) == len(page.entries)
    tried = {
        key.message_id
        for _, key, _ in await decoded(engine.stores.queues.database)
        if isinstance(key, AttemptsKey)
    }
    assert tried <= alive
    assert rows["failure"] == sum([(await engine.stats(name)).failed for name in names])
    again = await compactor.run_once(thorough=True)
    assert again.is_empty, again.removed


def engine_url(engine: Engine) -> str:
    return str(engine.stores.objects.location)


async def _nothing_is_gone_too_early(engine: Engine, clock: ManualClock, model: Model) -> None:
    now = clock.now_ms()
    alive = sorted(model.alive(now))
    messages = await engine.read_many(sorted(model.deadlines))
    there = [one.message_id for one in messages if one is not None]
    # What is finished goes with some pass, and until then it is there.
    assert [one for one in there if one not in model.finished] == alive
    for name in await engine.list_queues():
        page = await engine.browse(name, "done", limit=1_000)
        assert sorted(one.message_id for one in page.entries) == model.still_done(name, now)
        failed = await engine.browse(name, "failed", limit=1_000)
        model.failed_at[name] |= {one.message_id: one.finished_at_ms or 0 for one in failed.entries}
        since = now - FAILED_RETENTION_S * 1_000
        assert all((one.finished_at_ms or 0) >= since for one in failed.entries)


async def _no_entry_is_gone_too_early(engine: Engine, clock: ManualClock, model: Model) -> None:
    """What a queue was given and is not done with is in it, once."""
    now = clock.now_ms()
    alive = model.alive(now)
    model.needed(now)
    for name, wanted in model.open.items():
        entries: list[int] = []
        for state in ("available", "delayed", "in_flight", "failed"):
            page = await engine.browse(name, state, limit=1_000)
            entries += [one.message_id for one in page.entries]
        assert len(entries) == len(set(entries))
        assert wanted & alive <= set(entries) <= wanted
