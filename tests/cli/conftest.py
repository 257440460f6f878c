"""``odq`` in this process, on a root of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import opendata_queue
from opendata_queue.cli import app


@dataclass(frozen=True)
class Odq:
    """Runs ``odq`` with arguments, and expects it to exit with a code."""

    url: str

    def __call__(self, *arguments: str, code: int = 0, input: str | bytes | None = None) -> str:
        """What it prints; what it complains of if it should fail."""
        shown = CliRunner(env={"COLUMNS": "160", "ODQ_STORE": self.url}).invoke(
            app, arguments, input=input, catch_exceptions=False
        )
        assert shown.exit_code == code, (shown.exit_code, shown.stdout, shown.stderr)
        assert "Traceback" not in shown.stderr
        return shown.stderr if code and not shown.stdout else shown.stdout

    def json(self, *arguments: str, code: int = 0, input: str | bytes | None = None) -> Any:
        return json.loads(self(*arguments, "--json", code=code, input=input))

    def lines(self, *arguments: str, code: int = 0, input: str | bytes | None = None) -> list[Any]:
        shown = self(*arguments, "--json", code=code, input=input)
        return [json.loads(line) for line in shown.splitlines()]

    def system(self) -> opendata_queue.System:
        return opendata_queue.open(self.url)


@pytest.fixture
def odq(tmp_path: Path) -> Odq:
    """On a root that is there, and empty."""
    url = f"file://{tmp_path}/root"
    opendata_queue.open(url).close()
    return Odq(url)


@pytest.fixture
def orders(odq: Odq) -> Odq:
    """On a root with a queue ``orders`` of all messages."""
    with odq.system() as system:
        system.create_queue("orders")
    return odq
