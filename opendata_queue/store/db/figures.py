"""What SlateDB counts, as figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import slatedb.uniffi as slatedb

from opendata_queue.model.figures import Figure, cumulated

_LEFT_OUT: Final = frozenset({"worker_id"})  # another one in every process


def slatedb_figures(
    recorder: slatedb.DefaultMetricsRecorder, labels: tuple[tuple[str, str], ...]
) -> Iterator[Figure]:
    """What SlateDB counts itself, in Rust. What never happened is left out: there is much of it."""
    kinds = slatedb.MetricValue
    for metric in recorder.snapshot():
        name = metric.name.replace(".", "_")
        own = tuple((one.key, one.value) for one in metric.labels if one.key not in _LEFT_OUT)
        value = metric.value[0]
        help = metric.description or metric.name
        if isinstance(metric.value, kinds.HISTOGRAM):
            if value.count:
                yield Figure(
                    name=name,
                    help=help,
                    kind="histogram",
                    labels=labels + own,
                    value=value.sum,
                    buckets=tuple(cumulated(value.boundaries, value.bucket_counts)),
                )
        elif isinstance(metric.value, kinds.COUNTER):
            if value:
                yield Figure(name=name, help=help, kind="counter", labels=labels + own, value=value)
        else:
            yield Figure(name=name, help=help, kind="gauge", labels=labels + own, value=value)
