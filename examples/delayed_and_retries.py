"""Messages that are not due yet, and messages that come back after a failure.

python examples/delayed_and_retries.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue
from opendata_queue import QueueOptions


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        if "mails" not in system.list_queues():
            # 40 ms after the first failure, 80 after the second, then 160, less up to a tenth.
            options = QueueOptions(
                max_attempts=4, backoff_ms=40, backoff_factor=2, backoff_jitter=0.1
            )
            system.create_queue("mails", options=options)

        system.publish(b"in a while", delay_ms=100)
        system.publish(b"now")

        done = 0
        while done < 2:
            for message in system.claim("mails", 10, wait_ms=60_000):
                if message.payload == b"now" and message.attempts < 3:
                    print(f"{message.payload!r} failed in attempt {message.attempts}")
                    system.nack("mails", message, error="the server is busy")
                else:
                    print(f"{message.payload!r} done in attempt {message.attempts}")
                    system.ack("mails", message)
                    done += 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
