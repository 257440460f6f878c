"""Messages that fail too often: listed with their errors, replayed, or forgotten.

python examples/dead_letters.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue
from opendata_queue import NewMessage, QueueOptions, System


def fail_everything(system: System, count: int) -> None:
    failed = 0
    while failed < count:
        claimed = system.claim("orders", 10, wait_ms=60_000)
        # All of a batch in one call; without delay_ms they would rest for a growing while.
        system.nack("orders", *claimed, error="no such customer", delay_ms=0)
        failed += len(claimed)


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        if "orders" not in system.list_queues():
            system.create_queue("orders", options=QueueOptions(max_attempts=2))
        tenants = ["acme", "acme", "acme", "globex", "initech"]
        system.publish_many(
            [NewMessage(b"%d" % n, headers={"tenant": name}) for n, name in enumerate(tenants)]
        )
        fail_everything(system, 2 * len(tenants))

        for dead in system.failed("orders"):
            tenant = dict(dead.headers)["tenant"]
            print(f"message {dead.message_id} of {tenant}: {dead.error}, {dead.attempts} attempts")

        # By ids, by a filter, or all of them; up to 10,000 in a call.
        first = system.failed("orders", filter="tenant = 'acme'", limit=1)[0].message_id
        print(f"replayed by id: {len(system.replay('orders', first))}")
        replayed = 0
        while some := system.replay("orders", filter="tenant = 'acme'"):
            replayed += len(some)
        print(f"replayed by filter: {replayed}")
        print(f"forgotten: {len(system.purge_failed('orders', all=True))}")

        stats = system.stats("orders")
        print(f"{stats.available} available again, {stats.failed} failed")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
