"""Payloads of any size, payloads elsewhere, and publishing again without doing it twice.

python examples/payloads_and_keys.py [file:///path]
"""

from __future__ import annotations

import sys
import tempfile

import opendata_queue


def main(url: str) -> None:
    with opendata_queue.open(url) as system:
        # Over 65,535 bytes it becomes an object of its own in the store; that does not show.
        large = system.read(system.publish(b"x" * 5_000_000))
        assert large is not None
        print(f"{len(large.payload or b''):,} bytes came back")

        # What is in a bucket already is published by its URI.
        there = system.read(system.publish(payload_uri="s3://videos/17.mp4"))
        assert there is not None
        print(f"payload {there.payload!r}, at {there.payload_uri}")

        # After a timeout or a crash it is not known whether a publish arrived: just do it again.
        ids = {system.publish(b"pay 5 EUR", idempotency_key="invoice-4711") for _ in range(3)}
        print(f"published three times, stored {len(ids)} time")

        # Not handed out any more after ten minutes.
        short = system.read(system.publish(b"the weather now", retention_seconds=600))
        assert short is not None
        print(f"kept for {short.retention_seconds} seconds")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/queue")
