"""Tasks with few rows: they send them to the driver, which puts all of them into one shard.

A shard of its own for each would cost a number out of 57,600 a day, a database, and some ten
requests: with a trigger every ten seconds and seven tasks more numbers than there are (RFC 0009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from opendata_queue.spark.rows.columns import Batch

_TASK_BYTES: Final = 256 * 1024
_ALL_BYTES: Final = 16 * 1024 * 1024


def few_bytes(partition: int) -> int:
    """How much a task may send.

    A task does not know how many tasks there are, but by its own number that there are at least
    so many: later ones may send less and less, and 10,000 together send 100 MiB at most.
    """
    return min(_TASK_BYTES, _ALL_BYTES // (partition + 1))


def encode_batches(batches: Sequence[Batch]) -> bytes:
    """Batches of one schema, for the way to the driver."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def decode_batches(encoded: bytes) -> Iterator[Batch]:
    with pa.ipc.open_stream(encoded) as stream:
        yield from stream
