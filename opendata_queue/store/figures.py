"""Figures about stores: plain numbers, made when somebody asks for them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import slatedb.uniffi as slatedb

_LEFT_OUT: Final = frozenset({"worker_id"})  # another one in every process


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number, or how many there were up to each bound and what their sum is."""

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[tuple[str, str], ...] = ()
    value: float = 0
    """The number; of a histogram, the sum."""
    buckets: tuple[tuple[float, int], ...] = ()
    """Of a histogram: bounds, and how many were not over each; the last bound is infinite."""


class Distribution:
    """Counts values by how large they are; cheap enough for something done at every commit."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def figure(self, name: str, help: str, labels: tuple[tuple[str, str], ...]) -> Figure:
        buckets = tuple(_cumulated(self._bounds, self._counts))
        return Figure(
            name=name, help=help, kind="histogram", labels=labels, value=self._sum, buckets=buckets
        )


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
                    buckets=tuple(_cumulated(value.boundaries, value.bucket_counts)),
                )
        elif isinstance(metric.value, kinds.COUNTER):
            if value:
                yield Figure(name=name, help=help, kind="counter", labels=labels + own, value=value)
        else:
            yield Figure(name=name, help=help, kind="gauge", labels=labels + own, value=value)


def _cumulated(bounds: Iterable[float], counts: Iterable[int]) -> Iterator[tuple[float, int]]:
    so_far = 0
    for bound, count in zip([*bounds, float("inf")], counts, strict=True):
        so_far += count
        yield bound, so_far
