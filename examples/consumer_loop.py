"""Loop over a queue: done when the loop goes on, failed when the block is left by an exception.

python examples/consumer_loop.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue
from opendata_queue import NewMessage, QueueOptions


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        if "jobs" not in system.list_queues():
            system.create_queue("jobs", options=QueueOptions(max_attempts=2, backoff_ms=10))
        system.publish_many([NewMessage(job) for job in (b"4", b"2", b"0", b"1")])

        # Without idle_ms the loop would wait for more for ever.
        with system.consumer("jobs", idle_ms=2_000) as messages:
            for message in messages:
                try:
                    print(f"4 / {int(message.payload or b'')} = {4 / int(message.payload or b'')}")
                except ZeroDivisionError as error:
                    # It comes back after a pause, and is given up after two attempts.
                    messages.nack(f"{error} in attempt {message.attempts}")

        for failed in system.failed("jobs"):
            print(f"message {failed.message_id} was given up: {failed.error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
