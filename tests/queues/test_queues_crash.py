"""Real consumers killed for real: what was acknowledged stays done, the rest comes back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from odq_encodings import DoneMessages, RecordType, decode_any
from opendata_queue import Engine
from opendata_queue.testing import ManualClock
from tests.queues.consumer_process import QUEUE, SETTINGS

REPOSITORY = Path(__file__).parents[2]
HOUR_MS = 3_600_000


@dataclass
class Told:
    """What all processes together have said, checked line by line."""

    published: set[int] = field(default_factory=set)
    acked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The process that was told, and the attempt that it acknowledged."""
    attempts: Counter[int] = field(default_factory=Counter)
    """The highest attempt that was delivered."""

    def line(self, process: int, line: str) -> None:
        match line.split():
            case ["p", message_id]:
                assert int(message_id) not in self.published, "an id was given out twice"
                self.published.add(int(message_id))
            case ["d", message_id, attempts]:
                self.delivered(process, int(message_id), int(attempts))
            case ["a", message_id, attempts]:
                assert int(message_id) not in self.acked, "acknowledged twice"
                self.acked[int(message_id)] = process, int(attempts)
            case words:
                raise AssertionError(f"not a line of the process: {words}")

    def delivered(self, process: int, message_id: int, attempts: int) -> None:
        by, acked_attempt = self.acked.get(message_id, (process, attempts))
        # A process may say late what it got before another of its tasks was done with it.
        assert by == process, "delivered by a later process although it is done"
        assert attempts <= acked_attempt, "delivered although it is done"
        self.attempts[message_id] = max(self.attempts[message_id], attempts)


def run_and_kill(url: str, number: int, lines: int, told: Told) -> None:
    """Let a process work, kill it after so many lines, and take note of all that it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.queues.consumer_process", url],
        cwd=REPOSITORY,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(str(REPOSITORY / p) for p in (".", "encodings"))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = [process.stdout.readline()]
        assert said == ["open\n"], "the root did not open by itself"
        for _ in range(lines):
            said.append(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        said += process.stdout.readlines()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    for line in said[1:]:
        if line.endswith("\n"):  # one that was cut by the kill was never said
            told.line(number, line)


async def done_ids(system: Engine) -> list[int]:
    """What the store holds to be done, with repetitions, if there were any."""
    found: list[int] = []
    async for chunk in system._queues.database.scan(b"\x01", b"\xff"):
        for key, value in chunk:
            if key[1] == RecordType.DONE_MESSAGES:
                record = decode_any(key, value).value
                assert isinstance(record, DoneMessages)
                found += [message.message_id for message in record.messages]
    return found


async def drain(system: Engine) -> dict[int, int]:
    """Claim and finish all that is left; the attempts of each message."""
    left: dict[int, int] = {}
    while claimed := await system.claim(QUEUE, 500):
        ids = [message.message_id for message in claimed]
        assert not left.keys() & set(ids), "handed out twice"
        left |= {message.message_id: message.attempts for message in claimed}
        outcomes = await system.ack(QUEUE, *(message.receipt for message in claimed))
        assert set(outcomes) == {"ok"}
    return left


async def check_the_end(url: str, told: Told) -> None:
    # All leases, delays and back-offs are over after an hour. Leases that are over are taken back
    # by the first claim, and rest for their back-off: so the clock is turned once more.
    clock = ManualClock(time.time_ns() // 1_000_000)
    async with await Engine.open(url, settings=SETTINGS, clock=clock) as system:
        clock.advance_ms(HOUR_MS)
        await system._tailer.caught_up()
        everything = {e.message_id async for chunk in system.scan_log() for e in chunk}
        done = await done_ids(system)
        assert len(done) == len(set(done)) == (await system.stats(QUEUE)).done
        assert told.acked.keys() <= set(done), "an acknowledged ack was forgotten"

        left = await drain(system)
        clock.advance_ms(HOUR_MS)
        left |= await drain(system)

        assert told.published <= everything, "a published message is lost"
        assert left.keys().isdisjoint(done)
        assert left.keys() | set(done) == everything, "a message is neither done nor left"
        assert all(attempts > 0 for attempts in left.values())
        assert sorted(await done_ids(system)) == sorted(everything)
        stats = await system.stats(QUEUE)
        assert stats.done == len(everything)
        assert (stats.available, stats.delayed, stats.in_flight, stats.failed) == (0, 0, 0, 0)


async def test_30_kills_of_a_process_that_publishes_and_consumes(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/root"
    chance = random.Random(30)
    told = Told()
    for number in range(30):
        run_and_kill(url, number, chance.choice([0, 1, 20, 200, 1_000]), told)
    assert len(told.acked) > 1_000
    assert told.attempts.keys() >= told.acked.keys()
    assert max(told.attempts.values()) > 1, "nothing ever came back"
    await check_the_end(url, told)
