"""A new queue of what was published before it was made: the log is replayed for it.

python examples/queue_from_the_past.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile
import time

import opendata_queue
from opendata_queue import Start, System


def payloads(system: System, queue: str, start: Start) -> list[bytes | None]:
    if queue in system.list_queues():
        system.delete_queue(queue)
    system.create_queue(queue, filter="type = 'order'", start=start)
    # What is in the log is brought in the background, while the queue can be used already. To have
    # it all, wait until nothing is left to be read.
    while system.stats(queue).replaying:
        time.sleep(0.01)
    found = []
    while claimed := system.claim(queue, 100):
        system.ack(queue, *claimed)
        found += [message.payload for message in claimed]
    return found


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        for number in range(3):
            message_id = system.publish(b"order %d" % number, headers={"type": "order"})
        last = system.read(message_id)
        assert last is not None

        print(f"from now on: {payloads(system, 'new', 'now')}")
        print(f"from the beginning: {payloads(system, 'all', 'beginning')}")
        print(f"from a time on: {payloads(system, 'since', last.received_at_ms)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
