"""OpenData Queue next to its alternatives, on this machine.

    python -m benchmarks.compare [--parts compare,cost,growth] [--quick] [--systems odq,postgres]
                                 [--workloads W2,W4] [--rounds 3] [--seconds 0.5] [--deep]
                                 [--write docs/benchmarks.md] [--output build/benchmarks]
                                 [--figures build/benchmarks/measured.json …]

Every cell runs in fresh processes, and every message that is consumed is checked: its payload, that
it comes once, and that none is missing. Systems take turns, round by round, and the median counts.
Servers are started on loopback in a temporary folder, and stopped and removed at the end, after a
Ctrl-C, too. What is not installed is skipped, and the report says why.

With --figures nothing is measured: the figures of runs before are put together, part by part, drawn
and written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.compare import machine, report
from benchmarks.compare.runner import Plan, Runner, saved
from benchmarks.compare.systems import KEYS
from benchmarks.compare.workloads import WORKLOADS

PARTS = ("compare", "cost", "growth")
GROWTH = ("backlog", "history", "queues", "headers", "payload", "consumers")
_TAKES_S = {"compare": 0, "cost": 90, "growth": 210}
"""How long the parts that come after the comparison take."""
_ENDING = (signal.SIGINT, signal.SIGTERM)


def chosen(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := set(wanted) - set(known):
            raise argparse.ArgumentTypeError(
                f"{', '.join(sorted(unknown))}: not among {', '.join(known)}"
            )
        return [one for one in known if one in wanted]

    return parse


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", type=chosen(PARTS), default=list(PARTS), metavar="PARTS")
    parser.add_argument("--systems", type=chosen(KEYS), default=list(KEYS), metavar="SYSTEMS")
    parser.add_argument(
        "--workloads", type=chosen(tuple(WORKLOADS)), default=list(WORKLOADS), metavar="WORKLOADS"
    )
    parser.add_argument("--rounds", type=int, help="at most: 3, or 1 with --quick")
    parser.add_argument(
        "--minutes", type=float, default=14.0, help="no round begins that would end later"
    )
    parser.add_argument("--seconds", type=float, help="of one cell: 0.5, or 0.2 with --quick")
    parser.add_argument("--quick", action="store_true", help="less of everything, for a look")
    parser.add_argument(
        "--growth", type=chosen(GROWTH), default=list(GROWTH), metavar="KINDS", help="of what"
    )
    parser.add_argument(
        "--deep", action="store_true", help="growth up to 10⁷ messages and 100,000 queues"
    )
    parser.add_argument(
        "--s3-latency-ms", type=float, default=30.0, help="of each request, in cost"
    )
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--write", type=Path, help="a document with markers, and plots beside it")
    parser.add_argument(
        "--figures", type=Path, nargs="+", metavar="JSON", help="of runs before: measure nothing"
    )
    given = parser.parse_args(arguments)
    given.rounds = given.rounds or (1 if given.quick else 3)
    given.seconds = given.seconds or (0.2 if given.quick else 0.5)
    return given


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def measured(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine.describe(root)}
    began = time.monotonic()
    rounds = given.rounds
    if "compare" in given.parts:
        plan = Plan(
            systems=given.systems,
            workloads=given.workloads,
            rounds=given.rounds,
            seconds=given.seconds,
            root=root / "compare",
            say=say,
            messages=2_000 if given.quick else None,
            until_s=began + given.minutes * 60 - sum(_TAKES_S[part] for part in given.parts),
        )
        runner = Runner(plan)
        found["compare"] = runner.run().to_json()
        rounds = runner.rounds
    if "cost" in given.parts:
        from benchmarks.compare.cost import measure_cost

        found["cost"] = measure_cost(latency_ms=given.s3_latency_ms, quick=given.quick, say=say)
    if "growth" in given.parts:
        from benchmarks.compare.growth import measure_growth

        found["growth"] = measure_growth(
            root / "growth", kinds=given.growth, quick=given.quick, deep=given.deep, say=say
        )
    found["run"] = {
        "arguments": " ".join(that_matter(sys.argv[1:])),
        "rounds": rounds,
        "seconds": given.seconds,
        "took_s": time.monotonic() - began,
    }
    return found


def that_matter(arguments: Sequence[str]) -> list[str]:
    """Arguments without those that name places on this machine."""
    places = ("--root", "--output", "--write")
    return [
        argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
        if not argument.startswith(places) and before not in places
    ]


def put_together(paths: Sequence[Path]) -> dict[str, Any]:
    """The figures of several runs, each of some parts; of a part that several have, the last."""
    runs = [json.loads(path.read_text()) for path in paths]
    found: dict[str, Any] = {}
    for one in runs:
        found |= one
    found["run"]["arguments"] = "`, `".join(one["run"]["arguments"] for one in runs)
    found["run"]["took_s"] = sum(one["run"]["took_s"] for one in runs)
    return found


def drawn(found: dict[str, Any], folder: Path, prefix: str) -> list[str]:
    try:
        from benchmarks.compare.plots import draw
    except ImportError as error:
        say(f"no plots: {error}; install opendata-queue[bench]")
        return []
    return draw(found, folder, prefix)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Once: a second one would cut short what stops servers and removes folders."""
    for one in _ENDING:
        signal.signal(one, signal.SIG_IGN)
    raise KeyboardInterrupt


def measured_here(given: argparse.Namespace) -> dict[str, Any] | None:
    """Measure on this machine; none if somebody has interrupted it."""
    # Whoever ends us, what we have started ends with us.
    for one in _ENDING:
        signal.signal(one, _interrupt)
    if (load := os.getloadavg()[0]) > 0.5:
        say(f"the load average is {load:.1f} before we begin: expect less")
    given.root.mkdir(parents=True, exist_ok=True)
    # Servers that do not run as root have to come to the folders that we make, and only to those.
    before = os.umask(0o022)
    try:
        # Removed at the end, not in between: ext4 makes new files slowly for a minute after many
        # were deleted.
        with tempfile.TemporaryDirectory(dir=given.root, prefix="odq-compare-") as root:
            Path(root).chmod(0o711)
            return measured(given, Path(root))
    except KeyboardInterrupt:
        say("interrupted; everything is stopped and removed")
        return None
    finally:
        os.umask(before)


def main() -> int:
    given = parsed(sys.argv[1:])
    found = put_together(given.figures) if given.figures else measured_here(given)
    if found is None:
        return 130
    section = report.DEEP if given.deep else report.MEASURED
    prefix = "deep-" if given.deep else ""
    found["plots"] = drawn(found, given.output, prefix)
    saved(given.output / f"{section}.json", found)
    text = report.markdown(found)
    (given.output / f"{section}.md").write_text(text)
    if given.write is not None:
        report.write_into(given.write, text, section)
        drawn(found, given.write.parent / "benchmarks", prefix)
        saved(given.write.parent / "benchmarks" / f"{section}.json", found)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
