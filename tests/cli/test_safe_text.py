"""What others have put into names, headers, errors and payloads does nothing to a terminal."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from opendata_queue import NewMessage, QueueOptions
from opendata_queue.cli.common import table_of
from opendata_queue.http.requests.logs import JsonLines
from opendata_queue.model.safe_text import HarmlessLines, harmless, harmless_json, json_text
from tests.cli.conftest import Odq

# A title, the clipboard, a question that is answered into the input, the same with C1 controls, a
# bell, text from right to left, a line of another program's, a tag and markup.
EVIL = (
    "\x1b]0;owned\x07\x1b]52;c;cm0gLXJm\x07\x1b[6n\x9b31m\x9d0;x\x9c\x7f\x08\r"
    "\u202egnp.exe\u2066\u2028ok  healthy\nforged line\U000e0041[bold red]markup[/]"
)


def is_harmless(shown: str) -> bool:
    return all(line.isprintable() for line in shown.split("\n"))


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Odq:
    """A root in which all that others can choose is evil."""
    odq = Odq(f"file://{tmp_path_factory.mktemp('evil')}/root")
    with odq.system() as system:
        once = QueueOptions(max_attempts=1)
        system.create_queue("q", filter=f"a = '{EVIL}' OR TRUE", options=once)
        payload = EVIL.replace("\n", "").encode()  # one may have lines
        system.publish_many(
            [NewMessage(payload, headers={"a": EVIL, EVIL: "name"}), NewMessage(b"2")]
        )
        (first,) = system.claim("q", consumer=EVIL, wait_ms=10_000)
        system.nack("q", first.receipt, error=EVIL)
        system.claim("q", consumer=EVIL, wait_ms=10_000)
    return odq


@pytest.mark.parametrize(
    "arguments",
    [
        ("queues", "list"),
        ("queues", "show", "q"),
        ("queues", "stats", "q"),
        ("failed", "list", "q"),
        ("messages", "get", "0"),
        ("messages", "browse", "q", "failed"),
        ("messages", "browse", "q", "in_flight"),
        ("inspect", "message", "0"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_what_commands_show_is_harmless(evil: Odq, arguments: tuple[str, ...]) -> None:
    shown = evil(*arguments)

    assert is_harmless(shown), [c for c in shown if not c.isprintable() and c != "\n"]
    assert "\nforged line" not in shown


def test_a_table_on_a_terminal_is_harmless_and_has_no_markup() -> None:
    shown = io.StringIO()

    Console(file=shown, color_system=None, width=400).print(table_of(["a"], [[EVIL]]))

    assert is_harmless(shown.getvalue())
    assert "[bold red]markup[/]" in shown.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [("failed", "list", "q"), ("messages", "get", "0"), ("queues", "show", "q")],
    ids=" ".join,
)
def test_json_is_harmless_and_exact(evil: Odq, arguments: tuple[str, ...]) -> None:
    shown = evil(*arguments, "--json")

    assert is_harmless(shown)
    assert any(EVIL in text for text in _texts(json.loads(shown)))


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in _texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def test_errors_are_harmless(odq: Odq, tmp_path: Path) -> None:
    for code, arguments in (
        (3, ("queues", "show", f"no{EVIL}")),  # readers and owners say the same: no such queue
        (3, ("messages", "peek", EVIL)),
        (2, ("queues", "create", EVIL)),
        (2, ("filter", "check", EVIL)),
        (1, ("doctor", f"file://{tmp_path}/{EVIL}")),
    ):
        assert is_harmless(odq(*arguments, code=code))


@given(st.text())
def test_json_has_the_same_value(text: str) -> None:
    document = json_text({text: [text]}, indent=2)

    assert is_harmless(document)
    assert json.loads(document) == {text: [text]}
    assert harmless_json(document) == document


@given(st.text())
def test_harmless_text_is_printable_and_tells_what_was_there(text: str) -> None:
    assert harmless(text).isprintable()
    assert harmless(text) == text or not text.isprintable()


@pytest.mark.parametrize("formatter", [HarmlessLines("%(message)s"), JsonLines()])
def test_a_log_has_one_line_for_an_event(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "queue %s", (EVIL,), None)

    line = formatter.format(record)

    assert line.isprintable()


def test_a_traceback_in_a_log_keeps_its_lines_alone() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        caught = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "failed", (), caught)

    assert is_harmless(HarmlessLines("%(message)s").format(record))
