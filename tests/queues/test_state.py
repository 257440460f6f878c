"""The pure transitions of a queue against a simple model, with tiny windows and buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from odq_encodings import (
    ActiveMessages,
    DoneMessages,
    FailedMessages,
    Failure,
    QueueCounters,
)
from opendata_queue.model.options import QueueRules
from opendata_queue.queues.lanes import Past
from opendata_queue.queues.state import (
    TRANSITIONS,
    Changes,
    Claim,
    Held,
    QueueState,
    Waiting,
    Where,
)

LEASE_MS = 100
GRACE_MS = 60
BACKOFF_MS = 50


class IndexRows:
    """The rows behind the version-1 records, as a store would keep them."""

    def __init__(self) -> None:
        self.backlog: dict[tuple[int, int], Waiting] = {}
        self.schedule: dict[tuple[int, int], Waiting] = {}
        self.done: dict[int, DoneMessages] = {}
        self.failed: dict[int, FailedMessages] = {}
        self.failures: dict[int, Failure] = {}
        self.changed: dict[int, list[str]] = {}
        """What was done to the rows of each message since this was last emptied."""

    def note(self, what: str, message_id: int) -> None:
        self.changed.setdefault(message_id, []).append(what)

    def put_backlog(self, messages: Sequence[Waiting]) -> None:
        for message in messages:
            self.note("put_backlog", message.message_id)
            assert message[:2] not in self.backlog
            self.backlog[message[:2]] = message

    def delete_backlog(self, messages: Sequence[Waiting]) -> None:
        for message in messages:
            self.note("delete_backlog", message.message_id)
            assert self.backlog.pop(message[:2]) == message

    def put_schedule(self, message: Waiting) -> None:
        self.note("put_schedule", message.message_id)
        key = (message.visible_at, message.message_id)
        assert key not in self.schedule
        self.schedule[key] = message

    def delete_schedule(self, message: Waiting) -> None:
        self.note("delete_schedule", message.message_id)
        assert self.schedule.pop((message.visible_at, message.message_id)) == message

    def seal_done(self, bucket: int, value: bytes) -> None:
        assert bucket not in self.done
        self.done[bucket] = DoneMessages.decode(value)

    def seal_failed(self, bucket: int, value: bytes) -> None:
        assert bucket not in self.failed
        self.failed[bucket] = FailedMessages.decode(value)

    def put_failure(self, message_id: int, failure: Failure) -> None:
        self.note("put_failure", message_id)
        assert message_id not in self.failures
        self.failures[message_id] = failure

    def delete_failure(self, message_id: int) -> None:
        self.note("delete_failure", message_id)
        del self.failures[message_id]


class QueueMachine(RuleBasedStateMachine):
    """Every message is in exactly one place, in order, and nothing is handed out twice."""

    @initialize(
        window=st.integers(1, 4),
        bucket=st.integers(1, 3),
        max_attempts=st.integers(0, 3),
        max_in_flight=st.integers(1, 6),
    )
    def make(self, window: int, bucket: int, max_attempts: int, max_in_flight: int) -> None:
        self.rules_in_force = QueueRules(
            window=window,
            bucket=bucket,
            max_attempts=max_attempts,
            max_in_flight=max_in_flight,
            backoff_ms=BACKOFF_MS,
            backoff_jitter=0,
        )
        self.rows = IndexRows()
        self.changes = Changes(backlog=self.rows, schedule=self.rows, finished=self.rows)
        self.state = QueueState(self.rules_in_force, self.changes)
        self.now = 1_000
        self.next_id = 0
        self.deadlines: dict[int, int] = {}
        # The model: where each message must be.
        self.waiting: dict[int, Waiting] = {}
        self.held: dict[int, Held] = {}
        self.done: set[int] = set()
        self.failed: dict[int, int] = {}
        self.expired = 0
        self.old_claims: list[Claim] = []
        self.read_behind: Waiting | None = None
        self.were: dict[int, Where] = {}

    # --- messages come in and time passes ---------------------------------------------------------

    @rule(
        arrivals=st.lists(
            st.tuples(
                st.integers(0, 3),
                st.sampled_from([0, 0, 0, 1, 40, 300]),
                st.sampled_from([0, 0, 0, 10, 100]),
            ),
            min_size=1,
            max_size=6,
        ),
        together=st.booleans(),
    )
    def route_some(self, arrivals: list[tuple[int, int, int]], together: bool) -> None:
        messages = [self.arrival(*arrival) for arrival in arrivals]
        if together:
            with self.transition("route"):
                self.state.route_many(messages, self.now)
        else:
            for message in messages:
                with self.transition("route"):
                    self.state.route(message, self.now)

    @rule(priority=st.integers(0, 3), count=st.integers(1, 20))
    def route_alike(self, priority: int, count: int) -> None:
        arrivals = [self.arrival(priority, 0, 0) for _ in range(count)]
        with self.transition("route"):
            self.state.route_many(arrivals, self.now)

    def arrival(self, priority: int, delay: int, life: int) -> Waiting:
        self.next_id += 1
        deadline = self.now + life if life else 0
        message = Waiting(priority, self.next_id, self.now + delay, deadline, 0)
        self.deadlines[self.next_id] = deadline
        self.waiting[self.next_id] = message
        return message

    @rule(milliseconds=st.sampled_from([1, 10, 49, 50, 51, 100, 161, 500]))
    def time_passes(self, milliseconds: int) -> None:
        self.now += milliseconds
        self.bring_up_to_date()

    def bring_up_to_date(self) -> None:
        """What the engine does before every claim: leases, then the schedule, then a refill."""
        with self.transition("expire_leases"):
            over = self.state.expire_leases(self.now, grace_ms=GRACE_MS, chance=lambda: 0.0)
        for held in over:
            assert self.now > held.lease_deadline + GRACE_MS
            self.give_back(self.held.pop(held.message_id), BACKOFF_MS * 2 ** (held.attempts - 1))
        due = sorted(
            (m for m in self.rows.schedule.values() if m.visible_at <= self.now),
            key=lambda m: (m.visible_at, m.message_id),
        )
        if due:
            assert self.state.schedule.due_from <= due[0].visible_at
        later = [when for when, _ in self.rows.schedule if when > self.now]
        with self.transition("take_due"):
            self.state.take_due(
                due, self.now, next_due=min(later, default=self.state.schedule.due_from)
            )
        while self.state.ready.wants_refill:
            if not self.state.ready.knows_front:
                self.state.ready.learn_front(
                    sorted(self.rows.backlog.values())[: self.state.ready.front_size]
                )
            with self.transition("refill"):
                assert self.state.refill(self.now)
        for message_id in [i for i, m in self.waiting.items() if is_over(m, self.now)]:
            if message_id not in self.present():
                del self.waiting[message_id]
                self.expired += 1

    @rule()
    def begin_to_read_behind_the_front(self) -> None:
        if self.state.ready.wants_longer_front:
            self.read_behind = self.state.ready.front[-1]

    @rule()
    def end_to_read_behind_the_front(self) -> None:
        last, self.read_behind = self.read_behind, None
        if last is not None:
            behind = sorted(m for m in self.rows.backlog.values() if m > last)
            self.state.ready.lengthen_front(last, behind[:3])

    # --- consumers --------------------------------------------------------------------------------

    @rule(count=st.integers(1, 8))
    def claim(self, count: int) -> None:
        self.bring_up_to_date()
        expected = sorted(m for m in self.waiting.values() if m.visible_at <= self.now)
        claimed: list[Held] = []
        while len(claimed) < count:
            with self.transition("claim"):
                some = self.state.claim(
                    count - len(claimed), lease_ms=LEASE_MS, consumer="c", now=self.now
                )
            claimed += some
            self.bring_up_to_date()
            if not some and not self.state.claimable:
                break
        room = self.rules_in_force.max_in_flight - len(self.held)
        alive = [m for m in expected if not is_over(m, self.now)]
        assert [held.message_id for held in claimed] == [
            m.message_id for m in alive[: min(count, room)]
        ]
        for held in claimed:
            message = self.waiting.pop(held.message_id)
            assert held.attempts == message.attempts + 1
            assert held.lease_deadline == self.now + LEASE_MS
            self.held[held.message_id] = held
            self.old_claims.append(claim_of(held))

    def pick(self, data: st.DataObject) -> Claim | None:
        """A claim that was once given out; perhaps it is not valid any more."""
        if not self.old_claims:
            return None
        return data.draw(st.sampled_from(self.old_claims[-8:]))

    def is_valid(self, claim: Claim) -> bool:
        held = self.held.get(claim.message_id)
        return held is not None and claim_of(held) == claim and self.now <= held.lease_deadline

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        claim = self.pick(data)
        if claim is None:
            return
        valid = self.is_valid(claim)
        with self.transition("ack"):
            assert self.state.ack([claim], self.now) == [valid]
        if valid:
            del self.held[claim.message_id]
            self.done.add(claim.message_id)

    @rule(data=st.data(), delay=st.sampled_from([None, 0, 70]))
    def nack(self, data: st.DataObject, delay: int | None) -> None:
        claim = self.pick(data)
        if claim is None:
            return
        self.learn_deadlines()
        valid = self.is_valid(claim)
        with self.transition("nack"):
            gone = self.state.nack(claim, self.now, error="broken", delay_ms=delay, chance=0.0)
        assert gone == valid
        if valid:
            pause = BACKOFF_MS * 2 ** (claim.attempts - 1) if delay is None else delay
            self.give_back(self.held.pop(claim.message_id), pause)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        claim = self.pick(data)
        if claim is None:
            return
        self.learn_deadlines()
        valid = self.is_valid(claim)
        with self.transition("release"):
            assert self.state.release(claim, self.now) == valid
        if valid:
            held = self.held.pop(claim.message_id)
            self.back_to_waiting(held, self.now, held.attempts - 1)

    @rule(data=st.data(), lease=st.sampled_from([1, 100, 1_000]))
    def extend(self, data: st.DataObject, lease: int) -> None:
        claim = self.pick(data)
        if claim is None:
            return
        valid = self.is_valid(claim)
        with self.transition("extend"):
            deadline = self.state.extend(claim, self.now, lease_ms=lease)
        assert deadline == (self.now + lease if valid else None)
        if valid:
            held = self.held[claim.message_id]
            self.held[claim.message_id] = held._replace(lease_deadline=self.now + lease)

    def give_back(self, held: Held, pause: int) -> None:
        limit = self.rules_in_force.max_attempts
        if limit and held.attempts >= limit:
            deadline = self.deadlines[held.message_id]
            if 0 < deadline < self.now:
                self.expired += 1
            else:
                self.failed[held.message_id] = held.priority
        else:
            self.back_to_waiting(held, self.now + pause, held.attempts)

    def back_to_waiting(self, held: Held, visible_at: int, attempts: int) -> None:
        deadline = self.deadlines[held.message_id]
        if 0 < deadline < self.now:
            self.expired += 1
        else:
            self.waiting[held.message_id] = Waiting(
                held.priority, held.message_id, visible_at, deadline, attempts
            )

    @rule(data=st.data(), again=st.booleans())
    def finish_failed(self, data: st.DataObject, again: bool) -> None:
        if not self.failed:
            return
        message_id = data.draw(st.sampled_from(sorted(self.failed)))
        failure = self.rows.failures[message_id]
        with self.transition("replay" if again else "forget_failed"):
            if again:
                was_open = self.state.replay(message_id, failure, self.now)
            else:
                was_open = self.state.forget_failed(message_id)
        if not was_open:
            bucket = self.rows.failed[failure.bucket]
            left = tuple(m for m in bucket.messages if m.message_id != message_id)
            assert len(left) == len(bucket.messages) - 1
            self.rows.failed[failure.bucket] = FailedMessages(messages=left)
        priority = self.failed.pop(message_id)
        deadline = self.deadlines[message_id]
        if again and 0 < deadline < self.now:
            self.expired += 1
        elif again:
            self.waiting[message_id] = Waiting(priority, message_id, self.now, deadline, 0)

    @rule()
    def lose_memory(self) -> None:
        """Load the state from its records, as after a crash."""
        self.state = QueueState(
            self.rules_in_force,
            self.changes,
            active=ActiveMessages.decode(self.state.active_record()),
            done=DoneMessages.decode(self.state.finished.done_record()),
            failed=FailedMessages.decode(self.state.finished.failed_record()),
            counters=QueueCounters.decode(self.state.counters_record()),
        )
        self.learn_deadlines()

    def learn_deadlines(self) -> None:
        for message_id in list(self.state.in_flight.lacks_deadline):
            self.state.in_flight.learn_deadline(message_id, self.deadlines[message_id])

    # --- what must always hold --------------------------------------------------------------------

    @contextmanager
    def transition(self, name: str) -> Iterator[None]:
        """Every message that moves does so as the table says, and its rows with it."""
        before = self.were
        yield
        after = self.were = self.where()
        for message_id in before.keys() | after.keys():
            was = before.get(message_id, Where.NOWHERE)
            now = after.get(message_id, Where.NOWHERE)
            rows = tuple(self.rows.changed.pop(message_id, ()))
            if was is not now:
                assert rows == TRANSITIONS[name][was][now], (name, was, now)
            else:
                assert not rows, (name, was, rows)
        assert not self.rows.changed, "rows of messages that are nowhere"

    def where(self) -> dict[int, Where]:
        """Where each message is that is anywhere; in one place at most."""
        places = {
            Where.WINDOW: [m.message_id for m in self.state.ready.window()],
            Where.BACKLOG: [m.message_id for m in self.rows.backlog.values()],
            Where.SCHEDULE: [m.message_id for m in self.rows.schedule.values()],
            Where.IN_FLIGHT: [held.message_id for held in self.state.in_flight.held()],
            Where.DONE: self.done_ids(),
            Where.FAILED: sorted(self.rows.failures),
        }
        found = {one: place for place, ids in places.items() for one in ids}
        assert len(found) == sum(map(len, places.values()))
        return found

    def present(self) -> set[int]:
        """The ids that wait, wherever they are."""
        return {
            *(m.message_id for m in self.state.ready.window()),
            *(m.message_id for m in self.rows.backlog.values()),
            *(m.message_id for m in self.rows.schedule.values()),
        }

    @invariant()
    def every_message_is_where_the_model_says(self) -> None:
        places = [
            [m.message_id for m in self.state.ready.window()],
            [m.message_id for m in self.rows.backlog.values()],
            [m.message_id for m in self.rows.schedule.values()],
        ]
        together = [message_id for place in places for message_id in place]
        assert len(together) == len(set(together))
        missing = self.waiting.keys() - set(together)
        assert all(is_over(self.waiting[i], self.now) for i in missing)
        assert set(together) <= self.waiting.keys()
        assert {h.message_id: h.lease_deadline for h in self.state.in_flight.held()} == {
            h.message_id: h.lease_deadline for h in self.held.values()
        }
        assert self.done_ids() == sorted(self.done)
        assert self.failed_ids() == sorted(self.failed) == sorted(self.rows.failures)
        assert self.state.expired == self.expired + len(missing)

    def done_ids(self) -> list[int]:
        open_ones = DoneMessages.decode(self.state.finished.done_record()).messages
        sealed = [m for bucket in self.rows.done.values() for m in bucket.messages]
        return sorted(m.message_id for m in (*sealed, *open_ones))

    def failed_ids(self) -> list[int]:
        open_ones = FailedMessages.decode(self.state.finished.failed_record()).messages
        sealed = [m for bucket in self.rows.failed.values() for m in bucket.messages]
        return sorted(m.message_id for m in (*sealed, *open_ones))

    @invariant()
    def the_window_is_bounded_sorted_and_in_front_of_the_backlog(self) -> None:
        window = self.state.ready.window()
        assert window == sorted(window)
        assert len(window) <= self.rules_in_force.window
        if window and self.rows.backlog:
            assert window[-1] < min(self.rows.backlog.values())
        front = list(self.state.ready.front)
        assert front == sorted(self.rows.backlog.values())[: len(front)]

    @invariant()
    def counters_count_what_is_there(self) -> None:
        counters = QueueCounters.decode(self.state.counters_record())
        assert counters.scheduled == len(self.rows.schedule)
        assert counters.done == len(self.done)
        assert counters.failed == len(self.failed)
        by_priority: dict[int, list[int]] = {}
        for priority, message_id in self.rows.backlog:
            by_priority.setdefault(priority, []).append(message_id)
        assert [(c.priority, c.rows) for c in counters.backlog] == [
            (priority, len(ids)) for priority, ids in sorted(by_priority.items())
        ]
        for count in counters.backlog:
            assert count.from_message_id <= min(by_priority[count.priority])
        for when, _ in self.rows.schedule:
            assert counters.scheduled_from <= when


class QueueMachineWithRetention(QueueMachine):
    """The same, with what purges, retention and other rules do to a queue."""

    @rule()
    def drop_what_is_gone(self) -> None:
        """The messages of some claims are not in the store any more."""
        gone = [claim_of(held) for held in list(self.held.values())[:2]]
        valid = [claim.message_id for claim in gone if self.is_valid(claim)]
        with self.transition("drop_gone"):
            assert self.state.drop_gone(gone, self.now) == len(valid)
        for message_id in valid:
            del self.held[message_id]
        self.expired += len(valid)

    @rule()
    def purge(self) -> None:
        with self.transition("drop_scheduled"):
            self.state.drop_scheduled(list(self.rows.schedule.values()))
        with self.transition("drop_backlog"):
            self.state.drop_backlog(sorted(self.rows.backlog.values()))
        with self.transition("drop_window"):
            self.state.drop_window(Past({0: self.next_id + 1}))
        assert not self.present()
        # What had expired before a claim came across it counts as what it was: dropped.
        self.expired = self.state.expired
        self.waiting.clear()

    @rule()
    def expire_what_waits(self) -> None:
        with self.transition("expire_window"):
            self.state.expire_window(self.now)
        over = [m for m in self.rows.backlog.values() if m.expired(self.now)]
        with self.transition("expire_backlog"):
            self.state.expire_backlog(over)

    @rule(age_ms=st.sampled_from([0, 50, 200]))
    def forget_what_was_finished_long_ago(self, age_ms: int) -> None:
        """Of the open buckets only: the sealed ones are rows, and rewritten by their owner."""
        since = self.now - age_ms
        done = DoneMessages.decode(self.state.finished.open_done()).messages
        old = {m.message_id for m in done if m.done_at < since}
        with self.transition("trim_done"):
            assert self.state.trim_done(since) == len(old)
        self.done -= old
        lost = {
            one
            for one, failure in self.rows.failures.items()
            if self.state.finished.failed_open(one) and failure.failed_at < since
        }
        with self.transition("trim_failed"):
            assert self.state.trim_failed(since) == len(lost)
        self.failed = {one: priority for one, priority in self.failed.items() if one not in lost}

    @rule(window=st.integers(1, 4), bucket=st.integers(1, 3))
    def follow_other_rules(self, window: int, bucket: int) -> None:
        self.rules_in_force = replace(self.rules_in_force, window=window, bucket=bucket)
        with self.transition("follow"):
            self.state.follow(self.rules_in_force)


def is_over(message: Waiting, now: int) -> bool:
    """Past its retention: the deadline itself still counts."""
    return message.retention_deadline != 0 and now > message.retention_deadline


def claim_of(held: Held) -> Claim:
    return Claim(held.message_id, held.attempts, held.claimed_at)


TestQueueStateWithRetention = QueueMachineWithRetention.TestCase
TestQueueStateWithRetention.settings = settings(
    max_examples=25, stateful_step_count=60, deadline=None
)
TestQueueState = QueueMachine.TestCase
TestQueueState.settings = settings(max_examples=150, stateful_step_count=100, deadline=None)


def test_every_transition_of_the_table_is_one_of_the_state() -> None:
    assert all(callable(getattr(QueueState, name)) for name in TRANSITIONS)
