"""One Spark session for all tests of a process, with a store on disk and one on S3."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.s3_server import S3Server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Spark's workers get their environment when it starts, so it knows the S3 server too."""
    before = dict(os.environ)
    os.environ |= s3_server.environment() | worker_environment()
    builder = SparkSession.builder.master("local[2,3]").appName("odq-tests")
    for name, value in FAST.items():
        builder = builder.config(name, value)
    folder = tmp_path_factory.mktemp("spark")
    builder = builder.config("spark.local.dir", str(folder / "local"))
    builder = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    os.environ.clear()
    os.environ |= before
    yield session
    session.stop()


FAST = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.python.daemon.module": "tests.spark.daemon",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def worker_environment() -> dict[str, str]:
    """What Spark's Python workers need to run this very checkout."""
    folders = [str(ROOT), str(ROOT / "encodings"), str(ROOT / "compactor")]
    return {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(folders),
    }
