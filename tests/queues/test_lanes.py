"""Messages of several shards in one queue: lanes take turns, and none is starved or reordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odq_encodings import BacklogCount, Failure
from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.model.options import QueueRules
from opendata_queue.queues.lanes import BULK_LANE, Backlog, Past, in_turns, lane_end, lane_of
from opendata_queue.queues.rows.backlog import BacklogRows
from opendata_queue.queues.state import Changes, Claim, Held, QueueState, Waiting, in_order
from opendata_queue.systems.ingest import Ingest
from tests.conftest import NewRoot
from tests.support.bulk_jobs import append

WINDOW = 8


class BacklogOnly:
    """The rows of a backlog, and nothing else."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], Waiting] = {}

    def put_backlog(self, messages: Sequence[Waiting]) -> None:
        for message in messages:
            assert message[:2] not in self.rows
            self.rows[message[:2]] = message

    def delete_backlog(self, messages: Sequence[Waiting]) -> None:
        for message in messages:
            del self.rows[message[:2]]

    def put_schedule(self, message: Waiting) -> None: ...
    def delete_schedule(self, message: Waiting) -> None: ...
    def seal_done(self, bucket: int, value: bytes) -> None: ...
    def seal_failed(self, bucket: int, value: bytes) -> None: ...
    def put_failure(self, message_id: int, failure: Failure) -> None: ...
    def delete_failure(self, message_id: int) -> None: ...


class Queue:
    """A queue with a tiny window, whose backlog is read as the store reads it."""

    def __init__(self) -> None:
        self.backlog = rows = BacklogOnly()
        changes = Changes(backlog=rows, schedule=rows, finished=rows)
        self.state = QueueState(QueueRules(window=WINDOW, bucket=10_000), changes)

    def route(self, shard: int, sequence: int, priority: int = 128) -> None:
        self.state.route(Waiting(priority, shard << 32 | sequence, 0, 0, 0), 1)

    def claim(self, count: int) -> list[tuple[int, int, int]]:
        """Priority, shard and sequence of what is claimed."""
        state = self.state
        if state.ready.wants_refill_for(count):
            if not state.ready.knows_front:
                state.ready.learn_front(self._read())
            state.refill(1)
        expected = state.ready.first_ids(min(count, state.claimable), 1)
        held = state.claim(count, lease_ms=1_000, consumer="c", now=1)
        assert [one.message_id for one in held] == expected
        self.held = held
        return [(one.priority, one.message_id >> 32, one.message_id & 0xFFFF_FFFF) for one in held]

    def release(self) -> None:
        for one in self.held:
            assert self.state.release(Claim(one.message_id, one.attempts, one.claimed_at), 1)

    def _read(self) -> list[Waiting]:
        best = min(priority for priority, _ in self.backlog.rows)
        lanes: dict[int, list[Waiting]] = {}
        for message in sorted(self.backlog.rows.values()):
            if message.priority == best:
                lanes.setdefault(lane_of(message.message_id), []).append(message)
        share = max(1, self.state.ready.front_size // len(lanes))
        return in_turns(
            {lane: one[:share] for lane, one in lanes.items()}, self.state.ready.last_turn
        )


def test_a_lane_is_a_live_shard_or_all_bulk_shards() -> None:
    assert [lane_of(shard << 32 | 7) for shard in (0, 1, 65_535)] == [0, 1, 65_535]
    assert lane_of(65_536 << 32) == lane_of(99_999_999 << 32) == BULK_LANE
    assert lane_of(lane_end(3)) == 4


def test_lanes_take_turns_behind_the_last_one() -> None:
    lanes = {0: "aaa", 1: "b", 5: "cc"}

    assert "".join(in_turns(lanes, -1)) == "abcaca"
    assert "".join(in_turns(lanes, 0)) == "bcacaa"
    assert "".join(in_turns(lanes, 5)) == "abcaca"


def test_the_past_ends_at_the_cursors_and_holds_no_shard_that_came_later() -> None:
    past = Past({0: 5, 2: 1})

    assert 4 in past
    assert 5 not in past
    assert 1 << 32 not in past
    assert 2 << 32 in past
    assert (2 << 32 | 1) not in past
    assert 70_000 << 32 in past


def test_a_backlog_counts_each_lane_of_a_priority() -> None:
    backlog = Backlog()
    for shard, sequence in ((0, 5), (0, 9), (3, 1), (70_000, 2), (80_000, 1)):
        backlog.add(1, shard << 32 | sequence)

    backlog.remove_first(1, 5)
    backlog.remove(1, 80_000 << 32 | 1)

    assert backlog.total == 3
    assert backlog.ranges() == [(1, 6, 1), (1, 3 << 32 | 1, 1), (1, 70_000 << 32 | 2, 1)]
    assert Backlog(backlog.counts()).ranges() == backlog.ranges()
    assert backlog.counts()[0] == BacklogCount(priority=1, rows=1, from_message_id=6)


def test_a_busy_shard_does_not_starve_another() -> None:
    queue = Queue()
    queue.route(1, 0)
    sequence = 0
    claimed: list[tuple[int, int, int]] = []
    while not any(shard == 1 for _, shard, _ in claimed):
        for _ in range(5):  # it brings more than consumers can take, from the first moment on
            queue.route(0, sequence)
            sequence += 1
        claimed += queue.claim(3)
        assert len(claimed) < 4 * WINDOW


def test_shards_that_are_all_busy_get_equal_parts() -> None:
    queue = Queue()
    for sequence in range(300):
        for shard in (0, 3, 9, 70_000):
            queue.route(shard, sequence)

    claimed = [one for _ in range(60) for one in queue.claim(4)]

    parts = Counter(shard for _, shard, _ in claimed)
    assert max(parts.values()) - min(parts.values()) <= 2 * WINDOW


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("route"), st.sampled_from([0, 1, 2, 70_000]), st.integers(1, 3)),
            st.tuples(st.just("claim"), st.integers(1, 12), st.booleans()),
        ),
        max_size=80,
    )
)
def test_every_message_comes_once_in_the_order_of_its_lane_and_the_best_priority_first(
    steps: list[tuple[str, int, int]],
) -> None:
    queue = Queue()
    waiting: dict[tuple[int, int], list[int]] = {}
    sequence = 0

    def check(claimed: list[tuple[int, int, int]]) -> None:
        for priority, shard, number in claimed:
            assert priority == min(p for (p, _), there in waiting.items() if there)
            assert number == waiting[priority, shard].pop(0)

    for kind, first, second in steps:
        if kind == "route":
            waiting.setdefault((second, first), []).append(sequence)
            queue.route(first, sequence, priority=second)
            sequence += 1
            continue
        claimed = queue.claim(min(first, WINDOW))
        if second:  # given back: it is as if it had not been claimed
            queue.release()
        else:
            check(claimed)
    while claimed := queue.claim(WINDOW):
        check(claimed)

    assert not any(waiting.values())
    assert not queue.backlog.rows
    assert queue.state.ready.backlog.total == 0


