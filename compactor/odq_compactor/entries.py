"""Entries of expired messages that are in shards which this process does not write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from odq_compactor.messages import EARLIEST_MS, RUNS_AT_ONCE, delete_attempts, next_runs
from odq_compactor.options import CompactorOptions
from odq_compactor.pace import Pace
from odq_compactor.plan import Ids, Run, batches, expired_runs, parts
from odq_compactor.queues import expire_in_backlogs
from odq_compactor.report import RetentionReport
from odq_encodings import ExpiredEntries, ExpiredEntriesKey, encode_expiry_key
from opendata_queue.log.readers import is_not_there
from opendata_queue.model.errors import OdqError
from opendata_queue.store import DatabaseReads
from opendata_queue.systems.owned import OwnedStores

# Messages with a short life may be seen so late: their writer must learn that no queue has them.
_LATE_MS: Final = 60_000
_FAR_AWAY_MS: Final = (1 << 63) - 1


async def entries_expired_up_to(database: DatabaseReads, shard: int) -> int:
    """Up to which deadline queues are rid of the messages of a shard that others write."""
    key = ExpiredEntriesKey(shard=shard).encode()
    value = await database.get(key)
    if value is None:
        return EARLIEST_MS
    return database.decode(ExpiredEntries.decode, key, value).deadline


@dataclass(slots=True)
class _Reached:
    deadline: int
    """What expires before this is in no queue any more."""


class FollowedEntries:
    """Takes expired messages of other writers' shards out of backlogs.

    It goes by their expiry rows, from where it was the last time, so what is not due costs nothing.
    The writer of the shard may delete the rows as soon as the store says that we were there.
    """

    def __init__(self, stores: OwnedStores, options: CompactorOptions) -> None:
        self._stores = stores
        self._options = options
        self._pace = Pace(options.work_share)
        self._reached: dict[int, _Reached] = {}

    async def run(self, report: RetentionReport) -> None:
        """Take expired messages of all live shards out of backlogs."""
        for shard in self._stores.followed():
            try:
                await self.expire(
                    shard,
                    report,
                    routed_up_to=self._stores.routed_up_to(shard),
                    again_ms=_LATE_MS,
                )
            except OdqError as error:
                if not is_not_there(error):  # its writer has not come that far yet
                    raise

    async def expire(
        self, shard: int, report: RetentionReport, *, routed_up_to: int, again_ms: int = 0
    ) -> None:
        """Take out what is past its time. A run that is not all routed is left for later.

        What expired up to ``again_ms`` before the last time is read again.
        """
        reached = await self._known(shard)
        now = report.now_ms
        start = encode_expiry_key(max(EARLIEST_MS, reached.deadline - again_ms))
        left = now
        while True:
            due = await self._next(shard, start, now)
            expired = expired_runs(due, now=now, routed_up_to=routed_up_to)
            await self.expire_runs(expired, report)
            left = min([left, *(run.deadline for run in due if run not in expired)])
            is_all = len(due) < RUNS_AT_ONCE
            # Of the last deadline there may be more runs.
            await self._reach(shard, min(left, now if is_all else due[-1].deadline), bool(expired))
            if is_all:
                return
            start = encode_expiry_key(due[-1].deadline, due[-1].first_id) + b"\x00"

    async def expire_runs(self, runs: list[Run], report: RetentionReport) -> None:
        """Take out messages that are known to be past their time, and routed.

        A bulk writer may have made one run of all that it has.
        """
        size = self._options.batch_messages
        for batch in batches([part for run in runs for part in parts(run, size)], size):
            async with self._pace.work():
                await self._expire(batch, report)

    async def next_deadline(self, shard: int) -> int | None:
        """When the next messages of a shard expire whose entries are not taken out yet."""
        start = encode_expiry_key((await self._known(shard)).deadline)
        runs = await self._next(shard, start, _FAR_AWAY_MS, 1)
        return runs[0].deadline if runs else None

    def release(self, shard: int) -> None:
        """Remember no more of a shard than the store does."""
        self._reached.pop(shard, None)

    def forget(self, shard: int) -> None:
        """Delete what the store knows of a shard, in the batch that gathers."""
        self._stores.queues.committer.rows.delete(ExpiredEntriesKey(shard=shard).encode())
        self._reached.pop(shard, None)

    async def _expire(self, runs: list[Run], report: RetentionReport) -> None:
        ids = Ids(runs)
        await expire_in_backlogs(self._stores.queues, ids, report, self._pace)
        if self._options.erase:
            await delete_attempts(self._stores.queues, list(ids))

    async def _known(self, shard: int) -> _Reached:
        reached = self._reached.get(shard)
        if reached is None:
            deadline = await entries_expired_up_to(self._stores.queues.database, shard)
            reached = self._reached[shard] = _Reached(deadline)
        return reached

    async def _reach(self, shard: int, deadline: int, something: bool) -> None:
        """Remember how far it is; in the store only if the writer of the shard has to know."""
        reached = self._reached[shard]
        if deadline <= reached.deadline:
            return
        reached.deadline = deadline
        if something:
            committer = self._stores.queues.committer
            await committer.room()
            key = ExpiredEntriesKey(shard=shard).encode()
            committer.rows.put(key, ExpiredEntries(deadline=deadline).encode())
            await committer.wait(committer.commit())

    async def _next(
        self, shard: int, start: bytes, before: int, limit: int = RUNS_AT_ONCE
    ) -> list[Run]:
        return await self._stores.readers.read(
            shard, lambda reader: next_runs(reader.database, start, before, limit)
        )
