"""What a queue with a new filter would have received: ``odq spark backtest``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from opendata_queue.filters import Filter
from opendata_queue.model.errors import InvalidInputError
from opendata_queue.spark.data_source import FORMAT
from opendata_queue.spark.filter_column import filter_column
from opendata_queue.spark.visible import check_root

MAX_QUEUES: Final = 200
"""Existing queues whose overlap is counted; the first ones by name."""
MAX_EXAMPLES: Final = 100
"""Of each hour so many are kept until the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backtest:
    """What a filter matches, in all and by hours, which are (start in ms, messages).

    ``overlap`` says how many of them the filter of each existing queue matches as well. That is not
    what the queue got: it may be younger than they are, and may have had another filter.
    """

    filter: str
    looked_at: int
    matched: int
    hours: tuple[tuple[int, int], ...]
    overlap: dict[str, int]
    queues_left_out: int
    examples: tuple[dict[str, Any], ...]


def backtest(
    spark: SparkSession, root: str, text: str, *, since_ms: int | None = None, examples: int = 5
) -> Backtest:
    """Evaluate a filter over the messages that were received since a time, and are still there.

    They are read once. What comes to the driver are the hours and the examples, not the messages.
    """
    if not 0 <= examples <= MAX_EXAMPLES:
        raise InvalidInputError(f"examples is {examples}, not within 0 to {MAX_EXAMPLES}")
    parsed = Filter.given(text)
    asyncio.run(check_root(root))
    messages = _read(spark, root, "messages")
    if since_ms is not None:
        messages = messages.where(F.unix_millis("received_at") >= since_ms)
    queues = _read(spark, root, "queues").select("queue", "filter").orderBy("queue").collect()
    considered = {row.queue: row["filter"] for row in queues[:MAX_QUEUES]}
    matches = F.coalesce(filter_column(parsed), F.lit(False))
    also = [
        F.count_if(matches & F.coalesce(filter_column(one), F.lit(False))).alias(f"q{number}")
        for number, one in enumerate(considered.values())
    ]
    hour = F.unix_millis(F.date_trunc("hour", "received_at")).alias("hour")
    example = F.struct("message_id", F.map_entries("headers").alias("headers"))
    by_hour = messages.groupBy(hour).agg(
        F.count("*").alias("looked_at"),
        F.count_if(matches).alias("matched"),
        *also,
        # The latest of each hour: all that could be among the latest of all.
        F.max_by(example, F.when(matches, F.col("message_id")), max(1, examples)).alias("latest"),
    )
    # Lists can be sorted, and maps can't: so the headers are a list of pairs.
    latest = F.sort_array(F.flatten(F.collect_list("latest")), asc=False)
    (found,) = by_hour.agg(
        F.sort_array(F.collect_list(F.struct(*by_hour.drop("latest").columns))).alias("hours"),
        F.slice(latest, 1, examples).alias("examples") if examples else F.array().alias("examples"),
    ).collect()
    return Backtest(
        filter=parsed.text,
        looked_at=sum(row.looked_at for row in found.hours),
        matched=sum(row.matched for row in found.hours),
        hours=tuple((row.hour, row.matched) for row in found.hours if row.matched),
        overlap={
            name: sum(row[f"q{number}"] for row in found.hours)
            for number, name in enumerate(considered)
        },
        queues_left_out=len(queues) - len(considered),
        examples=tuple(
            {"message_id": one.message_id, "headers": dict(one.headers)} for one in found.examples
        ),
    )


def _read(spark: SparkSession, root: str, table: str) -> DataFrame:
    return spark.read.format(FORMAT).option("path", root).option("table", table).load()
