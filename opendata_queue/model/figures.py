"""Figures about stores: plain numbers, made when metrics are read."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal


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
        buckets = tuple(cumulated(self._bounds, self._counts))
        return Figure(
            name=name, help=help, kind="histogram", labels=labels, value=self._sum, buckets=buckets
        )


def cumulated(bounds: Iterable[float], counts: Iterable[int]) -> Iterator[tuple[float, int]]:
    so_far = 0
    for bound, count in zip([*bounds, float("inf")], counts, strict=True):
        so_far += count
        yield bound, so_far
