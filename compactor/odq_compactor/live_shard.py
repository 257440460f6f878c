"""Passes in the background of a publisher, for its own live shard (RFC 0008, RFC 0010)."""

from __future__ import annotations

from typing import Final

from odq_compactor.entries import entries_expired_up_to
from odq_compactor.finished import FinishedMessages, deletes_when_done
from odq_compactor.messages import ShardRetention, next_due
from odq_compactor.options import CompactorOptions
from odq_compactor.passes import Passes
from odq_compactor.positions import Position
from odq_compactor.report import RetentionReport
from odq_compactor.space import free_space
from odq_encodings import Cursor, CursorKey
from opendata_queue.model.ids import SHARD_SEQUENCES
from opendata_queue.model.paths import QUEUES_PATH
from opendata_queue.store import DatabaseReader, DatabaseReads
from opendata_queue.systems.ingest import Ingest

_QUEUES: Final = QUEUES_PATH
_EVERYTHING: Final = SHARD_SEQUENCES


class IngestRetention(Passes):
    """Removes expired rows and blobs of the shard that an ingest process writes.

    Queues are the business of their owner. The queue store says how far it is with the messages of
    this shard: what it may still need is left alone. It is read only when there is something to do.
    """

    def __init__(self, ingest: Ingest, options: CompactorOptions | None = None) -> None:
        super().__init__(ingest.shard.clock, options or CompactorOptions())
        self._number = ingest.shard_number
        self._shard = ingest.shard
        self._objects = ingest.shard.objects
        self._position: Position | None = None

    async def _pass(self, report: RetentionReport, *, rarely: bool, thorough: bool) -> None:
        position = self._position
        if position is None:
            position = self._position = await Position.load(self._shard)
        retention = ShardRetention(
            self._shard, None, position, number=self._number, options=self._options
        )
        since = position.due_from
        if rarely or await next_due(self._shard.database, report.now_ms, since=since):
            await self._with_queues(retention, position, report, rarely=rarely, thorough=thorough)
        if rarely:
            await retention.collect_orphans(report)
        if self._options.space:
            anyway = self._options.rewrite
            await free_space([position], report, anyway=anyway, patient=thorough)

    async def _with_queues(
        self,
        retention: ShardRetention,
        position: Position,
        report: RetentionReport,
        *,
        rarely: bool,
        thorough: bool,
    ) -> None:
        queues = await DatabaseReader.look(self._objects, _QUEUES)
        if queues is None:  # there never was a queue that anything could be for
            await retention.expire(
                report, routed_up_to=_EVERYTHING, before=report.now_ms, thorough=thorough
            )
            return
        try:
            before = min(report.now_ms, await entries_expired_up_to(queues, self._number))
            routed_up_to = await cursor_of(queues, self._number)
            await retention.expire(
                report, routed_up_to=routed_up_to, before=before, thorough=thorough
            )
            when_done = rarely and await deletes_when_done(queues)
        finally:
            await queues.close()
        if when_done:
            finished = FinishedMessages(
                self._shard,
                retention,
                position,
                self._shard,
                number=self._number,
                options=self._options,
            )
            async with DatabaseReader.at_one_instant(self._objects, _QUEUES) as instant:
                await finished.sweep_seen(instant, report)

    def _now_ms(self) -> int:
        return self._shard.clock.now_ms()

    def _requests(self) -> int:
        return self._objects.requests + self._shard.database.requests


async def cursor_of(queues: DatabaseReads, shard: int) -> int:
    """Up to which sequence a shard is routed, as the queue store says."""
    key = CursorKey(shard=shard).encode()
    value = await queues.get(key)
    return 0 if value is None else queues.decode(Cursor.decode, key, value).next_sequence


def look_after_shard(ingest: Ingest, options: CompactorOptions | None = None) -> IngestRetention:
    """Run retention in the background of a publisher until it is closed, and show what it does."""
    retention = IngestRetention(ingest, options)
    ingest.run_beside(retention.run_for_ever(), retention.totals.figures)
    return retention
