"""Taking away what a queue holds, or all of it, in batches that are each consistent (RFC 0006)."""

from __future__ import annotations

from typing import Final

from odq_encodings import (
    ActiveMessagesKey,
    BacklogKey,
    DoneMessagesKey,
    FailedMessagesKey,
    FailureKey,
    QueueConfigKey,
    QueueCountersKey,
    QueueOptionsKey,
    ReplayKey,
    RetentionFloorKey,
    ScheduleKey,
    SealedDoneKey,
    SealedFailedKey,
)
from opendata_queue.queues.lanes import Past
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.queues.rows.overlay import FIRST
from opendata_queue.store import DatabaseReads
from opendata_queue.store.group_commit import GroupCommitter

ROWS_AT_ONCE: Final = 500
"""How many rows a batch takes away: callers wait for no more than that. It is one step on the event
loop, since what was read must not change before it is taken away: some 4 ms."""

_MANY_ROWS: Final = (BacklogKey, ScheduleKey, FailureKey, SealedDoneKey, SealedFailedKey, ReplayKey)
_ONE_ROW: Final = (
    ActiveMessagesKey,
    DoneMessagesKey,
    FailedMessagesKey,
    QueueCountersKey,
    RetentionFloorKey,
    QueueOptionsKey,
    QueueConfigKey,
)


async def purge(queue: StoredQueue, committer: GroupCommitter, past: Past) -> int:
    """Drop the messages that wait and are in the past; returns how many.

    Consumers go on meanwhile, and with them messages move: from the schedule to the others, and
    between backlog and window. So the schedule comes first, and the rest is read again until
    there is nothing left. That ends, since what was dropped does not come back, and what is
    published meanwhile is not in the past.
    """
    dropped = await _purge_schedule(queue, committer, past)
    while True:
        async with queue.reading() as indexes:
            await committer.room()
            rows = await indexes.first_of_backlog(ROWS_AT_ONCE, past=past)
            queue.check()
            count = len(rows) + queue.state.drop_window(past)
            if not count:
                return dropped
            queue.state.drop_backlog(rows)
            queue.changed()
            done = committer.commit()
        dropped += count
        await committer.wait(done)


async def _purge_schedule(queue: StoredQueue, committer: GroupCommitter, past: Past) -> int:
    dropped = 0
    last = FIRST
    while queue.state.schedule.count:
        async with queue.reading() as indexes:
            await committer.room()
            rows = await indexes.schedule_after(last, ROWS_AT_ONCE)
            queue.check()
            if not rows:
                break
            last = rows[-1].visible_at, rows[-1].message_id
            old = [message for message in rows if message.message_id in past]
            if not old:
                continue
            queue.state.drop_scheduled(old)
            queue.changed()
            done = committer.commit()
        dropped += len(old)
        await committer.wait(done)
    return dropped


async def delete_rows(queue_id: bytes, database: DatabaseReads, committer: GroupCommitter) -> None:
    """Delete all rows of a queue that is marked in the store as being deleted.

    What says that it is being deleted goes last, so that it can be taken up again.
    """
    for kind in _MANY_ROWS:
        await _delete_prefix(kind.prefix(queue_id), database, committer)
    await committer.room()
    for one in _ONE_ROW:
        committer.rows.delete(one(queue_id=queue_id).encode())
    await committer.wait(committer.commit())


async def _delete_prefix(prefix: bytes, database: DatabaseReads, committer: GroupCommitter) -> None:
    start = prefix
    end = prefix[:-1] + b"\x01"  # a queue id ends in 00, and nothing else that begins like it
    while keys := [
        key async for chunk in database.scan(start, end, limit=ROWS_AT_ONCE) for key, _ in chunk
    ]:
        await committer.room()
        for key in keys:
            committer.rows.delete(key)
        await committer.wait(committer.commit())
        start = keys[-1] + b"\x00"
