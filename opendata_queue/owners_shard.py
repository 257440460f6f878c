"""The shard of whoever serves everything, when nobody does (RFC 0011)."""

from __future__ import annotations

import asyncio
import logging

from opendata_queue.clock import Clock
from opendata_queue.errors import OwnedError
from opendata_queue.owner_files import messages_role
from opendata_queue.ownership import Ownership
from opendata_queue.shard import MessageShard, PublishOptions
from opendata_queue.shard_files import OWNERS_SHARD
from opendata_queue.store import Objects, has_journal

logger = logging.getLogger(__name__)


async def bring_in_owners_shard(
    objects: Objects, clock: Clock, *, takeover: bool, name: str | None, lease_ms: int
) -> None:
    """Have readers see all of shard 0, for somebody who serves the queues and does not write it.

    An owner of everything that was killed leaves its last commits in a journal (RFC 0011), which
    only a writer brings in: that is whoever opens it next, and so it is opened and closed again.
    """
    if not await asyncio.to_thread(has_journal, objects, f"messages/{OWNERS_SHARD:05}"):
        return
    try:
        ownership = await Ownership.acquire(
            objects,
            (messages_role(OWNERS_SHARD),),
            clock=clock,
            takeover=takeover,
            name=name,
            lease_ms=lease_ms,
        )
    except OwnedError as error:
        logger.info("shard %d is brought in by its writer: %s", OWNERS_SHARD, error)
        return
    try:
        shard = await MessageShard.open(
            objects, OWNERS_SHARD, clock=clock, options=PublishOptions()
        )
        await shard.close()
    finally:
        await ownership.release()
