"""A claim that is cancelled, by a timeout or a stop, keeps nothing."""

from __future__ import annotations

import asyncio

import pytest

from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.testing import ManualClock


@pytest.mark.parametrize("relaxed", [False, True])
async def test_a_claim_that_is_cancelled_at_any_point_gives_back_what_it_took(
    relaxed: bool,
) -> None:
    async with await Engine.open("memory:///", clock=ManualClock()) as system:
        await system.create_queue("q", options=QueueOptions(window=2, relaxed_claims=relaxed))
        await system.publish_many([NewMessage(b"%d" % n) for n in range(6)])
        await system.parts.tailer.caught_up()
        steps, cancelled = 0, 0
        while True:
            claiming = asyncio.create_task(system.claim("q", 5))
            for _ in range(steps):
                await asyncio.sleep(0)
            if claiming.done():
                break
            steps += 1
            claiming.cancel()
            await asyncio.wait([claiming])
            cancelled += claiming.cancelled()
            if not claiming.cancelled():
                await system.release("q", *(m.receipt for m in claiming.result()))

            stats = await system.stats("q")
            assert (stats.available, stats.in_flight) == (6, 0)

        # A relaxed claim waits for nothing but its refills.
        assert cancelled > (0 if relaxed else 3)
        claimed = await claiming
        assert [(m.payload, m.attempts) for m in claimed] == [(b"%d" % n, 1) for n in range(5)]
        assert await system.ack("q", *(m.receipt for m in claimed)) == ["ok"] * 5
