"""``find``: what it finds is what browsing and judging by hand would, with bounded work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import opendata_queue
from opendata_queue import (
    BrowsedState,
    Engine,
    FoundEntry,
    FoundPage,
    InvalidInputError,
    NewMessage,
    QueueEntry,
    QueueNotFoundError,
    QueueOptions,
    System,
)
from opendata_queue.log.all_shards import AllMessages
from opendata_queue.store import forget_memory_root
from opendata_queue.systems import finding
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot

ROOT = "memory:///find"
SMALL = QueueOptions(window=2, bucket=3, max_attempts=1, backoff_jitter=0)
STATES: tuple[BrowsedState, ...] = ("available", "delayed", "in_flight", "done", "failed")
TIMES = {
    "available": "visible_at_ms",
    "delayed": "visible_at_ms",
    "in_flight": "claimed_at_ms",
    "done": "finished_at_ms",
    "failed": "finished_at_ms",
}
FILTERS: dict[str | None, Callable[[dict[str, str]], bool]] = {
    None: lambda headers: True,
    "tier = 'gold'": lambda headers: headers.get("tier") == "gold",
    "n >= 20 AND NOT n >= 40": lambda headers: 20 <= int(headers["n"]) < 40,
    "nothing = 'here'": lambda headers: False,
}


class Filled:
    """A queue with messages in all states, as its owner and as a reader have it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.owner = opendata_queue.open(ROOT, clock=self.clock)
        self.owner.create_queue("q", options=SMALL)
        for number in range(60):
            headers = {"n": str(number)} | ({"tier": "gold"} if number % 3 == 0 else {})
            self.owner.publish(
                b"", headers=headers, delay_ms=100_000 + number % 5 if number % 4 == 1 else None
            )
            self.clock.advance_ms(10)
        for number, message in enumerate(self.owner.claim("q", 36, consumer="a", wait_ms=60_000)):
            if number % 3 == 0:
                self.owner.ack("q", message)
            elif number % 3 == 1:
                self.owner.nack("q", message, error=f"{'timeout' if number % 2 else 'no'} {number}")
            self.clock.advance_ms(7)
        self.owner.claim("q", 3, consumer="b")
        self.headers = {
            one.message_id: dict(one.headers)
            for one in self.owner.read_many(range(60))
            if one is not None
        }
        self.reader = opendata_queue.open(ROOT, read_only=True, clock=self.clock)

    def close(self) -> None:
        self.reader.close()
        self.owner.close()
        forget_memory_root(ROOT)


@pytest.fixture(scope="module")
def filled() -> Iterator[Filled]:
    made = Filled()
    yield made
    made.close()


def browsed(system: System, state: BrowsedState) -> Iterator[QueueEntry]:
    after = None
    while True:
        page = system.browse("q", state, after=after)
        yield from page.entries
        if page.next is None:
            return
        after = page.next


def pages(system: System, state: BrowsedState, **arguments: Any) -> Iterator[FoundPage]:
    after = None
    while True:
        page = system.find("q", state, after=after, **arguments)
        yield page
        if page.next is None:
            return
        after = page.next


def found(of: Iterable[FoundPage]) -> list[FoundEntry]:
    return [entry for page in of for entry in page.entries]


def test_all_states_have_messages_to_find(filled: Filled) -> None:
    counts = {state: len([*browsed(filled.owner, state)]) for state in STATES}

    assert min(counts.values()) > 5, counts


@given(data=st.data())
def test_it_finds_what_browsing_and_judging_by_hand_would(filled: Filled, data: Any) -> None:
    system = data.draw(st.sampled_from([filled.owner, filled.reader]), "system")
    state = data.draw(st.sampled_from(STATES), "state")
    everything = [*browsed(system, state)]
    times = [getattr(one, TIMES[state]) for one in everything]
    some_time = st.none() | st.sampled_from([*times, min(times) - 1, max(times) + 1])
    text = data.draw(st.sampled_from([*FILTERS]), "filter")
    error = data.draw(st.sampled_from([None, "", "timeout", "1", "?"]), "error")
    consumer = data.draw(st.sampled_from([None, "a", "b", "c"]), "consumer")
    since_ms, until_ms = data.draw(some_time, "since"), data.draw(some_time, "until")
    limit = data.draw(st.integers(1, 50), "limit")
    error = error if state == "failed" else None
    consumer = consumer if state in ("in_flight", "failed") else None

    answered = [
        *pages(
            system,
            state,
            filter=text,
            error=error,
            consumer=consumer,
            since_ms=since_ms,
            until_ms=until_ms,
            limit=limit,
        )
    ]

    expected = [
        one
        for one, time in zip(everything, times, strict=True)
        if FILTERS[text](filled.headers[one.message_id])
        and (error is None or error in str(one.error))
        and (consumer is None or consumer == one.consumer)
        and (since_ms is None or time >= since_ms)
        and (until_ms is None or time < until_ms)
    ]
    assert [(one.message_id, one.state) for one in found(answered)] == [
        (one.message_id, one.state) for one in expected
    ]
    assert all(dict(one.headers) == filled.headers[one.message_id] for one in found(answered))
    assert sum(page.examined for page in answered) == len(everything)
    assert all(len(page.entries) == limit for page in answered[:-1])


