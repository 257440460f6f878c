"""Passes of the retention compactor, in the background of an owner (RFC 0010)."""

from __future__ import annotations

from typing import Final

from odq_compactor.attempts import AttemptsOfGone
from odq_compactor.bulk import BulkRetention
from odq_compactor.entries import FollowedEntries
from odq_compactor.finished import FinishedMessages, deletes_when_done
from odq_compactor.finished_bulk import FinishedBulk
from odq_compactor.messages import ShardRetention
from odq_compactor.options import CompactorOptions
from odq_compactor.passes import Passes
from odq_compactor.positions import Position, Written
from odq_compactor.queues import QueueRetention
from odq_compactor.report import Kind, RetentionReport
from odq_compactor.space import free_space
from opendata_queue.log.writer import MessageShard
from opendata_queue.model.paths import QUEUES_PATH, messages_path
from opendata_queue.queues.store import QueueStore
from opendata_queue.store import Database, Rows
from opendata_queue.systems.engine import Engine

_ENTRIES: Final[tuple[Kind, ...]] = ("expired entries", "done entries", "failed entries")
_ENTRY_BYTES: Final = 64
"""About what an entry takes up in files, and its tombstone."""


class RetentionCompactor(Passes):
    """Removes what is past its time from the stores of an owner.

    Messages of live shards that other processes write are removed by those (``IngestRetention``);
    here their entries are taken out of queues.
    """

    def __init__(self, engine: Engine, options: CompactorOptions | None = None) -> None:
        options = options or CompactorOptions()
        super().__init__(engine.stores.queues.clock.machine, options)
        self._engine = engine
        self._rows = _QueueRows(engine.stores.queues)
        self._queues = QueueRetention(engine.stores.queues, options)
        self._followed = FollowedEntries(engine.stores, options)
        self._bulk = BulkRetention(engine.stores, self._followed, options)
        self._finished_bulk = FinishedBulk(engine.stores, self._bulk, options)
        self._attempts = AttemptsOfGone(engine.stores, options)
        self._positions: dict[int | None, Position] = {}

    @property
    def positions(self) -> list[Position]:
        return list(self._positions.values())

    def positions_by_path(self) -> dict[str, Position]:
        """Positions by the paths of their databases."""
        return {
            QUEUES_PATH if number is None else messages_path(number): position
            for number, position in self._positions.items()
        }

    async def pass_shard(
        self,
        number: int,
        shard: MessageShard,
        position: Position,
        report: RetentionReport,
        *,
        rarely: bool,
        thorough: bool,
    ) -> None:
        """What a pass does about a shard that this process writes."""
        queues = self._engine.stores.queues
        retention = ShardRetention(shard, queues, position, number=number, options=self._options)
        await retention.expire(
            report,
            routed_up_to=self._engine.stores.routed_up_to(number),
            before=report.now_ms,
            thorough=thorough,
        )
        if rarely:
            await retention.collect_orphans(report)
        if await deletes_when_done(queues.database):
            finished = FinishedMessages(
                shard,
                retention,
                position,
                self._rows if number in self._engine.stores.shards else shard,
                number=number,
                options=self._options,
            )
            await finished.sweep(queues, report, anyway=thorough)

    async def _pass(self, report: RetentionReport, *, rarely: bool, thorough: bool) -> None:
        stores = self._engine.stores
        await self._position(None, self._rows)
        await self._queues.expire_windows(report)
        # Before finished messages are searched: a failed entry that is past must not hold one back.
        await self._queues.forget_finished(report)
        for number, shard in stores.shards.items():
            position = await self._position(number, shard)
            await self.pass_shard(number, shard, position, report, rarely=rarely, thorough=thorough)
        await self._followed.run(report)
        await self._bulk.run(report, rarely=rarely)
        if rarely and await deletes_when_done(stores.queues.database):
            await self._finished_elsewhere(report)
        if self._options.space:
            if thorough:
                await self._count_entries(report)
            anyway = self._options.rewrite
            await free_space(self.positions, report, anyway=anyway, patient=thorough)

    async def _finished_elsewhere(self, report: RetentionReport) -> None:
        """Delete when done, as far as messages are concerned that this process did not write."""
        stores = self._engine.stores
        await self._finished_bulk.run(report)
        if stores.followed():
            await self._attempts.run()
            # Writers of other shards see of the queues what is in files.
            await stores.queues.all_durable()
            await stores.queues.database.flush_to_files()

    async def _count_entries(self, report: RetentionReport) -> None:
        """Remember what a rewrite would free of the queue store.

        An owner does not need it: SlateDB compacts by itself what is written all the time.
        """
        freed_bytes = sum(report.total(kind) for kind in _ENTRIES) * _ENTRY_BYTES
        if freed_bytes:
            position = await self._position(None, self._rows)
            position.freeable.add(freed_bytes)
            await position.write()

    async def _position(self, number: int | None, store: Written) -> Position:
        position = self._positions.get(number)
        if position is None:
            position = self._positions[number] = await Position.load(store)
        return position

    def _now_ms(self) -> int:
        return self._engine.stores.queues.clock.now_ms()

    def _requests(self) -> int:
        return engine_requests(self._engine)


def engine_requests(engine: Engine) -> int:
    """How many requests an owner has made so far."""
    stores = engine.stores
    databases = [stores.queues.database, *(one.database for one in stores.shards.values())]
    return stores.objects.requests + sum(one.requests for one in databases)


def look_after(engine: Engine, options: CompactorOptions | None = None) -> RetentionCompactor:
    """Run retention in the background of an owner until it is closed, and show what it does."""
    compactor = RetentionCompactor(engine, options)
    engine.run_beside(compactor.run_for_ever(), compactor.totals.figures)
    return compactor


class _QueueRows:
    """The queue store, as something to write a position to."""

    def __init__(self, queues: QueueStore) -> None:
        self._queues = queues

    @property
    def database(self) -> Database:
        return self._queues.database

    async def commit(self, rows: Rows) -> None:
        committer = self._queues.committer
        await committer.room()
        await committer.wait(committer.add(rows))
