"""All cells of all systems: in rounds, so that a drift of the machine meets all of them."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.common import spread
from benchmarks.compare.cells import Cell, Outcome
from benchmarks.compare.contract import Address, System
from benchmarks.compare.processes import reason_of
from benchmarks.compare.servers import NotHere
from benchmarks.compare.systems import find
from benchmarks.compare.workloads import WORKLOADS, Workload

Say = Callable[[str], None]

_AGAIN: Final = frozenset({"W2", "W4", "W5", "W6", "W7"})
"""What comes in every round: that which targets are about. The rest is measured once."""


@dataclass(kw_only=True)
class Measured:
    """One cell over all rounds."""

    system: str
    workload: str
    rates: list[float] = field(default_factory=list)
    percentiles_ms: list[dict[str, float]] = field(default_factory=list)
    failure: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> str:
        return spread(self.rates) if len(self.rates) > 1 else ""

    def percentile_ms(self, part: float) -> float:
        return statistics.median(one[f"{part:g}"] for one in self.percentiles_ms)


@dataclass(kw_only=True)
class Comparison:
    """What was measured, and of whom nothing could be."""

    cells: dict[tuple[str, str], Measured] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def cell(self, system: str, workload: str) -> Measured | None:
        """A cell that has figures, which count."""
        found = self.cells.get((system, workload))
        return found if found is not None and found.rates and not found.failure else None

    def failed(self, system: str, workload: str) -> bool:
        """Whether a cell has failed, be it in one round of many: then it has no figures."""
        found = self.cells.get((system, workload))
        return found is not None and bool(found.failure)

    def failures(self) -> dict[tuple[str, str], list[str]]:
        """Systems and reasons, and which workloads have failed for them."""
        found: dict[tuple[str, str], list[str]] = {}
        for one in self.cells.values():
            if one.failure:
                found.setdefault((one.system, one.failure), []).append(one.workload)
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "cells": [vars(one) for one in self.cells.values()],
            "skipped": self.skipped,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Comparison:
        cells = [Measured(**one) for one in found["cells"]]
        return cls(
            cells={(one.system, one.workload): one for one in cells},
            skipped=found["skipped"],
            versions=found["versions"],
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    systems: Sequence[str]
    workloads: Sequence[str]
    rounds: int
    seconds: float
    root: Path
    say: Say
    messages: int | None = None
    """How many messages wait, or are to be published, if not what the workload says."""

    until_s: float = math.inf
    """By this time of the monotonic clock: no round begins that is likely to end later."""


class Runner:
    """Goes through a plan. A cell that fails is reported, and the others go on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._again = _AGAIN.intersection(plan.workloads) or frozenset(plan.workloads)
        self.found = Comparison()
        self._deep_servers = ExitStack()
        self._kept: dict[str, Address] = {}
        self._left: dict[str, int] = {}
        self.rounds = 0
        """How many there was time for; one in any case."""

    def run(self) -> Comparison:
        systems = [find(key) for key in self._plan.systems if self._is_here(key)]
        with self._deep_servers:
            for number in range(self._plan.rounds):
                began = time.monotonic()
                self.rounds += 1
                for system in systems:
                    self._plan.say(f"round {number + 1} of {self._plan.rounds}: {system.name}")
                    self._round(system, number)
                now = time.monotonic()
                took = now - began
                if not number:
                    took *= len(self._again) / len(self._plan.workloads)
                if now + took > self._plan.until_s:
                    break
        return self.found

    def _is_here(self, key: str) -> bool:
        if (missing := find(key).missing()) is not None:
            self._skip(find(key), missing)
            return False
        with self._failing(find(key), self._chosen(find(key), 0)):
            self.found.versions[key] = find(key).version()
        return key in self.found.versions

    def _skip(self, system: System, reason: str) -> None:
        self.found.skipped[system.key] = reason
        self.found.versions.pop(system.key, None)
        for workload in system.workloads:
            self.found.cells.pop((system.key, workload), None)
        self._plan.say(f"skipped: {system.name}: {reason}")

    def _round(self, system: System, number: int) -> None:
        if system.key in self.found.skipped:
            return
        chosen = self._chosen(system, number)
        shallow = [one for one in chosen if not one.deep]
        folder = self._plan.root / f"{system.key}-{number}"
        with self._failing(system, shallow):
            filled: dict[str, int] = {}
            if system.relaxes:
                with system.serve(folder, True) as address:
                    filled = self._fill_all(system, shallow, address)
            with system.serve(folder, False) as address:
                for workload in shallow:
                    self._measure(system, workload, address, filled.get(workload.key))
        deep = [one for one in chosen if one.deep and system.key not in self.found.skipped]
        with self._failing(system, deep):
            for workload in deep:
                self._measure_deep(system, workload, number)

    def _chosen(self, system: System, number: int) -> list[Workload]:
        """What is measured of a system in a round."""
        return [
            WORKLOADS[key]
            for key in self._plan.workloads
            if key in system.workloads and (not number or key in self._again)
        ]

    def _fill_all(
        self, system: System, workloads: Sequence[Workload], address: Address
    ) -> dict[str, int]:
        filled = {}
        for workload in workloads:
            if workload.kind == "consume":
                filled[workload.key] = self._messages(workload)
                self._cell(system, workload, address).fill(filled[workload.key])
        return filled

    def _measure(
        self, system: System, workload: Workload, address: Address, filled: int | None
    ) -> None:
        with self._failing(system, [workload]):
            cell = self._cell(system, workload, address)
            if workload.kind == "consume" and filled is None:
                cell.fill(self._messages(workload))
            self._note(system, workload, cell.run(filled or self._messages(workload)))

    def _measure_deep(self, system: System, workload: Workload, number: int) -> None:
        """The backlog is made once, and each round takes a little of it."""
        if self._measured(system, workload).failure or number >= system.deep_rounds:
            return
        published = self._messages(workload)
        if system.key not in self._left:
            with self._deep_address(system, relaxed=True) as address:
                self._cell(system, workload, address).fill(published)
            self._left[system.key] = published
        left = self._left[system.key]
        with self._deep_address(system, relaxed=False) as address:
            outcome = self._cell(system, workload, address).run(left, published)
        self._left[system.key] -= outcome.messages + outcome.unmeasured
        self._note(system, workload, outcome)

    @contextlib.contextmanager
    def _deep_address(self, system: System, *, relaxed: bool) -> Iterator[Address]:
        """Where the backlog is. A server that forgets has to live for all rounds."""
        serving = system.serve(self._plan.root / f"{system.key}-deep", relaxed)
        if not system.in_memory:
            with serving as address:
                yield address
            return
        if system.key not in self._kept:
            self._kept[system.key] = self._deep_servers.enter_context(serving)
        yield self._kept[system.key]

    def _messages(self, workload: Workload) -> int:
        return self._plan.messages or workload.messages

    def _cell(self, system: System, workload: Workload, address: Address) -> Cell:
        return Cell(
            system=system,
            workload=workload,
            address=address,
            queue=workload.key.lower(),
            seconds=self._plan.seconds,
        )

    def _note(self, system: System, workload: Workload, outcome: Outcome) -> None:
        measured = self._measured(system, workload)
        measured.rates.append(outcome.rate)
        measured.percentiles_ms.append(outcome.percentiles_ms)

    def _measured(self, system: System, workload: Workload) -> Measured:
        made = Measured(system=system.key, workload=workload.key)
        return self.found.cells.setdefault((system.key, workload.key), made)

    @contextlib.contextmanager
    def _failing(self, system: System, workloads: Sequence[Workload]) -> Iterator[None]:
        """One contender's failure does not stop the others: it is noted, and said."""
        try:
            yield
        except NotHere as reason:
            self._skip(system, str(reason))
        except Exception as error:
            self._plan.say(f"{system.name} has failed: {error}")
            self._plan.say(traceback.format_exc())
            for workload in workloads:
                # The whole story is said above. What came later often comes of what came first.
                measured = self._measured(system, workload)
                measured.failure = measured.failure or reason_of(error)


def saved(path: Path, everything: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
