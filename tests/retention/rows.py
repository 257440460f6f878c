"""What is really in a root: every row and every blob."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from odq_compactor import CompactorOptions, RetentionCompactor
from odq_encodings import Record, decode_any
from opendata_queue import Engine, NewMessage
from opendata_queue.store import DatabaseReads
from opendata_queue.testing import ManualClock

QUICK = CompactorOptions(work_share=1.0, space=False, orphan_age_ms=86_400_000)
ERASING = CompactorOptions(work_share=1.0, space=False, erase=True)


class Routed(Engine):
    """An owner whose publishes return when the messages are in their queues."""

    async def publish_many(self, messages: Sequence[NewMessage]) -> list[int]:
        ids = await super().publish_many(messages)
        await self.all_is_routed()
        return ids


async def decoded(database: DatabaseReads) -> list[tuple[str, Record, Record]]:
    rows = [row async for chunk in database.scan(b"\x01", b"\xff") for row in chunk]
    found = [decode_any(key, value) for key, value in rows]
    return [(row.kind.title, row.key, row.value) for row in found]


async def message_rows(engine: Engine) -> Counter[str]:
    """How many rows of each kind the messages database has, without those of the counter."""
    titles = Counter(title for title, _, _ in await decoded(engine.stores.shards[0].database))
    del titles["sequence block"], titles["retention position"]
    return titles


async def queue_rows(engine: Engine) -> Counter[str]:
    await engine.stores.queues.all_durable()
    return Counter(title for title, _, _ in await decoded(engine.stores.queues.database))


async def blobs(engine: Engine) -> list[str]:
    listed = await engine.stores.objects.list_from("blobs/00000", "", 1_000)
    return [name for name, _ in listed]


@asynccontextmanager
async def opened(
    url: str, clock: ManualClock, options: CompactorOptions = QUICK
) -> AsyncIterator[tuple[Engine, RetentionCompactor]]:
    async with await Routed.open(url, clock=clock) as engine:
        yield engine, RetentionCompactor(engine, options)
