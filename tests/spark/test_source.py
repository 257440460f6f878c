"""Reading with Spark: exactly what the engine reports, while it is live."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import opendata_queue as odq
from opendata_queue import NewMessage, QueueOptions
from opendata_queue.filters import Filter, SystemFields
from opendata_queue.spark import filter_column
from opendata_queue.spark.visible import ShardRange, grouped
from tests.conftest import NewRoot
from tests.filters.strategies import filters, headers_of_messages

HOUR_MS = 3_600_000
WINDOW, AT_ONCE = 8, 7


@pytest.fixture(params=["file", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, new_s3_root: NewRoot) -> str:
    return f"file://{tmp_path}/root" if request.param == "file" else new_s3_root()


@pytest.fixture
def system(root: str) -> Iterator[odq.System]:
    """The owner of a root, which stays open, and serves, while Spark reads."""
    with odq.open(root) as system:
        yield system


def read(spark: SparkSession, root: str, table: str = "messages", **options: str) -> DataFrame:
    reader = spark.read.format("opendata_queue").option("path", root).option("table", table)
    return reader.options(**options).load()


def in_ms(column: str) -> Any:
    return F.unix_millis(column).alias(column)


def as_dicts(rows: list[Row]) -> list[dict[str, Any]]:
    return [row.asDict() for row in rows]


# --- messages -------------------------------------------------------------------------------------


def test_messages_are_those_that_were_published(
    spark: SparkSession, root: str, system: odq.System
) -> None:
    ids = system.publish_many(
        [
            NewMessage(b"plain", headers={"type": "order", "größe": "ü"}),
            NewMessage(b"", visible_at_ms=9_000_000_000_000_000, created_at_ms=-1),
            NewMessage(b"x" * 70_000, retention_seconds=60),
            NewMessage(payload_uri="s3://elsewhere/object"),
        ]
    )

    rows = read(spark, root, payloads="true").orderBy("message_id")
    times = [in_ms(name) for name in ("created_at", "received_at", "visible_at")]
    found = rows.select(
        "message_id", "payload", "payload_uri", "headers", *times, "retention_seconds"
    ).collect()

    expected = [message for message in system.read_many(ids) if message is not None]
    assert [
        (
            row.message_id,
            None if row.payload is None else bytes(row.payload),
            row.payload_uri,
            tuple(row.headers.items()),
            row.created_at,
            row.received_at,
            row.visible_at,
            row.retention_seconds,
        )
        for row in found
    ] == [
        (
            one.message_id,
            one.payload,
            one.payload_uri,
            one.headers,
            one.created_at_ms,
            one.received_at_ms,
            one.visible_at_ms,
            one.retention_seconds,
        )
        for one in expected
    ]


def test_a_bulk_job_is_read_back_with_what_was_published_and_cut_into_partitions(
    spark: SparkSession, root: str, system: odq.System
) -> None:
    system.publish_many([NewMessage(b"live-%d" % n) for n in range(10)])
    bulk = spark.range(0, 100, 1, 3).select(F.concat(F.lit("bulk-"), "id").alias("payload"))
    bulk.write.format("opendata_queue").mode("append").option("path", root).save()

    frame = read(spark, root, columns="payload", rowsPerPartition="40")

    assert frame.schema.names == ["payload"]
    assert frame.rdd.getNumPartitions() == 3
    assert sorted(bytes(row.payload) for row in frame.collect()) == sorted(
        [b"live-%d" % n for n in range(10)] + [b"bulk-%d" % n for n in range(100)]
    )


def test_conditions_on_ids_choose_what_is_read(
    spark: SparkSession, root: str, system: odq.System
) -> None:
    ids = system.publish_many([NewMessage(b"%d" % n) for n in range(20)])
    frame = read(spark, root, rowsPerPartition="5").where(
        (F.col("message_id") > ids[3]) & (F.col("message_id") <= ids[9])
    )

    assert sorted(row.message_id for row in frame.collect()) == ids[4:10]
    assert frame.rdd.getNumPartitions() == 2
    assert read(spark, root).where(F.col("message_id") == ids[7]).count() == 1
    assert read(spark, root).where(F.col("message_id") < 0).count() == 0


def test_a_read_is_of_one_moment(spark: SparkSession, root: str, system: odq.System) -> None:
    system.publish_many([NewMessage(b"before")] * 5)
    frame = read(spark, root)
    first = frame.count()
    system.publish_many([NewMessage(b"after")] * 5)

    assert (first, read(spark, root).count()) == (5, 10)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"table": "orders"}, "no table 'orders'"),
        ({"columns": "colour"}, "no column 'colour'"),
        ({"colums": "payload"}, "no option 'colums'"),
        ({"rowsPerPartition": "many"}, "rowsPerPartition is 'many'"),
    ],
)
def test_what_can_not_be_read_is_said(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], reason: str
) -> None:
    with pytest.raises(PySparkException, match=reason):
        read(spark, f"file://{tmp_path}/root", **options).collect()


def test_a_root_that_nobody_served_has_messages_and_no_queues(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = f"file://{tmp_path}/root"
    bulk = spark.range(0, 10, 1, 1).selectExpr("string(id) AS payload")
    bulk.write.format("opendata_queue").mode("append").option("path", root).save()

    assert read(spark, root).count() == 10
    assert read(spark, root, "queues").collect() == []


def test_a_schema_chooses_columns_and_can_not_change_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = f"file://{tmp_path}/root"
    with odq.open(root) as system:
        system.publish(b"p")
        reader = spark.read.format("opendata_queue").option("path", root)

        assert reader.schema("payload binary").load().collect() == [Row(payload=bytearray(b"p"))]
        with pytest.raises(PySparkException, match=r"message_id.*is bigint, not string"):
            reader.schema("message_id string").load().collect()


def test_large_shards_are_cut_and_small_ones_put_together() -> None:
    ranges = [ShardRange(shard=s, first=0, end=n) for s, n in ((0, 25), (1, 3), (2, 4), (3, 8))]

    groups = grouped(ranges, 10)

    assert [[(one.shard, one.first, one.end) for one in group] for group in groups] == [
        [(0, 0, 10)],
        [(0, 10, 20)],
        [(0, 20, 25), (1, 0, 3), (2, 0, 2)],
        [(2, 2, 4), (3, 0, 8)],
    ]


# --- consuming what Spark wrote -------------------------------------------------------------------


def test_a_broker_that_runs_all_along_hands_out_what_spark_appends(
    spark: SparkSession, root: str, system: odq.System, tmp_path: Path
) -> None:
    system.create_queue("emea", filter="region = 'emea'")
    system.create_queue("all", filter="")
    bulk = spark.range(0, 300, 1, 3).selectExpr(
        "concat('row-', id) AS payload", "if(id % 3 = 0, 'emea', 'apj') AS region"
    )
    writer = bulk.write.format("opendata_queue").mode("append").option("path", root)
    for _ in range(2):  # the second run does nothing
        writer.option("headerColumns", "region").option("jobId", "j").save()

    claimed: list[odq.ClaimedMessage] = []
    while len(claimed) < 100 and (some := system.claim("emea", 100, wait_ms=30_000)):
        claimed += some
    system.ack("emea", *[one.receipt for one in claimed])
    while system.stats("all").available < 300:
        system.claim("emea", 1, wait_ms=100)

    assert sorted(one.payload or b"" for one in claimed) == sorted(
        b"row-%d" % n for n in range(0, 300, 3)
    )
    assert system.claim("emea", 1) == []
    assert (system.stats("emea").done, system.stats("all").available) == (100, 300)
    # And back: what was done, beside what it was.
    done = read(spark, root, "done").join(read(spark, root, payloads="true"), "message_id")
    assert sorted(bytes(row.payload) for row in done.collect()) == sorted(
        one.payload or b"" for one in claimed
    )
    assert read(spark, root, "backlog").count() == 300 - QueueOptions().window
    # Registered shards are part of the stream of messages, each once.
    assert read(spark, root).count() == 300
    query = (
        spark.readStream.format("opendata_queue")
        .option("path", root)
        .option("maxRowsPerTrigger", "150")
        .load()
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    assert [one.numInputRows for one in query.recentProgress] == [300]  # one bulk shard, whole
    streamed = spark.read.parquet(str(tmp_path / "out")).select("message_id")
    assert (streamed.count(), streamed.distinct().count()) == (300, 300)


# --- queues ---------------------------------------------------------------------------------------


def busy(system: odq.System) -> None:
    """Queues with messages in every state, in the window, behind it and in sealed buckets."""
    small = QueueOptions(window=4, bucket=3, max_attempts=1, lease_ms=HOUR_MS)
    system.create_queue("work/a", filter="kind = 'a' PRIORITY 7", options=small)
    system.create_queue("b", filter="kind = 'b'", options=QueueOptions(paused=True))
    system.create_queue("gone", filter="")
    messages = [NewMessage(b"%d" % n, headers={"kind": "a"}) for n in range(30)]
    messages += [NewMessage(b"later", headers={"kind": "a"}, delay_ms=HOUR_MS) for _ in range(3)]
    messages += [NewMessage(b"kept", headers={"kind": "b"}, retention_seconds=3600)]
    ids = system.publish_many(messages)
    system.history(ids[-1])
    claimed = system.claim("work/a", 16, consumer="me")
    system.ack("work/a", *[one.receipt for one in claimed[:8]])
    system.nack("work/a", *[one.receipt for one in claimed[8:13]], error="broken")
    system.delete_queue("gone")


def browsed(system: odq.System, queue: str, state: Any) -> list[odq.QueueEntry]:
    entries: list[odq.QueueEntry] = []
    after = None
    while True:
        page = system.browse(queue, state, after=after)
        entries += page.entries
        if (after := page.next) is None:
            return sorted(entries, key=lambda entry: entry.message_id)


def test_every_table_says_what_the_engine_says(
    spark: SparkSession, root: str, system: odq.System
) -> None:
    busy(system)

    queues = {row.queue: row for row in read(spark, root, "queues").collect()}
    assert sorted(queues) == sorted(system.list_queues())
    for name, row in queues.items():
        told, stats = system.get_queue(name), system.stats(name)
        assert row["filter"] == told.filter
        for option in QueueOptions.__slots__:
            assert row[option] == getattr(told.options, option)
        for count in ("available", "delayed", "in_flight", "done", "failed", "expired"):
            assert row[count] == getattr(stats, count)

    def stored(table: str, *times: str) -> list[dict[str, Any]]:
        frame = read(spark, root, table)
        for name in times:
            frame = frame.withColumn(name, F.unix_millis(name))
        return as_dicts(frame.orderBy("queue", "message_id").collect())

    for name in queues:
        waiting = browsed(system, name, "available")
        held = browsed(system, name, "in_flight")
        active = [
            row
            for row in stored("active", "visible_at", "expires_at", "claimed_at", "lease_deadline")
            if row["queue"] == name
        ]
        backlog = [
            row | {"state": "available", "claimed_at": None, "lease_deadline": None}
            for row in stored("backlog", "visible_at", "expires_at")
            if row["queue"] == name
        ]
        assert sorted(active + backlog, key=lambda row: row["message_id"]) == sorted(
            [
                {
                    "queue": name,
                    "message_id": one.message_id,
                    "state": one.state,
                    "priority": one.priority,
                    "attempts": one.attempts,
                    "visible_at": one.visible_at_ms,
                    "expires_at": one.expires_at_ms if one.state == "available" else None,
                    "claimed_at": one.claimed_at_ms,
                    "lease_deadline": one.lease_deadline_ms,
                }
                for one in waiting + held
            ],
            key=lambda row: row["message_id"],
        )
    assert stored("backlog"), "some messages must be behind the window"
    assert [
        (row["message_id"], row["visible_at"], row["priority"], row["attempts"])
        for row in stored("scheduled", "visible_at")
    ] == [
        (one.message_id, one.visible_at_ms, one.priority, one.attempts)
        for one in browsed(system, "work/a", "delayed")
    ]
    assert [
        (row["queue"], row["message_id"], row["done_at"], row["attempts"])
        for row in stored("done", "done_at")
    ] == [
        ("work/a", one.message_id, one.finished_at_ms, one.attempts)
        for one in browsed(system, "work/a", "done")
    ]
    assert [
        (row["message_id"], row["failed_at"], row["attempts"], row["consumer"], row["error"])
        for row in stored("failed", "failed_at")
    ] == [
        (one.message_id, one.finished_at_ms, one.attempts, one.consumer, one.error)
        for one in browsed(system, "work/a", "failed")
    ]
    attempts = read(spark, root, "attempts").collect()
    assert len(attempts) == 16
    for row in attempts:
        history = system.history(row.message_id)
        assert history is not None
        assert row.consumers == list(history.consumers)


@contextlib.contextmanager
def traffic(system: odq.System) -> Iterator[Counter[str]]:
    """A publisher and two consumers at work on queues ``live`` and ``flaky``, and what they did."""
    over, done = threading.Event(), Counter[str]()
    small = QueueOptions(window=WINDOW, bucket=4, max_attempts=2, backoff_ms=0, lease_ms=HOUR_MS)
    for name in ("live", "flaky"):
        system.create_queue(name, filter=f"kind = '{name}'", options=small)

    def publish() -> None:
        while not over.is_set():
            kinds = ("live", "flaky") * 5
            system.publish_many([NewMessage(b"x", headers={"kind": kind}) for kind in kinds])
            done["published"] += len(kinds)

    def consume(queue: str) -> None:
        while not over.is_set():
            receipts = [one.receipt for one in system.claim(queue, AT_ONCE, wait_ms=50)]
            if queue == "flaky" and receipts:
                system.nack(queue, *receipts[:2], error="meant to fail")
                receipts = receipts[2:]
            if receipts:
                system.ack(queue, *receipts)
                done[queue] += len(receipts)

    threads = [threading.Thread(target=publish)]
    threads += [threading.Thread(target=consume, args=(name,)) for name in ("live", "flaky")]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_every_table_is_exact_while_others_publish_and_consume(
    spark: SparkSession, root: str, system: odq.System
) -> None:
    busy(system)
    quiet = ("work/a", "b")
    tables = ("messages", "done", "failed", "active", "backlog", "scheduled", "attempts", "queues")
    first = min(row.message_id for row in read(spark, root).collect())
    with traffic(system) as done:
        before = done.copy()
        rows = {
            table: [row.asDict() for row in read(spark, root, table).collect()] for table in tables
        }
        assert all(done[name] > before[name] for name in ("published", "live", "flaky"))

    def of(table: str, *queues: str, **chosen: str) -> list[int]:
        return sorted(
            one["message_id"]
            for one in rows[table]
            if one["queue"] in queues and all(one[key] == chosen[key] for key in chosen)
        )

    # What nobody touches is exactly what the engine says.
    for name in quiet:
        for table, state in (("done", "done"), ("failed", "failed"), ("scheduled", "delayed")):
            assert of(table, name) == [one.message_id for one in browsed(system, name, state)]
        waiting = [one.message_id for one in browsed(system, name, "available")]
        assert sorted(of("active", name, state="available") + of("backlog", name)) == waiting
        held = [one.message_id for one in browsed(system, name, "in_flight")]
        assert of("active", name, state="in_flight") == held
    told = {one["queue"]: one for one in rows["queues"]}
    for name in quiet:
        stats = system.stats(name)
        for count in ("available", "delayed", "in_flight", "done", "failed", "expired"):
            assert told[name][count] == getattr(stats, count)
    # What is being worked on is of one moment: nothing twice, no gap, counts that add up.
    ids = [one["message_id"] for one in rows["messages"]]
    assert sorted(ids) == list(range(first, first + len(ids)))
    for table in ("done", "failed", "active", "backlog", "scheduled"):
        keys = [(one["queue"], one["message_id"]) for one in rows[table]]
        assert len(set(keys)) == len(keys)
    # Consumed in order, by one consumer: in each moment those that are done come first, then those
    # in flight, then those at hand, then those behind them. In no table there is one missing.
    routed = sorted(live_ids(system))
    finished = of("done", "live")
    assert finished
    assert finished == routed[: len(finished)]
    in_flight, at_hand = (of("active", "live", state=one) for one in ("in_flight", "available"))
    assert in_flight + at_hand == slice_from(routed, in_flight + at_hand)
    assert len(in_flight) <= AT_ONCE
    assert of("backlog", "live") == slice_from(routed, of("backlog", "live"))
    # Whoever was claimed has a row that says by whom, up to the last one and no further.
    attempts = {one["message_id"]: one["consumers"] for one in rows["attempts"]}
    claimed = [one for one in routed if one in attempts]
    assert claimed
    assert claimed == routed[: len(claimed)]
    unchanged = claimed + [one.message_id for one in browsed(system, "work/a", "in_flight")]
    for message_id in unchanged[:: max(1, len(unchanged) // 50)]:
        history = system.history(message_id)
        assert history is not None
        assert attempts[message_id] == list(history.consumers)


def slice_from(routed: list[int], found: list[int]) -> list[int]:
    """As many as were found of what was routed, from the first one of them on."""
    start = routed.index(found[0]) if found else 0
    return routed[start : start + len(found)]


def live_ids(system: odq.System) -> list[int]:
    """All that was ever routed to the queue ``live``."""
    states = ("done", "available", "in_flight", "delayed", "failed")
    return [one.message_id for state in states for one in browsed(system, "live", state)]


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_of_messages_goes_on_where_it_ended(
    spark: SparkSession, root: str, system: odq.System, tmp_path: Path
) -> None:
    sizes: list[list[int]] = []

    def run(**options: str) -> list[int]:
        query = (
            spark.readStream.format("opendata_queue")
            .option("path", root)
            .options(**options)
            .load()
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)
        assert query.exception() is None
        sizes.append([one.numInputRows for one in query.recentProgress])
        return sorted(row.message_id for row in spark.read.parquet(str(tmp_path / "out")).collect())

    first = system.publish_many([NewMessage(b"%d" % n) for n in range(25)])
    assert run(maxRowsPerTrigger="10") == first
    second = system.publish_many([NewMessage(b"%d" % n) for n in range(5)])
    assert run(maxRowsPerTrigger="10") == first + second
    assert run() == first + second
    # Having found nothing is reported as well.
    assert sizes == [[10, 10, 5], [5], [0]]


# --- filters --------------------------------------------------------------------------------------


@given(
    st.lists(filters(), min_size=10, max_size=30),
    st.lists(
        st.tuples(
            st.none() | headers_of_messages,
            st.tuples(st.integers(0, 2**63 - 1), *[st.integers(-(2**63), 2**63 - 1)] * 3),
        ),
        min_size=1,
        max_size=20,
    ),
)
@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_filter_in_spark_agrees_with_the_compiled_one(
    spark: SparkSession,
    parsed: list[Filter],
    messages: list[tuple[dict[str, str] | None, tuple[int, int, int, int]]],
) -> None:
    schema = "headers map<string,string>, id long, created long, received long, visible long"
    frame = spark.createDataFrame([(headers, *sys) for headers, sys in messages], schema)

    rows = frame.select(
        *(
            filter_column(
                one,
                message_id="id",
                created_at_ms=F.col("created"),
                received_at_ms=F.col("received"),
                visible_at_ms=F.col("visible"),
            )
            for one in parsed
        )
    ).collect()

    for row, (headers, sys) in zip(rows, messages, strict=True):
        for answer, one in zip(row, parsed, strict=True):
            assert answer is one.evaluate(headers or {}, SystemFields(*sys)), (one.text, headers)


def test_a_filter_chooses_the_messages_that_its_queue_got(
    spark: SparkSession, root: str, system: odq.System
) -> None:
    text = "region = 'emea' AND price >= 10 AND sys.created_at > 0"
    system.create_queue("q", filter=text)
    ids = system.publish_many(
        [
            NewMessage(b"", headers={"region": region, "price": price})
            for region in ("emea", "apj")
            for price in ("9", "10", "cheap", "1e3")
        ]
    )
    system.history(ids[-1])

    chosen = read(spark, root).where(filter_column(text)).collect()

    assert [row.message_id for row in chosen] == [one.message_id for one in system.peek("q", 10)]
