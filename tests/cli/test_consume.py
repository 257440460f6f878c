"""``odq consume`` as a person or a script uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Odq

ROOT = Path(__file__).parents[2]


@pytest.fixture
def three(orders: Odq) -> Odq:
    with orders.system() as system:
        for number in range(3):
            system.publish(b"payload %d" % number, headers={"n": str(number), "content-type": "x"})
    return orders


def counts(odq: Odq) -> dict[str, int]:
    with odq.system() as system:
        stats = system.stats("orders")
    names = ("available", "delayed", "in_flight", "done", "failed")
    return {name: count for name in names if (count := getattr(stats, name))}


def test_payloads_are_printed_as_they_are_and_acked(three: Odq) -> None:
    shown = three("consume", "orders", "--count", "2")

    assert shown == "payload 0\npayload 1\n"
    assert counts(three) == {"available": 1, "done": 2}


def test_json_has_all_of_a_message_and_can_be_published_again(three: Odq) -> None:
    with three.system() as system:
        system.publish(b"\xff")

    messages = three.lines("consume", "orders", "--idle", "0")

    assert [message.get("payload") for message in messages[:3]] == [
        "payload 0",
        "payload 1",
        "payload 2",
    ]
    assert messages[0]["headers"] == {"n": "0", "content-type": "x"}
    assert messages[0]["queue"] == "orders"
    assert messages[0]["attempts"] == 1
    assert isinstance(messages[0]["message_id"], str)
    assert messages[3]["payload_base64"] == "/w=="
    again = "\n".join(map(json.dumps, messages))
    assert three("publish", "--jsonl", "-", input=again) == "published 4 messages\n"
    assert three.lines("consume", "orders", "--idle", "0")[3]["payload_base64"] == "/w=="


def test_messages_are_appended_to_a_file(three: Odq, tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_bytes(b"before\n")

    three("consume", "orders", "--idle", "0", "--output", str(file), "--format", "hex")

    lines = file.read_text().splitlines()
    assert [lines[0], *map(bytes.fromhex, lines[1:])] == [
        "before",
        b"payload 0",
        b"payload 1",
        b"payload 2",
    ]
    assert counts(three) == {"done": 3}


def test_no_ack_looks_and_gives_back(three: Odq) -> None:
    assert three("consume", "orders", "--no-ack", "--count", "2") == "payload 0\npayload 1\n"

    again = three.lines("consume", "orders", "--no-ack")
    assert [message["attempts"] for message in again] == [1, 1, 1]
    assert counts(three) == {"available": 3}


def test_nothing_that_came_has_an_exit_code_of_its_own(orders: Odq) -> None:
    assert orders("consume", "orders", "--idle", "0", code=3) == ""
    assert orders("consume", "orders", "--no-ack", code=3) == ""
    assert orders("consume", "nope", "--idle", "0", code=3) == "Error: there is no queue 'nope'\n"


def test_a_command_gets_the_message_and_acks_it_by_its_success(three: Odq, tmp_path: Path) -> None:
    line = (
        f'cat >> "{tmp_path}/all"; echo " $ODQ_QUEUE $ODQ_HEADER_N $ODQ_HEADER_CONTENT_TYPE '
        f'$ODQ_ATTEMPTS" >> "{tmp_path}/all"'
    )

    told = three.lines("consume", "orders", "--idle", "0", "--exec", line)

    assert [one["outcome"] for one in told] == ["acked"] * 3
    assert (tmp_path / "all").read_text().splitlines() == [
        "payload 0 orders 0 x 1",
        "payload 1 orders 1 x 1",
        "payload 2 orders 2 x 1",
    ]
    assert counts(three) == {"done": 3}


def test_a_command_that_fails_nacks_with_what_it_said(three: Odq) -> None:
    three("queues", "update", "orders", "--max-attempts", "1")
    line = 'echo "no $ODQ_HEADER_N" >&2; exit "$ODQ_HEADER_N"'

    told = three.lines("consume", "orders", "--count", "3", "--exec", line, code=1)

    assert [one["exit_code"] for one in told] == [0, 1, 2]
    with three.system() as system:
        failed = system.failed("orders")
    assert [one.error for one in failed] == ["exit code 1: no 1", "exit code 2: no 2"]


def test_a_command_that_is_not_found_ends_it_without_an_attempt(three: Odq) -> None:
    complaint = three("consume", "orders", "--exec", "/nope/command", code=1)

    assert complaint.splitlines()[-1] == "Error: could not run '/nope/command': it is not found"
    assert counts(three) == {"available": 3}
    assert three.lines("consume", "orders", "--no-ack", "-n", "1")[0]["attempts"] == 1


def test_a_command_need_not_read_a_large_payload(orders: Odq) -> None:
    with orders.system() as system:
        system.publish(bytes(1_000_000))

    orders("consume", "orders", "--count", "1", "--exec", "true")

    assert counts(orders) == {"done": 1}


def test_what_excludes_each_other_is_refused(orders: Odq) -> None:
    assert "excludes" in orders("consume", "orders", "--exec", "x", "--no-ack", code=2)
    assert "1000 at most" in orders("consume", "orders", "--no-ack", "-n", "1001", code=2)
    assert "Invalid value" in orders("consume", "orders", "--format", "xml", code=2)


# --- signals and pipes, in processes --------------------------------------------------------------


def started(odq: Odq, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from opendata_queue.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ
        | {
            "ODQ_STORE": odq.url,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "encodings"))),
        },
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting_and_loses_nothing(three: Odq, number: signal.Signals) -> None:
    with started(three, "consume", "orders") as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(number)
        _, complaints = process.communicate(timeout=120)

    assert (process.returncode, complaints) == (0, "")
    assert counts(three) == {"done": 3}


def test_a_signal_lets_a_command_end_and_gives_back_the_rest(three: Odq, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)

    line = f'echo begun; cat "{go_on}"'
    with started(three, "consume", "orders", "--batch", "3", "--exec", line) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        go_on.write_text("ended\n")
        output, complaints = process.communicate(timeout=120)

    assert (process.returncode, output, complaints) == (0, "ended\n", "")
    assert counts(three) == {"available": 2, "done": 1}


def test_a_second_signal_ends_the_command_and_gives_its_message_back(
    three: Odq, tmp_path: Path
) -> None:
    never = tmp_path / "never"
    os.mkfifo(never)

    with started(three, "consume", "orders", "--exec", f'echo begun; cat "{never}"') as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)

    assert process.returncode == 0
    assert counts(three) == {"available": 3}


def test_a_reader_that_stops_early_gets_no_more_acked_than_it_could_see(three: Odq) -> None:
    with started(three, "consume", "orders", "--batch", "1", "--idle", "0") as process:
        assert process.stdout is not None
        process.stdout.close()
        _, complaints = process.communicate(timeout=120)

    assert "Traceback" not in complaints
    assert counts(three) == {"available": 3}
