"""Bulk shards that every queue has finished with (RFC 0009, RFC 0010, Delete when done)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Container
from dataclasses import dataclass
from typing import Final

from odq_compactor.bulk import BulkRetention, is_lost
from odq_compactor.finished import waiting_ids
from odq_compactor.messages import due_runs
from odq_compactor.options import CompactorOptions
from odq_compactor.pace import Pace
from odq_compactor.report import RetentionReport
from odq_encodings import FINISHED, BulkShard, BulkShardKey, FailureKey, RecordType
from opendata_queue.model.errors import OdqError
from opendata_queue.model.ids import SEQUENCE_BITS, is_bulk
from opendata_queue.queues.queue import StoredQueue
from opendata_queue.store import DatabaseReads
from opendata_queue.systems.owned import OwnedStores

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedShard:
    """A bulk shard of which no queue needs anything any more."""

    number: int
    row: BulkShard

    @property
    def shard(self) -> int:
        return self.row.shard


async def finished_shards(
    database: DatabaseReads, pace: Pace, *, now: int, forgotten: Container[FailureKey] = ()
) -> AsyncIterator[FinishedShard]:
    """The shards that a snapshot of the queue store needs nothing of, in their order.

    Entries that have expired hold nothing back: their messages are not handed out any more.
    """
    start, end = BulkShardKey(number=0).encode(), RecordType.BULK_JOB.prefix
    waiting = waiting_ids(database, pace, now=now, forgotten=forgotten)
    wanted = {one >> SEQUENCE_BITS async for one in waiting if is_bulk(one >> SEQUENCE_BITS)}
    async for chunk in database.scan(start, end):
        for key, value in chunk:
            row = database.decode(BulkShard.decode, key, value)
            if row.state == FINISHED and row.shard not in wanted:
                number = database.decode(BulkShardKey.decode, key, key).number
                yield FinishedShard(number=number, row=row)


async def expired_of(shard: DatabaseReads, now: int) -> int:
    """How many messages of a shard were past their time anyway."""
    return sum([run.messages async for runs in due_runs(shard, now) for run in runs])


class FinishedBulk:
    """Removes finished bulk shards, each whole: they are never written again."""

    def __init__(self, stores: OwnedStores, bulk: BulkRetention, options: CompactorOptions) -> None:
        self._stores = stores
        self._bulk = bulk
        self._options = options

    async def run(self, report: RetentionReport) -> None:
        queues = self._stores.queues
        known = set(queues.queues())
        if not known or queues.replaying() or not await queues.bulk.from_number(0):
            return
        await queues.all_durable()
        snapshot = await queues.database.snapshot()
        some: list[FinishedShard] = []
        pace = Pace(self._options.work_share)
        async for one in finished_shards(snapshot, pace, now=report.now_ms):
            some.append(one)
            if len(some) == _AT_ONCE:
                if not await self._drop(some, known, report):
                    return
                some = []
        if some:
            await self._drop(some, known, report)

    async def _drop(
        self, some: list[FinishedShard], known: set[StoredQueue], report: RetentionReport
    ) -> bool:
        """Remove shards; false if a queue that may want them was made since the snapshot.

        One that was deleted and made again has the same name, and is another queue.
        """
        expired = {one.shard: await self._expired_of(one.shard, report) for one in some}
        return await self._bulk.drop_finished(
            [(one.number, one.row) for one in some],
            expired,
            report,
            wanted=lambda: not known.issuperset(self._stores.queues.queues()),
        )

    async def _expired_of(self, shard: int, report: RetentionReport) -> int:
        try:
            return await self._stores.readers.read(
                shard, lambda reader: expired_of(reader.database, report.now_ms)
            )
        except OdqError as error:
            if not is_lost(error):
                raise
            # No queue needs it, so it goes; how much of it had expired is not known.
            logger.error("bulk shard %d is lost, and finished: %s", shard, error)
            return 0
