"""The owner's shard, when no process writes it (RFC 0011)."""

from __future__ import annotations

import asyncio
import logging

from opendata_queue.log.writer import MessageShard, PublishOptions
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import OwnedError
from opendata_queue.model.ids import OWNERS_SHARD
from opendata_queue.model.paths import messages_path
from opendata_queue.root.owner_files import messages_role
from opendata_queue.root.ownership import Ownership
from opendata_queue.store import Objects, has_journal

logger = logging.getLogger(__name__)


async def bring_in_owners_shard(
    objects: Objects, clock: Clock, *, takeover: bool, name: str | None, lease_ms: int
) -> None:
    """Have readers see all of shard 0, for an owner that serves the queues and does not write it.

    An owner of everything that was killed leaves its last commits in a journal (RFC 0011), which
    only the next writer brings in. So this becomes the writer, and closes the shard again.
    """
    if not await asyncio.to_thread(has_journal, objects, messages_path(OWNERS_SHARD)):
        return
    role = messages_role(OWNERS_SHARD)
    try:
        ownership = await Ownership.acquire(
            objects,
            (role,),
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
            objects,
            OWNERS_SHARD,
            clock=clock,
            options=PublishOptions(),
            acknowledged=ownership.acknowledged(role),
        )
        ownership.say_durable(role, shard.database.durable_sequence)
        await shard.close()
    finally:
        await ownership.release()
