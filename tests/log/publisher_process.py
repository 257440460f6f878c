"""A process that publishes until it is killed, and says what was acknowledged.

    python -m tests.log.publisher_process URL [--takeover]

It prints a line ``opening`` when it begins to open the root, ``open`` when it owns it, and one line
``<id> <seed>`` for each message after its publish has returned. A message's payload and headers
follow from its seed, so whoever reads the lines knows what must be in the store. When it is fenced
it prints ``fenced`` and ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from opendata_queue import Engine, FencedError, NewMessage, PublishOptions, StoreSettings

PUBLISHERS = 4
# Small, so that the few large payloads become blobs and uploads are killed too.
OPTIONS = PublishOptions(inline_bytes=2_000)
SETTINGS = StoreSettings(memtable_bytes=256 * 1024, garbage_interval_ms=100, garbage_age_ms=1_000)


def message_of(seed: int) -> NewMessage:
    """The message that a seed stands for."""
    chance = random.Random(seed)
    size = chance.choice([0, 1, 50, 500, 500, 500, 5_000])
    headers = {"seed": str(seed)} | {
        f"header-{n}": "wért" * chance.randrange(8) for n in range(chance.randrange(4))
    }
    return NewMessage(chance.randbytes(size), headers=headers)


async def publish_forever(system: Engine, chance: random.Random) -> None:
    while True:
        seeds = [chance.getrandbits(48) for _ in range(chance.choice([1, 1, 2, 10, 100]))]
        ids = await system.publish_many([message_of(seed) for seed in seeds])
        lines = [f"{message_id} {seed}\n" for message_id, seed in zip(ids, seeds, strict=True)]
        os.write(1, "".join(lines).encode())


async def main(url: str, *, takeover: bool) -> None:
    os.write(1, b"opening\n")
    system = await Engine.open(url, settings=SETTINGS, options=OPTIONS, takeover=takeover)
    os.write(1, b"open\n")
    try:
        await asyncio.gather(
            *(publish_forever(system, random.Random(os.urandom(8))) for _ in range(PUBLISHERS))
        )
    except FencedError:
        os.write(1, b"fenced\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], takeover="--takeover" in sys.argv))
