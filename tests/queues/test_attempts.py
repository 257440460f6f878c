"""No claim of a message is ever forgotten, however little the ledger can keep in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odq_encodings import Attempts, encode_attempts_key
from opendata_queue.queues import attempts
from opendata_queue.queues.attempts import AttemptsLedger
from opendata_queue.store import Database, Objects, Rows, StoreSettings

# More than can be claimed and read during one commit: what is not durable is never forgotten.
KEPT = 36
IDS = 120
BEGINS_HERE = 90

ids_at_once = st.lists(st.integers(0, IDS - 1), min_size=1, max_size=5, unique=True)


class Step(NamedTuple):
    """A claim, and which further ones are made while it reads, after so many turns of the loop."""

    ids: list[int]
    meanwhile: list[list[int]]
    turns: int


steps = st.builds(Step, ids_at_once, st.lists(ids_at_once, max_size=4), st.integers(0, 4))


class Claims:
    """A ledger on a real store, and what must be in it."""

    def __init__(self, database: Database, first_id: int = 0) -> None:
        self.database = database
        self.first_id = first_id
        self.ledger = AttemptsLedger(database)
        self.expected: dict[int, list[str]] = {}
        self.number = 0

    async def claim(self, ids: Sequence[int]) -> None:
        while unknown := self.ledger.unknown(ids):
            await self.ledger.learn(unknown)
        await self.claim_what_is_known(ids)

    async def claim_what_is_known(self, ids: Sequence[int]) -> None:
        rows, consumer = Rows(), f"c{self.number}"
        self.number += 1
        self.ledger.claim(ids, consumer, rows)
        for one in ids:
            self.expected.setdefault(one, []).append(consumer)
        if rows:
            await self.database.commit(rows)

    async def check(self) -> None:
        values = await self.database.get_by_id(
            range(self.first_id, self.first_id + IDS), encode_attempts_key
        )
        found = {one: list(Attempts.decode(v).consumer_ids) for one, v in values.items()}
        assert found == self.expected


@pytest.fixture(autouse=True)
def little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_KEPT", KEPT)
    monkeypatch.setattr(attempts, "_IDS_AT_ONCE", 12)
    monkeypatch.setattr(attempts, "_ROWS_AT_ONCE", 4)
    monkeypatch.setattr(attempts, "_SCAN_LEAST", 2)
    monkeypatch.setattr(attempts, "_RANGES_KEPT", 3)


async def new_claims() -> Claims:
    return Claims(await Database.open(Objects.open("memory:///", StoreSettings()), "d"))


def test_no_claim_is_lost_whatever_is_forgotten_and_read_again() -> None:
    with asyncio.Runner() as runner:
        database = runner.run(new_claims()).database
        first_ids = itertools.count(0, 1_000)

        @settings(max_examples=100, deadline=None)
        @given(steps=st.lists(steps, min_size=10, max_size=25), restart_after=st.integers(0, 25))
        def check(steps: list[Step], restart_after: int) -> None:
            claims = Claims(database, next(first_ids))
            runner.run(go_through(claims, steps, restart_after))

        check()
        runner.run(database.close())


async def go_through(claims: Claims, steps: list[Step], restart_after: int) -> None:
    first = claims.first_id
    claims.ledger.starts_at(first + BEGINS_HERE)
    for number, step in enumerate(steps):
        if number == restart_after:
            claims.ledger = AttemptsLedger(claims.database)
        learning = asyncio.create_task(claims.ledger.learn([first + one for one in step.ids]))
        for _ in range(step.turns):
            await asyncio.sleep(0)
        for more in step.meanwhile:
            others = [first + one for one in more]
            unknown = set(claims.ledger.unknown(others))
            await claims.claim_what_is_known([one for one in others if one not in unknown])
        await learning
        await claims.claim([first + one for one in step.ids])
    await claims.check()


async def test_what_is_forgotten_while_its_range_is_read_is_not_taken_for_known() -> None:
    claims = await new_claims()
    for one in range(8):
        await claims.claim([one])
    claims.ledger = AttemptsLedger(claims.database)
    await claims.claim([1])  # alone, and so the oldest that is kept
    for one in range(60, 60 + KEPT - 2):
        await claims.claim([one])

    await claims.ledger.learn([0, 2])  # reads the range that it is in, and forgets the oldest
    await claims.claim([1])

    assert claims.expected[1] == ["c1", "c8", f"c{7 + KEPT}"]
    await claims.check()
    await claims.database.close()


async def test_few_messages_among_many_that_others_have_claimed_can_be_claimed() -> None:
    """Reading about the last ones must not make it forget the first ones, over and over."""
    claims = await new_claims()
    await claims.claim_what_is_known(range(IDS))
    claims.ledger = AttemptsLedger(claims.database)

    async with asyncio.timeout(120):
        await claims.claim(range(0, IDS, 5))

    await claims.check()
    await claims.database.close()
