"""A process that publishes and consumes until it is killed, and says what it was told.

    python -m tests.queues.consumer_process URL

It prints a line ``open`` when it owns the root, and then, each after the call has returned:

    p ID             a publish that was acknowledged
    d ID ATTEMPTS    a message that was delivered
    a ID ATTEMPTS    an ack that was accepted
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from opendata_queue import Engine, NewMessage, QueueOptions, StoreSettings

QUEUE = "work"
PUBLISHERS = 2
CONSUMERS = 6
MOST_UNDER_WAY = 400
SETTINGS = StoreSettings(memtable_bytes=256 * 1024, garbage_interval_ms=100, garbage_age_ms=1_000)
# Short leases, so that what a killed process held comes back to the next one.
OPTIONS = QueueOptions(max_attempts=0, lease_ms=200, backoff_ms=5, window=16, bucket=8)


def say(lines: list[str]) -> None:
    os.write(1, "".join(f"{line}\n" for line in lines).encode())


async def publish_forever(
    system: Engine, under_way: asyncio.Semaphore, chance: random.Random
) -> None:
    while True:
        size = chance.choice([1, 1, 5, 30])
        for _ in range(size):
            await under_way.acquire()
        messages = [
            NewMessage(
                chance.randbytes(chance.choice([0, 10, 200])),
                headers={"priority": chance.choice(["0", "3", "3", "3", "9"])},
                delay_ms=chance.choice([0, 0, 0, 20]),
            )
            for _ in range(size)
        ]
        say([f"p {message_id}" for message_id in await system.publish_many(messages)])


async def consume_forever(
    system: Engine, under_way: asyncio.Semaphore, chance: random.Random
) -> None:
    while True:
        claimed = await system.claim(QUEUE, chance.choice([1, 2, 10, 40]), wait_ms=1_000)
        say([f"d {message.message_id} {message.attempts}" for message in claimed])
        chance.shuffle(claimed)
        # Some are done, some fail, some are given back, and a few are forgotten.
        failing = claimed[: len(claimed) // 8]
        released = claimed[len(failing) : len(claimed) // 5]
        done = claimed[len(claimed) // 5 : max(1, len(claimed) - len(claimed) // 30)]
        outcomes, *_ = await asyncio.gather(
            system.ack(QUEUE, *(message.receipt for message in done)),
            system.nack(QUEUE, *(message.receipt for message in failing), error="not now"),
            system.release(QUEUE, *(message.receipt for message in released)),
        )
        acked = [m for m, outcome in zip(done, outcomes, strict=True) if outcome == "ok"]
        say([f"a {message.message_id} {message.attempts}" for message in acked])
        for _ in acked:
            under_way.release()


async def main(url: str) -> None:
    system = await Engine.open(url, settings=SETTINGS)
    if QUEUE not in await system.list_queues():
        await system.create_queue(QUEUE, options=OPTIONS)
    say(["open"])
    under_way = asyncio.Semaphore(MOST_UNDER_WAY)
    chance = random.Random(os.urandom(8))
    await asyncio.gather(
        *(publish_forever(system, under_way, chance) for _ in range(PUBLISHERS)),
        *(consume_forever(system, under_way, chance) for _ in range(CONSUMERS)),
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
