"""One system, many threads: producers and consumers share it, and their calls share commits.

python examples/many_threads.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import opendata_queue
from opendata_queue import System, TimedOutError

PRODUCERS = CONSUMERS = 4
MESSAGES = 50


def produce(system: System, producer: int) -> int:
    """Returns the id of the last one."""
    return [system.publish(b"%d from %d" % (n, producer)) for n in range(MESSAGES)][-1]


def consume(system: System, consumer: str, all_published: threading.Event) -> list[int]:
    seen = []
    while not all_published.is_set() or system.stats("jobs").available:
        claimed = system.claim("jobs", 10, consumer=consumer, wait_ms=100)
        if claimed:
            system.ack("jobs", *claimed)
        seen += [message.message_id for message in claimed]
    return seen


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        if "jobs" not in system.list_queues():
            system.create_queue("jobs")
        all_published = threading.Event()
        with ThreadPoolExecutor(PRODUCERS + CONSUMERS) as threads:
            consuming = [
                threads.submit(consume, system, f"consumer {number}", all_published)
                for number in range(CONSUMERS)
            ]
            producing = [threads.submit(produce, system, number) for number in range(PRODUCERS)]
            system.history(max(one.result() for one in producing))  # all are in the queue now
            all_published.set()
            seen = Counter(one for consumed in consuming for one in consumed.result())
        print(f"{len(seen)} messages, each seen {set(seen.values())} times")

        try:  # whatever waits takes a timeout
            system.claim("jobs", wait_ms=60_000, timeout_ms=50)
        except TimedOutError as error:
            print(f"TimedOutError: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
