"""Reading tables: one moment of a root for a whole read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from opendata_queue.model.ids import MAX_MESSAGE_ID
from opendata_queue.root.features import checked_features
from opendata_queue.spark.options import integer_of, refuse_unknown, root_of
from opendata_queue.spark.read.messages import message_batches
from opendata_queue.spark.read.queue_tables import queue_table
from opendata_queue.spark.rows.arrow import Batches, in_steps
from opendata_queue.spark.rows.columns import Batch
from opendata_queue.spark.schemas import MESSAGES, check_schema, table_of
from opendata_queue.spark.visible import (
    QUEUE_STORE,
    ShardRange,
    check_root,
    grouped,
    moment_of,
    open_objects,
    root_now_ms,
    visible_ranges,
)

ROWS_PER_PARTITION: Final = 500_000
READ_OPTIONS: Final = ("path", "table", "columns", "payloads", "rowsPerPartition")
_BATCH_ROWS: Final = 10_000


@dataclass
class MessagesPartition(InputPartition):
    """Some ranges of logs, as they were at ``now_ms`` of the root's clock."""

    ranges: tuple[ShardRange, ...]
    now_ms: int


def table_reader(options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    refuse_unknown(options, READ_OPTIONS)
    table = table_of(options)
    check_schema(table, schema)
    root = root_of(options)
    rows = integer_of(options, "rowsPerPartition", ROWS_PER_PARTITION, 1, 1 << 32)
    asyncio.run(check_root(root))
    if table != MESSAGES:
        return QueueTableReader(root, table, schema)
    kind = PushingMessagesReader if _takes_filters() else MessagesReader
    return kind(root, schema, rows)


def _takes_filters() -> bool:
    """Whether this is the process in which Spark offers filters to a reader.

    A reader that could take them, in a session that has the push-down switched off, is refused by
    Spark instead of being used without.
    """
    name = "pyspark.sql.worker.data_source_pushdown_filters"
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return name in sys.modules or getattr(main, "name", None) == name


class MessagesReader(DataSourceReader):
    """The table ``messages``, in ranges of ids."""

    def __init__(self, root: str, schema: StructType, rows_per_partition: int) -> None:
        self._root = root
        self._schema = schema
        self._rows_per_partition = rows_per_partition
        self._first_id = 0
        self._last_id = MAX_MESSAGE_ID

    def partitions(self) -> Sequence[InputPartition]:
        now_ms, ranges = asyncio.run(self._visible())
        wanted = [one.within(self._first_id, self._last_id) for one in ranges]
        groups = grouped([one for one in wanted if one.size], self._rows_per_partition)
        return [MessagesPartition(ranges=group, now_ms=now_ms) for group in groups] or [
            MessagesPartition(ranges=(), now_ms=now_ms)
        ]

    async def _visible(self) -> tuple[int, list[ShardRange]]:
        objects = open_objects(self._root)
        return await root_now_ms(objects), await visible_ranges(objects)

    def read(self, partition: InputPartition) -> Iterator[Batch]:
        assert isinstance(partition, MessagesPartition)
        objects = open_objects(self._root)
        batches = Batches(self._schema)
        return in_steps(message_batches(objects, partition.ranges, batches, partition.now_ms))


class PushingMessagesReader(MessagesReader):
    """The same; conditions on ``message_id`` choose the shards and ranges that are read."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        return [one for one in filters if not self._take(one)]

    def _take(self, condition: Filter) -> bool:
        """Whether a condition is met by the range alone."""
        if getattr(condition, "attribute", None) != ("message_id",):
            return False
        match condition:
            case EqualTo(value=int(value)):
                self._narrow(value, value)
            case GreaterThan(value=int(value)):
                self._narrow(value + 1, MAX_MESSAGE_ID)
            case GreaterThanOrEqual(value=int(value)):
                self._narrow(value, MAX_MESSAGE_ID)
            case LessThan(value=int(value)):
                self._narrow(0, value - 1)
            case LessThanOrEqual(value=int(value)):
                self._narrow(0, value)
            case _:
                return False
        return True

    def _narrow(self, first_id: int, last_id: int) -> None:
        self._first_id = max(self._first_id, first_id)
        self._last_id = min(self._last_id, last_id)


class QueueTableReader(DataSourceReader):
    """A table of the queue store. Its state changes all the time, so one task reads one moment."""

    def __init__(self, root: str, table: str, schema: StructType) -> None:
        self._root = root
        self._table = table
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[Batch]:
        return in_steps(self._batches())

    async def _batches(self) -> AsyncIterator[Batch]:
        batches = Batches(self._schema)
        gathered = []
        objects = open_objects(self._root)
        await checked_features(objects)
        now_ms = await root_now_ms(objects)
        async with moment_of(objects, QUEUE_STORE) as reader:
            if reader is None:  # this root has not had an owner yet
                return
            async for records in queue_table(reader, self._table, now_ms):
                gathered += records
                if len(gathered) >= _BATCH_ROWS:
                    yield batches.of_records(gathered)
                    gathered = []
        if gathered:
            yield batches.of_records(gathered)
