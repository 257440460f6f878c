"""Many messages at once: batches, priorities from a filter, delays, and an idempotency key.

python examples/batches_and_priorities.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue
from opendata_queue import NewMessage


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        if "orders" not in system.list_queues():
            # Lower numbers are claimed first; 128 is what a rule has that names none.
            system.create_queue("orders", filter="price >= 100 PRIORITY 5; price < 100")

        # All of them are stored, or none; one commit for a thousand is as fast as one for one.
        system.publish_many(
            [NewMessage(b"%d" % number, headers={"price": str(number)}) for number in range(200)]
        )
        system.publish(b"much later", headers={"price": "1"}, delay_ms=3_600_000)
        twice = [
            system.publish(b"pay", headers={"price": "500"}, idempotency_key="invoice-4711")
            for _ in range(2)
        ]
        print(f"published with one key twice: one message, {twice[0] == twice[1]}")

        left = 201
        while left:
            batch = system.claim("orders", 50, wait_ms=60_000)
            left -= len(batch)
            priorities = sorted({message.priority for message in batch})
            system.ack("orders", *batch)
            print(f"{len(batch)} messages of priority {priorities} done with one call")
        stats = system.stats("orders")
        print(f"{stats.done} done, {stats.delayed} delayed")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
