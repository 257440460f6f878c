"""``odq queues`` as a person or a script uses it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import opendata_queue
from opendata_queue.cli import app
from opendata_queue.cli.common import duration_ms, duration_text
from tests.cli.conftest import Odq
from tests.support.broker import BrokerProcess


def test_a_queue_is_made_with_every_option_by_its_name(odq: Odq) -> None:
    made = odq.json(
        *("queues", "create", "emails", "--filter", "type='a'", "--max-attempts", "7"),
        *("--lease", "45s", "--max-lease", "2h", "--backoff", "250ms", "--backoff-factor", "3"),
        *("--max-backoff", "10m", "--backoff-jitter", "0.5", "--done-retention", "1d"),
        *("--failed-retention", "forever", "--max-in-flight", "50", "--relaxed-claims"),
        *("--paused", "--window", "64", "--bucket", "32"),
    )

    assert made["name"] == "emails"
    assert made["filter"] == "type = 'a'"
    assert made["options"] == {
        "max_attempts": 7,
        "lease_ms": 45_000,
        "max_lease_ms": 7_200_000,
        "backoff_ms": 250,
        "backoff_factor": 3.0,
        "max_backoff_ms": 600_000,
        "backoff_jitter": 0.5,
        "done_retention_seconds": 86_400,
        "failed_retention_seconds": 0,
        "max_in_flight": 50,
        "relaxed_claims": True,
        "paused": True,
        "window": 64,
        "bucket": 32,
    }


def test_only_what_is_named_is_changed(orders: Odq) -> None:
    before = orders.json("queues", "show", "orders")

    changed = orders.json("queues", "update", "orders", "--lease", "2m")

    assert changed["options"] == before["options"] | {"lease_ms": 120_000}
    assert "nothing to change is named" in orders("queues", "update", "orders", code=2)


def test_a_queue_is_paused_and_resumed(orders: Odq) -> None:
    assert orders("queues", "pause", "orders") == "paused queue orders\n"
    assert orders.json("queues", "show", "orders")["options"]["paused"]
    assert orders.json("queues", "resume", "orders") == {"queue": "orders", "paused": False}
    assert not orders.json("queues", "show", "orders")["options"]["paused"]


def test_queues_are_listed_with_what_they_hold(orders: Odq) -> None:
    with orders.system() as system:
        system.create_queue("none", filter="x = 1")
        system.publish(b"1")
        system.publish(b"2", delay_ms=60_000)

    listed = {queue["name"]: queue for queue in orders.json("queues", "list")}

    assert listed["orders"]["available"] == 1
    assert listed["orders"]["delayed"] == 1
    assert listed["none"]["available"] == 0
    assert [line.split()[:3] for line in orders("queues", "list").splitlines()] == [
        ["queue", "available", "delayed"],
        ["none", "0", "0"],
        ["orders", "1", "1"],
    ]


def test_a_queue_that_begins_in_the_past_gets_older_messages(orders: Odq) -> None:
    with orders.system() as system:
        system.publish(b"old")

    orders("queues", "create", "all", "--start", "beginning")
    orders("queues", "create", "lately", "--start", "1h")

    with orders.system() as system:
        assert [m.payload for m in system.claim("all", wait_ms=60_000)] == [b"old"]
        assert [m.payload for m in system.claim("lately", wait_ms=60_000)] == [b"old"]


def test_stats_are_watched_look_after_look(orders: Odq) -> None:
    watch = ("queues", "stats", "orders", "--watch", "--times", "3", "--interval", "1ms")

    looks = orders.lines(*watch)

    assert [look[0]["name"] for look in looks] == ["orders"] * 3
    assert orders(*watch).count("queue ") == 3


def test_purging_and_deleting_want_a_yes(orders: Odq) -> None:
    with orders.system() as system:
        system.publish(b"1")

    assert "--yes" in orders("queues", "purge", "orders", code=2)
    assert "--yes" in orders("queues", "delete", "orders", code=2)
    assert orders.json("queues", "purge", "orders", "--yes") == {"queue": "orders", "purged": 1}
    assert orders("queues", "delete", "orders", "--yes") == "deleted queue orders\n"
    assert orders.json("queues", "list") == []


def test_a_queue_that_is_not_there_has_an_exit_code_of_its_own(odq: Odq) -> None:
    for command in (["show"], ["stats"], ["pause"], ["delete", "--yes"], ["update", "--paused"]):
        complaint = odq("queues", command[0], "nope", *command[1:], code=3)

        assert complaint == "Error: there is no queue 'nope'\n"


def test_a_filter_that_is_wrong_is_pointed_at(odq: Odq) -> None:
    complaint = odq("queues", "create", "q", "--filter", "type = ", code=2)

    assert complaint.splitlines()[0].startswith("Error: column 7: expected a literal")
    assert complaint.splitlines()[-1].strip() == "^"


def test_a_second_queue_of_a_name_is_refused(orders: Odq) -> None:
    assert "orders" in orders("queues", "create", "orders", code=1)


@pytest.mark.parametrize("option", ["--lease=5", "--lease=5x", "--done-retention=5ms"])
def test_a_duration_without_a_unit_that_fits_is_refused(odq: Odq, option: str) -> None:
    assert "Invalid value" in odq("queues", "create", "q", option, code=2)


def test_an_option_out_of_bounds_is_named(odq: Odq) -> None:
    complaint = odq("queues", "create", "q", "--window", "0", code=2)

    assert complaint == "Error: window is 0, not within 1 to 65535\n"


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("", 2, "no store is given"),
        ("orders", 1, "is not a root URL"),
        ("file://orders/x", 1, "has a host"),
        ("memory:///x", 1, "lives within one process"),
    ],
)
def test_a_store_that_can_not_be_is_explained(url: str, code: int, said: str) -> None:
    complaint = Odq(url)("queues", "list", code=code)

    assert said in complaint
    assert complaint.startswith("Error: ")
    assert complaint.count("\n") == 1


def test_a_root_is_not_made_at_a_typo(odq: Odq) -> None:
    typo = Odq(odq.url + "-typo")

    assert "odq init" in typo("queues", "list", code=1)
    assert "odq init" in typo("queues", "list", code=1)  # it was not made by the first


def test_a_root_that_is_served_is_looked_at_and_left_to_its_owner(orders: Odq) -> None:
    with orders.system() as owner:
        owner.history(owner.publish(b"hello"))

        assert [queue["name"] for queue in orders.json("queues", "list")] == ["orders"]
        assert orders.lines("messages", "peek", "orders")[0]["payload"] == "hello"
        assert "is served by" in orders("queues", "pause", "orders", code=1)
        assert "is served by" in orders("publish", "more", code=1)
        assert not owner.get_queue("orders").options.paused


def test_a_root_that_is_served_over_http_is_changed_there(orders: Odq) -> None:
    with BrokerProcess(orders.url) as broker:
        orders("publish", "hello")
        orders("queues", "pause", "orders")

        assert orders.json("queues", "show", "orders")["options"]["paused"] is True
        assert orders.json("failed", "list", "orders") == []
        assert broker.stop() == 0
    assert orders.json("queues", "stats", "orders")[0]["available"] == 1


def test_a_root_whose_broker_was_killed_is_opened(orders: Odq) -> None:
    with BrokerProcess(orders.url) as broker:
        broker.kill()

    orders("publish", "hello")

    assert orders.json("queues", "stats", "orders")[0]["available"] == 1


def test_a_broker_that_can_not_be_reached_and_lives_is_named(orders: Odq) -> None:
    nobody = "http://127.0.0.1:1"

    with opendata_queue.open(orders.url, address=nobody):
        complaint = orders("queues", "pause", "orders", code=1)

    assert f"at {nobody}" in complaint
    assert "is served by" in complaint


def test_debug_shows_where_an_error_comes_from(odq: Odq) -> None:
    shown = CliRunner(env={"ODQ_STORE": odq.url}).invoke(app, ["--debug", "queues", "show", "x"])

    assert "Traceback" in shown.stderr
    assert shown.stderr.splitlines()[-1] == "Error: there is no queue 'x'"


def test_every_command_has_help_with_an_example() -> None:
    def check(*path: str) -> None:
        shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, [*path, "--help"])
        assert shown.exit_code == 0
        commands = _commands_of(shown.output)
        for command in commands:
            check(*path, command)
        if not commands:
            assert "Example" in shown.output, path

    check()


def _commands_of(help: str) -> list[str]:
    _, found, rest = help.partition("─ Commands ─")
    lines = rest.splitlines()[1:] if found else []
    return [line[2:].split()[0] for line in lines if line.startswith("│ ") and line[2] != " "]


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("0", 0),
        ("5ms", 5),
        ("1.5s", 1_500),
        ("2m", 120_000),
        ("3h", 10_800_000),
        ("1w", 604_800_000),
    ],
)
def test_durations_are_read(text: str, milliseconds: int) -> None:
    assert duration_ms(text) == milliseconds


def test_durations_are_shown_with_two_units() -> None:
    assert duration_text(999) == "999ms"
    assert duration_text(61_001) == "1m 1s"
    assert duration_text(2 * 86_400_000 + 3_600_000 + 5_000) == "2d 1h"


def test_a_shell_is_told_how_to_complete_commands() -> None:
    completed = CliRunner(
        env={"_ODQ_COMPLETE": "complete_bash", "COMP_WORDS": "odq qu", "COMP_CWORD": "1"}
    ).invoke(app, [], prog_name="odq")

    assert completed.stdout.split() == ["queues"]
