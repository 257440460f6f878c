"""How fast Spark appends and reads back, next to the engine's own publish_many.

    python -m benchmarks.spark [--rows 1000000] [--rounds 3] [--quick]

Rows of 256 bytes with two headers, `local[2]`, on a local disk, synced, after a warm-up with a
twentieth of them. They are read from Parquet. publish_many and the append take turns, each round on
a root of its own, and the median of the rounds counts. Requests are counted on a real S3 server in
memory (moto).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame, SparkSession
from rich.console import Console
from rich.table import Table

import opendata_queue as odq
from benchmarks.common import HEADERS, PAYLOAD
from opendata_queue import NewMessage
from tests.support.s3_server import S3Server

BUCKET = "benchmark"
BATCH = 500
REPOSITORY = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="a look: 20,000 rows")
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args()
    rows = 20_000 if told.quick else told.rows
    rounds = 1 if told.quick else told.rounds
    with tempfile.TemporaryDirectory() as folder, S3Server() as server:
        server.create_bucket(BUCKET)
        os.environ |= server.environment()
        spark = session()
        source = make_rows(spark, folder, rows)
        small = source.limit(max(2, rows // 20)).repartition(2)
        append(small, f"file://{folder}/warm")
        published, appended = [], []
        for number in range(rounds):
            published.append(published_per_second(f"{folder}/engine-{number}", rows // 4))
            appended.append(rows / seconds(append, source, f"file://{folder}/bulk-{number}"))
        read_back(spark, f"file://{folder}/warm", rows)
        read = rows / seconds(read_back, spark, f"file://{folder}/bulk-0", rows)
        waited = seconds_to_the_first_claim(folder, source.limit(1_000))
        few = min(rows, 100_000)
        requests = requests_per_1000(server, source.limit(few).repartition(2), few)
        spark.stop()
    times = median(appended) / median(published)
    table = Table("256-byte rows with two headers", "measured", "target", "")
    add = table.add_row
    add("publish_many, one process, rows/s", f"{median(published):,.0f}", "", spread(published))
    add("Spark append, local[2], rows/s", f"{median(appended):,.0f}", "", spread(appended))
    add("  times publish_many", f"{times:.2f}", "at least 2", verdict(times >= 2))
    add("read back with payloads, rows/s", f"{read:,.0f}", "at least 100,000", verdict(read >= 1e5))
    add("seconds from the commit to a running broker's claim", f"{waited:.2f}", "at most 5",
        verdict(waited <= 5))  # fmt: skip
    add(f"S3 requests per 1,000 rows, {few:,} rows in 2 shards", f"{requests:.2f}", "", "")
    Console().print(table)


def spread(found: list[float]) -> str:
    return f"{min(found):,.0f} to {max(found):,.0f}" if len(found) > 1 else ""


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def session() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    folders = [str(REPOSITORY / part) for part in (".", "encodings", "compactor")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    spark = builder.config("spark.driver.memory", "2g").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def make_rows(spark: SparkSession, folder: str, rows: int) -> DataFrame:
    pairs = ", ".join(f"'{key}', '{value}'" for key, value in HEADERS.items())
    frame = spark.range(0, rows, 1, 2).selectExpr(
        f"unhex('{PAYLOAD.hex()}') AS payload", f"map({pairs}) AS headers"
    )
    frame.write.parquet(f"{folder}/rows")
    return spark.read.parquet(f"{folder}/rows")


def published_per_second(folder: str, rows: int) -> float:
    """The engine in one process, without queues, messages made anew for each call."""
    with odq.open(f"file://{folder}") as system:
        started = time.perf_counter()
        for _ in range(0, rows, BATCH):
            system.publish_many([NewMessage(PAYLOAD, headers=HEADERS) for _ in range(BATCH)])
        return rows / (time.perf_counter() - started)


def append(source: DataFrame, root: str) -> None:
    source.write.format("opendata_queue").mode("append").option("path", root).save()


def read_back(spark: SparkSession, root: str, rows: int) -> None:
    reader = spark.read.format("opendata_queue").option("path", root)
    frame = reader.option("payloads", "true").option("rowsPerPartition", str(rows // 2)).load()
    frame.write.format("noop").mode("overwrite").save()


def seconds_to_the_first_claim(folder: str, source: DataFrame) -> float:
    """Of a system that was open all along, and whose consumer waits."""
    root = f"file://{folder}/served"
    with odq.open(root) as system:
        system.create_queue("all", filter="")
        append(source, root)
        started = time.perf_counter()
        claimed = system.claim("all", 1, wait_ms=60_000)
        assert claimed
        return time.perf_counter() - started


def seconds(work: Callable[..., None], *arguments: object) -> float:
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def requests_per_1000(server: S3Server, source: DataFrame, rows: int) -> float:
    server.reset_requests()
    append(source, f"s3://{BUCKET}/root")
    counts = server.requests()
    requests = sum(count for name, count in counts.items() if not name.startswith("bytes"))
    return requests * 1000 / rows


if __name__ == "__main__":
    main()
