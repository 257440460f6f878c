"""The data source ``opendata_queue`` of Spark."""

from __future__ import annotations

import asyncio
from typing import Final

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    IntegerType,
    IntegralType,
    LongType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from opendata_queue.model.errors import InvalidInputError
from opendata_queue.spark.options import SinkOptions
from opendata_queue.spark.read.reader import table_reader
from opendata_queue.spark.read.stream_reader import MessagesStreamReader
from opendata_queue.spark.rows.columns import (
    CORRUPT_RECORD,
    CREATED_AT,
    HEADERS,
    PAYLOAD,
    PAYLOAD_URI,
    RETENTION_SECONDS,
    VISIBLE_AT,
    Layout,
)
from opendata_queue.spark.schemas import schema_of
from opendata_queue.spark.write.sink import (
    BatchWriter,
    SinkTask,
    StreamWriter,
    prepare_root,
    was_committed,
)

FORMAT = "opendata_queue"


class OpendataQueueSource(DataSource):
    """Reads and writes roots of OpenData Queue; ``docs/spark.md`` has its options."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return schema_of(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        return table_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> MessagesStreamReader:
        return MessagesStreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise InvalidInputError('messages are only ever added: write with mode("append")')
        options = SinkOptions.read(self.options, streaming=False)
        layout = _layout(schema, options)
        assert options.job is not None
        repeated = asyncio.run(_prepare(options, options.job))
        return BatchWriter(SinkTask(options=options, layout=layout, repeated=repeated))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        if overwrite:
            raise InvalidInputError('messages are only ever added: use outputMode("append")')
        options = SinkOptions.read(self.options, streaming=True)
        layout = _layout(schema, options)
        asyncio.run(prepare_root(options.root))
        return StreamWriter(SinkTask(options=options, layout=layout))


async def _prepare(options: SinkOptions, job: str) -> bool:
    """Make the root ready for a job; true if the job was committed before."""
    await prepare_root(options.root)
    return await was_committed(options, job)


def _layout(schema: StructType, options: SinkOptions) -> Layout:
    layout = Layout(columns=tuple(schema.fieldNames()), header_columns=options.header_columns)
    for field in schema.fields:
        kinds, wanted = _HEADER_TYPES if field.name in layout.header_columns else _TYPES[field.name]
        kind = field.dataType
        fits = isinstance(kind, kinds)
        if isinstance(kind, MapType):
            fits = fits and {type(kind.keyType), type(kind.valueType)} == {StringType}
        if not fits:
            raise InvalidInputError(f"column {field.name!r} is {kind.simpleString()}, not {wanted}")
    return layout


_TIMES = (TimestampType, TimestampNTZType, StringType, LongType, IntegerType)
_TYPES: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    PAYLOAD: ((BinaryType, StringType), "binary or string"),
    PAYLOAD_URI: ((StringType,), "string"),
    HEADERS: ((MapType,), "map<string,string>"),
    CREATED_AT: (_TIMES, "timestamp, string or bigint (milliseconds)"),
    VISIBLE_AT: (_TIMES, "timestamp, string or bigint (milliseconds)"),
    RETENTION_SECONDS: ((IntegralType, StringType), "an integer, or its text"),
    CORRUPT_RECORD: ((StringType,), "string"),
}
_HEADER_TYPES: Final = (
    (StringType, NumericType, BooleanType, DateType, TimestampType, TimestampNTZType),
    "something that is plain as text: cast it to string",
)
