"""Sessions for our own jobs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from opendata_queue.model.errors import StoreAccessError
from opendata_queue.spark.data_source import OpendataQueueSource

_STARTED_BY_SPARK: Final = "PYSPARK_GATEWAY_PORT"
"""Set for a driver that ``spark-submit`` has started, wherever it runs: its master is chosen."""
_QUIET: Final = Path(__file__).with_name("quiet.properties")
_OURS: Final = "opendata_queue.model.errors."


def job_session(name: str, master: str | None = None) -> SparkSession:
    """The session of ``spark-submit``, or one with a master that was named, or on this machine.

    Without a master of ours Spark takes that of its own configuration, and ``local[*]`` at last.
    """
    # Without it Spark's workers run whatever `python3` is on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    if _STARTED_BY_SPARK not in os.environ:
        os.environ.setdefault("SPARK_SUBMIT_OPTS", f"-Dlog4j2.configurationFile={_QUIET.as_uri()}")
        builder = builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    try:
        session = builder.getOrCreate()
    except Exception as error:  # of Py4J, which has no class of its own for it
        raise StoreAccessError(f"Spark does not start: {reason_of(error)}") from error
    session.sparkContext.setLogLevel("OFF")  # what fails is raised, and said once
    session.dataSource.register(OpendataQueueSource)
    return session


def reason_of(error: Exception) -> str:
    """What went wrong in a line: of Spark's pages of text the last line of the traceback in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(_OURS)]
    if ours:
        return ours[-1].partition(": ")[2]
    return lines[0] if lines else type(error).__name__
