"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from opendata_queue.api.system import AsyncSystem
from opendata_queue.model.errors import OtherRoleError, QueueNotFoundError
from opendata_queue.model.figures import Figure
from opendata_queue.model.values import QueueStats
from opendata_queue.systems.engine import Engine

_LATENCIES: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
M = TypeVar("M")

_STATES: Final = ("available", "delayed", "in_flight", "done", "failed", "expired")


class Metrics:
    """Counts what a broker does. Each broker has a registry of its own.

    Requests and messages are counted as they come; all else is read when it is asked for.
    ``figures`` gives those of the engine and its store.
    """

    def __init__(self, max_queues: int, figures: Callable[[], Iterator[Figure]]) -> None:
        self._max_queues = max_queues
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "odq_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "odq_request_seconds",
            "How long requests took, long polls included.",
            ["route"],
            buckets=_LATENCIES,
            registry=self.registry,
        )
        self._open = Gauge(
            "odq_requests_open", "Requests under way.", ["route"], registry=self.registry
        )
        messages = Counter(
            "odq_messages",
            "Messages published, claimed, acked and nacked.",
            ["event"],
            registry=self.registry,
        )
        self._messages = _Children[Counter](messages.labels)
        self._queues = _Queues()
        self.registry.register(self._queues)
        self.registry.register(_Figures(figures))

    def route(self, route: str) -> RouteMetrics:
        """What is counted of one route."""
        return RouteMetrics(
            _Children[Counter](lambda status: self._requests.labels(route, status)),
            self._seconds.labels(route),
            self._open.labels(route),
        )

    def count(self, event: str, messages: int) -> None:
        self._messages[event].inc(messages)

    async def exposition(self, system: AsyncSystem) -> bytes:
        """All figures; those of queues as they are now."""
        try:
            shown = await system.list_queues(limit=self._max_queues)
            count = system.count_queues() if isinstance(system, Engine) else len(shown)
        except OtherRoleError:  # it publishes, and others serve the queues
            shown, count = [], 0
        self._queues.seen = await _stats_of(system, shown)
        self._queues.left_out = count - len(shown)
        return generate_latest(self.registry)


class _Children(dict[str, M], Generic[M]):
    """Metrics by the value of a label, looked up once: the library's own way takes a lock."""

    def __init__(self, make: Callable[[str], M]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, value: str) -> M:
        self[value] = made = self._make(value)
        return made


class RouteMetrics:
    """What is counted of the requests of one route."""

    __slots__ = ("_open", "_requests", "_seconds")

    def __init__(self, requests: _Children[Counter], seconds: Histogram, open: Gauge) -> None:
        self._requests = requests
        self._seconds = seconds
        self._open = open

    def asked(self) -> None:
        self._open.inc()

    def answered(self, status: int, seconds: float) -> None:
        self._open.dec()
        self._requests[str(status)].inc()
        self._seconds.observe(seconds)


async def _stats_of(system: AsyncSystem, names: Iterable[str]) -> list[tuple[str, QueueStats]]:
    seen = []
    for name in names:
        try:
            seen.append((name, await system.stats(name)))
        except QueueNotFoundError:  # deleted meanwhile
            continue
    return seen


class _Queues(Collector):
    """The queues as they were seen last."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, QueueStats]] = []
        self.left_out = 0

    def collect(self) -> Iterator[Metric]:
        depths = GaugeMetricFamily(
            "odq_queue_messages", "Messages of a queue by state.", labels=["queue", "state"]
        )
        ages = GaugeMetricFamily(
            "odq_queue_oldest_age_seconds",
            "For how long the oldest available message has waited.",
            labels=["queue"],
        )
        replaying = GaugeMetricFamily(
            "odq_queue_replaying_messages",
            "How much of the log is still to be read for a queue that begins in the past.",
            labels=["queue"],
        )
        for name, stats in self.seen:
            for state in _STATES:
                depths.add_metric([name, state], getattr(stats, state))
            ages.add_metric([name], (stats.oldest_age_ms or 0) / 1000)
            replaying.add_metric([name], stats.replaying)
        yield from (depths, ages, replaying)
        left_out = "Queues that are too many to be shown one by one."
        yield GaugeMetricFamily("odq_queues_left_out", left_out, value=self.left_out)


class _Figures(Collector):
    """Commits, requests to the object store, and what SlateDB counts of itself."""

    def __init__(self, figures: Callable[[], Iterator[Figure]]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return []  # so that nothing is read when it is registered

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for figure in self._figures():
            family = families.get(figure.name)
            if family is None:
                family = families[figure.name] = _FAMILIES[figure.kind](
                    figure.name, figure.help, labels=[name for name, _ in figure.labels]
                )
            values = [value for _, value in figure.labels]
            if isinstance(family, HistogramMetricFamily):
                bounds = [
                    ("+Inf" if bound == float("inf") else f"{bound:g}", count)
                    for bound, count in figure.buckets
                ]
                family.add_metric(values, bounds, figure.value)
            elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
                family.add_metric(values, figure.value)
        yield from families.values()


_FAMILIES: Final[dict[str, Callable[..., Metric]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