@pytest.mark.parametrize("state", STATES)
def test_an_entry_says_what_browsing_says_of_it(filled: Filled, state: BrowsedState) -> None:
    for entry, seen in zip(
        found(pages(filled.owner, state)), browsed(filled.owner, state), strict=True
    ):
        assert {name: getattr(entry, name) for name in QueueEntry.__slots__} == {
            name: getattr(seen, name) for name in QueueEntry.__slots__
        }


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("state", STATES)
def test_a_page_may_be_empty_and_the_next_one_goes_on(
    filled: Filled, state: BrowsedState, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "MOST_EXAMINED", most)

    answered = [*pages(filled.reader, state, filter="n = 13 OR tier = 'gold'")]

    assert all(page.examined == most for page in answered[:-1])
    assert any(not page.entries for page in answered) or most == 7
    assert [one.message_id for one in found(answered)] == [
        one.message_id
        for one in browsed(filled.reader, state)
        if filled.headers[one.message_id]["n"] == "13" or one.message_id % 3 == 0
    ]


@pytest.mark.parametrize("state", STATES)
def test_a_full_page_that_ends_with_the_last_message_is_the_last_one(
    filled: Filled, state: BrowsedState
) -> None:
    count = len([*browsed(filled.owner, state)])

    assert filled.owner.find("q", state, limit=count).next is None
    assert filled.owner.find("q", state, limit=count - 1).next is not None


# --- work and size --------------------------------------------------------------------------------


async def test_a_page_examines_two_thousand_messages_at_most(new_memory_root: NewRoot) -> None:
    async with await Engine.open(new_memory_root()) as system:
        await system.create_queue("q")
        headers = [{"n": str(number)} for number in range(2_300)]
        ids = await system.publish_many([NewMessage(b"", headers=one) for one in headers])

        first = await system.find("q", "available", filter="n = 2200")
        second = await system.find("q", "available", filter="n = 2200", after=first.next)

    assert (first.entries, first.examined) == ((), 2_000)
    assert first.next is not None
    assert [one.message_id for one in second.entries] == [ids[2_200]]
    assert (second.next, second.examined) == (None, 300)


async def test_a_page_of_large_headers_ends_early(new_memory_root: NewRoot) -> None:
    large = {"large": "x" * 50_000}
    async with await Engine.open(new_memory_root()) as system:
        await system.create_queue("q")
        ids = await system.publish_many([NewMessage(b"", headers=large) for _ in range(30)])

        first = await system.find("q", "available")
        rest = await system.find("q", "available", after=first.next)

    assert 20 <= len(first.entries) <= 22
    assert first.next is not None
    assert [one.message_id for one in (*first.entries, *rest.entries)] == ids


async def test_headers_are_read_of_what_the_other_conditions_leave(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    metadata = AllMessages.metadata

    async def noted(self: AllMessages, message_ids: Iterable[int], *budget: Any) -> Any:
        ids = [*message_ids]
        read.extend(ids)
        return await metadata(self, ids, *budget)

    async with await Engine.open(new_memory_root()) as system:
        await system.create_queue("q", options=SMALL)
        ids = await system.publish_many([NewMessage(b"") for _ in range(20)])
        for message in await system.claim("q", 20, wait_ms=60_000):
            await system.nack("q", message, error=f"error {message.message_id - ids[0]}.")
        monkeypatch.setattr(AllMessages, "metadata", noted)

        await system.find("q", "failed", error="error 7.", filter="NOT a = 'b'")
        await system.find("q", "failed", limit=2)

    assert read == [ids[7], ids[0], ids[1]]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "arguments", "why"),
    [
        ("lost", {}, "state is 'lost', not one of available, delayed, in_flight, done, failed"),
        ("done", {"error": "x"}, "done messages have no error: it is a condition for failed ones"),
        ("done", {"consumer": "x"}, "have no consumer: .* for in_flight and failed ones"),
        ("failed", {"error": 7}, "error is 7, not a text"),
        ("failed", {"since_ms": -1}, "since_ms is -1"),
        ("failed", {"until_ms": "now"}, "until_ms is 'now'"),
        ("failed", {"limit": 1_001}, "limit is 1001"),
        ("failed", {"filter": "a = "}, "column 4: expected a literal"),
        ("failed", {"after": "done:1.1"}, "no `next` of a page of failed entries"),
    ],
)
def test_what_makes_no_sense_is_refused(
    filled: Filled, state: Any, arguments: dict[str, Any], why: str
) -> None:
    for system in (filled.owner, filled.reader):
        with pytest.raises(InvalidInputError, match=why):
            system.find("q", state, **arguments)
        with pytest.raises(QueueNotFoundError):
            system.find("nope", "failed")
