"""What is measured. The letters are those of docs/benchmarks.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MESSAGES_PER_SECOND: Final = 500
LONGEST: Final = 3
"""By how many times a cell may take longer, to publish as many as the others."""
LONGEST_GROWING_S: Final = 60.0
"""The same for a system whose figures are the better the less it has published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    key: str
    title: str
    kind: Literal["publish", "consume", "latency"]
    batch: int = 1
    consumers: int = 1
    deep: bool = False
    messages: int = 20_000
    """How many wait to be consumed, or are published at least if time permits."""


WORKLOADS: Final = {
    one.key: one
    for one in (
        Workload(key="W1", title="single durable publishes in sequence", kind="publish"),
        Workload(key="W2", title="publish ×100", kind="publish", batch=100),
        Workload(key="W2L", title="publish ×500", kind="publish", batch=500),
        Workload(key="W3", title="receive and ack one at a time", kind="consume", messages=4_000),
        Workload(key="W4", title="receive and ack ×100", kind="consume", batch=100),
        Workload(key="W5", title="publish→receive latency at 500 messages/s", kind="latency"),
        Workload(
            key="W6",
            title="W4 with 200,000 waiting",
            kind="consume",
            batch=100,
            deep=True,
            messages=200_000,
        ),
        Workload(
            key="W7",
            title="8 concurrent consumers, ×10",
            kind="consume",
            batch=10,
            consumers=8,
            messages=10_000,
        ),
    )
}
