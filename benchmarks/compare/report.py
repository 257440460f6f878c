"""The figures as Markdown, for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.compare.contract import System
from benchmarks.compare.runner import Comparison, Measured
from benchmarks.compare.systems import KEYS, find

MEASURED: Final = "measured"
DEEP: Final = "deep"
_MARKERS: Final = {
    section: (f"<!-- {section}: begin (written by {command}) -->", f"<!-- {section}: end -->")
    for section, command in ((MEASURED, "make bench"), (DEEP, "make bench-deep"))
}
"""Between which lines of a document the figures of a run go."""

_PEERS: Final = (
    "postgres", "redis-always", "nats", "rabbitmq", "beanstalkd", "litequeue", "persist-queue",
    "huey",
)  # fmt: skip
_OURS: Final = "odq"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Something that was promised, and what came of it."""

    what: str
    target: str
    measured: str
    met: bool


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose first column is text, and the others numbers."""
    lines = [f"| {' | '.join(header)} |", "|---|" + "--:|" * (len(header) - 1)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def comparison_table(found: Comparison) -> list[str]:
    header = [
        "system", "W1 msg/s", "W1 p50 / p99 ms", "W2", "W2L", "W3", "W3 p50 ms", "W4",
        "W5 p50 / p99 ms", "W6", "W6/W4", "W7",
    ]  # fmt: skip
    measured = [find(key) for key in KEYS if any(one[0] == key for one in found.cells)]
    return table(header, [_row(found, system) for system in measured])


def _row(found: Comparison, system: System) -> list[str]:
    cells = {key: found.cell(system.key, key) for key in ("W1", "W3", "W4", "W5", "W6")}
    ratio = ""
    if (deep := cells["W6"]) is not None and (shallow := cells["W4"]) is not None:
        ratio = f"{deep.rate / shallow.rate:.2f}"
    return [
        system.label,
        _rate(found, system, "W1"),
        _latency(cells["W1"], 0.5, 0.99),
        _rate(found, system, "W2"),
        _rate(found, system, "W2L"),
        _rate(found, system, "W3"),
        _latency(cells["W3"], 0.5),
        _rate(found, system, "W4"),
        _latency(cells["W5"], 0.5, 0.99),
        _rate(found, system, "W6"),
        ratio,
        _rate(found, system, "W7"),
    ]


def _rate(found: Comparison, system: System, workload: str) -> str:
    cell = found.cell(system.key, workload)
    if cell is None:
        failed = found.cells.get((system.key, workload))
        return "failed" if failed is not None and failed.failure else ""
    return f"{cell.rate:,.0f}{'†' if workload in system.loops else ''} {cell.spread}".rstrip()


def _latency(cell: Measured | None, *parts: float) -> str:
    if cell is None:
        return ""
    return " / ".join(_short(cell.percentile_ms(part)) for part in parts)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


# --- what was promised ----------------------------------------------------------------------------


def targets(found: Comparison) -> list[Target]:
    return [*_ahead_of_peers(found), *_of_ours(found), *_ahead_of_queue_json(found)]


def _ahead_of_peers(found: Comparison) -> Iterator[Target]:
    for workload, peers in (("W2", _PEERS), ("W4", _PEERS), ("W7", ("postgres",))):
        ours = found.cell(_OURS, workload)
        for peer in peers:
            theirs = found.cell(peer, workload)
            if ours is not None and theirs is not None:
                times = ours.rate / theirs.rate
                yield Target(
                    what=workload,
                    target=f"ahead of {find(peer).label}",
                    measured=f"{times:.2f} ×",
                    met=times > 1,
                )


def _of_ours(found: Comparison) -> Iterator[Target]:
    shallow, deep = found.cell(_OURS, "W4"), found.cell(_OURS, "W6")
    if shallow is not None and deep is not None:
        part = deep.rate / shallow.rate
        yield Target(what="W6/W4", target="0.8 or more", measured=f"{part:.2f}", met=part >= 0.8)
    latency = found.cell(_OURS, "W5")
    if latency is not None:
        p50 = latency.percentile_ms(0.5)
        yield Target(what="W5 p50", target="under 5 ms", measured=f"{p50:.2f} ms", met=p50 < 5)


def _ahead_of_queue_json(found: Comparison) -> Iterator[Target]:
    for workload in ("W2", "W4", "W7"):
        for peer, what in (("queue-json", "queue.json"), ("queue-json-kept", "one that is kept")):
            ours, theirs = found.cell("odq-s3", workload), found.cell(peer, workload)
            if ours is not None and theirs is not None:
                times = ours.rate / theirs.rate
                yield Target(
                    what=f"{workload} on moto S3",
                    target=f"10 × {what}",
                    measured=f"{times:.1f} ×",
                    met=times >= 10,
                )


def targets_table(found: Sequence[Target]) -> list[str]:
    rows = [
        [one.what, one.target, one.measured, "met" if one.met else "**not met**"] for one in found
    ]
    return table(["what", "target", "measured", ""], rows)


# --- all of it ------------------------------------------------------------------------------------


def settings_table(found: Comparison) -> list[str]:
    rows = [[find(key).label, said, find(key).settings] for key, said in found.versions.items()]
    return ["| system | version | settings |", "|---|---|---|"] + [
        f"| {' | '.join(row)} |" for row in rows
    ]


def markdown(everything: dict[str, Any]) -> str:
    """What goes between the markers. Each part is there if it was measured."""
    lines = [*_machine(everything)]
    promised: list[Target] = []
    if "compare" in everything:
        found = Comparison.from_json(everything["compare"])
        lines += ["", "### Side by side", "", *comparison_table(found)]
        for key, reason in found.skipped.items():
            lines += ["", f"Skipped: {find(key).name}, since {reason}."]
        lines += ["", "### Versions and settings", "", *settings_table(found)]
        promised += targets(found)
    if "cost" in everything:
        from benchmarks.compare.cost import cost_lines, cost_targets

        lines += ["", "### Cost on object storage", "", *cost_lines(everything["cost"])]
        promised += cost_targets(everything["cost"])
    if "growth" in everything:
        from benchmarks.compare.growth import growth_lines, growth_targets

        lines += ["", "### Growth", "", *growth_lines(everything["growth"])]
        promised += growth_targets(everything["growth"])
    if promised:
        lines += ["", "### Targets", "", *targets_table(promised)]
    for name in everything.get("plots", []):
        lines += ["", f"![{name.removesuffix('.svg').replace('-', ' ')}](benchmarks/{name})"]
    return "\n".join(lines).strip() + "\n"


def _machine(everything: dict[str, Any]) -> list[str]:
    machine, run = everything["machine"], everything["run"]
    said = ", ".join(f"{name}: {value}" for name, value in machine.items())
    return [
        f"Measured with `python -m benchmarks.compare {run['arguments']}`".rstrip("` ") + "`:",
        f"{run['rounds']} rounds of {run['seconds']:g} s, in {run['took_s'] / 60:.0f} minutes; "
        "what has no ± was measured once.",
        f"Machine: {said}.",
    ]


def replaced(document: str, measured: str, section: str = MEASURED) -> str:
    """A document with what is between the markers of a section replaced."""
    begins, ends = _MARKERS[section]
    before, begin, rest = document.partition(begins)
    _, end, after = rest.partition(ends)
    if not begin or not end:
        raise ValueError(f"the document has no {begins!r} and {ends!r}")
    return f"{before}{begins}\n\n{measured}\n{ends}{after}"


def write_into(path: Path, measured: str, section: str = MEASURED) -> None:
    path.write_text(replaced(path.read_text(), measured, section))
