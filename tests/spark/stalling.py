"""The sink, stopped or killed where a test wants it.

At the commit it is stopped, so that it can be killed there on any store. A job that is called
``before`` never gets to its commit, one that is called ``during`` has committed and nobody has
heard of it. For a stream the environment says which batch it is.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from opendata_queue.spark import OpendataQueueSource
from opendata_queue.spark.rows.columns import Batch
from opendata_queue.spark.write.sink import BatchWriter, StreamWriter, TaskReport

STALLING: Final = "stalling_queue"
KILLED: Final = "killed_queue"
BEFORE: Final = "before"
DURING: Final = "during"
FOLDER_VARIABLE: Final = "ODQ_TEST_STALLED"
"""Where whoever waits leaves a file."""
BATCH_VARIABLE: Final = "ODQ_TEST_STALLED_BATCH"
"""Such as ``during-1``."""


class StallingSource(OpendataQueueSource):
    """Writes like the real one."""

    @classmethod
    def name(cls) -> str:
        return STALLING

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return StallingWriter(super().writer(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return StallingStreamWriter(super().streamWriter(schema, overwrite))


class StallingWriter(BatchWriter):
    def __init__(self, real: BatchWriter) -> None:
        self._task = real._task

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        job = self._task.options.job
        if job == BEFORE:
            _wait_to_be_killed(BEFORE)
        super().commit(messages)
        if job == DURING:
            _wait_to_be_killed(DURING)


class StallingStreamWriter(StreamWriter):
    def __init__(self, real: StreamWriter) -> None:
        self._task = real._task

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        chosen = os.environ[BATCH_VARIABLE]
        if chosen == f"{BEFORE}-{batchId}":
            _wait_to_be_killed(chosen)
        super().commit(messages, batchId)
        if chosen == f"{DURING}-{batchId}":
            _wait_to_be_killed(chosen)


class KilledSource(OpendataQueueSource):
    """Writes like the real one, until the worker of the first attempt of a task is killed."""

    @classmethod
    def name(cls) -> str:
        return KILLED

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return KilledWriter(super().writer(schema, overwrite)._task)


class KilledWriter(BatchWriter):
    def write(self, iterator: Iterator[Batch]) -> TaskReport:
        return super().write(_killed_in_the_middle(iterator))


def _killed_in_the_middle(batches: Iterator[Batch]) -> Iterator[Batch]:
    context = TaskContext.get()
    assert context is not None
    for number, batch in enumerate(batches):
        if number == 2 and context.partitionId() == 1 and context.attemptNumber() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def _wait_to_be_killed(name: str) -> None:
    (Path(os.environ[FOLDER_VARIABLE]) / name).touch()
    threading.Event().wait()
