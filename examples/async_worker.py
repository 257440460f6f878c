"""The same with asyncio: a handler that is awaited in the event loop.

python examples/async_worker.py [file:///path]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import opendata_queue
from opendata_queue import ClaimedMessage, NewMessage

MESSAGES = 20


async def main(url: str) -> None:
    async with await opendata_queue.open_async(url) as system:
        if "pages" not in await system.list_queues():
            await system.create_queue("pages")
        fetched: asyncio.Queue[int] = asyncio.Queue()

        @system.worker("pages", concurrency=10)
        async def fetch(message: ClaimedMessage) -> None:
            await asyncio.sleep(0.05)  # its lease is extended for as long as this takes
            fetched.put_nowait(message.message_id)

        fetch.start()
        await system.publish_many([NewMessage(b"/page/%d" % number) for number in range(MESSAGES)])
        for _ in range(MESSAGES):
            print(f"fetched {await fetched.get()}")
        await fetch.stop()
        print(f"{(await system.stats('pages')).done} done")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue"))
