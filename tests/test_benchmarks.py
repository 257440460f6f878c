"""The benchmarks run to their end. How fast they are is not asserted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def run(
    benchmark: str, *arguments: str | Path, quick: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a script of the folder, or with ``-m`` a module."""
    path = os.pathsep.join(str(REPOSITORY / part) for part in (".", "encodings", "compactor"))
    return subprocess.run(
        [sys.executable, *_what(benchmark), *["--quick"] * quick, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def _what(benchmark: str) -> list[str]:
    if benchmark.endswith(".py"):
        return [str(REPOSITORY / "benchmarks" / benchmark)]
    return ["-m", benchmark]


def test_publishing_is_measured_next_to_the_limit_and_its_requests_are_counted(
    tmp_path: Path,
) -> None:
    shortest = ("--seconds", "0.01", "--rounds", "1")
    done = run("publish.py", *shortest, "--root", tmp_path, quick=False)

    assert done.returncode == 0, done.stderr
    for title in ("raw rows x500", "publish_many x500", "publish, 64 at once", "Requests to S3"):
        assert title in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_life_cycle_is_measured_and_every_message_is_accounted_for(tmp_path: Path) -> None:
    done = run("lifecycle.py", "--depth", "2000", "--seconds", "0.1", "--root", str(tmp_path))

    assert done.returncode == 0, done.stderr
    for title in ("Claim and ack", "Opened by", "publish to ack", "Milliseconds", "Targets"):
        assert title in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_time_of_the_event_loop_is_told_by_task(tmp_path: Path) -> None:
    done = run("event_loop.py", "--batches", "3", "--root", tmp_path, quick=False)

    assert done.returncode == 0, done.stderr
    for title in ("publish and route ×100, 300", "claim and ack ×100, 2,300", "caller", "commit"):
        assert title in done.stdout
    assert not list(tmp_path.iterdir())


def test_what_a_bulk_job_does_to_others_is_measured(tmp_path: Path) -> None:
    shortest = ("--rows", "3000", "--shards", "2", "--seconds", "0.1")
    done = run("routing.py", *shortest, "--root", tmp_path, quick=False)

    assert done.returncode == 0, done.stderr
    for title in ("3,000 rows routed alone", "µs of CPU", "while routing", "publish", "claim"):
        assert title in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["http.py", "publish.py"])
def test_a_file_called_http_hides_nothing_from_the_scripts_beside_it(script: str) -> None:
    done = run(script, "--help")

    assert done.returncode == 0, done.stderr


def test_retention_is_measured_and_what_must_survive_is_counted(tmp_path: Path) -> None:
    done = run("retention.py", "--stores", "file", "--only", "space,requests", "--root", tmp_path)

    assert done.returncode == 0, done.stderr
    for title in ("Space", "Requests of a pass", "Targets"):
        assert title in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_broker_is_measured_next_to_the_engine(tmp_path: Path) -> None:
    done = run("benchmarks.http", "--root", str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert "claim+ack" in done.stdout
    assert not list(tmp_path.iterdir())


def test_spark_is_measured_next_to_the_engine() -> None:
    done = run("benchmarks.spark")

    assert done.returncode == 0, done.stderr
    assert "S3 requests per 1,000 rows" in done.stdout
