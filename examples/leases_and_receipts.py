"""A claim is yours for as long as its lease: extended, lost, given back.

python examples/leases_and_receipts.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue
from opendata_queue import InvalidInputError, QueueOptions


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        if "jobs" not in system.list_queues():
            system.create_queue("jobs", options=QueueOptions(lease_ms=60_000, backoff_ms=0))
        system.publish(b"a long job")

        # One consumer claims it and is never heard of again. The next claim waits for the lease.
        (lost,) = system.claim("jobs", consumer="first", lease_ms=100, wait_ms=60_000)
        (held,) = system.claim("jobs", consumer="second", wait_ms=60_000)
        print(f"attempt {held.attempts}: the first one's ack is {system.ack('jobs', lost.receipt)}")

        (deadline_ms,) = system.extend("jobs", held.receipt, lease_ms=600_000)
        assert deadline_ms is not None
        print(f"extended by {round((deadline_ms - held.lease_deadline_ms) / 60_000)} minutes")

        # Given back at once, as if it had not been claimed.
        system.release("jobs", held.receipt)
        (held,) = system.claim("jobs", consumer="third", wait_ms=60_000)
        print(f"attempt {held.attempts} again")

        # Receipts are signed: one that was made up is refused.
        try:
            system.ack("jobs", "made up")
        except InvalidInputError as error:
            print(f"InvalidInputError: {error}")
        print(f"the holder's ack is {system.ack('jobs', held.receipt)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
