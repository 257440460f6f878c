"""OpenData Queue next to its alternatives, on this machine.

    python -m benchmarks.compare [--parts compare,cost,growth] [--quick] [--systems odq,postgres]
                                 [--workloads W2,W4] [--rounds 3] [--seconds 0.5] [--deep]
                                 [--write docs/benchmarks.md] [--output build/benchmarks]
                                 [--figures build/benchmarks/measured.json …]

Every cell runs in fresh processes, and every message that is consumed is checked: its payload, that
it comes once, and that none is missing. Systems take turns, round by round, and the median counts.
Servers are started on loopback in a temporary folder, and stopped and removed at the end, after a
Ctrl-C, too. What is not installed is skipped, and the report says why.

A cell that fails in any round has no figure, and no part that fails stops the others: the program
ends with 1 then, and leaves the document as it was. What is measured is kept in the folder of
--output after each part, and after a Ctrl-C.

With --figures nothing is measured: the figures of runs before are put together, part by part, drawn
and written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.compare import machine, report
from benchmarks.compare.processes import reason_of
from benchmarks.compare.runner import Plan, Runner, saved
from benchmarks.compare.systems import KEYS
from benchmarks.compare.workloads import WORKLOADS

PARTS = ("compare", "cost", "growth")
GROWTH = ("backlog", "history", "queues", "headers", "payload", "consumers")
_TAKES_S = {"compare": 0, "cost": 145, "growth": 130}
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


def number(
    kind: type[int] | type[float], *, least: float = -math.inf, above: float = -math.inf
) -> Any:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: not a number") from None
        if not (math.isfinite(value) and value >= least and value > above):
            limit = f"at least {least:g}" if least > above else f"more than {above:g}"
            raise argparse.ArgumentTypeError(f"{text}: it must be {limit}")
        return value

    return parse


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """What is wanted. Whatever could not be done with it is said before anything is measured."""
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
    parser.add_argument("--rounds", type=number(int, least=1), help="at most: 3, or 1 with --quick")
    parser.add_argument(
        "--minutes",
        type=number(float, above=0),
        default=14.5,
        help="no round begins that would end later",
    )
    parser.add_argument(
        "--seconds", type=number(float, above=0), help="of one cell: 0.5, or 0.2 with --quick"
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, for a look")
    parser.add_argument(
        "--growth", type=chosen(GROWTH), default=list(GROWTH), metavar="KINDS", help="of what"
    )
    parser.add_argument(
        "--deep", action="store_true", help="growth up to 10⁷ messages and 100,000 queues"
    )
    parser.add_argument(
        "--s3-latency-ms",
        type=number(float, least=0),
        default=30.0,
        help="of each request, in cost",
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
    try:
        check_places(given)
    except ValueError as error:
        parser.error(str(error))
    return given


def check_places(given: argparse.Namespace) -> None:
    """Read and make now what would fail when all is measured."""
    if given.figures:
        try:
            given.found = put_together(given.figures)
        except ValueError as error:
            raise ValueError(f"--figures {error}") from None
    for option in ("root", "output"):
        folder = getattr(given, option)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--{option} {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"--{option} {folder}: nothing can be written there")
    if given.write is not None:
        try:
            report.replaced(given.write.read_text(), "", section_of(given))
        except OSError as error:
            raise ValueError(f"--write {given.write}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"--write {given.write}: {error}") from None


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def compare(given: argparse.Namespace, root: Path, found: dict[str, Any]) -> None:
    plan = Plan(
        systems=given.systems,
        workloads=given.workloads,
        rounds=given.rounds,
        seconds=given.seconds,
        root=root / "compare",
        say=say,
        messages=2_000 if given.quick else None,
        until_s=time.monotonic() + given.minutes * 60 - sum(_TAKES_S[one] for one in given.parts),
    )
    runner = Runner(plan)
    try:
        runner.run()
    finally:
        found["compare"] = runner.found.to_json()
        found["run"]["rounds"] = runner.rounds


def cost(given: argparse.Namespace, root: Path, found: dict[str, Any]) -> None:
    from benchmarks.compare.cost import measure_cost
    from benchmarks.compare.systems.moto import no_moto

    if (reason := no_moto()) is not None:
        found["skipped"]["cost"] = reason
        say(f"skipped: cost: {reason}")
        return
    found["cost"] = {}
    measure_cost(found["cost"], latency_ms=given.s3_latency_ms, quick=given.quick, say=say)


def growth(given: argparse.Namespace, root: Path, found: dict[str, Any]) -> None:
    from benchmarks.compare.growth import Growth

    measuring = Growth(root / "growth", quick=given.quick, deep=given.deep, say=say)
    found["growth"] = {}
    found["run"]["looks"] = measuring.looks
    measuring.measure(given.growth, found["growth"])


_MEASURE: dict[str, Callable[[argparse.Namespace, Path, dict[str, Any]], None]] = {
    "compare": compare,
    "cost": cost,
    "growth": growth,
}


def measure(given: argparse.Namespace, root: Path, found: dict[str, Any]) -> None:
    """Measure all parts; what is known is kept after each of them, however it has ended."""
    began = time.monotonic()
    found |= {"machine": machine.describe(root), "failures": {}, "skipped": {}}
    found["run"] = {
        "arguments": " ".join(that_matter(sys.argv[1:])),
        "rounds": given.rounds,
        "seconds": given.seconds,
    }
    for part in given.parts:
        found["failures"][part] = found["skipped"][part] = ""
        try:
            _MEASURE[part](given, root, found)
        except Exception as error:
            say(f"{part} has failed: {traceback.format_exc()}")
            found["failures"][part] = reason_of(error)
        except KeyboardInterrupt:
            found["run"]["interrupted"] = True
            raise
        finally:
            found["run"]["took_s"] = time.monotonic() - began
            keep(given, found)


def keep(given: argparse.Namespace, found: dict[str, Any]) -> str:
    """Save what was measured, and how it reads. Nothing does not replace an earlier run's."""
    if found["run"].get("interrupted") and not has_figures(found):
        return ""
    section = section_of(given)
    saved(given.output / f"{section}.json", found)
    text = report.markdown(found)
    (given.output / f"{section}.md").write_text(text)
    return text


