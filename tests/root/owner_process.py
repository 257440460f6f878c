"""A process that owns a root and works on it, or wants to.

    python -m tests.root.owner_process URL LEASE_MS plain|takeover|standby|storm

In a storm it prints ``ready``, and takes over when it is sent a line. It prints ``standing by``
before it waits, ``owned PID`` if another process serves the root, and ``open`` when it owns it
itself. Then it publishes and consumes, and says what it was told, as
``tests.queues.consumer_process`` does. When it is taken over it prints ``fenced``, closes and ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from opendata_queue import Engine, FencedError, OwnedError, SystemClock, Vacancy
from opendata_queue.root.owner_watch import stand_by
from opendata_queue.store import Objects
from tests.queues.consumer_process import (
    CONSUMERS,
    MOST_UNDER_WAY,
    OPTIONS,
    PUBLISHERS,
    QUEUE,
    SETTINGS,
    consume_forever,
    publish_forever,
    say,
)


async def opened(url: str, lease_ms: int, how: str) -> Engine:
    if how == "standby":
        say(["standing by"])
    if how == "storm":
        say(["ready"])
        sys.stdin.readline()
    while True:
        takeover: bool | Vacancy = how in ("takeover", "storm")
        if how == "standby":
            takeover = await stand_by(Objects.open(url, SETTINGS), clock=SystemClock())
        try:
            return await Engine.open(
                url, settings=SETTINGS, takeover=takeover, owner_lease_ms=lease_ms
            )
        except OwnedError:
            if how != "standby":
                raise


async def work(system: Engine) -> None:
    if QUEUE not in await system.list_queues():
        await system.create_queue(QUEUE, options=OPTIONS)
    say(["open"])
    under_way = asyncio.Semaphore(MOST_UNDER_WAY)
    chance = random.Random(os.urandom(8))
    await asyncio.gather(
        *(publish_forever(system, under_way, chance) for _ in range(PUBLISHERS)),
        *(consume_forever(system, under_way, chance) for _ in range(CONSUMERS)),
    )


async def main(url: str, lease_ms: int, how: str) -> None:
    try:
        system = await opened(url, lease_ms, how)
    except OwnedError as error:
        say([f"owned {error.pid}"])
        return
    try:
        await work(system)
    except FencedError:
        say(["fenced"])
    finally:
        await system.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
