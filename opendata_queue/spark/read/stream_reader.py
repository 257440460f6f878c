"""A stream of all messages, in the order of each log, with offsets that can be replayed.

An offset says for each live shard up to which sequence its log was read, and up to which number
bulk shards were: the owner of queues numbers them when it registers their commit (RFC 0009), and
they are read whole. So an offset stays small, however many bulk jobs there were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from opendata_queue.model.errors import InvalidInputError
from opendata_queue.spark.options import integer_of, refuse_unknown, root_of
from opendata_queue.spark.read.messages import message_batches
from opendata_queue.spark.read.reader import ROWS_PER_PARTITION, MessagesPartition
from opendata_queue.spark.rows.arrow import Batches, in_steps
from opendata_queue.spark.rows.columns import Batch
from opendata_queue.spark.schemas import MESSAGES, check_schema, table_of
from opendata_queue.spark.visible import (
    QUEUE_STORE,
    ShardRange,
    check_root,
    grouped,
    live_range,
    live_shards,
    moment_of,
    next_number,
    open_objects,
    registered,
    root_now_ms,
)

Offset = dict[str, Any]

STREAM_OPTIONS: Final = (
    "path",
    "table",
    "columns",
    "payloads",
    "rowsPerPartition",
    "startingOffsets",
    "maxRowsPerTrigger",
)
_LIVE, _BULK = "live", "bulk"
_UNBOUNDED: Final = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Available:
    """What there is to read: the logs of live shards, and bulk shards below a number."""

    live: tuple[ShardRange, ...]
    next_number: int


class MessagesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """``spark.readStream.format("opendata_queue")``."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        refuse_unknown(options, STREAM_OPTIONS)
        if table_of(options) != MESSAGES:
            raise InvalidInputError(f"only the table {MESSAGES} can be read as a stream")
        check_schema(MESSAGES, schema)
        starting = options.get("startingOffsets", "earliest")
        if starting not in ("earliest", "latest"):
            raise InvalidInputError(f"startingOffsets is {starting!r}, not earliest or latest")
        self._root = root_of(options)
        self._schema = schema
        self._starts_at_latest = starting == "latest"
        self._max_rows = integer_of(options, "maxRowsPerTrigger", 0, 1, 1 << 62)
        self._rows = integer_of(options, "rowsPerPartition", ROWS_PER_PARTITION, 1, 1 << 32)
        self._until: _Available | None = None
        asyncio.run(check_root(self._root))

    def initialOffset(self) -> Offset:
        available = asyncio.run(self._all())
        if self._starts_at_latest:
            live = {str(one.shard): one.end for one in available.live if one.end}
            return {_LIVE: live, _BULK: available.next_number}
        # A log may begin late: what comes before would be planned for, in vain.
        live = {str(one.shard): one.first for one in available.live if one.first}
        return {_LIVE: live, _BULK: 0}

    def prepareForTriggerAvailableNow(self) -> None:
        """Spark will read what is there now, in batches within the limit, and then end."""
        self._until = asyncio.run(self._all())

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._max_rows) if self._max_rows else ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return asyncio.run(self._end(start, most))

    def reportLatestOffset(self) -> Offset | None:
        return None

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        now_ms = asyncio.run(root_now_ms(open_objects(self._root)))
        ranges = asyncio.run(self._ranges(start, end))
        return [MessagesPartition(group, now_ms) for group in grouped(ranges, self._rows)]

    def read(self, partition: InputPartition) -> Iterator[Batch]:
        assert isinstance(partition, MessagesPartition)
        objects = open_objects(self._root)
        batches = Batches(self._schema)
        return in_steps(message_batches(objects, partition.ranges, batches, partition.now_ms))

    async def _all(self) -> _Available:
        objects = open_objects(self._root)
        live = [await live_range(objects, shard) for shard in await live_shards(objects)]
        return _Available(live=tuple(live), next_number=await next_number(objects))

    async def _end(self, start: Offset, most: int | None) -> Offset:
        """How far to read now: everything, or about ``most`` messages, bulk shards whole."""
        available = self._until or await self._all()
        left = _UNBOUNDED if most is None else most
        live = dict(start[_LIVE])
        for one in available.live:
            # What retention has removed since is not there to be read, nor to be counted.
            first = max(live.get(str(one.shard), 0), one.first)
            end = min(one.end, first + max(0, left))
            if end > first:
                live[str(one.shard)] = end
                left -= end - first
        number = available.next_number
        if most is not None:
            number = await self._bulk_end(start[_BULK], available, left)
        return {_LIVE: live, _BULK: number}

    async def _bulk_end(self, number: int, available: _Available, left: int) -> int:
        if number >= available.next_number:
            return number
        async with moment_of(open_objects(self._root), QUEUE_STORE) as queues:
            assert queues is not None  # it has given out numbers
            async for row_number, row in registered(queues, number, available.next_number):
                if left <= 0:
                    return number
                left -= row.messages
                number = row_number + 1
        return available.next_number

    async def _ranges(self, start: Offset, end: Offset) -> list[ShardRange]:
        ranges = [
            ShardRange(shard=int(shard), first=start[_LIVE].get(shard, 0), end=sequence)
            for shard, sequence in end[_LIVE].items()
        ]
        if start[_BULK] < end[_BULK]:
            async with moment_of(open_objects(self._root), QUEUE_STORE) as queues:
                assert queues is not None  # it has given out numbers
                async for _, row in registered(queues, start[_BULK], end[_BULK]):
                    ranges.append(ShardRange(shard=row.shard, first=0, end=row.next_sequence))
        return [one for one in ranges if one.size]
