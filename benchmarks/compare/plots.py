"""Pictures of the figures, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

from benchmarks.compare import cost
from benchmarks.compare.cells import PERCENTILES
from benchmarks.compare.runner import Comparison
from benchmarks.compare.systems import KEYS, find

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_SIZE: Final = (9.0, 7.5)
_STYLES: Final = ("o", "s", "^", "v", "D", "P", "X", "*")


def draw(found: Mapping[str, Any], folder: Path, prefix: str = "") -> list[str]:
    """Draw what was measured; returns the names of the SVG files."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "odq"  # the same figures make the same file
    plt.rcParams["svg.fonttype"] = "none"  # text as text: a third of the size
    names = []
    for plain, plot in _plots(found).items():
        name = f"{prefix}{plain}"
        figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
        plot(axes)
        if axes.lines:  # not if too little was measured for a line
            figure.legend(fontsize="x-small", loc="outside lower center", ncols=2)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{name}.png", dpi=120)
            names.append(f"{name}.svg")
        plt.close(figure)
    return names


def _plots(found: Mapping[str, Any]) -> dict[str, Callable[[Any], None]]:
    plots: dict[str, Callable[[Any], None]] = {}
    if "compare" in found:
        comparison = Comparison.from_json(found["compare"])
        plots["publish-by-batch-size"] = lambda axes: _by_batch(
            axes, comparison, {1: "W1", 100: "W2", 500: "W2L"}, "publish"
        )
        plots["consume-by-batch-size"] = lambda axes: _by_batch(
            axes, comparison, {1: "W3", 100: "W4"}, "receive and ack"
        )
        plots["latency"] = lambda axes: _latencies(axes, comparison)
    if "cost" in found and len(cost.dial(found["cost"])) > 1:
        plots["latency-and-cost"] = lambda axes: _dial(axes, found["cost"])
    if "growth" in found:
        growth = found["growth"]
        for what, key, label in (
            ("backlog", "waiting", "messages waiting"),
            ("history", "done", "messages done"),
            ("queues", "queues", "idle queues"),
        ):
            if len(growth.get(what, [])) > 1:
                plots[f"growth-with-{what}"] = _growing(growth[what], key, label)
        for what, key, label, lines in (
            ("headers", "headers", "headers of a message", _OF_ONE),
            ("payload", "bytes", "bytes of a payload", _OF_ONE),
            ("consumers", "consumers", "consumers at once", _OF_MANY),
        ):
            if len(growth.get(what, [])) > 1:
                plots[f"growth-with-{what}"] = _figures(growth[what], key, label, lines)
    return plots


def _by_batch(axes: Any, found: Comparison, workloads: Mapping[int, str], what: str) -> None:
    drawn = 0
    for key in KEYS:
        cells = {batch: found.cell(key, workload) for batch, workload in workloads.items()}
        points = {batch: cell.rate for batch, cell in cells.items() if cell is not None}
        if len(points) < 2 or key.startswith("raw-"):
            continue
        _line(axes, list(points), list(points.values()), key, drawn)
        drawn += 1
    _logarithmic(axes)
    axes.set_xlabel("messages in one call")
    axes.set_ylabel(f"{what}, messages/s")
    axes.set_xticks(list(workloads), [str(batch) for batch in workloads])


def _latencies(axes: Any, found: Comparison) -> None:
    drawn = 0
    for key in KEYS:
        cell = found.cell(key, "W5")
        if cell is None:
            continue
        _line(
            axes, range(len(PERCENTILES)), [cell.percentile_ms(p) for p in PERCENTILES], key, drawn
        )
        drawn += 1
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.set_xticks(range(len(PERCENTILES)), [f"{100 * part:g} %" for part in PERCENTILES])
    axes.set_xlabel("part of the messages that had come by then")
    axes.set_ylabel("from publish to receive at 500 messages/s, ms")


def _dial(axes: Any, found: Mapping[str, Any]) -> None:
    spent = cost.dial(found)
    latencies = [one.latencies_ms["0.5"] for one in spent]
    axes.plot(latencies, [one.dollars_per_million for one in spent], marker="o", label="measured")
    for one, latency in zip(spent, latencies, strict=True):
        said = f"linger {one.scenario['linger_ms']:g} ms"
        axes.annotate(
            said, (latency, one.dollars_per_million), xytext=(6, 6), textcoords="offset points"
        )
    for batch, style in ((1, "--"), (10, ":")):
        price = cost.sqs_dollars_per_million(batch)
        calls = "one message a call" if batch == 1 else "ten messages a call"
        axes.axhline(price, color="gray", linestyle=style, label=f"SQS, {calls}")
    _logarithmic(axes)
    axes.margins(x=0.2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_xlabel(f"from publish to receive at {cost.MAIN_RATE:,} messages/s, p50, ms")
    axes.set_ylabel("dollars per million messages, requests")


_GROWING: Final = {
    "open_ms": ("time to reopen", "ms"),
    "memory_mib": ("memory", "MiB"),
    "peak_mib": ("memory at most", "MiB"),
    "commit_kib": ("size of a commit", "KiB"),
    "claim_1_us": ("claim+ack", "µs"),
    "claim_100_us": ("claim+ack ×100, each", "µs"),
}


_OF_ONE: Final = {
    "publish_us": "publish, µs a message",
    "consume_us": "claim+ack, µs a message",
    "log_bytes": "written to the log, bytes a message",
    "queue_bytes": "written to the queue, bytes a message",
}
_OF_MANY: Final = {
    "rate": "claim+ack ×10, messages/s",
    "p50_ms": "claim+ack ×10, p50 ms",
    "p99_ms": "claim+ack ×10, p99 ms",
}


def _figures(
    rows: Sequence[Mapping[str, float]], key: str, label: str, lines: Mapping[str, str]
) -> Callable[[Any], None]:
    """Figures as they are, each with its unit."""

    def plot(axes: Any) -> None:
        sizes = [row[key] for row in rows]
        for style, (name, said) in zip(_STYLES, lines.items(), strict=False):
            axes.plot(sizes, [row[name] for row in rows], marker=style, label=said)
        _logarithmic(axes)
        if not min(sizes):
            axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
        axes.minorticks_off()
        axes.set_xlabel(label)

    return plot


def _growing(rows: Sequence[Mapping[str, float]], key: str, label: str) -> Callable[[Any], None]:
    """Figures as times of the first one: what is bounded stays level."""

    def plot(axes: Any) -> None:
        first, *_, last = rows
        sizes = [row[key] for row in rows]
        for style, (name, (said, unit)) in zip(_STYLES, _GROWING.items(), strict=False):
            values = [row[name] / first[name] for row in rows]
            shown = f"{said}: {first[name]:,.3g} to {last[name]:,.3g} {unit}"
            axes.plot(sizes, values, marker=style, label=shown)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0, top=max(2, axes.get_ylim()[1]))
        axes.grid(alpha=0.3)
        axes.set_xlabel(label)
        axes.set_ylabel("times the first figure")

    return plot


def _line(axes: Any, xs: Sequence[float], ys: Sequence[float], key: str, number: int) -> None:
    system = find(key)
    axes.plot(
        xs,
        ys,
        marker=_STYLES[number % len(_STYLES)],
        linewidth=2.5 if system.ours else 1,
        linestyle="-" if system.durable else "--",
        label=system.name if system.durable else f"{system.name} (not synced)",
    )


def _logarithmic(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
