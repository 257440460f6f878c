"""Publish a message, claim it, and acknowledge it.

python examples/publish_and_consume.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        if "emails" not in system.list_queues():
            system.create_queue("emails", filter="type = 'order.created'")

        system.publish(b'{"order": 17}', headers={"type": "order.created"})
        system.publish(b'{"order": 16}', headers={"type": "order.cancelled"})  # for another queue

        for message in system.claim("emails", 10, wait_ms=60_000):
            (outcome,) = system.ack("emails", message)
            print(f"{message.payload!r}, attempt {message.attempts}: {outcome}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
