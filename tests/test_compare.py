"""The program that compares: its adapters on real systems, its checks, and its report."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import redis_server
from benchmarks.compare import __main__ as program
from benchmarks.compare import report
from benchmarks.compare.__main__ import that_matter
from benchmarks.compare.cells import Cell, Outcome
from benchmarks.compare.content import (
    HEADERS,
    WrongMessages,
    boxed,
    check_losses,
    check_numbers,
    opened,
    payload_of,
    payloads,
    unboxed,
)
from benchmarks.compare.contract import Received
from benchmarks.compare.cost import (
    Scenario,
    Spent,
    _publish,
    cost_lines,
    cost_targets,
    sqs_dollars_per_million,
)
from benchmarks.compare.growth import growth_lines, growth_targets
from benchmarks.compare.processes import ProcessFailed, expect_ready, reason_of
from benchmarks.compare.runner import Comparison, Measured, Plan, Runner
from benchmarks.compare.servers import NotHere, give_to, lacking, listens, server
from benchmarks.compare.systems import KEYS, find
from benchmarks.compare.workloads import WORKLOADS
from opendata_queue import NewMessage

REPOSITORY = Path(__file__).parents[1]
# A system of ours in another dress, or slow to start: `make bench` runs them all.
CONTENDERS = [key for key in KEYS if key not in {"odq-nosync", "odq-http-16", "litequeue-normal"}]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters set variables, as those of a process of its own may."""
    for name in ("AWS_ENDPOINT", "ODQ_BATCH_WRITER"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that others may come to, as that of a run: some servers do not run as root."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o711)
        yield Path(made)


@pytest.mark.parametrize("key", CONTENDERS)
async def test_an_adapter_publishes_counts_hands_out_and_finishes_messages(
    key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = find(key)
    if (missing := system.missing()) is not None:
        pytest.skip(missing)
    with system.serve(folder / "system", False) as address:
        for name in filter(str.isupper, address):  # a variable that the adapter sets
            monkeypatch.setenv(name, os.environ.get(name, ""))
        async with system.connect(address, "w4", 1) as (client,):
            await client.publish(payloads(0, 1))
            await client.publish(payloads(1, 3))
            if "W4" not in system.workloads:
                assert await client.depth() == 4
                return
            await client.fill(payloads(4, 5))
            async with asyncio.timeout(120):
                while await client.depth() < 9:  # of those who fill without waiting
                    await asyncio.sleep(0.01)

            found: list[Received] = []
            while len(found) < 7:
                got = await client.receive(7 - len(found), wait_ms=2_000)
                await client.ack([one.handle for one in got])
                found += got

            assert sorted(opened(one.payload, one.headers)[0] for one in found) == list(range(7))
            assert await client.depth() == 2
        async with system.connect(address, "w4", 1) as (client,):
            assert await client.depth() == 2


@pytest.mark.parametrize(
    ("key", "client"),
    [
        ("postgres", r"; psycopg 3\.\S+ \((binary|c)\)$"),
        ("redis-always", r"; redis-py \S+ with hiredis \S+$"),
        ("rabbitmq", r"; pika \S+ \(pure Python\)$"),
        ("nats", r"; nats-py \S+ \(pure Python\)$"),
        ("beanstalkd", r"; greenstalk \S+ \(pure Python\)$"),
        ("queue-json", r", obstore \S+ \(Rust\), json$"),
        ("queue-json-fast", r", obstore \S+ \(Rust\), msgspec \S+ \(C\)$"),
        ("odq-http-1", r"; aiohttp \S+ \(C\), msgspec \S+ \(C\)$"),
    ],
)
def test_a_version_says_through_which_client_and_whether_it_is_compiled(
    key: str, client: str
) -> None:
    system = find(key)
    if (missing := system.missing()) is not None:
        pytest.skip(missing)

    assert re.search(client, system.version())


@pytest.mark.parametrize("key", ["litequeue", "persist-queue", "huey"])
def test_many_that_connect_to_a_new_file_at_once_do_not_lock_each_other_out(
    key: str, tmp_path: Path
) -> None:
    async def connected(folder: Path) -> int:
        async with find(key).connect({"folder": str(folder)}, "w4", 1) as (client,):
            return await client.depth()

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for number in range(10):
            (folder := tmp_path / str(number)).mkdir()
            found = [threads.submit(asyncio.run, connected(folder)) for _ in range(8)]
            assert [one.result() for one in found] == [0] * 8


def test_cells_run_in_fresh_processes_and_come_out_as_a_table(tmp_path: Path) -> None:
    said: list[str] = []
    plan = Plan(
        systems=["odq", "litequeue"],
        workloads=["W2", "W5", "W6"],
        rounds=1,
        seconds=0.05,
        root=tmp_path,
        say=said.append,
        messages=300,
    )

    found = Runner(plan).run()

    assert not [one.failure for one in found.cells.values() if one.failure], said
    found = Comparison.from_json(json.loads(json.dumps(found.to_json())))
    assert set(found.cells) == {(s, w) for s in plan.systems for w in plan.workloads}
    ours, theirs = report.comparison_table(found)[2:]
    assert ours.startswith("| OpenData Queue, file |")
    assert "†" in theirs  # it takes messages one by one
    assert {one.what for one in report.targets(found)} == {"W2", "W5 p50"}


def test_a_contender_whose_publishes_become_dearer_has_to_publish_all(tmp_path: Path) -> None:
    system = find("queue-json")
    with system.serve(tmp_path, False) as address:
        cell = Cell(
            system=system,
            workload=WORKLOADS["W2"],
            address=address,
            queue="w2",
            seconds=1e-9,
        )

        assert cell.run(500).messages == 500


def test_a_contender_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: object, *_: object) -> Outcome:
        raise WrongMessages("message 3 was handed out twice")

    monkeypatch.setattr("benchmarks.compare.cells.Cell.run", run)
    plan = Plan(
        systems=["litequeue", "huey"],
        workloads=["W2"],
        rounds=1,
        seconds=0.01,
        root=tmp_path,
        say=lambda text: None,
    )

    found = Runner(plan).run()

    assert {one.failure for one in found.cells.values()} == {"message 3 was handed out twice"}
    assert "failed" in report.comparison_table(found)[2]


def test_a_contender_that_can_not_run_in_a_folder_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(folder: Path, relaxed: bool) -> Any:
        raise NotHere("its user can't come to it")

    system = dataclasses.replace(find("huey"), serve=serve)
    monkeypatch.setattr("benchmarks.compare.runner.find", lambda key: system)
    plan = Plan(
        systems=["huey"],
        workloads=["W2", "W6"],
        rounds=2,
        seconds=0.01,
        root=tmp_path,
        say=lambda text: None,
    )

    found = Runner(plan).run()

    assert found.skipped == {"huey": "its user can't come to it"}
    assert not found.cells
    assert not found.versions


def test_a_contender_whose_version_can_not_be_told_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version() -> str:
        raise IndexError("it said nothing")

    systems = {"huey": dataclasses.replace(find("huey"), version=version), "odq": find("odq")}
    monkeypatch.setattr("benchmarks.compare.runner.find", systems.__getitem__)
    outcome = Outcome(messages=1, unmeasured=0, seconds=1.0, percentiles_ms={})
    monkeypatch.setattr("benchmarks.compare.cells.Cell.run", lambda *_: outcome)
    plan = Plan(
        systems=["huey", "odq"],
        workloads=["W2"],
        rounds=1,
        seconds=0.01,
        root=tmp_path,
        say=lambda text: None,
    )

    found = Runner(plan).run()

    assert found.failures() == {("huey", "it said nothing"): ["W2"]}
    assert found.cell("odq", "W2") is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_folders_of_others_are_not_opened_to_the_user_of_a_server(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (folder := tmp_path / "postgres").mkdir()

    with pytest.raises(NotHere, match="nobody"):
        give_to("nobody", folder)

    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_the_complaint_of_initdb_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (missing := find("postgres").missing()) is not None:
        pytest.skip(missing)
    (initdb := folder / "initdb").write_text("#!/bin/sh\necho no such locale >&2\nexit 1\n")
    initdb.chmod(0o755)
    where = "benchmarks.compare.systems.postgres.find_program"
    monkeypatch.setattr(where, lambda *_: str(initdb))

    with pytest.raises(RuntimeError, match="no such locale"):
        find("postgres").serve(folder / "system", False).__enter__()


async def test_batches_are_whole_where_a_server_sends_messages_one_by_one(folder: Path) -> None:
    system = find("rabbitmq")
    if (missing := system.missing()) is not None:
        pytest.skip(missing)
    with system.serve(folder / "system", False) as address:
        async with system.connect(address, "w4", 1) as (client,):
            await client.fill(payloads(0, 1_050))
            sizes = []
            while got := await client.receive_whole(100, wait_ms=2_000):
                sizes.append(len(got))
                await client.ack([one.handle for one in got])
                if sum(sizes) == 1_050:
                    break

    assert sizes == [100] * 10 + [50]


@pytest.mark.parametrize(
    "said", ["", "print('hello')", "import sys; sys.exit('no\\n' + 'x' * 9_999)"]
)
def test_a_process_that_is_not_ready_is_not_waited_for_for_ever(said: str) -> None:
    command = [sys.executable, "-c", said or "input()"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        with pytest.raises(ProcessFailed) as failed:
            expect_ready(process, timeout_s=60.0 if said else 0.0)
        process.kill()

    if "exit" in said:  # its lines are whole
        assert reason_of(failed.value) == "x" * 9_999
    if not said:
        assert "not ready" in str(failed.value)


def test_the_reason_of_a_failure_is_the_last_line_that_says_something() -> None:
    group = "  | Traceback\n  +-+---- 1 ----\n    | ValueError: no\n    +--------\n"

    assert reason_of(RuntimeError(group)) == "ValueError: no"
    assert reason_of(RuntimeError()) == "RuntimeError()"


@pytest.mark.parametrize(("until_s", "rounds"), [(0.0, 1), (math.inf, 3)])
def test_a_round_that_would_end_too_late_does_not_begin(
    until_s: float, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(messages=1, unmeasured=0, seconds=1.0, percentiles_ms={})
    monkeypatch.setattr("benchmarks.compare.cells.Cell.run", lambda *_: outcome)
    plan = Plan(
        systems=["huey"],
        workloads=["W1", "W2"],
        rounds=3,
        seconds=0.01,
        root=tmp_path,
        say=lambda text: None,
        until_s=until_s,
    )

    runner = Runner(plan)
    found = runner.run()

    assert runner.rounds == rounds
    assert found.cells["huey", "W1"].rates == [1.0]  # no target is about it
    assert found.cells["huey", "W2"].rates == [1.0] * rounds


def test_what_was_consumed_is_checked() -> None:
    payload = payload_of(7, 99)

    assert opened(payload, HEADERS) == (7, 99)
    assert unboxed(boxed(payload)) == (payload, HEADERS)
    check_numbers([2, 0, 1], range(3))
    check_losses(3, 2, 1)
    for broken, headers in ((payload[:-1], HEADERS), (payload[:-1] + b"!", HEADERS), (payload, {})):
        with pytest.raises(WrongMessages, match="changed"):
            opened(broken, headers)
    with pytest.raises(WrongMessages, match="twice"):
        check_numbers([0, 1, 0], range(3))
    with pytest.raises(WrongMessages, match="never published"):
        check_numbers([3], range(3))
    with pytest.raises(WrongMessages, match="are waiting"):
        check_losses(3, 1, 1)


def test_what_is_not_installed_is_a_reason_to_skip(tmp_path: Path) -> None:
    assert lacking(modules=["json"], programs={"sh": "/bin/sh"}) is None
    assert "not installed" in str(lacking(modules=["no_such_library_of_ours"]))
    assert "not on this machine" in str(lacking(programs={"odq-server": None}))


WITHOUT = """
import json, sys
for name in ("redis", "uvloop", "moto", "msgspec"):
    sys.modules[name] = None
import benchmarks.compare.__main__, benchmarks.compare.cost, benchmarks.compare.growth_worker
from benchmarks.common import run_fast
from benchmarks.compare.systems import find
async def nothing(): return "ran"
keys = ["odq", "redis-always", "odq-s3", "queue-json", "raw-compiled-s3"]
print(json.dumps([run_fast(nothing()), {key: find(key).missing() for key in keys}]))
"""


def test_libraries_that_are_missing_cost_only_the_contenders_that_need_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True
    )

    assert json.loads(done.stdout) == [
        "ran",
        {
            "odq": None,
            "redis-always": "the Python library redis is not installed",
            "odq-s3": "the Python library moto is not installed",
            "queue-json": "the Python library msgspec is not installed",
            "raw-compiled-s3": "the Python library moto is not installed",
        },
    ]


def test_a_redis_to_compare_with_is_started_as_the_contender_is(tmp_path: Path) -> None:
    if (missing := find("redis-always").missing()) is not None:
        pytest.skip(missing)
    with redis_server(tmp_path / "redis") as client:
        assert client.config_get("appendfsync") == {"appendfsync": "always"}


def test_a_server_is_stopped_with_all_that_it_has_started(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    with (
        contextlib.suppress(KeyboardInterrupt),
        server([sys.executable, "-c", child], folder=tmp_path, ready=lambda: True) as process,
    ):
        raise KeyboardInterrupt

    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no disk')"]
    with (
        pytest.raises(RuntimeError, match="no disk"),
        server(command, folder=tmp_path, ready=lambda: listens(1)),
    ):
        pass


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.compare", "--parts", "compare", "--seconds", "30"]
    command += ["--systems", "litequeue", "--workloads", "W1", "--root", str(tmp_path)]
    command += ["--output", str(output := tmp_path / "output")]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/compare/litequeue-0/*.sqlite")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for _ in range(3):  # impatience must not cut the cleaning up short
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)

    _, said = process.communicate(timeout=120)

    assert process.returncode == 130
    assert "interrupted" in said
    assert list(tmp_path.iterdir()) == [output]
    assert not list(output.iterdir())  # nothing was measured


# --- the report -----------------------------------------------------------------------------------


def measured(system: str, workload: str, *rates: float, p50: float = 1.0) -> Measured:
    percentiles = {"0.5": p50, "0.99": 9.0}
    return Measured(
        system=system,
        workload=workload,
        rates=list(rates),
        percentiles_ms=[percentiles for _ in rates],
    )


def test_targets_compare_medians_with_those_of_each_peer() -> None:
    cells = [
        measured("odq", "W2", 900, 1_000, 5_000),
        measured("postgres", "W2", 1_100, 10, 1_200),
        measured("odq", "W4", 1_000),
        measured("odq", "W6", 700),
        measured("odq", "W5", 500, p50=4.9),
        measured("odq-s3", "W7", 500),
        measured("queue-json", "W7", 50),
    ]
    found = Comparison(cells={(one.system, one.workload): one for one in cells})

    judged = {(one.what, one.met): one.measured for one in report.targets(found)}

    assert judged == {
        ("W2", False): "0.91 ×",
        ("W6/W4", False): "0.70",
        ("W5 p50", True): "4.90 ms",
        ("W7 on moto S3", True): "10.0 ×",
    }


def test_a_cell_that_has_failed_in_one_round_has_no_figure_and_meets_no_target() -> None:
    cells = [
        measured("odq", "W2", 900),
        measured("postgres", "W2", 1),
        measured("huey", "W2", 1),
        measured("odq", "W5", 500),
        measured("huey", "W7", 1),
    ]
    cells[1].failure = cells[3].failure = "message 3 was handed out twice"
    found = Comparison(cells={(one.system, one.workload): one for one in cells})

    assert {(one.what, one.target): one.met for one in report.targets(found)} == {
        ("W2", "ahead of PostgreSQL, SKIP LOCKED"): None,
        ("W2", "ahead of huey SqliteStorage (no ack)"): True,
        ("W5 p50", "under 5 ms"): None,
    }
    ours, theirs, _ = report.comparison_table(found)[2:]
    assert ours == "| OpenData Queue, file |  |  | 900 |  |  |  |  | failed |  |  |  |"
    assert theirs == "| PostgreSQL, SKIP LOCKED |  |  | failed |  |  |  |  |  |  |  |  |"
    said = report.markdown({"machine": {}, "run": RUN, "compare": found.to_json()})
    assert "Failed: PostgreSQL, SKIP LOCKED, W2: message 3 was handed out twice\n" in said
    assert "| W5 p50 | under 5 ms |  | **failed** |" in said


RUN = {"arguments": "", "rounds": 1, "seconds": 0.5, "took_s": 60.0}


@pytest.mark.parametrize(
    ("rounds", "said"),
    [(1, "Every cell was measured once"), (2, "the mean of 2 rounds"), (3, "the median of 3")],
)
def test_a_report_says_how_often_something_was_measured(rounds: int, said: str) -> None:
    everything = {"machine": {}, "run": {**RUN, "rounds": rounds}}

    assert said in report.markdown({**everything, "compare": Comparison().to_json()})
    assert "round" not in report.markdown(everything)
    looked = growth_lines({"backlog": [looked_at(1_000, 100.0)]}, looks=3)
    assert "median of 3 fresh" in looked[0]


SECTIONS = [(report.MEASURED, "make bench"), (report.DEEP, "make bench-deep")]


@pytest.mark.parametrize(("section", "command"), SECTIONS)
def test_the_measured_part_of_a_document_is_replaced_and_nothing_else(
    section: str, command: str
) -> None:
    begin, end = f"<!-- {section}: begin (written by {command}) -->", f"<!-- {section}: end -->"

    assert report.replaced(f"before\n{begin}\nold\n{end}\nafter\n", "new\n", section) == (
        f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    )
    with pytest.raises(ValueError, match="has no"):
        report.replaced("no markers", "new", section)


@pytest.mark.parametrize(("section", "command"), SECTIONS)
def test_the_document_has_its_markers(section: str, command: str) -> None:
    document = (REPOSITORY / "docs" / "benchmarks.md").read_text()

    assert report.replaced(document, "new", section) != document


def test_a_report_names_no_place_on_the_machine() -> None:
    given = ["--parts", "cost", "--root", "/here", "--output=/there", "--write", "it.md", "--quick"]

    assert that_matter(given) == ["--parts", "cost", "--quick"]


def test_figures_of_runs_before_are_put_together_and_written(tmp_path: Path) -> None:
    machine = {"date": "then"}
    runs = {
        "cost": {"latency_ms": 30.0, "spent": []},
        "growth": {"backlog": [looked_at(1_000, 100.0), looked_at(10_000, 120.0)]},
    }
    for part, figures in runs.items():
        run = {"arguments": f"--parts {part}", "rounds": 3, "seconds": 0.5, "took_s": 120.0}
        found = {"machine": machine, part: figures, "run": run}
        (tmp_path / f"{part}.json").write_text(json.dumps(found))
    document = tmp_path / "benchmarks.md"
    document.write_text("<!-- measured: begin (written by make bench) -->\n<!-- measured: end -->")

    figures_of = [str(tmp_path / f"{part}.json") for part in runs]
    where = ["--write", str(document), "--output", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", *where, "--figures", *figures_of],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        check=True,
    )

    written = document.read_text()
    assert "compare --parts cost`, `--parts growth`:" in written
    assert "in 4 minutes" in written
    assert "| 10,000 | 120 | 70 | 90 | 9 | 900 | 40 |" in written
    assert "SQS at list price" in written


# --- the program ----------------------------------------------------------------------------------

DOCUMENT = "<!-- measured: begin (written by make bench) -->\n<!-- measured: end -->"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    (document := tmp_path / "benchmarks.md").write_text(DOCUMENT)
    return document


def ran(
    monkeypatch: pytest.MonkeyPatch, document: Path, parts: dict[str, Any], *more: str
) -> tuple[int, dict[str, Any]]:
    """Run the program in this process, with parts that are measured in no time."""
    output = document.parent / "output"
    arguments = ["--root", str(document.parent), "--output", str(output), "--write", str(document)]
    monkeypatch.setattr("sys.argv", ["compare", *arguments, *more])
    monkeypatch.setattr(program, "_ENDING", ())
    monkeypatch.setattr(program, "_MEASURE", parts)
    code = program.main()
    found = output / "measured.json"
    assert (output / "measured.md").exists() == found.exists()
    return code, json.loads(found.read_text()) if found.exists() else {}


def compared(given: object, root: Path, found: dict[str, Any]) -> None:
    cell = measured("odq", "W2", 900)
    found["compare"] = Comparison(cells={("odq", "W2"): cell}).to_json()


def grown(given: object, root: Path, found: dict[str, Any]) -> None:
    found["growth"] = {"backlog": [looked_at(1_000, 100.0), looked_at(10_000, 120.0)]}


def nothing(given: object, root: Path, found: dict[str, Any]) -> None:
    pass


def test_a_run_without_a_failure_replaces_the_document(
    document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"compare": compared, "cost": nothing, "growth": grown}

    code, found = ran(monkeypatch, document, parts)

    assert code == 0
    assert {"compare", "growth"} <= found.keys()
    assert "### Side by side" in document.read_text()


def test_a_part_that_fails_is_told_and_the_others_go_on(
    document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(given: object, root: Path, found: dict[str, Any]) -> None:
        raise RuntimeError("no disk")

    code, found = ran(monkeypatch, document, {"compare": compared, "cost": broken, "growth": grown})

    assert code == 1
    assert found["failures"] == {"compare": "", "cost": "no disk", "growth": ""}
    assert {"compare", "growth"} <= found.keys()
    assert document.read_text() == DOCUMENT
    said = (document.parent / "output" / "measured.md").read_text()
    assert "Failed: no disk" in said
    assert "| Cost on object storage | measured |  | **failed** |" in said


def test_a_cell_that_fails_fails_the_run(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(given: object, root: Path, found: dict[str, Any]) -> None:
        compared(given, root, found)
        found["compare"]["cells"][0]["failure"] = "a payload was changed"

    parts = {"compare": failing, "cost": nothing, "growth": grown}

    code, found = ran(monkeypatch, document, parts)

    assert code == 1
    assert found["compare"]["cells"][0]["failure"] == "a payload was changed"
    assert document.read_text() == DOCUMENT


def test_what_was_measured_before_an_interrupt_is_kept_but_not_in_the_document(
    document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(given: object, root: Path, found: dict[str, Any]) -> None:
        found["cost"] = {"latency_ms": 30.0, "spent": []}
        raise KeyboardInterrupt

    parts = {"compare": compared, "cost": interrupted, "growth": grown}

    code, found = ran(monkeypatch, document, parts)

    assert code == 130
    assert "compare" in found
    assert "growth" not in found
    assert document.read_text() == DOCUMENT
    assert "interrupted" in (document.parent / "output" / "measured.md").read_text()


def test_where_nothing_can_be_measured_the_document_stays(
    document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = dict.fromkeys(("compare", "cost", "growth"), nothing)

    assert ran(monkeypatch, document, parts)[0] == 1
    assert document.read_text() == DOCUMENT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "at least 1"),
        (["--rounds", "-1"], "at least 1"),
        (["--rounds", "many"], "not a number"),
        (["--seconds", "0"], "more than 0"),
        (["--seconds", "-1"], "more than 0"),
        (["--seconds", "nan"], "more than 0"),
        (["--s3-latency-ms", "-5"], "at least 0"),
        (["--minutes", "0"], "more than 0"),
        (["--figures", "/nowhere.json"], "No such file"),
        (["--figures", __file__], "not the figures of a run"),
        (["--root", f"{__file__}/root"], "Not a directory"),
        (["--output", f"{__file__}/output"], "Not a directory"),
        (["--write", "/nowhere.md"], "No such file"),
        (["--write", str(REPOSITORY / "README.md")], "has no '<!-- measured: begin"),
    ],
)
def test_what_can_not_be_done_is_said_before_anything_is_measured(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--root", str(tmp_path), "--output", str(tmp_path)]

    with pytest.raises(SystemExit) as ended:
        program.parsed([*places, *arguments])

    assert ended.value.code == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in complaint
    assert said in complaint
    assert arguments[0] in complaint


def test_figures_of_something_else_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, text in enumerate(("[]", "{}", '{"run": {}}', '{"run": 1, "machine": 2}')):
        (figures := tmp_path / f"{number}.json").write_text(text)
        with pytest.raises(SystemExit):
            program.parsed(["--output", str(tmp_path), "--figures", str(figures)])
        assert "not the figures of a run" in capsys.readouterr().err


async def test_a_message_tells_when_it_was_due_not_when_it_was_published() -> None:
    class System:
        due: list[int]

        async def publish_many(self, messages: list[NewMessage]) -> None:
            self.due += [opened(one.payload or b"", one.headers or {})[1] for one in messages]

    (system := System()).due = []
    scenario = Scenario(rate=5_000, seconds=0.02, linger_ms=0, latency_ms=0)

    async with asyncio.TaskGroup() as tasks:
        await _publish(system, scenario, 100, tasks)

    assert {later - one for one, later in itertools.pairwise(system.due)} == {200_000}


def test_requests_become_dollars() -> None:
    requests = {"PUT": 8, "GET": 20, "LIST": 2, "POST": 3, "HEAD": 0, "DELETE": 50}
    spent = Spent(
        scenario={"rate": 1_000, "seconds": 1, "linger_ms": 100.0, "latency_ms": 30},
        messages=1_000,
        seconds=1.0,
        requests={**requests, "bytes_in": 512_000, "bytes_out": 1_024},
        latencies_ms={"0.5": 250.0, "0.99": 400.0},
        received_s=0.8,
    )
    found = {"latency_ms": 30, "spent": [vars(spent)]}

    assert spent.dollars_per_million == pytest.approx(10 * 5.0 / 1_000 + 20 * 0.4 / 1_000, rel=1e-9)
    assert sqs_dollars_per_million() == pytest.approx(1.20)
    (target,) = cost_targets(found)
    assert target.met
    assert (
        "| 1,000 | 100 | 100% | 8.0 | 20.0 | 2.0 | 53.0 | 500 | 1 | 0.058 | 4.8% | 48.3% |"
        " 250 / 400 |" in cost_lines(found)
    )


@pytest.mark.parametrize(("received_s", "held"), [(0.0, 1.0), (8.0, 1.0), (20.0, 0.5)])
def test_a_rate_is_held_if_messages_come_as_fast_as_they_go(received_s: float, held: float) -> None:
    spent = Spent(
        scenario={"rate": 100}, messages=1_000, seconds=10.0, requests={}, received_s=received_s
    )

    assert spent.held == held


def looked_at(waiting: int, open_ms: float) -> dict[str, float]:
    looked = {"open_ms": open_ms, "memory_mib": 70.0, "peak_mib": 90.0, "commit_kib": 9.0}
    return {"waiting": waiting, **looked, "claim_1_us": 900.0, "claim_100_us": 40.0}


def test_what_was_measured_is_drawn_and_what_was_not_is_left_out(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.compare.plots")
    cells = [measured("odq", "W1", 900), measured("odq", "W2", 9_000), measured("odq", "W3", 500)]
    comparison = Comparison(cells={(one.system, one.workload): one for one in cells})
    growth = {"backlog": [looked_at(1_000, 100.0), looked_at(10_000, 120.0)]}

    names = plots.draw({"compare": comparison.to_json(), "growth": growth}, tmp_path)

    assert names == ["publish-by-batch-size.svg", "growth-with-backlog.svg"]
    assert {path.name for path in tmp_path.iterdir()} == {
        name.replace("svg", kind) for name in names for kind in ("svg", "png")
    }


def test_growth_is_judged_by_its_ends() -> None:
    rows = [looked_at(1_000, 100.0), looked_at(10_000, 120.0), looked_at(100_000, 301.0)]
    found = {"backlog": rows}

    assert [one.met for one in growth_targets(found)] == [True, False, True, True, True]
    assert "| 100,000 | 301 | 70 | 90 | 9 | 900 | 40 |" in growth_lines(found)


@pytest.mark.parametrize(("open_ms", "met"), [(902.0, True), (904.0, False), (3_001.0, False)])
def test_opening_is_judged_by_a_root_of_several_files(open_ms: float, met: bool) -> None:
    rows = [looked_at(1_000, 1.0), looked_at(100_000, 301.0), looked_at(10_000_000, open_ms)]

    in_all, growth, *_ = growth_targets({"backlog": rows})

    assert in_all.met is (open_ms < 3_000)
    assert growth.met is met
