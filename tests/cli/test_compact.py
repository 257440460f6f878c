"""``odq compact``: on a root that nobody serves, and only looking at one that is."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import opendata_queue
from opendata_queue import NewMessage, QueueOptions, StoreSettings
from opendata_queue.testing import ManualClock
from tests.cli.conftest import Odq

LONG_AGO_MS = 1_700_000_000_000


def fill(odq: Odq) -> list[int]:
    """Messages of long ago, half of which are past their time since then."""
    # A root that is of long ago, too: the clock of one that was opened since does not go back.
    shutil.rmtree(odq.url.removeprefix("file://"))
    clock = ManualClock(LONG_AGO_MS)
    with opendata_queue.open(odq.url, clock=clock, retention=False) as system:
        system.create_queue("q", options=QueueOptions(done_retention_seconds=60, window=2))
        messages = [NewMessage(bytes(70_000), retention_seconds=60)] + [
            NewMessage(b"x" * 1_000, retention_seconds=60 * (n % 2)) for n in range(20)
        ]
        ids = system.publish_many(messages)
        (one,) = system.claim("q", 1)
        system.ack("q", one.receipt)
    return [one for n, one in enumerate(ids) if n % 2]


def files(odq: Odq) -> dict[str, int]:
    folder = Path(odq.url.removeprefix("file://"))
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def removed(report: dict[str, object]) -> dict[str, int]:
    rows = report["removed"]
    assert isinstance(rows, list)
    return {row["kind"]: row["count"] for row in rows}


def test_a_dry_run_shows_the_plan_and_touches_nothing_and_a_pass_does_it(odq: Odq) -> None:
    left = fill(odq)
    before = files(odq)

    planned = odq.json("compact", "--dry-run")

    assert files(odq) == before
    assert removed(planned) == {
        "blobs": 1,
        "done entries": 1,
        "expired entries": 10,
        "expired messages": 11,
    }
    report = odq.json("compact", "--erase", "--rewrite")
    assert removed(report) == removed(planned)
    assert report["bytes_freed"] > 70_000
    assert report["bytes_after"] < report["bytes_before"]
    assert report["requests"] > 0
    with odq.system() as system:
        messages = system.read_many(left)
        assert [m.payload for m in messages if m is not None] == [b"x" * 1_000] * 10
    assert odq.json("compact")["removed"] == []


def test_a_table_says_what_was_removed_and_why(odq: Odq) -> None:
    fill(odq)

    shown = odq("compact", "--rewrite")

    assert "expired messages" in shown
    assert f"rewritten             {odq.url}/queues/00000, {odq.url}/messages/00000" in shown
    assert "done at + the queue's done retention is over" in shown
    assert "bytes freed" in shown
    assert "nothing is past its time" in odq("compact", "--dry-run")


def test_it_says_what_is_freed_only_in_an_hour(odq: Odq) -> None:
    clock = ManualClock(int(time.time() * 1_000))
    with opendata_queue.open(odq.url, clock=clock, retention=False) as system:
        system.publish_many([NewMessage(b"x" * 1_000, retention_seconds=60)] * 20)
        clock.advance_ms(61_000)  # the next owner goes on from there

    planned = odq.json("compact", "--dry-run")
    erased = odq.json("compact", "--dry-run", "--erase")
    shown = odq("compact")

    assert planned["aging_bytes"] == planned["row_bytes"] > 20_000
    assert (erased["aging_bytes"], erased["row_bytes"]) == (0, planned["row_bytes"])
    assert "received at + their retention is over; a pass in an hour frees the space" in shown
    assert "freed in an hour" in shown


def test_a_root_that_is_served_is_refused_and_says_by_whom(odq: Odq) -> None:
    with opendata_queue.open(odq.url, name="the broker"):
        complaint = odq("compact", code=1)
        assert "the broker" in complaint
        assert "by itself; odq compact --space-only can run meanwhile" in complaint
        assert odq.json("compact", "--dry-run")["removed"] == []


def test_what_makes_no_sense_is_refused(odq: Odq, tmp_path: Path) -> None:
    assert "by itself" in odq("compact", "http://localhost:1", code=2)
    assert "pause" in odq("compact", "--every", "0s", code=2)
    assert "runs once" in odq("compact", "--dry-run", "--every", "1h", code=2)
    assert "touches nothing" in odq("compact", "--dry-run", "--delete-when-done", code=2)
    assert "leave out --rewrite" in odq("compact", "--dry-run", "--rewrite", code=2)
    assert "odq init" in odq("compact", f"file://{tmp_path}/none", code=1)


def test_a_daemon_does_not_wait_for_a_root_that_can_not_be_one(odq: Odq, tmp_path: Path) -> None:
    assert "is not a root URL" in odq("compact", "ftp://x", "--every", "1h", code=1)
    assert "odq init" in odq("compact", f"file://{tmp_path}/none", "--every", "1h", code=1)


def test_a_daemon_passes_again_and_again_and_gives_up_the_root_when_it_is_told_to_end(
    odq: Odq,
) -> None:
    fill(odq)
    with opendata_queue.open(odq.url, name="the broker"):
        daemon = daemon_of(odq.url)
        try:
            assert daemon.stderr is not None
            complaint = daemon.stderr.readline()
        finally:
            daemon.kill()
            daemon.communicate()
    assert "the broker" in complaint
    assert complaint.endswith("the next try is in 10ms\n")

    daemon = daemon_of(odq.url)
    assert daemon.stdout is not None
    reports = [json.loads(daemon.stdout.readline()) for _ in range(2)]
    daemon.send_signal(signal.SIGTERM)
    _, complaint = daemon.communicate()

    assert [bool(one["removed"]) for one in reports] == [True, False]
    assert (daemon.returncode, complaint) == (0, "")
    with odq.system() as system:  # it is nobody's
        assert system.stats("q").available == 10


def daemon_of(url: str) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("odq")), "compact", url, "--every", "10ms"]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, "--json"], stdout=pipe, stderr=pipe, text=True)


def test_files_are_rewritten_when_that_frees_much_or_when_it_is_told_to(odq: Odq) -> None:
    fill(odq)

    assert odq.json("compact")["rewritten"] == []
    rewritten = odq.json("compact", "--rewrite")["rewritten"]

    assert [one.rpartition("/root/")[2] for one in rewritten] == ["queues/00000", "messages/00000"]


def test_a_system_can_be_told_to_delete_what_is_done(odq: Odq) -> None:
    with odq.system() as system:
        system.create_queue("q")
        ids = system.publish_many([NewMessage(b"x")] * 3)
        (one,) = system.claim("q", 1)
        system.ack("q", one.receipt)

    report = odq.json("compact", "--delete-when-done")

    assert removed(report) == {"finished messages": 1}
    with odq.system() as system:
        assert [one is None for one in system.read_many(ids)] == [True, False, False]
    assert odq.json("compact", "--keep-when-done")["removed"] == []


def test_space_is_freed_by_another_process_beside_an_owner_who_goes_on(odq: Odq) -> None:
    settings = StoreSettings(compaction_poll_ms=100, memtable_bytes=64 * 1024)
    with opendata_queue.open(odq.url, settings=settings, retention=False) as system:
        system.create_queue("q")
        ids = system.publish_many([NewMessage(b"x" * 1_000)] * 500)

        report = beside(odq.url)

        assert [one for one in report["rewritten"] if one.endswith("messages/00000")]
        assert report["removed"] == []
        assert None not in system.read_many(ids)
        shown = odq("compact", "--space-only")
        assert "no rows were removed; files that were replaced leave the store in" in shown
        claimed = system.claim("q", 500)
        system.ack("q", *(one.receipt for one in claimed))
        system.publish(b"after")
        beside(odq.url)
        (left,) = system.claim("q", 10)
        assert (len(claimed), left.payload) == (500, b"after")
    with odq.system() as system:
        assert None not in system.read_many(ids)
        assert system.stats("q").done == 500
    assert "no process serves" in odq("compact", "--space-only", code=1)
    assert "removes nothing" in odq("compact", "--space-only", "--erase", code=2)


def beside(url: str) -> dict[str, Any]:
    """A real process: what it does must not fence the owner."""
    odq = str(Path(sys.executable).with_name("odq"))
    command = [odq, "compact", url, "--space-only", "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(shown.stdout)
    return report
