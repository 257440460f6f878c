"""One cell of the table: a system and a workload, in fresh processes, every message checked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.common import percentile
from benchmarks.compare.content import WrongMessages, check_losses, check_numbers
from benchmarks.compare.contract import Address, System
from benchmarks.compare.processes import expect_ready, process, result
from benchmarks.compare.worker import Figures
from benchmarks.compare.workloads import (
    LONGEST,
    LONGEST_GROWING_S,
    MESSAGES_PER_SECOND,
    Workload,
)

_WORKER: Final = "benchmarks.compare.worker"
PERCENTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Of W5, a round has 500 messages: there is no more to say of them."""
_TIMEOUT_S: Final = 240.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run of a cell has shown."""

    messages: int
    unmeasured: int
    seconds: float
    percentiles_ms: dict[str, float]

    @property
    def rate(self) -> float:
        return self.messages / self.seconds


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A system at an address, and what to do with a queue of it."""

    system: System
    workload: Workload
    address: Address
    queue: str
    seconds: float

    def fill(self, count: int) -> None:
        """Let messages wait in the queue."""
        ((found,),) = self._processes([[{"job": "fill", "messages": count}]])
        if found.depth != count:
            raise WrongMessages(f"{count} were published, and {found.depth} are waiting")

    def run(self, messages: int = 0, published: int | None = None) -> Outcome:
        """Measure. So many messages are to be published, or wait: among the first ``published``."""
        match self.workload.kind:
            case "publish":
                return self._publish(messages)
            case "consume":
                return self._consume(messages, range(published or messages))
            case "latency":
                return self._latency()

    def _publish(self, at_least: int) -> Outcome:
        """Publish for so long; in batches, longer to publish as many as the others.

        Where the cost of a publish grows with what is there already, all of them must be.
        """
        batch, clients = self.workload.batch, self.system.clients
        job = {"job": "publish", "batch": batch, "seconds": self.seconds, "at_least": 0}
        if batch > 1:
            job["at_least"] = at_least // clients
            job["longest"] = LONGEST_GROWING_S if self.system.grows else self.seconds * LONGEST
        jobs = [{**job, "first": number << 32} for number in range(clients)]
        found = self._processes(_shared_out(jobs, self.system.processes), count_after=True)
        figures = [one for process in found for one in process]
        messages = sum(one.unmeasured + one.messages for one in figures)
        # Each process counts when it has ended: the last one sees all.
        check_losses(messages, 0, max(process[0].depth for process in found))
        return _outcome(figures)

    def _consume(self, waiting: int, published: range) -> Outcome:
        """Consume some of what waits; it is counted before and after."""
        consumers = self.workload.consumers
        processes = 1
        if consumers == 1:
            consumers, processes = self.system.clients, self.system.processes
        job = {"job": "consume", "batch": self.workload.batch, "seconds": self.seconds}
        found = self._processes(_shared_out([job] * consumers, processes), count_after=True)
        figures = [one for process in found for one in process]
        numbers = [number for one in figures for number in one.numbers]
        check_numbers(numbers, published)
        check_losses(waiting, len(numbers), min(process[0].depth for process in found))
        return _outcome(figures)

    def _latency(self) -> Outcome:
        # Longer than the others: there are few messages.
        count = int(MESSAGES_PER_SECOND * max(self.seconds * 2, 0.1))
        jobs = [{"job": one, "messages": count} for one in ("consume_paced", "publish_paced")]
        if self.system.one_process:
            ((consumed, _),) = self._processes([jobs])
        else:
            (consumed,), _ = self._processes([[job] for job in jobs])
        check_numbers(consumed.numbers, range(count))
        check_losses(count, len(consumed.numbers), 0)
        return _outcome([consumed])

    def _processes(
        self, jobs: Sequence[Sequence[dict[str, Any]]], *, count_after: bool = False
    ) -> list[list[Figures]]:
        """Run lists of jobs, each in a fresh process, all from the same moment on."""
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(
                    process(
                        _WORKER,
                        {
                            "system": self.system.key,
                            "address": self.address,
                            "queue": self.queue,
                            "jobs": list(some),
                            "count_after": count_after,
                        },
                    )
                )
                for some in jobs
            ]
            for worker in workers:
                expect_ready(worker, timeout_s=_TIMEOUT_S)
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
            found = [result(worker, timeout_s=_TIMEOUT_S) for worker in workers]
        return [[Figures(**one) for one in figures] for figures in found]


def _shared_out(jobs: list[dict[str, Any]], processes: int) -> list[list[dict[str, Any]]]:
    return [jobs[number::processes] for number in range(processes)]


def _outcome(figures: Sequence[Figures]) -> Outcome:
    """All that worked at once, from the first beginning to the last end."""
    latencies = [value for one in figures for value in one.latencies_ms]
    if not latencies:
        raise WrongMessages("nothing was measured")
    return Outcome(
        messages=sum(one.messages for one in figures),
        unmeasured=sum(one.unmeasured for one in figures),
        seconds=max(one.end_s for one in figures) - min(one.begin_s for one in figures),
        percentiles_ms={f"{part:g}": percentile(latencies, part) for part in PERCENTILES},
    )
