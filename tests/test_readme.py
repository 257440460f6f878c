"""What the documents show runs as it is written, and prints what they say.

The Python blocks of a document are run in their order and share their names, like cells of a
notebook. A block that calls ``run_workers()`` is a script of its own: it is run until it has
printed something, and then gets a SIGINT. Where a line ``print(…)`` ends with a comment, that is
what it prints; ``…`` stands for anything.

Of console blocks, the lines with ``$ odq`` are run, and what follows them is what they print.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import opendata_queue
from opendata_queue.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "docs/guide.md"]
LINKING = [
    *("CHANGELOG.md", "CONTRIBUTING.md"),
    *("docs/architecture.md", "docs/benchmarks.md", "docs/operations.md", "docs/retention.md"),
    *("docs/spark.md", "examples/README.md", "examples/deploy/README.md", "rfcs/README.md"),
]
MAPS = ["docs/architecture.md", "CONTRIBUTING.md"]
SHARED_FOLDER = "file:///tmp/"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAID = re.compile(r"^\s*print\(.*\)  # (.*)$")
_LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
_FILE = re.compile(r"\b(?:[\w-]+/)+[\w.-]+\.(?:py|md|lark)\b")
_PARTS = re.compile(r"`([\w./-]+\.py)` \(((?:`\w+`(?:, )?)+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block and the number of its first line."""

    language: str
    text: str
    line: int


def blocks(document: str, language: str) -> list[Block]:
    text = (ROOT / document).read_text()
    found = (
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in _BLOCK.finditer(text)
    )
    return [block for block in found if block.language == language]


def is_script(block: Block) -> bool:
    return "run_workers()" in block.text


def scripts() -> list[tuple[str, int]]:
    return [
        (document, block.line)
        for document in DOCUMENTS
        for block in blocks(document, "python")
        if is_script(block)
    ]


def source_of(block: Block, folder: Path) -> str:
    """What is run: in a folder of its own, and with the patience that a busy machine needs."""
    text = re.sub(r"wait_ms=[15]_000\b", "wait_ms=60_000", block.text)
    return text.replace(SHARED_FOLDER, f"file://{folder}/")


def agrees(printed: str, said: str) -> bool:
    pattern = "*".join(re.sub(r"([\[*?])", r"[\1]", part) for part in said.split("…"))
    return fnmatch.fnmatchcase(printed, pattern)


