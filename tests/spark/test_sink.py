"""Appending with Spark: every row exactly once, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from opendata_queue.model.errors import StoreUnavailableError
from opendata_queue.root.commit_files import CommitFiles
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.spark import FORMAT, register
from opendata_queue.spark.options import SinkOptions
from opendata_queue.spark.rows.columns import Layout
from opendata_queue.spark.rows.few import few_bytes
from opendata_queue.spark.write import sink
from opendata_queue.spark.write.rejects import choose_rejects
from opendata_queue.spark.write.sink import SinkTask, commit_job
from opendata_queue.store import Objects, StoreSettings
from tests.conftest import NewRoot
from tests.spark.bulk_log import committed, payloads
from tests.spark.conftest import ROOT, worker_environment
from tests.spark.driver import AFTER, FILLING, large, named
from tests.spark.driver import ROWS as DRIVER_ROWS
from tests.spark.stalling import (
    BATCH_VARIABLE,
    BEFORE,
    DURING,
    FOLDER_VARIABLE,
    KILLED,
    STALLING,
    KilledSource,
)
from tests.support.s3_server import S3Server

ROWS = 1_000
LINE_TIMEOUT_S = 180


@pytest.fixture
def file_root(tmp_path: Path) -> str:
    return f"file://{tmp_path}/root"


@pytest.fixture(params=["file", "s3"])
def any_root(request: pytest.FixtureRequest, tmp_path: Path, new_s3_root: NewRoot) -> str:
    return f"file://{tmp_path}/root" if request.param == "file" else new_s3_root()


def numbered(spark: SparkSession, rows: int = ROWS, partitions: int = 3) -> DataFrame:
    return named(spark, "row", rows, partitions)


def expected(rows: int = ROWS, filling: str = "") -> Counter[bytes]:
    return Counter(f"row-{n}{filling}".encode() for n in range(rows))


def append(frame: DataFrame, root: str, **options: str) -> None:
    frame.write.format("opendata_queue").mode("append").option("path", root).options(
        **options
    ).save()


def commits(root: str) -> list[str]:
    return asyncio.run(CommitFiles(Objects.open(root, StoreSettings())).jobs())


def reserved(root: str) -> int:
    files = ShardFiles(Objects.open(root, StoreSettings()))
    return len(asyncio.run(files.bulk_shards()))


# --- one line -------------------------------------------------------------------------------------


def test_rows_become_messages_with_all_that_their_columns_say(
    spark: SparkSession, any_root: str
) -> None:
    frame = spark.sql(
        """
        SELECT * FROM VALUES
          ('plain', NULL, map('type', 'order'), 'de', NULL, NULL, 0),
          ('later', NULL, NULL, NULL, timestamp_millis(1000), timestamp_millis(2000), 60),
          (NULL, 's3://elsewhere/object', map(), 'fr', NULL, NULL, 0),
          (repeat('x', 70000), NULL, map(), NULL, NULL, NULL, 0)
        AS t(payload, payload_uri, headers, region, created_at, visible_at, retention_seconds)
        """
    ).coalesce(1)

    append(frame, any_root, headerColumns="region")

    plain, later, uri, large = committed(any_root)
    assert (plain.payload, plain.headers) == (b"plain", (("type", "order"), ("region", "de")))
    assert plain.created_at_ms == plain.received_at_ms == plain.visible_at_ms
    assert (later.created_at_ms, later.visible_at_ms, later.retention_seconds) == (1000, 2000, 60)
    assert (uri.payload, uri.payload_uri) == (None, "s3://elsewhere/object")
    assert (large.payload, large.headers) == (b"x" * 70_000, ())


def test_every_task_has_a_shard_of_its_own_and_one_commit_names_them(
    spark: SparkSession, any_root: str
) -> None:
    append(large(numbered(spark, partitions=3)), any_root, jobId="orders-2026")

    assert payloads(any_root) == expected(filling=FILLING)
    assert commits(any_root) == ["orders-2026"]
    assert reserved(any_root) == 3
    assert len({message.message_id >> 32 for message in committed(any_root)}) == 3


def test_tasks_with_few_rows_share_a_shard_in_the_order_of_their_partitions(
    spark: SparkSession, any_root: str
) -> None:
    frame = spark.range(0, 20, 1, 5).selectExpr(
        "if(id = 7, NULL, concat('row-', id)) AS payload",
        "if(id = 7, 's3://elsewhere/object', NULL) AS payload_uri",
        "id AS number",
    )

    append(frame, any_root, headerColumns="number")

    found = committed(any_root)
    assert [one.headers for one in found] == [(("number", str(n)),) for n in range(20)]
    assert (found[7].payload_uri, found[8].payload) == ("s3://elsewhere/object", b"row-8")
    assert [one.message_id & 0xFFFF_FFFF for one in found] == list(range(20))
    assert reserved(any_root) == 1


def test_later_tasks_send_less_so_that_all_of_them_send_little() -> None:
    sent = [few_bytes(partition) for partition in range(10_000)]

    assert sent[0] == 256 * 1024
    assert sent == sorted(sent, reverse=True)
    assert sum(sent) < 100 * 1024 * 1024


def test_an_empty_frame_is_committed_and_reserves_nothing(
    spark: SparkSession, file_root: str
) -> None:
    append(numbered(spark).where("payload = 'no such row'"), file_root, jobId="empty")

    assert commits(file_root) == ["empty"]
    assert reserved(file_root) == 0


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        ("overwrite", {}, "only ever added"),
        ("append", {"jobId": "no/slashes"}, "job is 'no/slashes'"),
        ("append", {"jobid2": "x"}, "no option 'jobid2'"),
        ("append", {"path": "memory:///x"}, "seen by one process"),
        ("append", {"headerColumns": "region"}, "is no column"),
    ],
)
def test_what_can_not_be_done_is_said_before_anything_is_written(
    spark: SparkSession, file_root: str, mode: str, options: dict[str, str], reason: str
) -> None:
    writer = numbered(spark).write.format("opendata_queue").mode(mode)
    with pytest.raises(PySparkException, match=reason):
        writer.options(**{"path": file_root} | options).save()


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (["id AS payload"], "column 'payload' is bigint, not binary or string"),
        (["'p' AS payload", "map('a', 1) AS headers"], "not map<string,string>"),
        (["'p' AS payload", "array(1) AS region"], "cast it to string"),
        (["'p' AS payload", "current_date() AS created_at"], "column 'created_at' is date"),
    ],
)
def test_columns_of_the_wrong_type_are_refused(
    spark: SparkSession, file_root: str, columns: list[str], reason: str
) -> None:
    frame = spark.range(1).selectExpr(*columns)
    named = "region" if "region" in frame.columns else ""
    with pytest.raises(PySparkException, match=reason):
        append(frame, file_root, headerColumns=named)


def test_a_thread_that_registers_the_format_can_append_and_read(
    spark: SparkSession, file_root: str
) -> None:
    found: list[int] = []

    def append_and_read() -> None:
        register(spark)
        append(numbered(spark, 10, 1), file_root)
        found.append(spark.read.format(FORMAT).option("path", file_root).load().count())

    thread = threading.Thread(target=append_and_read)
    thread.start()
    thread.join()

    assert found == [10]


# --- bad rows -------------------------------------------------------------------------------------


def test_a_bad_row_fails_the_job_with_its_position_and_reason(
    spark: SparkSession, file_root: str
) -> None:
    frame = spark.range(0, 10, 1, 1).selectExpr("if(id = 7, NULL, 'p') AS payload", "id AS number")

    with pytest.raises(PySparkException, match=r"row 7 of partition 0: payload is null.*number"):
        append(frame, file_root, headerColumns="number")

    assert commits(file_root) == []


def test_bad_rows_go_to_the_rejects_path_and_the_others_are_appended(
    spark: SparkSession, any_root: str, tmp_path: Path
) -> None:
    frame = spark.range(0, 100, 1, 2).selectExpr(
        "if(id % 10 = 7, NULL, concat('row-', id)) AS payload", "id AS number"
    )

    append(frame, any_root, headerColumns="number", jobId="j", rejectsPath=f"file://{tmp_path}/bad")

    assert payloads(any_root) == Counter(
        {f"row-{n}".encode(): 1 for n in range(100) if n % 10 != 7}
    )
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "bad" / "j").glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert [(one["partition"], one["row"]) for one in lines] == [
        (partition, row) for partition in (0, 1) for row in (7, 17, 27, 37, 47)
    ]
    assert {one["reason"] for one in lines} == {"payload is null"}
    assert [one["columns"]["number"] for one in lines] == list(range(7, 100, 10))


def rejected_rows(folder: Path) -> list[tuple[int, int]]:
    lines = [
        json.loads(line)
        for path in sorted(folder.glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [(one["partition"], one["row"]) for one in lines]


async def test_rejects_are_those_of_the_run_that_was_committed(tmp_path: Path) -> None:
    options = SinkOptions(
        root=f"file://{tmp_path}/root", job="j", header_columns=(), rejects=f"file://{tmp_path}/bad"
    )
    task = SinkTask(options=options, layout=Layout(columns=("payload",)))

    def rows() -> Iterator[Any]:
        yield pa.RecordBatch.from_pydict({"payload": ["good", None, "good"]})

    # A run with three partitions that dies before its commit, then one with one partition.
    first = [await task.run(rows(), "j", partition) for partition in range(3)]
    await choose_rejects(
        f"file://{tmp_path}/bad", "j", "nobody", [(one.partition, one.rejected) for one in first]
    )
    assert rejected_rows(tmp_path / "bad" / "j") == []
    assert await commit_job(task, "j", [await task.run(rows(), "j", 0)])

    assert rejected_rows(tmp_path / "bad" / "j") == [(0, 1)]
    # Another driver of the job that comes too late changes nothing.
    assert not await commit_job(task, "j", first)
    assert rejected_rows(tmp_path / "bad" / "j") == [(0, 1)]


async def test_a_run_that_died_after_its_commit_has_its_rejects_published_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SinkOptions(
        root=f"file://{tmp_path}/root", job="j", header_columns=(), rejects=f"file://{tmp_path}/bad"
    )
    task = SinkTask(options=options, layout=Layout(columns=("payload",)))

    def rows() -> Iterator[Any]:
        yield pa.RecordBatch.from_pydict({"payload": [None, "good"]})

    async def dies(*_: object) -> None:
        raise StoreUnavailableError("the driver dies here")

    reports = [await task.run(rows(), "j", 0)]
    with monkeypatch.context() as dying:
        dying.setattr(sink, "publish_rejects", dies)
        with pytest.raises(StoreUnavailableError):
            await commit_job(task, "j", reports)
    assert rejected_rows(tmp_path / "bad" / "j") == []

    assert not await commit_job(task, "j", [await task.run(rows(), "j", 0)])

    assert rejected_rows(tmp_path / "bad" / "j") == [(0, 0)]


# --- exactly once ---------------------------------------------------------------------------------


def fails_at_first(number: int) -> Callable[[Iterable[Any]], Iterable[Any]]:
    def rows(found: Iterable[Any]) -> Iterable[Any]:
        context = TaskContext.get()
        assert context is not None
        for count, row in enumerate(found):
            if context.partitionId() == 1 and context.attemptNumber() < number and count == 150:
                raise RuntimeError("this attempt was meant to fail")
            yield row

    return rows


def test_a_task_that_fails_twice_is_tried_again_and_adds_its_rows_once(
    spark: SparkSession, any_root: str
) -> None:
    failing = numbered(spark).rdd.mapPartitions(fails_at_first(2))

    append(large(spark.createDataFrame(failing, "payload string")), any_root)

    assert payloads(any_root) == expected(filling=FILLING)


def test_a_worker_that_is_killed_in_the_middle_of_its_rows_adds_them_once(
    spark: SparkSession, any_root: str
) -> None:
    spark.dataSource.register(KilledSource)
    batch_rows = "spark.sql.execution.arrow.maxRecordsPerBatch"
    usual = spark.conf.get(batch_rows)
    assert usual is not None
    rows = 3_000
    spark.conf.set(batch_rows, "300")
    try:
        writer = large(numbered(spark, rows)).write.format(KILLED).mode("append")
        writer.option("path", any_root).save()
    finally:
        spark.conf.set(batch_rows, usual)

    assert payloads(any_root) == expected(rows, FILLING)
    # One for each of the three tasks, and the one that was being filled.
    assert (reserved(any_root), len(commits(any_root))) == (4, 1)


def test_a_job_that_fails_for_good_adds_nothing(spark: SparkSession, file_root: str) -> None:
    failing = numbered(spark).rdd.mapPartitions(fails_at_first(9))

    with pytest.raises(PySparkException, match="meant to fail"):
        append(spark.createDataFrame(failing, "payload string"), file_root)

    assert commits(file_root) == []


def test_the_same_job_twice_is_done_once(spark: SparkSession, any_root: str) -> None:
    append(large(numbered(spark)), any_root, jobId="job")
    shards = reserved(any_root)

    append(large(numbered(spark)), any_root, jobId="job")

    assert payloads(any_root) == expected(filling=FILLING)
    assert reserved(any_root) == shards  # the second time nothing was even written


@pytest.mark.parametrize("filling", ["", FILLING], ids=["few", "many"])
async def test_attempts_of_one_task_that_run_at_once_add_its_rows_once(
    any_root: str, s3_environment: S3Server, filling: str
) -> None:
    options = SinkOptions(root=any_root, job="j", header_columns=(), rejects=None)
    task = SinkTask(options=options, layout=Layout(columns=("payload",)))

    def rows() -> Iterator[Any]:
        yield pa.RecordBatch.from_pydict({"payload": [f"row-{n}{filling}" for n in range(ROWS)]})

    first, second = await asyncio.gather(*(task.run(rows(), "j", 0) for _ in range(2)))
    assert await commit_job(task, "j", [second])
    zombie = await task.run(rows(), "j", 0)
    again = await commit_job(task, "j", [first])

    assert not again
    assert (zombie.result, zombie.few) == (None, b"")
    assert await asyncio.to_thread(payloads, options.root) == expected(filling=filling)


@pytest.mark.parametrize("executed", [True, False])
def test_a_commit_whose_answer_is_lost_is_settled_by_reading_it_back(
    spark: SparkSession, new_s3_root: NewRoot, s3_environment: S3Server, executed: bool
) -> None:
    root = new_s3_root()
    fault = s3_environment.drop_after if executed else s3_environment.drop
    fault(methods=["PUT"], path_contains="/commits/", times=1)

    append(numbered(spark), root)

    assert s3_environment.faulted() == 1
    assert payloads(root) == expected()


# --- drivers that are killed ----------------------------------------------------------------------


class Driver:
    """A Spark driver in a process of its own, with its JVM and its workers."""

    def __init__(self, *arguments: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.driver", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment, **worker_environment()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self) -> None:
        """SIGKILL to all of it at once."""
        for pid in [self._process.pid, *_descendants(self._process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(LINE_TIMEOUT_S)


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def wait_for(what: str, is_there: Callable[[], bool]) -> None:
    """Until something is there that another process makes."""
    behind = time.monotonic() + LINE_TIMEOUT_S
    while not is_there():
        assert time.monotonic() < behind, f"{what} did not come"
        time.sleep(0.05)


def test_drivers_killed_around_their_commits_leave_all_or_nothing_of_each_job(
    spark: SparkSession,
    file_root: str,
    new_s3_root: NewRoot,
    s3_environment: S3Server,
    tmp_path: Path,
) -> None:
    roots = new_s3_root(), file_root
    s3_environment.stall(methods=["PUT"], path_contains=f"/commits/{BEFORE}")
    s3_environment.stall_after(methods=["PUT"], path_contains=f"/commits/{DURING}")
    jobs = (AFTER, DURING, BEFORE)
    environment = s3_environment.environment() | {FOLDER_VARIABLE: str(tmp_path)}
    driver = Driver("append", *roots, environment=environment)
    try:
        s3_environment.wait_until_faulted(2, timeout_s=LINE_TIMEOUT_S)
        # A request that stalls is sent again after a while, and counts twice.
        wait_for("the commit", lambda: DURING in commits(roots[0]))
        for name in (BEFORE, DURING):
            wait_for(name, (tmp_path / name).exists)
    finally:
        driver.kill()
    s3_environment.heal()

    left = [commits(root) for root in roots]
    written = reserved(file_root)
    for root, with_more in ((roots[0], False), (file_root, True)):
        for job in jobs:
            frame = named(spark, job, DRIVER_ROWS)
            append(large(frame) if with_more else frame, root, jobId=job)

    assert left == 2 * [[AFTER, DURING]]
    # On files each task wrote a shard of its own; those of the job without a commit stay unseen.
    tasks = 3
    assert (written, reserved(file_root)) == (len(jobs) * tasks, (len(jobs) + 1) * tasks)
    for root, filling in zip(roots, ("", FILLING), strict=True):
        assert payloads(root) == Counter(
            f"{job}-{n}{filling}".encode() for job in jobs for n in range(DRIVER_ROWS)
        )


# --- streams --------------------------------------------------------------------------------------


def write_lines(folder: Path, number: int, rows: int = 50) -> None:
    folder.mkdir(exist_ok=True)
    lines = "".join(f"row-{number * rows + n}\n" for n in range(rows))
    partial = folder / f".{number}"
    partial.write_text(lines)
    partial.rename(folder / f"{number}.txt")


def stream(spark: SparkSession, folder: Path, root: str, checkpoint: Path) -> None:
    """Append the lines of all files that are there, a file for each batch."""
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(folder))
    query = (
        lines.select(F.col("value").alias("payload"))
        .writeStream.format("opendata_queue")
        .option("path", root)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(LINE_TIMEOUT_S)
    assert query.exception() is None


def test_a_stream_appends_each_batch_under_a_name_of_its_own(
    spark: SparkSession, any_root: str, tmp_path: Path
) -> None:
    for number in range(2):
        write_lines(tmp_path / "in", number)
    stream(spark, tmp_path / "in", any_root, tmp_path / "checkpoint")
    write_lines(tmp_path / "in", 2)
    stream(spark, tmp_path / "in", any_root, tmp_path / "checkpoint")

    query = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    assert payloads(any_root) == expected(150)
    assert commits(any_root) == [f"stream-{query}-{batch}" for batch in range(3)]


def test_a_batch_that_is_run_again_adds_nothing(
    spark: SparkSession, file_root: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / "in", 0)
    stream(spark, tmp_path / "in", file_root, tmp_path / "checkpoint")
    # As if the driver had died between our commit and Spark's note of it.
    for note in (tmp_path / "checkpoint" / "commits").glob("*0*"):
        note.unlink()
    stream(spark, tmp_path / "in", file_root, tmp_path / "checkpoint")

    assert payloads(file_root) == expected(50)


def test_a_fresh_checkpoint_is_a_new_query(
    spark: SparkSession, file_root: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / "in", 0)
    stream(spark, tmp_path / "in", file_root, tmp_path / "one")
    stream(spark, tmp_path / "in", file_root, tmp_path / "two")

    assert payloads(file_root) == Counter(dict.fromkeys(expected(50), 2))


def test_a_stream_that_is_killed_again_and_again_appends_every_row_once(
    spark: SparkSession,
    file_root: str,
    new_s3_root: NewRoot,
    s3_environment: S3Server,
    tmp_path: Path,
) -> None:
    roots = new_s3_root(), file_root
    folder, checkpoints = tmp_path / "in", tmp_path / "checkpoints"
    for number in range(4):
        write_lines(folder, number)
    # Of the second batch the commit is cut off after it has happened, of the third before.
    for stall, when, batch in (
        (s3_environment.stall_after, DURING, 1),
        (s3_environment.stall, BEFORE, 2),
    ):
        stall(methods=["PUT"], path_contains=f"-{batch}.json")
        chosen = f"{when}-{batch}"
        environment = {FOLDER_VARIABLE: str(tmp_path), BATCH_VARIABLE: chosen}
        driver = Driver(
            "stream",
            *roots,
            str(folder),
            str(checkpoints),
            environment=s3_environment.environment() | environment,
        )
        try:
            s3_environment.wait_until_faulted(timeout_s=LINE_TIMEOUT_S)
            wait_for(chosen, (tmp_path / chosen).exists)
        finally:
            driver.kill()
        s3_environment.heal()
    interrupted = [commits(root) for root in roots]
    for root, name in zip(roots, (FORMAT, STALLING), strict=True):
        stream(spark, folder, root, checkpoints / name)

    for root, left in zip(roots, interrupted, strict=True):
        assert [job.rsplit("-", 1)[1] for job in left] == ["0", "1"]
        assert payloads(root) == expected(200)
