"""Dead letters: listed, replayed and purged, by their ids, by a filter, or all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from opendata_queue import (
    Engine,
    FilterError,
    InvalidInputError,
    MessageExpiredError,
    NewMessage,
    PublishOptions,
    QueueNotFoundError,
    QueueOptions,
)
from opendata_queue.filters import Filter, like
from opendata_queue.queues.rows.finished import FinishedRows
from opendata_queue.runtime import turns as turns_module
from opendata_queue.store import Database, Rows
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot

ONE_TRY = QueueOptions(max_attempts=1, bucket=7, window=2)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, new_memory_root: NewRoot) -> str:
    return new_memory_root() if request.param == "memory" else f"file://{tmp_path}/root"


@pytest.fixture
async def system(url: str, clock: ManualClock) -> AsyncIterator[Engine]:
    async with await Engine.open(url, clock=clock) as system:
        await system.create_queue("q", options=ONE_TRY)
        yield system


async def fail(system: Engine, *messages: NewMessage) -> list[int]:
    """Publish messages, and let all of them fail."""
    ids = await system.publish_many(messages)
    await system._tailer.caught_up()
    while claimed := await system.claim("q", 1_000):
        await system.nack("q", *(message.receipt for message in claimed), error="broken")
    return ids


def of_kinds(*kinds: str, **fields: Any) -> list[NewMessage]:
    return [NewMessage(b"x", headers={"kind": kind}, **fields) for kind in kinds]


async def failed_ids(system: Engine, **options: Any) -> list[int]:
    return [message.message_id for message in await system.failed("q", **options)]


async def test_failed_messages_carry_their_headers(system: Engine) -> None:
    await fail(system, *of_kinds("a", "b"))

    headers = [message.headers for message in await system.failed("q")]

    assert headers == [(("kind", "a"),), (("kind", "b"),)]


async def test_a_filter_selects_over_pages_and_batches(system: Engine) -> None:
    ids = await fail(system, *of_kinds(*(["a"] * 600 + ["b"]) * 2))
    b = [ids[600], ids[1_201]]

    assert await failed_ids(system, filter="kind = 'b'") == b
    assert await failed_ids(system, filter="kind = 'b'", limit=1) == b[:1]
    assert await failed_ids(system, filter="kind = 'b'", after_id=b[0]) == b[1:]
    assert await failed_ids(system, filter="kind = 'c'") == []
    assert await failed_ids(system, filter=f"sys.id < {ids[3]}") == ids[:3]


async def test_all_failed_messages_are_replayed_in_their_order(url: str, system: Engine) -> None:
    ids = await fail(system, *[NewMessage(b"x")] * 1_203)

    assert await system.replay("q", all=True) == ids
    assert await system.replay("q", all=True) == []

    stats = await system.stats("q")
    assert (stats.available, stats.failed) == (1_203, 0)
    claimed = await system.claim("q", 1_000) + await system.claim("q", 1_000)
    assert [(m.message_id, m.attempts) for m in claimed] == [(one, 1) for one in ids]


async def test_a_limit_is_kept_and_the_next_call_goes_on(system: Engine) -> None:
    ids = await fail(system, *of_kinds("a", "b", "a", "b", "a"))

    assert await system.replay("q", filter="kind = 'a'", limit=2) == [ids[0], ids[2]]
    assert await system.purge_failed("q", filter="kind = 'b'", limit=1) == [ids[1]]
    assert await system.replay("q", filter="kind = 'a'", limit=2) == [ids[4]]
    assert await system.replay("q", filter="kind = 'a'", limit=2) == []
    assert await failed_ids(system) == [ids[3]]


async def test_what_was_purged_stays_purged_after_a_reopen(url: str, clock: ManualClock) -> None:
    async with await Engine.open(url, clock=clock) as system:
        await system.create_queue("q", options=ONE_TRY)
        ids = await fail(system, *of_kinds("a", "b") * 40)
        assert await system.purge_failed("q", filter="kind = 'a'") == ids[::2]
    async with await Engine.open(url, clock=clock) as system:
        assert await failed_ids(system) == ids[1::2]
        assert await system.purge_failed("q", all=True) == ids[1::2]
    async with await Engine.open(url, clock=clock) as system:
        assert await failed_ids(system) == []
        assert (await system.stats("q")).failed == 0


async def test_an_expired_message_is_not_replayed_but_counted(
    system: Engine, clock: ManualClock
) -> None:
    short = of_kinds("a", "a", retention_seconds=60)
    ids = await fail(system, *short, *of_kinds("a"))
    clock.advance_ms(60_001)

    assert await system.replay("q", all=True) == [ids[2]]

    stats = await system.stats("q")
    assert (stats.available, stats.failed, stats.expired) == (1, 0, 2)


async def test_who_names_an_expired_message_hears_that_it_cannot_be_replayed(
    system: Engine, clock: ManualClock
) -> None:
    (gone,) = await fail(system, *of_kinds("a", retention_seconds=60))
    (kept,) = await fail(system, *of_kinds("a"))
    clock.advance_ms(60_001)

    with pytest.raises(MessageExpiredError, match=f"message {gone} of queue 'q'.*purge it"):
        await system.replay("q", kept, gone)

    assert await failed_ids(system) == [gone, kept]
    assert (await system.stats("q")).expired == 0


async def test_an_expired_message_can_be_purged(system: Engine, clock: ManualClock) -> None:
    (one,) = await fail(system, *of_kinds("a", retention_seconds=60))
    clock.advance_ms(60_001)

    assert await system.purge_failed("q", all=True) == [one]
    assert (await system.stats("q")).expired == 0


@pytest.mark.parametrize("call", ["replay", "purge_failed"])
async def test_which_ones_are_meant_must_be_said_in_one_way(system: Engine, call: str) -> None:
    (one,) = await fail(system, NewMessage(b"x"))
    finish = getattr(system, call)

    for ids, which in (
        ((), {}),
        ((), {"all": False}),
        ((one,), {"all": True}),
        ((one,), {"filter": "TRUE"}),
        ((), {"all": True, "filter": "TRUE"}),
    ):
        with pytest.raises(InvalidInputError, match="choices of failed messages were given, not 1"):
            await finish("q", *ids, **which)
    with pytest.raises(InvalidInputError, match="say all=True"):
        await finish("q", filter=" ")
    with pytest.raises(FilterError):
        await finish("q", filter="kind ==")
    with pytest.raises(InvalidInputError, match="limit is 0"):
        await finish("q", all=True, limit=0)
    for bad in (-1, 1 << 63, "1"):
        with pytest.raises(InvalidInputError, match="message_id is"):
            await finish("q", bad)
    with pytest.raises(QueueNotFoundError):
        await finish("r", all=True)
    assert await failed_ids(system) == [one]


async def test_a_bad_page_is_named(system: Engine) -> None:
    for bad in ({"limit": 0}, {"limit": 1_001}, {"after_id": -2}, {"after_id": 1 << 63}):
        with pytest.raises(InvalidInputError, match=next(iter(bad))):
            await system.failed("q", **bad)  # type: ignore[arg-type]


async def test_those_who_replay_at_once_share_the_messages(system: Engine) -> None:
    ids = await fail(system, *[NewMessage(b"x")] * 1_100)

    replayed = await asyncio.gather(*(system.replay("q", all=True) for _ in range(3)))

    assert sorted(one for some in replayed for one in some) == ids
    stats = await system.stats("q")
    assert (stats.available, stats.failed) == (1_100, 0)


async def test_what_failed_is_listed_as_soon_as_stats_count_it(
    system: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = await system.publish_many([NewMessage(b"x")])
    await system.claim("q", lease_ms=1_000, wait_ms=60_000)
    commit = Database.commit
    counted = asyncio.Event()

    async def held_back(self: Database, rows: Rows, **options: Any) -> None:
        await counted.wait()
        await commit(self, rows, **options)

    monkeypatch.setattr(Database, "commit", held_back)
    clock.advance_ms(1_001)
    await system._queues.sweeper.caught_up()
    assert (await system.stats("q")).failed == 1
    listing = asyncio.create_task(failed_ids(system))
    await asyncio.sleep(0)
    counted.set()

    assert await listing == [one]


@pytest.mark.parametrize("wanted", ["failed", "purge_failed", "history", "create_queue"])
async def test_others_run_while_a_filter_is_evaluated(
    system: Engine, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """With a turn that is over at once there is a pause behind each message, or each queue."""
    turns, evaluated_at = 0, []

    def matcher(pattern: str, escape: str | None) -> Callable[[str], bool]:
        def matches(text: str) -> bool:
            evaluated_at.append(turns)
            return False

        return matches

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(turns_module, "TURN_S", 0)
    monkeypatch.setattr(turns_module, "SHORT_TURN_S", 0)
    monkeypatch.setattr(like, "matcher", matcher)
    costly = f"kind LIKE '%{wanted}_c%'"
    ids = await fail(system, *of_kinds(*(f"a{number}" for number in range(20))))
    for number in range(20 if wanted == "history" else 0):
        await system.create_queue(f"q{number}", filter=costly)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "failed": lambda: system.failed("q", filter=costly),
        "purge_failed": lambda: system.purge_failed("q", filter=costly),
        "history": lambda: system.history(ids[0]),
        "create_queue": lambda: system.create_queue("late", filter=costly, start="beginning"),
    }
    other = asyncio.create_task(count())
    await calls[wanted]()
    if wanted == "create_queue":
        await system._replay.finished()
    other.cancel()

    assert len(evaluated_at) == 20
    assert len(set(evaluated_at)) == 20


async def test_a_filter_that_costs_too_much_is_refused_unless_the_queue_has_it(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    costly = " OR ".join(["kind LIKE '%b_c%'"] * 9)
    with monkeypatch.context() as before_there_was_a_limit:
        before_there_was_a_limit.setattr(Filter, "check_cost", lambda self: None)
        async with await Engine.open(url, clock=clock) as system:
            await system.create_queue("old", filter=costly)

    async with await Engine.open(url, clock=clock) as system:
        assert (await system.get_queue("old")).filter == costly
        await system.update_queue("old", filter=costly, max_attempts=2)
        with pytest.raises(FilterError, match="over the limit of 16"):
            await system.update_queue("old", filter=f"{costly} OR kind = 'x'")
        with pytest.raises(FilterError, match="over the limit of 16"):
            await system.create_queue("new", filter=costly)
        with pytest.raises(FilterError, match="over the limit of 16"):
            await system.failed("old", filter=costly)
        with pytest.raises(FilterError, match="over the limit of 16"):
            await system.replay("old", filter=costly)


async def test_a_message_whose_payload_is_missing_becomes_a_dead_letter_and_blocks_nobody(
    tmp_path: Path, clock: ManualClock
) -> None:
    url = f"file://{tmp_path}/root"
    options = PublishOptions(inline_bytes=10)
    async with await Engine.open(url, clock=clock, options=options) as system:
        await system.create_queue("q", options=QueueOptions(max_attempts=2, backoff_ms=1_000))
        broken, _ = await system.publish_many([NewMessage(bytes(11)), NewMessage(b"fine")])
        await system._tailer.caught_up()
    (blob,) = (tmp_path / "root" / "blobs" / "00000").iterdir()
    blob.unlink()
    async with await Engine.open(url, clock=clock) as system:
        (message,) = await system.claim("q", 2)
        clock.advance_ms(1_000)
        assert await system.claim("q", 2) == []
        (failed,) = await system.failed("q")

    assert message.payload == b"fine"
    assert (failed.message_id, failed.attempts) == (broken, 2)
    assert "is missing" in failed.error


@pytest.mark.parametrize("again", [True, False])
async def test_failed_messages_are_read_in_pieces_however_many_are_named(
    system: Engine, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece is one step on the event loop, also before it is known that none has expired."""
    ids = await fail(system, *of_kinds(*["a"] * 900))
    failures_of, sizes = FinishedRows.failures_of, []

    async def noted(rows: FinishedRows, message_ids: Sequence[int], **options: Any) -> Any:
        sizes.append(len(message_ids))
        return await failures_of(rows, message_ids, **options)

    monkeypatch.setattr(FinishedRows, "failures_of", noted)
    finished = await (system.replay if again else system.purge_failed)("q", *ids)

    assert sorted(finished) == ids
    assert max(sizes) == 200
    assert sum(sizes) == (2 if again else 1) * len(ids)