class Prints:
    """Takes the place of ``print``, and compares what is printed with what the document says."""

    def __init__(self, document: str) -> None:
        lines = (ROOT / document).read_text().splitlines()
        said = ((number, _SAID.match(line)) for number, line in enumerate(lines, 1))
        self.said = {number: match[1] for number, match in said if match}
        self.printed: dict[int, list[str]] = {}

    def __call__(self, *values: Any) -> None:
        line = sys._getframe(1).f_lineno
        self.printed.setdefault(line, []).append(" ".join(map(str, values)))

    def differences(self) -> list[tuple[int, str, str]]:
        return [
            (number, said, printed)
            for number, said in self.said.items()
            for printed in self.printed.get(number, ["(nothing)"])
            if not agrees(printed, said)
        ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_python_of_a_document_runs_and_prints_what_it_says(
    document: str, tmp_path: Path
) -> None:
    prints = Prints(document)
    names: dict[str, Any] = {"__name__": "__main__", "print": prints}
    try:
        for block in blocks(document, "python"):
            if is_script(block):
                prints.said = {
                    number: said
                    for number, said in prints.said.items()
                    if not block.line <= number < block.line + block.text.count("\n")
                }
                continue
            source = "\n" * (block.line - 1) + source_of(block, tmp_path)
            exec(compile(source, document, "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, opendata_queue.System):
                value.close()

    assert prints.differences() == []


@pytest.mark.parametrize(("document", "line"), scripts())
def test_a_service_of_a_document_works_until_it_is_interrupted(
    document: str, line: int, tmp_path: Path
) -> None:
    (block,) = [block for block in blocks(document, "python") if block.line == line]
    script = tmp_path / "service.py"
    script.write_text(source_of(block, tmp_path))

    with subprocess.Popen(
        [sys.executable, "-u", script],
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/encodings:{ROOT}/compactor"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as service:
        assert service.stdout is not None
        first = service.stdout.readline()
        service.send_signal(signal.SIGINT)
        more, errors = service.communicate(timeout=120)

    assert (service.returncode, errors) == (0, "")
    said = [match[1] for match in map(_SAID.match, block.text.splitlines()) if match]
    assert [
        one for one in (first + more).splitlines() if not any(agrees(one, x) for x in said)
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_of_a_document_print_what_it_says(document: str) -> None:
    runner = CliRunner()
    for block in blocks(document, "console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, said = part.partition("\n")
            program, *arguments = shlex.split(command)
            if program != "odq":
                continue
            done = runner.invoke(app, arguments)
            assert done.exception is None or isinstance(done.exception, SystemExit), command
            if said:
                assert _trimmed(done.output) == _trimmed(said), command
            else:
                assert done.exit_code == 0, command


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("document", [*DOCUMENTS, *LINKING])
def test_links_of_a_document_lead_to_what_is_there(document: str) -> None:
    page = ROOT / document
    for path, anchor in _LINK.findall(page.read_text()):
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def anchors(page: Path) -> list[str]:
    """What its headings are called in links."""
    headings = _HEADING.findall(page.read_text())
    return [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings]


def of_the_source(path: str) -> Path | None:
    """A file that a map names: from the repository's folder on, or from the package's."""
    return next(
        (one for one in (ROOT / path, ROOT / "opendata_queue" / path) if one.exists()), None
    )


@pytest.mark.parametrize("document", MAPS)
def test_files_that_a_map_names_are_there(document: str) -> None:
    named = _FILE.findall((ROOT / document).read_text())

    assert len(named) > 20
    assert [one for one in named if of_the_source(one) is None] == []


@pytest.mark.parametrize("document", MAPS)
def test_what_a_map_says_is_in_a_file_is_there(document: str) -> None:
    found = _PARTS.findall((ROOT / document).read_text())

    assert found
    for path, names in found:
        file = of_the_source(path)
        assert file is not None, path
        text = file.read_text()
        missing = [one for one in re.findall(r"\w+", names) if not re.search(rf"\b{one}\b", text)]
        assert missing == [], path


def test_every_room_is_on_the_map() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rooms = {path.parent.name for path in ROOT.glob("opendata_queue/*/__init__.py")}
    within_store = {path.parent.name for path in ROOT.glob("opendata_queue/store/*/__init__.py")}

    assert [room for room in sorted(rooms) if f"| `{room}/` |" not in page] == []
    assert [room for room in sorted(within_store) if f"`store/{room}/`" not in page] == []


def test_every_module_is_on_the_map() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    listed = page.partition("### Every module")[2].partition("\n## ")[0]
    rows = [line for line in listed.splitlines() if line.startswith("| `")]
    source = ROOT / "opendata_queue"
    modules = [path.relative_to(source) for path in source.glob("*/**/*.py")]

    for module in [one for one in modules if one.name != "__init__.py"]:
        of_a_command = module.parts[0] == "cli" and len(module.parts) > 2
        room = "cli" if of_a_command else module.parent.as_posix()
        (row,) = [row for row in rows if f"`{room}/`" in row.split("|")[1]]
        shown = f"`{module.parts[1]}/`" if of_a_command else f"`{module.stem}`"
        assert shown in row, module


def test_every_operation_is_shown_in_the_guide() -> None:
    shown = "".join(block.text for block in blocks("docs/guide.md", "python"))
    operations = [
        name
        for name in vars(opendata_queue.System)
        if not name.startswith("_") and name not in {"opened_by"}
    ]

    assert [name for name in operations if f"system.{name}" not in shown] == []


def test_every_error_is_named_in_the_guide() -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    errors = [
        name
        for name, value in vars(opendata_queue).items()
        if isinstance(value, type) and issubclass(value, opendata_queue.OdqError)
    ]

    assert [name for name in errors if f"`{name}`" not in guide] == []


def test_every_option_of_a_queue_is_named_in_the_guide() -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    options = opendata_queue.QueueOptions.__slots__

    assert [name for name in options if f"`{name}`" not in guide] == []


def test_a_print_is_compared_with_what_the_document_says() -> None:
    assert agrees("[1, 2] or so", "[1, …] or so")
    assert not agrees("[1, 2]", "[1, 3]")
