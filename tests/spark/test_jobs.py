"""``odq spark append`` and ``odq spark backtest``: what they do, and what they say in a line."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

import opendata_queue as odq
from opendata_queue import NewMessage
from opendata_queue.cli import app
from opendata_queue.model.errors import StoreAccessError
from opendata_queue.model.ids import FIRST_BULK_SHARD
from opendata_queue.root.commit_files import CommitFiles, CommittedShard
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.spark import append as append_job
from opendata_queue.spark import backtest as backtest_module
from opendata_queue.spark.backtest import backtest
from opendata_queue.spark.sessions import job_session
from opendata_queue.store import Objects, StoreSettings
from tests.spark.bulk_log import committed, payloads
from tests.spark.driver import named
from tests.support.bulk_jobs import commit


@pytest.fixture
def file_root(tmp_path: Path) -> str:
    return f"file://{tmp_path}/root"


@pytest.fixture
def system(file_root: str) -> Iterator[odq.System]:
    with odq.open(file_root) as system:
        yield system


def test_a_master_is_set_only_where_one_was_named(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``spark-submit`` has chosen it, and Spark's own default is this machine."""
    named: list[str] = []
    real = SparkSession.Builder.master

    def noted(builder: SparkSession.Builder, master: str) -> SparkSession.Builder:
        named.append(master)
        return real(builder, master)

    monkeypatch.setattr(SparkSession.Builder, "master", noted)
    monkeypatch.delenv("SPARK_ENV_LOADED", raising=False)

    assert job_session("without") is job_session("with", "local[2]") is spark
    assert named == ["local[2]"]


# --- append ---------------------------------------------------------------------------------------


