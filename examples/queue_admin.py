"""Queues are made, changed, paused, purged and deleted while they are used.

python examples/queue_admin.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue
from opendata_queue import NewMessage, QueueExistsError, QueueNotFoundError, QueueOptions


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        options = QueueOptions(max_attempts=3, lease_ms=60_000)
        info = system.create_queue("shop/orders", filter="type='order'", options=options)
        print(f"{info.name}: {info.filter}, {info.options.max_attempts} attempts")
        try:
            system.create_queue("shop/orders")
        except QueueExistsError as error:
            print(f"QueueExistsError: {error}")

        # With relaxed claims messages are handed out before the claim is durable: faster on S3, and
        # after a crash one may be delivered again while its first holder still works.
        info = system.update_queue("shop/orders", max_attempts=9, relaxed_claims=True)
        print(f"now {info.options.max_attempts} attempts, relaxed: {info.options.relaxed_claims}")

        system.pause_queue("shop/orders")
        system.publish_many([NewMessage(b"order", headers={"type": "order"})] * 100)
        print(f"paused: {len(system.claim('shop/orders', 10, wait_ms=50))} claimed")
        system.resume_queue("shop/orders")
        print(f"resumed: {len(system.claim('shop/orders', 10, wait_ms=60_000))} claimed")

        print(f"purged: {system.purge_queue('shop/orders')}")
        system.delete_queue("shop/orders")
        try:
            system.get_queue("shop/orders")
        except QueueNotFoundError as error:
            print(f"QueueNotFoundError: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
