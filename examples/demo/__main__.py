"""A small shop on an embedded store: filters, priorities, delays, retries, dead letters, a kill.

make demo
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Final

import slatedb.uniffi as slatedb

import opendata_queue
from examples.demo.screen import Screen, screen_for_here
from examples.demo.shop import FILTERS, POISON_AT, Ledger, Shop, batches, events
from odq_encodings import QueueConfigKey
from opendata_queue import FencedError, System
from opendata_queue.cli import app as odq

ROOT: Final = Path(__file__).parents[2]
TICK_SECONDS: Final = 0.1
PATIENCE_SECONDS: Final = 60


class Demo:
    """The acts, one after the other: a shop, accidents elsewhere, and what became of the shop."""

    def __init__(self, folder: Path, screen: Screen) -> None:
        self.url = (folder / "shop").as_uri()
        self.accident_url = (folder / "accident").as_uri()
        self.screen = screen
        self.wrong: list[str] = []
        self.events, self.ticks = (650, 65) if screen.is_live else (200, 15)

    def run(self) -> bool:
        self.screen.title("OpenData Queue: the only durable state is a folder, or a bucket")
        self.screen.say(f"root: {self.url}")
        for name, filter in FILTERS.items():
            self.screen.say(f"queue {name:<10} {filter or '(every message)'}")
        self.pause(1)
        with opendata_queue.open(self.url) as system:
            ledger = self.work(system)
            self.tell_history(system, ledger.replayed[0])
        self.survive_a_kill()
        self.fence()
        with opendata_queue.open(self.url) as system:
            self.summarise(system, ledger)
        self.inspect("emails")
        return not self.wrong

    def pause(self, seconds: float) -> None:
        """Let people read."""
        if self.screen.is_live:
            time.sleep(seconds)

    def check(self, holds: bool, what: str) -> None:
        self.screen.say(what, "✓" if holds else "✗")
        if not holds:
            self.wrong.append(what)

    # --- the shop ---------------------------------------------------------------------------------

    def work(self, system: System) -> Ledger:
        shop = Shop(system, self.screen.tell)
        with self.screen.picture():
            self.screen.title("1. Messages come in; each queue takes what its filter matches")
            for worker in shop.workers:
                worker.start()
            for tick, batch in enumerate(batches(events(self.events), self.ticks)):
                shop.publish(batch)
                if tick == self.ticks // 3:
                    self.screen.title("2. A rush: orders pile up, and urgent ones overtake them")
                if tick == self.ticks // 2:
                    shop.leave_orders_behind()
                self.watch(system, TICK_SECONDS)
            self.screen.title("3. No more messages; what waits is worked off")
            self.watch_until(system, shop.ledger.settled)
            self.watch_until(system, lambda: system.stats("emails").failed == len(POISON_AT))
            self.screen.title("4. Dead letters: mended and replayed")
            for dead in system.failed("emails"):
                text = f"dead letter {dead.message_id}: {dead.error} ({dead.attempts} attempts)"
                self.screen.tell("✗", "emails", text)
            self.watch(system, 2 if self.screen.is_live else 0)
            shop.replay_the_dead()
            self.screen.tell("!", "emails", f"{len(shop.ledger.replayed)} dead letters replayed")
            self.watch_until(system, shop.ledger.settled)
            for worker in shop.workers:
                worker.stop()
            self.watch(system, TICK_SECONDS)
        return shop.ledger

    def watch(self, system: System, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self.screen.frame({name: system.stats(name) for name in FILTERS})
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, TICK_SECONDS))

    def watch_until(self, system: System, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            if time.monotonic() > until:
                raise TimeoutError(f"not reached within {PATIENCE_SECONDS} s")
            self.watch(system, TICK_SECONDS)

    # --- what became of it ------------------------------------------------------------------------

    def tell_history(self, system: System, message_id: int) -> None:
        history = system.history(message_id)
        assert history is not None
        self.screen.title(f"The history of message {message_id}, once a dead letter")
        self.screen.say(f"headers: {dict(history.headers)}")
        for entry in history.entries:
            self.screen.say(f"queue {entry.queue:<7} {entry.state}, attempts: {entry.attempts}")
        self.screen.say(f"claimed by: {', '.join(history.consumers)}")
        self.pause(1)

    def summarise(self, system: System, ledger: Ledger) -> None:
        stats = {name: system.stats(name) for name in FILTERS}
        done = sum(map(len, ledger.done.values()))
        failures = sum(ledger.failures.values())
        left_behind = len(ledger.left_behind)
        retried = failures - len(ledger.replayed) + left_behind
        self.screen.title("Summary")
        self.screen.say(f"published  {len(ledger.published):>6,} messages")
        self.screen.say(f"done       {done:>6,} in {len(FILTERS)} queues")
        self.screen.say(f"retried    {retried:>6,} times, {left_behind} after a lease ran out")
        self.screen.say(f"replayed   {len(ledger.replayed):>6,} dead letters")
        urgent, other = (mean(ledger.waited_ms[kind]) for kind in (True, False))
        self.screen.say(f"waited     {urgent:>6,.0f} ms an urgent order, {other:,.0f} ms any other")
        for name, one in stats.items():
            expected = ledger.expected(name)
            left = one.available + one.delayed + one.in_flight + one.failed + one.expired
            exact = sorted(ledger.done[name]) == expected and one.done == len(expected)
            what = f"{len(expected):,} published for it, {one.done:,} done, {left} left"
            self.check(exact and not left, f"queue {name:<10} {what}")
        due = ledger.expected_failures()
        self.check(failures == due, f"{due} attempts were to fail, {failures} have failed")
        self.check(not self.wrong, "nothing lost, nothing done twice: the numbers add up")

    # --- accidents --------------------------------------------------------------------------------

    def survive_a_kill(self) -> None:
        self.screen.title("Kill a process in the middle (kill -9), and open its root again")
        said = self.words_of_the_doomed()
        acked = {int(number) for word, number in said if word == "acked"}
        published = {int(number) for word, number in said if word == "published"}
        self.screen.say(f"it was told of {len(published)} messages published, {len(acked)} done")
        with opendata_queue.open(self.accident_url) as system:
            found = [message for message in system.read_many(sorted(published)) if message]
            self.check(0 < len(found) == len(published), f"{len(found)} are in the store")
            # It may have been killed between an ack and the word of it: then there are some more.
            page = system.browse("survivors", "done", limit=1_000)
            done = {entry.message_id for entry in page.entries}
            self.check(acked <= done, f"{len(acked & done)} are done")
            delivered = set()
            with system.consumer("survivors", batch=100, idle_ms=800) as messages:
                for message in messages:
                    delivered.add(message.message_id)
            again = len(delivered & done)
            self.check(not again, f"of those that were done, {again} were delivered again")
            missing = len(published - done - delivered)
            self.check(not missing, f"of the others {missing} are missing")

    def words_of_the_doomed(self) -> list[list[str]]:
        """What it said until it was killed."""
        child = subprocess.Popen(
            [sys.executable, "-m", "examples.demo.doomed", self.accident_url],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process
        )
        assert child.stdout is not None
        try:
            lines = [child.stdout.readline() for _ in range(100)]
        finally:
            child.kill()
        lines += child.stdout.readlines()
        child.wait()
        child.stdout.close()
        # The last line may be cut off.
        return [line.split() for line in lines if line.endswith("\n")]

    def fence(self) -> None:
        self.screen.title("Two owners: the second one takes over, and the first one is told")
        with (
            opendata_queue.open(self.accident_url) as first,
            opendata_queue.open(self.accident_url, takeover=True) as second,
        ):
            try:
                first.publish(b"too late")
                told = False
            except FencedError as error:
                told = True
                self.screen.say(f"first owner: FencedError: {error}")
            self.check(told, f"second owner: published message {second.publish(b'mine now')}")
        self.pause(1)

    # --- the bytes --------------------------------------------------------------------------------

    def inspect(self, queue: str) -> None:
        self.screen.title("The bytes follow an open format: one row, read with SlateDB alone")
        key = QueueConfigKey(queue_id=queue.encode()).encode()
        value = asyncio.run(self.value_of(key))
        self.screen.say(f"$ odq inspect hex {key.hex()} {value.hex()}\n")
        odq(["inspect", "hex", key.hex(), value.hex()], standalone_mode=False)

    async def value_of(self, key: bytes) -> bytes:
        folder = self.url.removeprefix("file:///")
        store = slatedb.ObjectStore.resolve("file:///")
        reader = await slatedb.DbReaderBuilder(f"{folder}/queues/00000", store).build()
        value = await reader.get(key)
        await reader.shutdown()
        assert isinstance(value, bytes)
        return value


def main() -> int:
    # Who presses Ctrl-C twice does not wait until the store is closed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        demo = Demo(Path(folder), screen_for_here())
        try:
            return 0 if demo.run() else 1
        except KeyboardInterrupt:
            demo.screen.say("stopped")
            return 130


if __name__ == "__main__":
    sys.exit(main())
