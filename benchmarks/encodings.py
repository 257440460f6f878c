"""What encoding and decoding cost, in nanoseconds per entry.

python benchmarks/encodings.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from odq_encodings import (
    ActiveMessages,
    AvailableMessage,
    DoneMessage,
    DoneMessages,
    InFlightMessage,
    InlinePayload,
    MessageMetadata,
    PayloadKey,
)

ROUNDS = 15


def median_seconds(work: Callable[[], object], repeat: int) -> float:
    """The median over several rounds of one call's time; a round makes ``repeat`` calls."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        rounds.append((time.perf_counter() - start) / repeat)
    return statistics.median(rounds)


def main() -> None:
    table = Table(title="odq_encodings, median of 15 rounds")
    table.add_column("what")
    table.add_column("entries", justify="right")
    table.add_column("µs per call", justify="right")
    table.add_column("ns per entry", justify="right")

    def measure(what: str, entries: int, work: Callable[[], object], repeat: int = 1) -> None:
        seconds = median_seconds(work, repeat)
        table.add_row(
            what, f"{entries:,}", f"{seconds * 1e6:,.1f}", f"{seconds / entries * 1e9:,.0f}"
        )

    available = [
        AvailableMessage(
            message_id=i,
            priority=128,
            visible_at=1_763_000_000_000 + i,
            retention_deadline=0,
            attempts=0,
        )
        for i in range(65_535)
    ]
    in_flight = InFlightMessage(
        message_id=1, priority=128, claimed_at=1, lease_deadline=2, attempts=1
    )
    encoded = [message.encode() for message in available]
    done = [DoneMessage(message_id=i, done_at=i, attempts=1).encode() for i in range(65_535)]
    active_record = ActiveMessages.join(encoded, [])
    done_record = DoneMessages.join(done)
    metadata = MessageMetadata(
        message_id=1,
        created_at=1,
        received_at=1,
        visible_at=1,
        retention_seconds=0,
        headers=(("type", "order.created"), ("region", "emea")),
    )
    metadata_value = metadata.encode()
    payload = InlinePayload(data=bytes(256))
    few, many = encoded[:2_048], [in_flight.encode()] * 2_048

    measure(
        "join an active record, encoded entries", 2_048, lambda: ActiveMessages.join(few, []), 200
    )
    measure("join, both lists", 4_096, lambda: ActiveMessages.join(few, many), 200)
    measure("join an active record, full", 65_535, lambda: ActiveMessages.join(encoded, []))
    measure("decode an active record", 65_535, lambda: ActiveMessages.decode(active_record))
    measure("decode a done record", 65_535, lambda: DoneMessages.decode(done_record))
    measure("encode one available message", 1, available[0].encode, 2_000)
    measure("encode metadata, two headers", 1, metadata.encode, 2_000)
    measure(
        "decode metadata, two headers", 1, lambda: MessageMetadata.decode(metadata_value), 2_000
    )
    measure("encode a payload of 256 bytes", 1, payload.encode, 2_000)
    measure("encode a payload key", 1, PayloadKey(message_id=1).encode, 2_000)
    Console().print(table)


if __name__ == "__main__":
    main()
