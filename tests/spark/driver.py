"""A Spark driver of its own, to be killed.

    python -m tests.spark.driver append S3_ROOT FILE_ROOT
    python -m tests.spark.driver stream S3_ROOT FILE_ROOT INPUT CHECKPOINTS

``append`` appends the jobs ``after``, ``during`` and ``before`` to both roots, as if they were four
programs; to files with rows that are enough for a shard of each task. ``stream`` appends the lines
of the text files in INPUT to both of them, a file for each batch. On files they wait at their
commits, as ``stalling`` says; on S3 the test's server sees to that.
"""

from __future__ import annotations

import sys
import threading

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from opendata_queue.spark import FORMAT, register
from tests.spark.conftest import FAST
from tests.spark.stalling import BEFORE, DURING, STALLING, StallingSource

AFTER = "after"
ROWS = 1_000
FILLING = "." * 1_000


def session() -> SparkSession:
    builder = SparkSession.builder.master("local[2,3]")
    for name, value in FAST.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(StallingSource)
    return spark


def named(spark: SparkSession, name: str, rows: int = 1_000, partitions: int = 3) -> DataFrame:
    """Rows that are called ``<name>-<number>``."""
    frame = spark.range(0, rows, 1, partitions)
    return frame.select(F.concat(F.lit(f"{name}-"), "id").alias("payload"))


def large(frame: DataFrame) -> DataFrame:
    """The same rows with more in them: every task has enough for a shard of its own."""
    return frame.select(F.concat("payload", F.lit(FILLING)).alias("payload"))


def append(s3_root: str, file_root: str) -> None:
    spark = session()

    def run(name: str, root: str, jobs: tuple[str, ...]) -> None:
        register(spark)
        for job in jobs:
            frame = named(spark, job, ROWS)
            frame = large(frame) if root == file_root else frame
            writer = frame.write.format(name).mode("append")
            writer.option("path", root).option("jobId", job).save()

    for name, root in ((FORMAT, s3_root), (STALLING, file_root)):
        for jobs in ((AFTER, DURING), (BEFORE,)):
            threading.Thread(target=run, args=(name, root, jobs)).start()


def stream(s3_root: str, file_root: str, folder: str, checkpoints: str) -> None:
    spark = session()
    register(spark)
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(folder)
    rows = lines.select(F.col("value").alias("payload"))
    for name, root in ((FORMAT, s3_root), (STALLING, file_root)):
        writer = rows.writeStream.format(name).option("path", root)
        writer.option("checkpointLocation", f"{checkpoints}/{name}").start()
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    if sys.argv[1] == "append":
        append(*sys.argv[2:4])
    else:
        stream(*sys.argv[2:6])
