"""A process that publishes and consumes until it is killed, and says what was acknowledged."""

from __future__ import annotations

import sys

import opendata_queue
from opendata_queue import NewMessage, QueueOptions


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        options = QueueOptions(lease_ms=500, backoff_ms=0)
        system.create_queue("survivors", filter="type = 'survivor'", options=options)
        message = NewMessage(b"still here", headers={"type": "survivor"})
        while True:
            for message_id in system.publish_many([message] * 5):
                print("published", message_id, flush=True)
            claimed = system.claim("survivors", 3, wait_ms=1_000)
            system.ack("survivors", *claimed[:2])
            for one in claimed[:2]:
                print("acked", one.message_id, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
