"""See what is in a queue without changing it: counts, the next messages, pages, and histories.

python examples/browse_and_history.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue
from opendata_queue import BrowsedState, NewMessage, System


def entries(system: System, queue: str, state: BrowsedState) -> list[int]:
    """The ids of all messages in one state, read in pages."""
    page = system.browse(queue, state, limit=3)
    found = [entry.message_id for entry in page.entries]
    while page.next is not None:
        page = system.browse(queue, state, after=page.next, limit=3)
        found += [entry.message_id for entry in page.entries]
    return found


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        if "jobs" not in system.list_queues():
            system.create_queue("jobs")
            system.create_queue("audit")
        ids = system.publish_many([NewMessage(b"job %d" % number) for number in range(10)])
        later = system.publish(b"job 10", delay_ms=3_600_000)
        system.history(later)  # returns when that message is in its queues

        done, failing, held = system.claim("jobs", 3, consumer="alice")
        system.ack("jobs", done)
        system.nack("jobs", failing, error="not today", delay_ms=3_600_000)

        stats = system.stats("jobs")
        print(f"{stats.available} available, {stats.delayed} delayed, {stats.in_flight} in flight")
        print(f"next: {[message.payload for message in system.peek('jobs', 2)]}")
        for state in ("available", "delayed", "in_flight", "done", "failed"):
            print(f"{state}: {entries(system, 'jobs', state)}")

        history = system.history(ids[1])
        assert history is not None
        print(f"message {ids[1]} was claimed by {', '.join(history.consumers)}")
        for entry in history.entries:
            print(f"  in {entry.queue}: {entry.state} after {entry.attempts} attempts")
        system.release("jobs", held)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
