"""What a driver looks at before it lets tasks write, and before it commits what they wrote."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from opendata_queue.log.bulk_writer import BulkResult
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import FormatVersionError, InvalidInputError
from opendata_queue.root.commit_files import CommitFiles
from opendata_queue.root.descriptor import read_root
from opendata_queue.root.shard_files import earliest_bulk_shard
from opendata_queue.spark.data_source import OpendataQueueSource
from opendata_queue.spark.options import SinkOptions
from opendata_queue.spark.rows.columns import Layout
from opendata_queue.spark.write.rejects import RejectedFiles
from opendata_queue.spark.write.sink import SinkTask, TaskReport, commit_job
from opendata_queue.store import Objects, StoreSettings

DAY_MS = 86_400_000


def report(
    partition: int, reserved_at: int, *, expires_from: int = 0, expires_at: int = 0
) -> TaskReport:
    result = BulkResult(
        shard=earliest_bulk_shard(reserved_at),
        messages=1,
        next_sequence=1,
        bytes=1,
        expires_from=expires_from,
        expires_at=expires_at,
    )
    return TaskReport(job="j", partition=partition, result=result, rejected=RejectedFiles())


@pytest.mark.parametrize("streaming", [True, False])
def test_a_new_path_becomes_a_root_before_any_task_writes(tmp_path: Path, streaming: bool) -> None:
    root = f"file://{tmp_path}/root"
    source = OpendataQueueSource({"path": root})
    schema = StructType([StructField("payload", StringType())])

    (source.streamWriter if streaming else source.writer)(schema, False)

    assert asyncio.run(read_root(Objects.open(root, StoreSettings()))) is not None


def test_a_stream_to_a_root_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "system.json").write_text('{"format_version": 99}')
    schema = StructType([StructField("payload", StringType())])

    with pytest.raises(FormatVersionError):
        OpendataQueueSource({"path": f"file://{tmp_path}"}).streamWriter(schema, False)


async def test_a_job_is_not_committed_with_a_shard_that_retention_may_have_removed(
    tmp_path: Path,
) -> None:
    root = f"file://{tmp_path}/root"
    options = SinkOptions(root=root, job="j", header_columns=(), rejects=None)
    task = SinkTask(options=options, layout=Layout(columns=("payload",)))
    now_ms = SystemClock().now_ms()
    young, old = report(0, now_ms - 5 * DAY_MS), report(1, now_ms - 6 * DAY_MS - 3_600_000)

    with pytest.raises(InvalidInputError, match=r"job j can't be committed.*6 days.*run it again"):
        await commit_job(task, "j", [young, old])

    assert await CommitFiles(Objects.open(root, StoreSettings())).jobs() == []
    assert await commit_job(task, "j", [young])


def writing(root: str) -> SinkTask:
    options = SinkOptions(root=root, job="j", header_columns=(), rejects=None)
    return SinkTask(options=options, layout=Layout(columns=("payload",)))


async def test_a_job_that_took_longer_than_the_retention_of_all_its_rows_is_refused(
    tmp_path: Path,
) -> None:
    root = f"file://{tmp_path}/root"
    now_ms = SystemClock().now_ms()
    past = [
        report(0, now_ms - DAY_MS, expires_from=now_ms - 9, expires_at=now_ms - 8),
        report(1, now_ms - 2 * DAY_MS, expires_from=now_ms - 7, expires_at=now_ms - 7),
    ]

    with pytest.raises(InvalidInputError, match=r"all 2 have expired\. Nothing was added"):
        await commit_job(writing(root), "j", past)

    assert await CommitFiles(Objects.open(root, StoreSettings())).jobs() == []


@pytest.mark.parametrize(
    ("expires_from", "expires_at", "warned"),
    [(-9, -8, True), (-9, DAY_MS, True), (-9, 0, True), (DAY_MS, DAY_MS, False), (0, 0, False)],
    ids=["all of a shard", "some of it", "some of it, others stay", "none yet", "none ever"],
)
async def test_a_job_that_took_longer_than_the_retention_of_some_rows_says_so(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    expires_from: int,
    expires_at: int,
    warned: bool,
) -> None:
    now_ms = SystemClock().now_ms()
    first = report(
        0,
        now_ms - DAY_MS,
        expires_from=expires_from and now_ms + expires_from,
        expires_at=expires_at and now_ms + expires_at,
    )
    others = [report(1, now_ms - 2 * DAY_MS), report(2, now_ms - 3 * DAY_MS)]

    assert await commit_job(writing(f"file://{tmp_path}/root"), "j", [first, *others])

    assert ("up to 1 of 3 have expired" in caplog.text) == warned
