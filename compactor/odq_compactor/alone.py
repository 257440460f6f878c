"""A pass on a root without an owner."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from odq_compactor.compactor import RetentionCompactor, engine_requests
from odq_compactor.finished import set_delete_when_done
from odq_compactor.options import CompactorOptions
from odq_compactor.positions import Position
from odq_compactor.report import RetentionReport
from odq_compactor.space import collect_garbage, free_space, shorten_replay
from opendata_queue.log.writer import MessageShard, PublishOptions
from opendata_queue.model.clock import Clock, machine_clock
from opendata_queue.model.errors import OdqError, OwnedError
from opendata_queue.model.paths import messages_path
from opendata_queue.root.owner_files import messages_role
from opendata_queue.root.ownership import Ownership
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import StoreSettings, Upkeep
from opendata_queue.systems.engine import Engine
from opendata_queue.systems.owned import OwnedStores

logger = logging.getLogger(__name__)

NAME: Final = "odq compact"
# No other process reads the root: what was replaced need not be kept for long.
_KEPT_MS: Final = 2_000
_POLL_MS: Final = 250
_ALONE: Final = CompactorOptions(work_share=1.0)


class _Alone(Engine):
    """An owner whose only caller wants all of it routed: bulk jobs, and the past for new queues."""

    async def all_is_routed(self) -> None:
        await super().all_is_routed()
        await self._following.bulk.tried()
        try:
            await self._replay.finished()
        except OdqError as error:  # what has to be replayed stays, and all else goes
            logger.error("the past can't be replayed: %s", error)


async def compact_root(
    url: str,
    *,
    options: CompactorOptions = _ALONE,
    settings: StoreSettings | None = None,
    clock: Clock | None = None,
    delete_when_done: bool | None = None,
) -> RetentionReport:
    """Own the root at ``url`` for one thorough pass; ``OwnedError`` if another process does.

    What was published or committed before is routed first, so that all that is past its time goes.
    Live shards without a writer have their passes, too. The others are left to their writers.
    ``delete_when_done``, if it is given, configures the system from now on.
    """
    settings = replace(
        settings or StoreSettings(), compaction_poll_ms=_POLL_MS, replaced_files_kept_ms=_KEPT_MS
    )
    clock = machine_clock(clock)
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with await _Alone.open(url, settings=settings, clock=clock, name=NAME) as engine:
        stores = engine.stores
        before = await stores.objects.size_bytes()
        if delete_when_done is not None:
            await set_delete_when_done(stores.queues, delete_when_done)
        await engine.all_is_routed()
        await stores.queues.sweeper.caught_up()
        compactor = RetentionCompactor(engine, options)
        report = await compactor.run_once(thorough=True)
        report.requests = 0  # all of them are counted at the end
        if options.space:
            for path, position in compactor.positions_by_path().items():
                await shorten_replay(Upkeep(stores.objects, path), position)
        await collect_garbage(compactor.positions, report, kept_ms=_KEPT_MS)
        for number in await ShardFiles(stores.objects).live_shards():
            await _pass_live_shard(compactor, stores, number, report, clock, options)
        report.bytes_before = before
        report.bytes_after = await stores.objects.size_bytes()
        report.requests += engine_requests(engine)
    report.duration_ms = round((loop.time() - started) * 1000)
    return report


async def _pass_live_shard(
    compactor: RetentionCompactor,
    stores: OwnedStores,
    number: int,
    report: RetentionReport,
    clock: Clock,
    options: CompactorOptions,
) -> None:
    """Become the writer of a live shard for a while, unless it has one."""
    objects, root = stores.objects, stores.queues.clock
    role = messages_role(number)
    try:
        ownership = await Ownership.acquire(objects, (role,), clock=clock, name=NAME)
    except OwnedError as error:
        logger.info("shard %d is left to its writer: %s", number, error)
        return
    shard: MessageShard | None = None
    try:
        shard = await MessageShard.open(
            objects,
            number,
            clock=root,
            options=PublishOptions(),
            acknowledged=ownership.acknowledged(role),
        )
        ownership.say_durable(role, shard.database.durable_sequence)
        # A process that was taken over while it opened has fenced its successor: it gives way.
        await ownership.check()
        position = await Position.load(shard)
        await compactor.pass_shard(number, shard, position, report, rarely=True, thorough=True)
        if options.space:
            await free_space([position], report, anyway=options.rewrite, patient=True)
            await shorten_replay(Upkeep(objects, messages_path(number)), position)
            await collect_garbage([position], report, kept_ms=_KEPT_MS)
        report.requests += shard.database.requests
    finally:
        try:
            if shard is not None:
                await shard.close()
        finally:
            await ownership.release()
