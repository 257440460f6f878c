"""Every example runs, ends by itself, and shows what it is for."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.screen import LiveScreen
from opendata_queue import QueueStats

ROOT = Path(__file__).parents[1]
DEMO = "demo"
SPARK = "spark_pipeline.py"
EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}

SHOWN = {
    "async_worker.py": ["fetched ", "20 done"],
    "batches_and_priorities.py": ["one message, True", "priority [5]", "201 done, 1 delayed"],
    "browse_and_history.py": [
        "7 available, 2 delayed, 1 in flight",
        "next: [b'job 3', b'job 4']",
        "available: [3, 4, 5, 6, 7, 8, 9]",
        "message 1 was claimed by alice",
        "in audit: available after 0 attempts",
    ],
    "consumer_loop.py": ["4 / 2 = 2.0", "given up: division by zero in attempt 2"],
    "dead_letters.py": [
        "message 3 of globex: no such customer, 2 attempts",
        "by id: 1",
        "by filter: 2",
        "forgotten: 2",
        "3 available again, 0 failed",
    ],
    "delayed_and_retries.py": [
        "b'now' failed in attempt 2",
        "b'now' done in attempt 3",
        "b'in a while' done in attempt 1",
    ],
    "filters_and_priorities.py": [
        "europe: disk is slow (128), disk is lost (128)",
        "alerts: disk is lost (1), fan is loud (2), disk is slow (5)",
        "nowhere: fan is loud (128)",
        "refused: column 10",
    ],
    "leases_and_receipts.py": [
        "attempt 2: the first one's ack is ['lease_lost']",
        "extended by 9 minutes",
        "attempt 2 again",
        "'made up' is no receipt",
        "the holder's ack is ['ok']",
    ],
    "many_threads.py": ["200 messages, each seen {1} times", "TimedOutError: "],
    "payloads_and_keys.py": [
        "5,000,000 bytes came back",
        "payload None, at s3://videos/17.mp4",
        "stored 1 time",
        "kept for 600 seconds",
    ],
    "publish_and_consume.py": ["b'{\"order\": 17}', attempt 1: ok"],
    "queue_admin.py": [
        "QueueExistsError: ",
        "now 9 attempts, relaxed: True",
        "paused: 0 claimed",
        "resumed: 10 claimed",
        "purged: 90",
        "QueueNotFoundError: ",
    ],
    "queue_from_the_past.py": [
        "from now on: []",
        "from the beginning: [b'order 0', b'order 1', b'order 2']",
        "b'order 2']\nfrom a time on: [",
    ],
    "spark_pipeline.py": [
        "250 orders were handled",
        "250 are in Parquet again",
        "83 orders are expensive",
    ],
    "testing_with_a_manual_clock.py": [
        "passed: test_a_reminder_is_given_after_a_day",
        "passed: test_a_message_that_nobody_finishes_comes_back",
    ],
    "worker.py": ["sent by odq emails", "again in 50 ms", "20 done"],
}

Done = subprocess.CompletedProcess[str]


def run(name: str, folder: Path) -> Done:
    script = ["-m", "examples.demo"] if name == DEMO else [f"examples/{name}"]
    return subprocess.run(
        [sys.executable, *script, f"file://{folder}/{name}"],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/encodings:{ROOT}/compactor"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Done]]]:
    """All of them, a few at the same time: they spend most of it waiting."""
    folder = tmp_path_factory.mktemp("examples")
    with ThreadPoolExecutor(3) as threads:
        yield {name: threads.submit(run, name, folder) for name in [DEMO, *sorted(EXAMPLES)]}


def test_every_example_is_tested() -> None:
    assert set(SHOWN) == EXAMPLES


def test_every_example_is_listed() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (ROOT / "examples/README.md").read_text())

    assert set(listed) == EXAMPLES
    assert len(listed) == len(EXAMPLES)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_runs(name: str, runs: dict[str, Future[Done]]) -> None:
    done = runs[name].result()

    # What Spark has to say for itself when it starts is not ours.
    complaints = "" if name == SPARK else done.stderr
    assert (done.returncode, complaints) == (0, ""), done.stderr
    assert [text for text in SHOWN.get(name, []) if text not in done.stdout] == [], done.stdout


def test_the_demo_without_a_terminal_is_plain_text_whose_numbers_add_up(
    runs: dict[str, Future[Done]],
) -> None:
    done = runs[DEMO].result()

    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "✗ emails: no mailbox nobody@nowhere.example: a dead letter now" in done.stdout
    assert "! emails: 3 dead letters replayed" in done.stdout
    assert "first owner: FencedError" in done.stdout
    summary = done.stdout.partition("== Summary")[2]
    assert re.findall(r"^(?:published|replayed) +(\d+)", summary, re.MULTILINE) == ["200", "3"]
    assert re.findall(r"(\d+) published for it, (\d+) done, (\d+) left", summary) == [
        ("200", "200", "0"),
        ("102", "102", "0"),
        ("75", "75", "0"),
        ("18", "18", "0"),
    ]
    assert "nothing lost, nothing done twice" in summary
    assert "QueueConfig" in summary


@pytest.mark.parametrize("columns", [70, 100, 160])
def test_the_picture_of_the_demo_fits_its_terminal(columns: int) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=columns, height=24, _environ={})
    screen = LiveScreen(console)
    stats = QueueStats(
        available=1_234, delayed=5, in_flight=67, done=89_012, failed=3, expired=0, oldest_age_ms=4
    )

    with screen.picture():
        screen.title("A rush")
        for number in range(20):
            screen.tell("✓", "orders", f"order {number} " + "far too long for one line " * 9)
        screen.frame({name: stats for name in ("audit", "orders", "emails", "reminders")})

    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    last = text[text.rindex("╭") :]  # it is drawn once more when it ends
    lines = [line for line in last.splitlines() if line]
    assert {len(line) for line in lines} == {columns}
    assert len(lines) < console.height
    assert "89,012" in last
    assert "order 19" in last