def run_job(*arguments: str) -> tuple[int, dict[str, Any]]:
    """What the job returns and prints, in the session that is there."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = append_job.main([*arguments, "--json"])
    return code, json.loads(printed.getvalue() or "{}")


def test_the_job_appends_parquet_with_chosen_columns(
    spark: SparkSession, file_root: str, tmp_path: Path
) -> None:
    spark.range(0, 10, 1, 2).selectExpr(
        "concat('body-', id) AS body", "if(id < 5, 'emea', NULL) AS region", "id * 2 AS price"
    ).write.parquet(str(tmp_path / "in"))
    arguments = (
        str(tmp_path / "in"), "--store", file_root, "--payload", "body", "--header", "region",
        "--header", "price", "--retention-seconds", "60", "--job", "orders",
    )  # fmt: skip

    code, summary = run_job(*arguments)
    again, repeated = run_job(*arguments)

    found = sorted(committed(file_root), key=lambda one: one.payload or b"")
    assert (code, again) == (0, 0)
    assert [one.payload for one in found] == [b"body-%d" % n for n in range(10)]
    assert found[1].headers == (("region", "emea"), ("price", "2"))
    assert found[7].headers == (("price", "14"),)
    assert {one.retention_seconds for one in found} == {60}
    assert summary["rows"] == repeated["rows"] == 10
    assert (summary["rejected"], summary["repeated"], repeated["repeated"]) == (0, False, True)
    assert summary["bytes"] > 0
    assert summary["shards"] >= 1


def test_a_job_whose_commit_was_removed_since_is_recognised(
    spark: SparkSession, file_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named(spark, "row", 10, 1).write.parquet(str(tmp_path / "in"))
    arguments = (str(tmp_path / "in"), "--store", file_root, "--job", "orders")
    code, first = run_job(*arguments)
    with odq.open(file_root) as system:
        system.create_queue("all", filter="", start="beginning")
        assert len(system.claim("all", 100, wait_ms=60_000)) == 10
    # As retention does it, after seven days or 900 other commits.
    objects = Objects.open(file_root, StoreSettings())
    asyncio.run(CommitFiles(objects).remove("orders"))

    again, repeated = run_job(*arguments)
    printed = append_job.main(list(arguments)), capsys.readouterr().out

    assert (code, again, printed[0]) == (0, 0, 0)
    assert (first["rows"], first["repeated"]) == (10, False)
    assert (repeated["rows"], repeated["bytes"], repeated["repeated"]) == (None, None, True)
    assert "job orders was committed before: nothing was added" in printed[1]
    assert "not known any more" in printed[1]
    assert asyncio.run(CommitFiles(objects).jobs()) == []
    assert len(asyncio.run(ShardFiles(objects).bulk_shards())) == 1


def test_the_summary_says_how_many_rows_had_expired_before_the_commit(
    spark: SparkSession, file_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named(spark, "row", 10, 1).write.parquet(str(tmp_path / "in"))
    # A job that took so long was run before, and is run again.
    shards = [
        CommittedShard(
            shard=FIRST_BULK_SHARD + messages,
            messages=messages,
            next_sequence=messages,
            bytes=1,
            expires_from=expires_from,
            expires_at=0,
        )
        for messages, expires_from in ((2, 999), (3, 1_000), (4, 0))
    ]
    asyncio.run(commit(file_root, "orders", shards, now_ms=1_000))
    arguments = [str(tmp_path / "in"), "--store", file_root, "--job", "orders"]

    code, summary = run_job(*arguments)
    printed = append_job.main(arguments), capsys.readouterr().out

    assert (code, printed[0]) == (0, 0)
    assert (summary["rows"], summary["expired"]) == (9, 2)
    assert "expired  up to 2: their retention ended before the commit" in printed[1]


def test_the_job_takes_json_lines_csv_and_tables(
    spark: SparkSession, file_root: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"payload":"json","kind":"x"}\n')
    (tmp_path / "b.csv").write_text("payload,kind\ncsv,y\n")
    spark.createDataFrame([(7, "z")], "number int, kind string").createOrReplaceTempView("numbers")

    codes = [
        run_job(str(tmp_path / "a.jsonl"), "--store", file_root, "--format", "json")[0],
        run_job(str(tmp_path / "b.csv"), "--store", file_root, "--format", "csv")[0],
        run_job("numbers", "--store", file_root, "--format", "table")[0],
    ]

    assert codes == [0, 0, 0]
    assert payloads(file_root) == Counter([b"json", b"csv", b'{"number":7,"kind":"z"}'])


def test_the_job_sets_bad_rows_aside_or_fails_with_their_reason(
    spark: SparkSession, file_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text(
        "payload,at\none,2026-01-01T00:00:00Z\ntwo,yesterday\n,2026-01-01T00:00:00Z\n"
    )
    arguments = (
        str(tmp_path / "a.csv"), "--store", file_root, "--format", "csv", "--created-at", "at"
    )  # fmt: skip

    failed, _ = run_job(*arguments)
    reason = capsys.readouterr().err
    code, summary = run_job(*arguments, "--rejects", f"file://{tmp_path}/bad")

    assert failed == 1
    assert "row 1 of partition 0: created_at is 'yesterday'" in reason
    assert len(reason.splitlines()) == 1
    assert (code, summary["rows"], summary["rejected"]) == (0, 1, 2)
    assert payloads(file_root) == Counter([b"one"])


@pytest.mark.parametrize(
    ("format", "text", "arguments", "bad"),
    [
        (
            "csv",
            "body,ttl,at\nhello,60,\nworld,abc,\nlater,,\nnever,5,soon\n",
            ("--payload", "body", "--retention-seconds", "ttl", "--visible-at", "at"),
            [
                (1, "retention_seconds is 'abc', not a whole number of seconds"),
                (3, "visible_at is 'soon', not a time like 2026-01-31T12:00:00Z"),
            ],
        ),
        ("csv", "body,n\nhello,1\nbroken,2,MORE,FIELDS\nlater,3\nless\n", (), [(1, ""), (3, "")]),
        ("csv", "body,n\nhello,1\nbroken,2,MORE\nlater,3\n", ("--payload", "body"), [(1, "")]),
        ("json", '{"body":"hello"}\n{broken\n{"body":"later"}\n', (), [(1, "")]),
        (
            "json",
            '{"body":"hello","ttl":7}\n{"body":"x","ttl":1e30}\n{"body":"later","ttl":1.5}\n',
            ("--payload", "body", "--retention-seconds", "ttl"),
            [(1, "retention_seconds is '1.0E30', not a whole number of seconds")],
        ),
    ],
    ids=["no numbers or times", "other columns", "unread columns", "broken JSON", "too large"],
)
def test_rows_that_can_not_be_read_are_bad_rows_and_the_others_are_appended(
    spark: SparkSession,
    file_root: str,
    tmp_path: Path,
    format: str,
    text: str,
    arguments: tuple[str, ...],
    bad: list[tuple[int, str]],
) -> None:
    (tmp_path / "in").write_text(text)
    given = (str(tmp_path / "in"), "--store", file_root, "--format", format, *arguments)

    code, summary = run_job(*given, "--job", "j", "--rejects", f"file://{tmp_path}/bad")

    rejected = [
        json.loads(line)
        for path in (tmp_path / "bad" / "j").glob("part-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert [one["row"] for one in rejected] == [row for row, _ in bad]
    lines = text.splitlines()[1:] if format == "csv" else text.splitlines()
    for one, (row, reason) in zip(rejected, bad, strict=True):
        assert one["reason"].startswith(reason or "Spark could not parse it")
        assert one["columns"]["_corrupt_record"] == (None if reason else lines[row])
    assert (code, summary["rows"], summary["rejected"]) == (0, 2, len(bad))
    found = "".join((one.payload or b"").decode() for one in committed(file_root))
    assert "hello" in found
    assert "later" in found
    assert "_corrupt_record" not in found


def test_a_file_in_which_nothing_can_be_parsed_is_refused(
    spark: SparkSession, file_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.json").write_text("no JSON\nat all\n")

    code, _ = run_job(str(tmp_path / "in.json"), "--store", file_root, "--format", "json")

    assert code == 2
    assert "the input has no columns: is it json?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--payload", "body"), "--payload: the input has no column 'body'; it has value"),
        (("--payload-uri", "uri"), "--payload-uri: the input has no column 'uri'; it has value"),
        (("--headers", "h"), "--headers: the input has no column 'h'"),
        (("--created-at", "at"), "--created-at: the input has no column 'at'"),
        (("--visible-at", "at"), "--visible-at: the input has no column 'at'"),
        (("--retention-seconds", "1d"), "--retention-seconds: the input has no column '1d'"),
        (("--header", "region"), "--header: the input has no column 'region'"),
        (("--header", "value", "--header", "value"), "--header value is given twice"),
        (("--job", "a b"), "job is 'a b'"),
    ],
)
def test_the_job_says_what_is_wrong_with_its_arguments(
    spark: SparkSession,
    file_root: str,
    tmp_path: Path,
    arguments: tuple[str, ...],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in.csv").write_text("value\n1\n")
    given = [str(tmp_path / "in.csv"), "--format", "csv", "--store", file_root, *arguments]

    assert append_job.main(given) == 2

    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("odq: ")
    assert reason in said[0]


def test_a_column_may_have_a_dot_in_its_name_and_no_known_name_as_a_header(
    spark: SparkSession, file_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.csv").write_text("a.b,c.d,payload\nbody,head,x\n")
    given = (str(tmp_path / "in.csv"), "--format", "csv", "--store", file_root)

    code, _ = run_job(*given, "--payload", "a.b", "--header", "c.d")
    wrong, _ = run_job(*given, "--header", "payload")

    (message,) = committed(file_root)
    assert (code, message.payload, message.headers) == (0, b"body", (("c.d", "head"),))
    assert wrong == 2
    assert "rename 'payload'" in capsys.readouterr().err


def test_the_commands_of_odq_reach_the_jobs() -> None:
    runner = CliRunner()

    shown = runner.invoke(app, ["spark", "append", "--help"])
    wrong = runner.invoke(app, ["spark", "append", "x", "--store", "", "--job", "j"])

    assert (shown.exit_code, wrong.exit_code) == (0, 2)
    assert "--rejects URL" in shown.output


# --- backtest -------------------------------------------------------------------------------------


def test_a_backtest_shows_what_a_new_queue_would_have_received(
    spark: SparkSession, file_root: str, system: odq.System
) -> None:
    system.create_queue("dear", filter="price > 6")
    system.create_queue("other", filter="region = 'apj'")
    ids = system.publish_many(
        [
            NewMessage(b"", headers={"region": "emea" if n % 2 else "apj", "price": str(n)})
            for n in range(10)
        ]
    )

    found = backtest(spark, file_root, "region = 'emea'", since_ms=0, examples=2)
    later = backtest(spark, file_root, "region = 'emea'", since_ms=2**50)

    assert (found.looked_at, found.matched) == (10, 5)
    assert sum(count for _, count in found.hours) == 5
    assert found.overlap == {"dear": 2, "other": 0}
    assert [one["message_id"] for one in found.examples] == [ids[9], ids[7]]
    assert (later.looked_at, later.matched, later.hours) == (0, 0, ())


def test_a_backtest_reads_every_message_once(
    spark: SparkSession, file_root: str, system: odq.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.publish_many([NewMessage(b"", headers={"n": str(n)}) for n in range(20)])
    read_rows = spark.sparkContext.accumulator(0)

    def counted(row: Any) -> Any:
        read_rows.add(1)
        return row

    real = backtest_module._read

    def counting(session: SparkSession, url: str, table: str) -> DataFrame:
        frame = real(session, url, table)
        if table != "messages":
            return frame
        return session.createDataFrame(frame.rdd.map(counted), frame.schema)

    monkeypatch.setattr(backtest_module, "_read", counting)

    found = backtest(spark, file_root, "n >= 15", examples=3)
    assert read_rows.value == 20
    none = backtest(spark, file_root, "n >= 15", examples=0)

    assert (found.matched, none.matched) == (5, 5)
    assert [one["headers"] for one in found.examples] == [{"n": n} for n in ("19", "18", "17")]
    assert none.examples == ()


def test_a_root_that_is_not_there_is_no_empty_one(spark: SparkSession, tmp_path: Path) -> None:
    typo = f"file://{tmp_path}/typo"
    reader = spark.read.format("opendata_queue").option("path", typo)

    with pytest.raises(StoreAccessError, match=r"there is no root at file://.*/typo"):
        backtest(spark, typo, "n = 1")
    for table in ("messages", "queues"):
        with pytest.raises(PySparkException, match=r"there is no root at file://.*/typo"):
            reader.option("table", table).load().count()
    asked = CliRunner().invoke(app, ["spark", "backtest", "--store", typo, "--filter", "n = 1"])

    assert asked.exit_code == 1
    assert f"there is no root at {typo}" in asked.stderr
    assert not (tmp_path / "typo").exists()


def test_the_command_shows_a_backtest(spark: SparkSession, tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    with odq.open(root) as system:
        system.create_queue("other", filter="region = 'apj'")
        system.publish(b"", headers={"region": "emea"})
        system.create_queue("late", filter="region = 'emea'")
        command = ["spark", "backtest", "--store", root, "--filter", "region = 'emea'"]

        shown = CliRunner().invoke(app, [*command, "--since", "1h"])
        printed = CliRunner().invoke(app, [*command, "--since", "1970-01-01T00:00:00Z", "--json"])
        wrong = CliRunner().invoke(app, [*command, "--since", "1970-01-01T00:00:00"])

    assert (shown.exit_code, printed.exit_code, wrong.exit_code) == (0, 0, 2)
    assert "region = 'emea'  1        1" in shown.output
    # Of a queue that came later its filter is meant, not what it got.
    assert ["queue", "matches", "as", "well"] in [
        line.split() for line in shown.output.splitlines()
    ]
    assert ["late", "1"] in [line.split() for line in shown.output.splitlines()]
    answer = json.loads(printed.output)
    assert (answer["matched"], answer["overlap"]) == (1, {"late": 1, "other": 0})
    assert answer["examples"][0]["headers"] == {"region": "emea"}
