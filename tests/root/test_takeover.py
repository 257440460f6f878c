"""Real processes: one is killed or stopped, another goes on, and nothing is lost or done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from opendata_queue.root.owner_files import current_owner
from opendata_queue.store import Objects
from tests.conftest import NewRoot
from tests.queues.consumer_process import SETTINGS
from tests.queues.test_queues_crash import Told, check_the_end

REPOSITORY = Path(__file__).parents[2]
LONGER_THAN_ANY_TEST_MS = 600_000
# Long enough for an owner on a busy machine to keep its roles.
SHORT_MS = 3_000
SOME_LINES = 150


class Process:
    """An owner, and all that it has said."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.said: list[str] = []

    @property
    def pid(self) -> int:
        return self.popen.pid

    def line(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if line.endswith("\n"):  # one that was cut by a kill was never said
            self.said.append(line.strip())
        return line.strip()

    def lines(self, count: int) -> None:
        for _ in range(count):
            assert self.line(), "it ended"

    def go(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()

    def send(self, signal: signal.Signals) -> None:
        self.popen.send_signal(signal)

    def to_the_end(self) -> None:
        while self.line():
            pass
        self.popen.wait()

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.to_the_end()


@contextmanager
def process(url: str, how: str, lease_ms: int = SHORT_MS) -> Iterator[Process]:
    popen = subprocess.Popen(
        [sys.executable, "-m", "tests.root.owner_process", url, str(lease_ms), how],
        cwd=REPOSITORY,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(str(REPOSITORY / p) for p in (".", "encodings"))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Process(popen)
    finally:
        popen.kill()
        popen.wait()
        for pipe in (popen.stdin, popen.stdout):
            assert pipe is not None
            pipe.close()


def told_by(*processes: Process) -> Told:
    """All that was said, by one owner after the other."""
    told = Told()
    for number, process in enumerate(processes):
        for line in process.said:
            if line[:2] in ("p ", "d ", "a "):
                told.line(number, line)
    assert told.acked
    return told


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/root"
    new_s3_root: NewRoot = request.getfixturevalue("new_s3_root")
    return new_s3_root()


async def test_a_root_whose_owner_was_killed_opens_at_once(url: str) -> None:
    with process(url, "plain", LONGER_THAN_ANY_TEST_MS) as first:
        assert first.line() == "open"
        first.lines(SOME_LINES)
        first.kill()

        with process(url, "plain", LONGER_THAN_ANY_TEST_MS) as second:
            assert second.line() == "open"
            second.lines(SOME_LINES)
            second.kill()

    await check_the_end(url, told_by(first, second))


def test_of_processes_that_race_to_open_a_root_one_wins(url: str) -> None:
    with ExitStack() as stack:
        racing = [
            stack.enter_context(process(url, "plain", LONGER_THAN_ANY_TEST_MS)) for _ in range(4)
        ]

        first_lines = {one.pid: one.line() for one in racing}

        (winner,) = [pid for pid, line in first_lines.items() if line == "open"]
        del first_lines[winner]
        assert set(first_lines.values()) == {f"owned {winner}"}


async def test_of_processes_that_take_a_root_over_at_once_one_serves_in_the_end(url: str) -> None:
    with ExitStack() as stack:
        owner = stack.enter_context(process(url, "plain"))
        assert owner.line() == "open"
        takers = [stack.enter_context(process(url, "storm")) for _ in range(3)]
        assert [one.line() for one in takers] == ["ready"] * 3
        for one in takers:
            one.go()

        first_lines = {one.pid: one.line() for one in takers}

        # One that came late may have taken over from another that served already.
        assert {line.split()[0] for line in first_lines.values()} <= {"open", "owned"}
        serving = await current_owner(Objects.open(url, SETTINGS))
        assert serving is not None
        (winner,) = [one for one in takers if one.pid == serving.pid]
        assert first_lines[winner.pid] == "open"
        for one in (owner, *takers):
            if one is not winner:
                one.to_the_end()
                assert one.popen.returncode == 0
                assert one.said[-1].startswith("owned") or "fenced" in one.said
        winner.lines(SOME_LINES)
        winner.kill()
    opened = [one for one in takers if first_lines[one.pid] == "open" and one is not winner]
    await check_the_end(url, told_by(owner, *opened, winner))


async def test_a_standby_takes_over_from_an_owner_that_was_killed(url: str) -> None:
    with process(url, "plain") as owner:
        assert owner.line() == "open"
        with process(url, "standby") as standby:
            assert standby.line() == "standing by"
            owner.lines(SOME_LINES)

            owner.kill()

            assert standby.line() == "open"
            standby.lines(SOME_LINES)
            standby.kill()
    await check_the_end(url, told_by(owner, standby))


@pytest.mark.parametrize("how", ["takeover", "standby"])
async def test_an_owner_that_was_only_stopped_steps_down_when_it_goes_on(
    url: str, how: str
) -> None:
    with process(url, "plain") as owner:
        assert owner.line() == "open"
        owner.lines(SOME_LINES)
        owner.send(signal.SIGSTOP)

        with process(url, how) as successor:
            while successor.line() != "open":
                assert successor.said == ["standing by"]
            successor.lines(SOME_LINES)
            owner.send(signal.SIGCONT)
            owner.to_the_end()
            assert owner.popen.returncode == 0
            # Other tasks may still say what had become durable before.
            assert "fenced" in owner.said
            successor.lines(SOME_LINES)
            successor.kill()

    await check_the_end(url, told_by(owner, successor))
