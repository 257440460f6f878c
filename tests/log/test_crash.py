"""Real processes killed for real: what was acknowledged is there, whole, and once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendata_queue import Engine, StoredMessage
from tests.conftest import NewRoot
from tests.log.publisher_process import OPTIONS, SETTINGS, message_of

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def publisher(url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A publishing process that is about to open; killed at the latest when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.log.publisher_process", url, *options],
        cwd=REPOSITORY,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(str(REPOSITORY / p) for p in (".", "encodings"))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "opening\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def acknowledged(lines: list[str]) -> dict[int, int]:
    """Ids and seeds; a line that was cut by the kill was never said."""
    whole = [line.split() for line in lines if line.endswith("\n")]
    return {int(words[0]): int(words[1]) for words in whole if len(words) == 2}


def run_and_kill(url: str, acknowledgements: int, *options: str) -> dict[int, int]:
    """Let a process publish, kill it after so many acknowledgements, and return all it gave."""
    with publisher(url, *options) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        assert lines == ["open\n"], "the root did not open by itself"
        for _ in range(acknowledgements):
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        return acknowledged(lines)


def run_and_kill_at(url: str, seconds: float) -> dict[int, int]:
    """The same, killed so long after it began to open, wherever it is by then."""
    with publisher(url) as process:
        assert process.stdout is not None
        with pytest.raises(subprocess.TimeoutExpired):  # or it has ended by itself
            process.wait(seconds)
        process.send_signal(signal.SIGKILL)
        return acknowledged(process.stdout.readlines())


async def check(system: Engine, expected: dict[int, int]) -> None:
    """Every acknowledged message is there with its exact payload and headers."""
    ids = list(expected)
    for start in range(0, len(ids), 1_000):
        some = ids[start : start + 1_000]
        for message_id, stored in zip(some, await system.read_many(some), strict=True):
            assert_is(stored, message_id, expected[message_id])


def assert_is(stored: StoredMessage | None, message_id: int, seed: int) -> None:
    assert stored is not None, f"message {message_id} was acknowledged and is lost"
    original = message_of(seed)
    assert stored.payload == original.payload
    assert stored.headers == tuple(original.headers.items())


async def check_nothing_is_torn(system: Engine) -> set[int]:
    """Every entry of the log has its payload, and no id occurs twice."""
    seen: set[int] = set()
    async for chunk in system.scan_log():
        ids = [entry.message_id for entry in chunk]
        assert ids == sorted(ids)
        assert not seen.intersection(ids)
        seen.update(ids)
        for entry, stored in zip(chunk, await system.read_many(ids), strict=True):
            assert_is(stored, entry.message_id, int(dict(entry.headers)["seed"]))
    return seen


async def kill_again_and_again(url: str, times: int) -> None:
    chance = random.Random(times)
    expected: dict[int, int] = {}
    for _ in range(times):
        if chance.random() < 0.5:
            fresh = run_and_kill(url, chance.choice([0, 1, 20, 200, 600]))
        else:  # most often while it opens, or while it publishes
            fresh = run_and_kill_at(url, chance.uniform(0, chance.choice([0.05, 0.3])))
        assert not expected.keys() & fresh.keys(), "an id was given out twice"
        expected |= fresh
        async with await Engine.open(url, settings=SETTINGS, options=OPTIONS) as system:
            await check(system, fresh)
    async with await Engine.open(url, settings=SETTINGS, options=OPTIONS) as system:
        await check(system, expected)
        assert await check_nothing_is_torn(system) >= expected.keys()
    assert len(expected) > times


async def test_50_kills_on_files(tmp_path: Path) -> None:
    await kill_again_and_again(f"file://{tmp_path}/root", times=50)


async def test_10_kills_on_s3(new_s3_root: NewRoot) -> None:
    await kill_again_and_again(new_s3_root(), times=10)


async def take_over(url: str) -> None:
    """Two processes, one root: the second one wins, the first one is told, nothing is lost."""
    with publisher(url) as first:
        assert first.stdout is not None
        lines = [first.stdout.readline() for _ in range(20)]

        second = run_and_kill(url, 50, "--takeover")

        lines += first.stdout.readlines()  # ends when the process does
        assert first.wait() == 0
        assert lines[-1] == "fenced\n"
        by_first = acknowledged(lines)
    assert len(by_first) >= 19
    assert not by_first.keys() & second.keys()
    async with await Engine.open(url, settings=SETTINGS, options=OPTIONS) as system:
        await check(system, by_first | second)
        await check_nothing_is_torn(system)


async def test_a_second_process_on_files_fences_the_first(tmp_path: Path) -> None:
    await take_over(f"file://{tmp_path}/root")


async def test_a_second_process_on_s3_fences_the_first(new_s3_root: NewRoot) -> None:
    await take_over(new_s3_root())
