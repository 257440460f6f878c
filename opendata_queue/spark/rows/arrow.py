"""Rows as the Arrow batches that Spark wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from opendata_queue.spark.rows.columns import Batch

T = TypeVar("T")

_LAST_MS: Final = ((1 << 63) - 1) // 1000
_END: Final = object()


class Batches:
    """Makes Arrow batches of columns, for a schema of Spark's."""

    def __init__(self, schema: StructType) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self.names = tuple(schema.fieldNames())

    def of_columns(self, columns: Mapping[str, Sequence[Any]], rows: int) -> Batch:
        """A batch; a column that is not there is null."""
        arrays = [
            pa.nulls(rows, field.type)
            if field.name not in columns
            else _array(columns[field.name], field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def of_records(self, records: Sequence[Mapping[str, Any]]) -> Batch:
        columns = {name: [one.get(name) for one in records] for name in self.names}
        return self.of_columns(columns, len(records))


def _array(values: Sequence[Any], kind: Any) -> Any:
    if pa.types.is_timestamp(kind):
        # Milliseconds, which Spark can't all hold in its microseconds: year 294,247 is the last.
        times = pa.array(values, pa.int64())
        times = pc.max_element_wise(times, -_LAST_MS, skip_nulls=False)
        times = pc.min_element_wise(times, _LAST_MS, skip_nulls=False)
        return pc.multiply(times, 1000).cast(kind)
    if pa.types.is_map(kind):
        return _maps(values, kind)
    return pa.array(values, kind)


def _maps(values: Sequence[Sequence[tuple[str, str]]], kind: Any) -> Any:
    """Maps of pairs; of a key that comes twice the last value counts, as for filters."""
    offsets = [0]
    keys: list[str] = []
    items: list[str] = []
    for pairs in values:
        if len(pairs) > 1:
            found = dict(pairs)
            keys += found
            items += found.values()
        elif pairs:
            keys.append(pairs[0][0])
            items.append(pairs[0][1])
        offsets.append(len(keys))
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(keys, kind.key_type),
        pa.array(items, kind.item_type),
        type=kind,
    )


def in_steps(results: AsyncIterator[T]) -> Iterator[T]:
    """What an async iterator yields, for code that blocks."""

    async def step() -> Any:
        return await anext(results, _END)

    with asyncio.Runner() as runner:
        try:
            while (result := runner.run(step())) is not _END:
                yield result
        finally:
            close = getattr(results, "aclose", None)
            if close is not None:
                runner.run(close())
