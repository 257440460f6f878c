"""Spark: append to roots in bulk, exactly once, and read everything back (``docs/spark.md``)."""

from __future__ import annotations

from pyspark.sql import SparkSession

from opendata_queue.spark.data_source import FORMAT, OpendataQueueSource
from opendata_queue.spark.filter_column import filter_column


def register(spark: SparkSession) -> None:
    """Let a session know the format ``opendata_queue``, and the calling thread the session.

    Spark finds sources that are written in Python in the session that is active in the calling
    thread; in a thread that was started by hand there is none, and the format is not found.
    """
    spark.dataSource.register(OpendataQueueSource)
    session = getattr(spark, "_jsparkSession", None)  # there is none with Spark Connect
    if session is not None:
        SparkSession._get_j_spark_session_class(spark._jvm).setActiveSession(session)


__all__ = ["FORMAT", "OpendataQueueSource", "filter_column", "register"]
