"""What the commits of a root make visible, read without an engine."""

from __future__ import annotations

import asyncio
from collections import Counter

from opendata_queue.log.reader import StoredMessages
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.messages import MessageFields
from opendata_queue.root.commit_files import CommitFiles
from opendata_queue.store import DatabaseReader, Objects, StoreSettings


def committed(root: str) -> list[MessageFields]:
    """The messages of all committed shards."""
    return asyncio.run(_committed(root))


def payloads(root: str) -> Counter[bytes]:
    return Counter(message.payload or b"" for message in committed(root))


async def read_shard(objects: Objects, shard: int) -> list[MessageFields]:
    reader = await DatabaseReader.open(objects, f"messages/{shard:05}")
    try:
        stored = StoredMessages(reader, objects, shard, SystemClock())
        ids = [entry.message_id async for chunk in stored.log.scan() for entry in chunk]
        found = await stored.read(ids)
        return [found[one] for one in ids]
    finally:
        await reader.close()


async def _committed(root: str) -> list[MessageFields]:
    objects = Objects.open(root, StoreSettings())
    files = CommitFiles(objects)
    messages: list[MessageFields] = []
    for job in await files.jobs():
        commit = await files.read(job)
        assert commit is not None
        for shard in commit.shards:
            found = await read_shard(objects, shard.shard)
            assert len(found) == shard.messages == shard.next_sequence
            messages += found
    return messages