def has_figures(found: dict[str, Any]) -> bool:
    compared, spent = found.get("compare", {}), found.get("cost", {})
    return bool(compared.get("cells") or spent.get("spent") or found.get("growth"))


def section_of(given: argparse.Namespace) -> str:
    return report.DEEP if given.deep else report.MEASURED


def that_matter(arguments: Sequence[str]) -> list[str]:
    """Arguments without those that name places on this machine."""
    places = ("--root", "--output", "--write")
    return [
        argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
        if not argument.startswith(places) and before not in places
    ]


def figures_in(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        report.markdown(found)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: not the figures of a run") from None
    return found


def put_together(paths: Sequence[Path]) -> dict[str, Any]:
    """The figures of several runs, each of some parts; of a part that several have, the last."""
    runs = [figures_in(path) for path in paths]
    found: dict[str, Any] = {}
    run: dict[str, Any] = {}
    ended: dict[str, dict[str, str]] = {"failures": {}, "skipped": {}}
    for one in runs:
        found |= one
        # How often something was measured is in the figures of the run that has measured it.
        for name, part in (("rounds", "compare"), ("seconds", "compare"), ("looks", "growth")):
            if part in one and name in one["run"]:
                run[name] = one["run"][name]
        for what, parts in ended.items():
            parts |= one.get(what, {})
    run["arguments"] = "`, `".join(one["run"]["arguments"] for one in runs)
    run["took_s"] = sum(one["run"]["took_s"] for one in runs)
    run["interrupted"] = any(one["run"].get("interrupted") for one in runs)
    return {**found, **ended, "run": run}


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


def measured_here(given: argparse.Namespace) -> dict[str, Any]:
    """Measure on this machine, until it is done or interrupted."""
    # However this process ends, what it has started ends with it.
    for one in _ENDING:
        signal.signal(one, _interrupt)
    if (load := os.getloadavg()[0]) > 0.5:
        say(f"the load average is {load:.1f} before we begin: expect less")
    found: dict[str, Any] = {}
    # Servers that do not run as root have to come to the folders that we make, and only to those.
    before = os.umask(0o022)
    try:
        # Removed at the end, not in between: ext4 makes new files slowly for a minute after many
        # were deleted.
        with tempfile.TemporaryDirectory(dir=given.root, prefix="odq-compare-") as root:
            Path(root).chmod(0o711)
            measure(given, Path(root), found)
    except KeyboardInterrupt:
        say("interrupted; everything is stopped and removed")
        found.setdefault("run", {})["interrupted"] = True
        if has_figures(found):
            say(f"what was measured is in {given.output}")
    finally:
        os.umask(before)
    return found


def main() -> int:
    given = parsed(sys.argv[1:])
    found = given.found if given.figures else measured_here(given)
    if not given.figures and found["run"].get("interrupted"):
        return 130
    prefix = "deep-" if given.deep else ""
    found["plots"] = drawn(found, given.output, prefix)
    text = keep(given, found)
    print(text)
    failed = report.failures(found)
    for one in failed:
        say(f"failed: {one}")
    if failed or not has_figures(found):
        if given.write is not None:
            say(f"{given.write} stays as it was")
        return 1
    if given.write is not None:
        report.write_into(given.write, text, section_of(given))
        drawn(found, given.write.parent / "benchmarks", prefix)
        saved(given.write.parent / "benchmarks" / f"{section_of(given)}.json", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
