"""A worker: a plain function that is called in threads, eight messages at a time.

    python examples/worker.py [file:///path]

A service would end with ``system.run_workers()``, which runs until SIGINT or SIGTERM, lets the
handlers finish and gives back what they had not begun.
"""

from __future__ import annotations

import sys
import tempfile
import threading

import opendata_queue
from opendata_queue import ClaimedMessage, NewMessage, RetryLater

MESSAGES = 20


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        if "emails" not in system.list_queues():
            system.create_queue("emails")
        left = threading.Semaphore(0)

        @system.worker("emails", concurrency=8)
        def send(message: ClaimedMessage) -> None:
            if message.message_id % 10 == 0 and message.attempts == 1:
                print(f"message {message.message_id}: the server is busy, again in 50 ms")
                raise RetryLater(delay_ms=50)
            print(f"message {message.message_id} sent by {threading.current_thread().name}")
            left.release()

        send.start()
        system.publish_many([NewMessage(b"hello %d" % number) for number in range(MESSAGES)])
        for _ in range(MESSAGES):
            left.acquire()
        send.stop()
        print(f"{system.stats('emails').done} done")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
