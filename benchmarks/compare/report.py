"""The figures as Markdown, for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    met: bool | None
    """None if it was to be measured, and that has failed."""


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
    ratio = ""
    deep, shallow = found.cell(system.key, "W6"), found.cell(system.key, "W4")
    if deep is not None and shallow is not None:
        ratio = f"{deep.rate / shallow.rate:.2f}"
    return [
        system.label,
        _rate(found, system, "W1"),
        _latency(found, system, "W1", 0.5, 0.99),
        _rate(found, system, "W2"),
        _rate(found, system, "W2L"),
        _rate(found, system, "W3"),
        _latency(found, system, "W3", 0.5),
        _rate(found, system, "W4"),
        _latency(found, system, "W5", 0.5, 0.99),
        _rate(found, system, "W6"),
        ratio,
        _rate(found, system, "W7"),
    ]


def _rate(found: Comparison, system: System, workload: str) -> str:
    cell = found.cell(system.key, workload)
    if cell is None:
        return _nothing(found, system, workload)
    return f"{cell.rate:,.0f}{'†' if workload in system.loops else ''} {cell.spread}".rstrip()


def _latency(found: Comparison, system: System, workload: str, *parts: float) -> str:
    cell = found.cell(system.key, workload)
    if cell is None:
        return _nothing(found, system, workload)
    return " / ".join(_short(cell.percentile_ms(part)) for part in parts)


def _nothing(found: Comparison, system: System, workload: str) -> str:
    return "failed" if found.failed(system.key, workload) else ""


def failure_lines(found: Comparison) -> list[str]:
    """What has failed, and why."""
    lines = []
    for (key, reason), workloads in found.failures().items():
        lines += ["", f"Failed: {find(key).name}, {', '.join(workloads)}: {reason}"]
    return lines


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


# --- what was promised ----------------------------------------------------------------------------


def targets(found: Comparison) -> list[Target]:
    return [*_ahead_of_peers(found), *_of_ours(found), *_ahead_of_queue_json(found)]


def _judged(
    found: Comparison,
    cells: Sequence[tuple[str, str]],
    *,
    what: str,
    target: str,
    judge: Callable[..., tuple[str, bool]],
) -> Iterator[Target]:
    """A target about some cells, unless one of them was not to be measured."""
    measured = [found.cell(*cell) for cell in cells]
    if all(measured):
        said, met = judge(*measured)
        yield Target(what=what, target=target, measured=said, met=met)
    elif all(here or found.failed(*cell) for here, cell in zip(measured, cells, strict=True)):
        yield Target(what=what, target=target, measured="", met=None)


def _ahead_of_peers(found: Comparison) -> Iterator[Target]:
    def judge(ours: Measured, theirs: Measured) -> tuple[str, bool]:
        times = ours.rate / theirs.rate
        return f"{times:.2f} ×", times > 1

    for workload, peers in (("W2", _PEERS), ("W4", _PEERS), ("W7", ("postgres",))):
        for peer in peers:
            yield from _judged(
                found,
                [(_OURS, workload), (peer, workload)],
                what=workload,
                target=f"ahead of {find(peer).label}",
                judge=judge,
            )


def _of_ours(found: Comparison) -> Iterator[Target]:
    def stays(deep: Measured, shallow: Measured) -> tuple[str, bool]:
        part = deep.rate / shallow.rate
        return f"{part:.2f}", part >= 0.8

    def fast(latency: Measured) -> tuple[str, bool]:
        p50 = latency.percentile_ms(0.5)
        return f"{p50:.2f} ms", p50 < 5

    both = [(_OURS, "W6"), (_OURS, "W4")]
    yield from _judged(found, both, what="W6/W4", target="0.8 or more", judge=stays)
    latency = [(_OURS, "W5")]
    yield from _judged(found, latency, what="W5 p50", target="under 5 ms", judge=fast)


# The first one is the target that was set; the others tell what it is worth.
_QUEUE_JSON: Final = {
    "queue-json": "queue.json",
    "queue-json-fast": "one that leaves messages as bytes",
    "queue-json-fast-kept": "one that does, and is kept in memory",
}


def _ahead_of_queue_json(found: Comparison) -> Iterator[Target]:
    def judge(ours: Measured, theirs: Measured) -> tuple[str, bool]:
        times = ours.rate / theirs.rate
        return f"{times:.1f} ×", times >= 10

    for workload in ("W2", "W4", "W7"):
        for peer, what in _QUEUE_JSON.items():
            yield from _judged(
                found,
                [("odq-s3", workload), (peer, workload)],
                what=f"{workload} on moto S3",
                target=f"10 × {what}",
                judge=judge,
            )


_JUDGED: Final = {True: "met", False: "**not met**", None: "**failed**"}


def targets_table(found: Sequence[Target]) -> list[str]:
    rows = [[one.what, one.target, one.measured, _JUDGED[one.met]] for one in found]
    return table(["what", "target", "measured", ""], rows)


# --- all of it ------------------------------------------------------------------------------------


def settings_table(found: Comparison) -> list[str]:
    rows = [[find(key).label, said, find(key).settings] for key, said in found.versions.items()]
    return ["| system | version | settings |", "|---|---|---|"] + [
        f"| {' | '.join(row)} |" for row in rows
    ]


def failures(everything: dict[str, Any]) -> list[str]:
    """All that has failed, each in a line."""
    found = [f"{part}: {reason}" for part, reason in _parts(everything, "failures").items()]
    if "compare" in everything:
        lines = failure_lines(Comparison.from_json(everything["compare"]))
        found += [line.removeprefix("Failed: ") for line in lines if line]
    return found


def _parts(everything: dict[str, Any], what: str) -> dict[str, str]:
    """The parts that have failed, or were skipped, and why."""
    return {part: reason for part, reason in everything.get(what, {}).items() if reason}


def markdown(everything: dict[str, Any]) -> str:
    """What goes between the markers. Each part is there if it was measured."""
    lines = [*_machine(everything)]
    promised: list[Target] = []
    for part, (title, lines_of) in _TITLES.items():
        failed = _parts(everything, "failures").get(part)
        skipped = _parts(everything, "skipped").get(part)
        if not (everything.get(part) or failed or skipped):
            continue
        lines += ["", f"### {title}"]
        if everything.get(part):
            said, targets = lines_of(everything)
            lines += ["", *said]
            promised += targets
        if failed:
            lines += ["", f"Failed: {failed}"]
            promised.append(Target(what=title, target="measured", measured="", met=None))
        if skipped:
            lines += ["", f"Skipped, since {skipped}."]
    if promised:
        lines += ["", "### Targets", "", *targets_table(promised)]
    for name in everything.get("plots", []):
        lines += ["", f"![{name.removesuffix('.svg').replace('-', ' ')}](benchmarks/{name})"]
    return "\n".join(lines).strip() + "\n"


def _compared(everything: dict[str, Any]) -> tuple[list[str], Sequence[Target]]:
    found = Comparison.from_json(everything["compare"])
    lines = [*comparison_table(found), *failure_lines(found)]
    for key, reason in found.skipped.items():
        lines += ["", f"Skipped: {find(key).name}, since {reason}."]
    return [*lines, "", "### Versions and settings", "", *settings_table(found)], targets(found)


def _cost(everything: dict[str, Any]) -> tuple[list[str], Sequence[Target]]:
    from benchmarks.compare.cost import cost_lines, cost_targets

    return cost_lines(everything["cost"]), cost_targets(everything["cost"])


def _growth(everything: dict[str, Any]) -> tuple[list[str], Sequence[Target]]:
    from benchmarks.compare.growth import growth_lines, growth_targets

    found = everything["growth"]
    return growth_lines(found, everything["run"].get("looks", 0)), growth_targets(found)


_TITLES: Final = {
    "compare": ("Side by side", _compared),
    "cost": ("Cost on object storage", _cost),
    "growth": ("Growth", _growth),
}


def _machine(everything: dict[str, Any]) -> list[str]:
    machine, run = everything["machine"], everything["run"]
    said = ", ".join(f"{name}: {value}" for name, value in machine.items())
    took = f"in {run['took_s'] / 60:.0f} minutes."
    lines = [f"Measured with `python -m benchmarks.compare {run['arguments']}`".rstrip("` ") + "`:"]
    if "compare" not in everything:
        lines.append(took)
    elif run["rounds"] == 1:
        lines += [f"1 round of {run['seconds']:g} s, {took} Every cell was measured once."]
    else:
        # Of two, the median is their mean.
        middle = "mean of 2" if run["rounds"] == 2 else f"median of {run['rounds']}"
        lines += [
            f"{run['rounds']} rounds of {run['seconds']:g} s, {took}",
            f"Rates with ±, the latencies next to them and those of W5 are the {middle} rounds;",
            "the other cells were measured once.",
        ]
    if run.get("interrupted"):
        lines.append("**It was interrupted**: what is missing was not measured.")
    return [*lines, f"Machine: {said}."]


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