async def test_claims_are_fair_to_all_shards_of_a_root(new_memory_root: NewRoot) -> None:
    root = new_memory_root()
    async with (
        await Engine.open(root) as system,
        await Ingest.open(root) as other,
    ):
        await system.create_queue("all")
        await system.publish_many([NewMessage(payload=b"own")] * 2_000)
        await other.publish_many([NewMessage(payload=b"other")] * 2_000)
        await append(root, "load", [NewMessage(payload=b"bulk")] * 2_000)
        await system._following.all_caught_up(None)
        await system._following.bulk.finished()
        claimed: Counter[bytes | None] = Counter()
        for _ in range(18):
            batch = await system.claim("all", 100)
            await system.ack("all", *(one.receipt for one in batch))
            claimed.update(one.payload for one in batch)

        assert claimed[b"other"] > 300
        assert claimed[b"bulk"] > 300
        assert claimed[b"own"] > 300


@pytest.mark.parametrize("start", ["now", "beginning"])
async def test_a_purge_drops_what_waits_of_all_shards_and_no_more(
    new_memory_root: NewRoot, start: str
) -> None:
    root = new_memory_root()
    async with (
        await Engine.open(root) as system,
        await Ingest.open(root) as other,
    ):
        await system.create_queue("all", start=start)  # type: ignore[arg-type]
        for publisher in (system, other):
            await publisher.publish_many([NewMessage(payload=b"old")] * 700)
            await publisher.publish_many([NewMessage(payload=b"late", delay_ms=60_000)] * 3)
        await append(root, "load", [NewMessage(payload=b"old")] * 700)
        await system._following.all_caught_up(None)
        await system._following.bulk.finished()

        assert await system.purge_queue("all") == 3 * 700 + 6
        for publisher in (system, other):
            await publisher.publish_many([NewMessage(payload=b"new")])
        await append(root, "next", [NewMessage(payload=b"new")])

        found: list[bytes | None] = []
        while len(found) < 3:
            found += [one.payload for one in await system.claim("all", 10, wait_ms=60_000)]
        stats = await system.stats("all")
        assert found == [b"new"] * 3
        assert (stats.available, stats.delayed) == (0, 0)


@pytest.mark.parametrize("priority", ["1", "200"])
async def test_what_comes_while_the_backlog_is_read_is_not_overtaken(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch, priority: str
) -> None:
    root = new_memory_root()
    async with await Engine.open(root) as system, await Ingest.open(root) as other:
        await system.create_queue("all", options=QueueOptions(window=2, backoff_ms=0))
        for publisher in (system, other):
            await publisher.publish_many([NewMessage(b"old", headers={"priority": "5"})] * 4)
        await system.all_is_routed()
        scan = BacklogRows.scan_lane
        late: list[int] = []

        async def scan_while_more_comes(rows: BacklogRows, *given: int) -> object:
            found = await scan(rows, *given)
            if not late:
                late.append(await system.publish(b"late", headers={"priority": priority}))
                await system._tailer.caught_up()
            return found

        monkeypatch.setattr(BacklogRows, "scan_lane", scan_while_more_comes)
        claimed = await system.claim("all", 9)

        # What had been in the window was claimed before it came; one answer is in one order.
        assert len(claimed) == 9
        assert [one.message_id for one in claimed].index(late[0]) == (0 if priority == "1" else 8)


def test_what_was_claimed_at_two_moments_is_put_in_order_and_lanes_keep_their_turns() -> None:
    def held(priority: int, shard: int, sequence: int) -> Held:
        return Held(shard << 32 | sequence, priority, 1, 2, 1, 0, "c")

    at_one = [held(1, 0, 5), held(1, 3, 7), held(1, 0, 6)]
    later = [held(0, 3, 9), held(1, 3, 2), held(1, 0, 1), held(2, 0, 0)]

    found = in_order([*at_one, *later])

    assert found == [
        held(0, 3, 9),
        held(1, 0, 1),
        held(1, 3, 2),
        held(1, 0, 5),
        held(1, 3, 7),
        held(1, 0, 6),
        held(2, 0, 0),
    ]
