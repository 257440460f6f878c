"""``odq filter`` as a person or a script uses it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from opendata_queue.cli.filter import app

runner = CliRunner(env={"COLUMNS": "160"})


def test_a_message_that_matches_is_told_its_priority() -> None:
    shown = runner.invoke(
        app,
        [
            "test",
            "type='order.created' and price>10 priority 5",
            *("--header", "type=order.created", "--header", "price=12"),
        ],
    )

    assert shown.exit_code == 0
    assert shown.output.splitlines() == [
        "filter    type = 'order.created' AND price > 10 PRIORITY 5",
        "result    matches",
        "priority  5",
    ]


def test_a_message_that_does_not_match_is_told_apart_from_one_that_is_unknown() -> None:
    refused = runner.invoke(app, ["test", "a = 1", "--header", "a=2"])
    unknown = runner.invoke(app, ["test", "a = 1 AND b = 2", "--header", "a=1"])
    no_number = runner.invoke(app, ["test", "a = 1", "--header", "a=x"])

    assert refused.exit_code == unknown.exit_code == no_number.exit_code == 1
    assert "result    does not match" in refused.output
    assert "result    unknown, for want of the headers b" in unknown.output
    assert "result    unknown\n" in no_number.output
    assert "priority" not in refused.output


def test_the_last_of_several_headers_counts_and_values_may_have_equals_signs() -> None:
    shown = runner.invoke(app, ["test", "a = 'x=y'", "--header", "a=1", "--header", "a=x=y"])

    assert shown.exit_code == 0


def test_system_fields_must_be_given_where_the_filter_asks_for_them() -> None:
    without = runner.invoke(app, ["test", "sys.id = 5"])
    given = runner.invoke(app, ["test", "sys.id = 5", "--sys", "id=5"])
    prefixed = runner.invoke(app, ["test", "sys.created_at < 5", "--sys", "sys.created_at=-1"])

    assert without.exit_code == 2
    assert "the filter asks for sys.id: add --sys id=" in without.output
    assert given.exit_code == prefixed.exit_code == 0


def test_json_says_all_of_it() -> None:
    shown = runner.invoke(app, ["test", "--json", "a = 1", "--header", "priority=7"])

    assert shown.exit_code == 1
    assert json.loads(shown.output) == {
        "filter": "a = 1",
        "result": None,
        "matches": False,
        "priority": None,
        "missing_headers": ["a"],
    }


def test_a_text_that_is_no_filter_is_pointed_at() -> None:
    shown = runner.invoke(app, ["test", "a = AND"])

    assert shown.exit_code == 2
    assert "column 5: expected a literal, such as 'text' or 5, but found AND" in shown.output
    assert shown.output.splitlines()[-2:] == ["  a = AND", "      ^"]


def test_a_text_that_is_no_filter_is_pointed_at_in_json_too() -> None:
    shown = runner.invoke(app, ["check", "--json", "a ="])

    assert shown.exit_code == 2
    assert json.loads(shown.output)["error"]["column"] == 4


@pytest.mark.parametrize(
    "options",
    [("--header", "a"), ("--sys", "id"), ("--sys", "size=5"), ("--sys", "id=x")],
)
def test_options_that_make_no_sense_are_refused(options: tuple[str, str]) -> None:
    assert runner.invoke(app, ["test", "a = 1", *options]).exit_code == 2


def test_check_prints_the_canonical_text() -> None:
    assert runner.invoke(app, ["check", "a=1;b=2"]).output == "a = 1; b = 2\n"
    assert "every message" in runner.invoke(app, ["check", ""]).output
    as_json = runner.invoke(app, ["check", "--json", "a=1;b=2"]).output
    assert json.loads(as_json) == {"filter": "a = 1; b = 2", "rules": 2}
