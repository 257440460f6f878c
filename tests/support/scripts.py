"""Small programs that are run in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/encodings:{ROOT}/compactor"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, *arguments: str) -> list[str]:
    """The lines that a script has printed when it has ended well."""
    process = start(script, *arguments)
    try:
        said, complaints = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        said, complaints = process.communicate()
        raise AssertionError(f"it hangs after {said!r}: {complaints}") from None
    assert process.returncode == 0, complaints
    assert "Error" not in complaints, complaints
    return said.splitlines()
