"""Passes that are killed for real: what survives is whole, and the pass is completed in the end."""

from __future__ import annotations

import random
from pathlib import Path

from odq_compactor import RetentionCompactor, set_delete_when_done
from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.testing import ManualClock
from tests.retention.pass_process import COMPACTOR, PUBLISHING, SETTINGS, kill_after
from tests.retention.rows import blobs, message_rows, queue_rows

KILLS = 20
MESSAGES = 600
START_MS = 1_700_000_000_000
LATER_MS = START_MS + 120_000
OPTIONS = QueueOptions(window=4, bucket=5, max_attempts=1, done_retention_seconds=60)


def payload(number: int) -> bytes:
    return b"%d " % number * (40 if number % 5 == 0 else 4)  # one in five is a blob


async def fill(url: str) -> dict[int, bytes]:
    """Fill a root; what must be left of it later, by id."""
    async with await Engine.open(
        url, settings=SETTINGS, options=PUBLISHING, clock=ManualClock(START_MS)
    ) as engine:
        await set_delete_when_done(engine.stores.queues, True)
        await engine.create_queue("q", options=OPTIONS)
        ids = await engine.publish_many(
            [NewMessage(payload(n), retention_seconds=60 if n % 3 else 0) for n in range(MESSAGES)]
        )
        done = await engine.claim("q", 100)
        await engine.ack("q", *(one.receipt for one in done))
        for one in await engine.claim("q", 30):
            await engine.nack("q", one.receipt)
    finished = {one.message_id for one in done}
    return {one: payload(n) for n, one in enumerate(ids) if n % 3 == 0 and one not in finished}


async def check_survivors(url: str, expected: dict[int, bytes]) -> None:
    async with await Engine.open(
        url, settings=SETTINGS, options=PUBLISHING, clock=ManualClock(LATER_MS)
    ) as engine:
        messages = await engine.read_many(expected)
        assert {one.message_id: one.payload for one in messages if one is not None} == expected


async def test_20_kills_damage_nothing_that_survives_and_the_pass_is_completed(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path}/root"
    expected = await fill(url)
    chance = random.Random(20)
    killed = 0
    for number in range(KILLS):
        killed += kill_after(url, chance.randint(1, 12), now_ms=LATER_MS)
        if number % 5 == 0:
            await check_survivors(url, expected)
    assert killed == KILLS, "there was not enough work for all kills"

    async with await Engine.open(
        url, settings=SETTINGS, options=PUBLISHING, clock=ManualClock(LATER_MS)
    ) as engine:
        compactor = RetentionCompactor(engine, COMPACTOR)
        assert not (await compactor.run_once(thorough=True)).is_empty, "the kills did all of it"
        assert (await compactor.run_once(thorough=True)).is_empty

        messages = await engine.read_many(expected)
        assert {one.message_id: one.payload for one in messages if one is not None} == expected
        large = sum(len(one) > 64 for one in expected.values())
        assert len(await blobs(engine)) == large
        assert await message_rows(engine) == {
            "payload": len(expected),
            "metadata log entry": len(expected),
            "blob reference": large,
            "blob of a message": large,
        }
        rows = await queue_rows(engine)
        assert rows["sealed done messages"] == 0
        failed = {one.message_id for one in await engine.failed("q", limit=100)}
        assert len(failed) == 30
        waiting = {one.message_id for one in await engine.claim("q", 1_000)}
        assert waiting == expected.keys() - failed
