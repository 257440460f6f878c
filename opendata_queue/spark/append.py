"""The job that appends files or tables to a root: ``odq spark append``.

``spark-submit`` runs files, not modules: docs/spark.md has the three lines for one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegralType, StringType, StructField
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from odq_encodings import BulkJob
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import CorruptStoreError, InvalidInputError, OdqError
from opendata_queue.root.commit_files import Commit, CommitFiles, check_job
from opendata_queue.root.timekeeping import reading_clock
from opendata_queue.spark.data_source import FORMAT
from opendata_queue.spark.rows.columns import (
    CORRUPT_RECORD,
    CREATED_AT,
    HEADERS,
    KNOWN,
    PAYLOAD,
    PAYLOAD_URI,
    RETENTION_SECONDS,
    VISIBLE_AT,
)
from opendata_queue.spark.sessions import job_session, reason_of
from opendata_queue.spark.visible import registered_job
from opendata_queue.spark.write.rejects import count_rejects
from opendata_queue.spark.write.sink import expired_at_most
from opendata_queue.store import Objects, StoreSettings

FORMATS: Final = ("parquet", "json", "csv", "table")
_PARSED: Final = ("json", "csv")
"""Formats of text, in which a row may be broken."""
_FAILED: Final = 1
_WRONG_INPUT: Final = 2
_PROGRESS_INTERVAL_S: Final = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendJob:
    """What to append, and where to. Columns that are not named are left out.

    Without ``payload`` the column of that name is the payload; if there is none, the whole row is,
    as JSON.
    """

    inputs: tuple[str, ...]
    store: str
    name: str
    format: str = "parquet"
    payload: str | None = None
    payload_uri: str | None = None
    headers: str | None = None
    header_columns: tuple[str, ...] = ()
    created_at: str | None = None
    visible_at: str | None = None
    retention_seconds: str | None = None
    rejects: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendSummary:
    """What a job has done. ``repeated`` says that it had been committed before, and did nothing.

    Of a job whose commit was removed by retention since, rows and bytes are not known any more.
    """

    job: str
    rows: int | None
    bytes: int | None
    shards: int
    expired: int | None
    """At most so many rows had expired before they were committed."""
    rejected: int
    seconds: float
    rows_per_second: float
    repeated: bool


def append(spark: SparkSession, job: AppendJob, *, progress: bool = False) -> AppendSummary:
    """Run a job; when this returns all of its rows are committed."""
    check_job(job.name)
    before = asyncio.run(_found(job)) is not None
    writer = messages_of(_input(spark, job), job).write.format(FORMAT).mode("append")
    writer = writer.option("path", job.store).option("jobId", job.name)
    if job.header_columns:
        writer = writer.option("headerColumns", ",".join(job.header_columns))
    if job.rejects is not None:
        writer = writer.option("rejectsPath", job.rejects)
    started = time.monotonic()
    with _progress_of(spark) if progress else _nothing():
        writer.save()
    seconds = time.monotonic() - started
    after = asyncio.run(_found(job))
    if after is None:
        raise CorruptStoreError(
            f"job {job.name} was committed, and there is no trace of it: "
            f"{job.store}/commits/{job.name}.json was removed"
        )
    rows = expired = None
    if isinstance(after, Commit):
        rows = sum(shard.messages for shard in after.shards)
        expired = asyncio.run(_expired(job, after))
    return AppendSummary(
        job=job.name,
        rows=rows,
        bytes=sum(one.bytes for one in after.shards) if isinstance(after, Commit) else None,
        shards=len(after.shards) if isinstance(after, Commit) else after.shards,
        expired=expired,
        rejected=0 if job.rejects is None else asyncio.run(count_rejects(job.rejects, job.name)),
        seconds=round(seconds, 3),
        rows_per_second=0.0 if before or rows is None else round(rows / seconds, 1),
        repeated=before,
    )


async def _found(job: AppendJob) -> Commit | BulkJob | None:
    """The commit of a job or, if retention has removed it, what the owner of queues knows of it."""
    objects = Objects.open(job.store, StoreSettings())
    return await CommitFiles(objects).read(job.name) or await registered_job(objects, job.name)


async def _expired(job: AppendJob, commit: Commit) -> int:
    """How many rows had expired at a commit. It has the driver's time, and they the root's."""
    root_clock = await reading_clock(Objects.open(job.store, StoreSettings()), SystemClock())
    return expired_at_most(commit.shards, commit.committed_at + root_clock.ahead_for_callers_ms())


def messages_of(frame: DataFrame, job: AppendJob) -> DataFrame:
    """The columns of messages, out of those of the input."""
    _check_columns(frame, job)
    columns = []
    if job.payload_uri is not None:
        columns.append(_column(job.payload_uri).alias(PAYLOAD_URI))
    named = job.payload or (PAYLOAD if PAYLOAD in frame.columns else None)
    if named is not None:
        column = _column(named)
        if not isinstance(frame.schema[named].dataType, BinaryType | StringType):
            column = column.cast("string")
        columns.append(column.alias(PAYLOAD))
    elif job.payload_uri is None:
        columns.append(F.to_json(F.struct(*map(_column, _given(frame, job)))).alias(PAYLOAD))
    for name, source in (
        (HEADERS, job.headers),
        (CREATED_AT, job.created_at),
        (VISIBLE_AT, job.visible_at),
    ):
        if source is not None:
            columns.append(_column(source).alias(name))
    if job.retention_seconds is not None:
        columns.append(_retention(frame, job.retention_seconds).alias(RETENTION_SECONDS))
    if job.format in _PARSED:
        columns.append(_column(CORRUPT_RECORD))
    return frame.select(*columns, *map(_column, job.header_columns))


def _given(frame: DataFrame, job: AppendJob) -> list[str]:
    """The columns that the input has of its own."""
    return [name for name in frame.columns if name != CORRUPT_RECORD or job.format not in _PARSED]


def _retention(frame: DataFrame, retention: str) -> Column:
    """Seconds, or the text of what is no number: the sink knows which row it is in."""
    if retention.isdecimal():
        return F.lit(int(retention)).cast("long")
    column = _column(retention)
    if isinstance(frame.schema[retention].dataType, IntegralType | StringType):
        return column
    return F.coalesce(column.try_cast("long").cast("string"), column.cast("string"))


def _column(name: str) -> Column:
    """A column by its whole name: a dot in it is no way into a structure."""
    quoted = name.replace("`", "``")
    return F.col(f"`{quoted}`")


def _check_columns(frame: DataFrame, job: AppendJob) -> None:
    """Refuse names that mean no column, all in the same way and before Spark reads them."""
    given = _given(frame, job)
    if not given:
        raise InvalidInputError(f"the input has no columns: is it {job.format}?")
    retention = job.retention_seconds
    named = [
        ("--payload", job.payload),
        ("--payload-uri", job.payload_uri),
        ("--headers", job.headers),
        ("--created-at", job.created_at),
        ("--visible-at", job.visible_at),
        ("--retention-seconds", None if retention and retention.isdecimal() else retention),
        *(("--header", name) for name in job.header_columns),
    ]
    for option, name in named:
        if name is not None and name not in given:
            raise InvalidInputError(
                f"{option}: the input has no column {name!r}; it has {', '.join(given)}"
            )
        if name is not None and frame.columns.count(name) > 1:
            raise InvalidInputError(f"{option}: the input has {name!r} more than once: rename one")
    for place, name in enumerate(job.header_columns):
        if name in KNOWN:
            raise InvalidInputError(f"rename {name!r} to use it as a header: it means something")
        if name in job.header_columns[:place]:
            raise InvalidInputError(f"--header {name} is given twice")


def _input(spark: SparkSession, job: AppendJob) -> DataFrame:
    if job.format == "table":
        first, *others = (spark.table(name) for name in job.inputs)
        for other in others:
            first = first.unionByName(other)
        return first
    reader, inputs = spark.read.format(job.format), list(job.inputs)
    if job.format not in _PARSED:
        return reader.load(inputs)
    # Spark finds that a CSV row has too many columns only if it reads all of them.
    reader = reader.options(columnNameOfCorruptRecord=CORRUPT_RECORD, columnPruning="false")
    if job.format == "csv":
        reader = reader.option("header", "true")
    schema = reader.load(inputs).schema
    if CORRUPT_RECORD not in schema.names:
        schema = schema.add(StructField(CORRUPT_RECORD, StringType()))
    return reader.schema(schema).load(inputs)


# --- progress -------------------------------------------------------------------------------------


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _progress_of(spark: SparkSession) -> Iterator[None]:
    """A bar of finished tasks, while something is running."""
    tracker = spark.sparkContext.statusTracker()
    over = threading.Event()

    def watch(bar: Progress) -> None:
        task = bar.add_task("appending", total=None)
        while not over.wait(_PROGRESS_INTERVAL_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            total = sum(stage.numTasks for stage in stages if stage)
            done = sum(stage.numCompletedTasks for stage in stages if stage)
            if total:
                bar.update(task, total=total, completed=done)

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} tasks"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as p:
        watcher = threading.Thread(target=watch, args=(p,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


# --- the command ----------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odq spark append",
        description="Append files or tables to a root with Spark: all rows at once, exactly once.",
        epilog="Nothing is visible before all of it is. Under the same --job a second run does "
        "nothing, so that a job whose end you have not seen can be run again. "
        "Example: odq spark append orders.parquet --store s3://bucket/orders --payload body",
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, or tables")
    parser.add_argument(
        "--store",
        metavar="URL",
        default=os.environ.get("ODQ_STORE"),
        help="the root: file:///path or s3://bucket/prefix (or the variable ODQ_STORE)",
    )
    parser.add_argument("--format", choices=FORMATS, default="parquet")
    parser.add_argument(
        "--payload",
        metavar="COLUMN",
        help="the payload; without it the column 'payload', or else the whole row as JSON",
    )
    parser.add_argument("--payload-uri", metavar="COLUMN", help="URIs instead of payloads")
    parser.add_argument("--headers", metavar="COLUMN", help="a map of headers")
    parser.add_argument(
        "--header",
        metavar="COLUMN",
        action="append",
        default=[],
        dest="header_columns",
        help="a header of that name; may be repeated",
    )
    parser.add_argument("--created-at", metavar="COLUMN", help="timestamps, ISO text, or ms")
    parser.add_argument("--visible-at", metavar="COLUMN", help="when it can be claimed")
    parser.add_argument("--retention-seconds", metavar="COLUMN|N", help="how long it is kept")
    parser.add_argument("--job", metavar="NAME", help="what is to be done only once")
    parser.add_argument("--rejects", metavar="URL", help="where rows go that can't be messages")
    parser.add_argument("--master", help="Spark's master; local[*] without spark-submit")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = build_parser().parse_args(arguments)
    if not given.store:
        print("odq: say where the root is, with --store URL or ODQ_STORE", file=sys.stderr)
        return _WRONG_INPUT
    job = AppendJob(
        inputs=tuple(given.inputs),
        store=given.store,
        name=given.job or f"append-{uuid.uuid4().hex}",
        format=given.format,
        payload=given.payload,
        payload_uri=given.payload_uri,
        headers=given.headers,
        header_columns=tuple(given.header_columns),
        created_at=given.created_at,
        visible_at=given.visible_at,
        retention_seconds=given.retention_seconds,
        rejects=given.rejects,
    )
    try:
        check_job(job.name)
        spark = job_session(f"odq append {job.name}", given.master)
        summary = append(spark, job, progress=sys.stderr.isatty())
    except (OdqError, PySparkException) as error:
        print(f"odq: {reason_of(error)}", file=sys.stderr)
        return _WRONG_INPUT if isinstance(error, InvalidInputError) else _FAILED
    if given.json:
        print(json.dumps(asdict(summary)))
    else:
        _print(summary)
    return 0


def _print(summary: AppendSummary) -> None:
    if summary.repeated:
        print(f"job {summary.job} was committed before: nothing was added")
    print(f"job      {summary.job}")
    print(f"rows     {_counted(summary.rows)}")
    print(f"bytes    {_counted(summary.bytes)}")
    print(f"shards   {summary.shards:,}")
    if summary.expired:
        print(f"expired  up to {summary.expired:,}: their retention ended before the commit")
    print(f"rejected {summary.rejected:,}")
    if not summary.repeated:
        print(f"speed    {summary.rows_per_second:,.0f} rows/s in {summary.seconds:.1f} s")


def _counted(number: int | None) -> str:
    return "not known any more: its commit was removed" if number is None else f"{number:,}"


if __name__ == "__main__":
    sys.exit(main())
