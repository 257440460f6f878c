"""The checks of ``odq doctor`` that read files: some of them always, and all with ``--deep``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

from opendata_queue.cli.common import plural
from opendata_queue.cli.doctor.findings import Finding, fail, ok, warn
from opendata_queue.cli.doctor.whole_root import Progress, RootCheck
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import OdqError
from opendata_queue.store import Objects, Problem
from opendata_queue.store.problems import LOOK_DEEP

FILES: Final = "files"
_SHOWN: Final = 1_000
_JOBS_SHOWN: Final = 5


async def check_files(objects: Objects, clock: Clock) -> AsyncIterator[Finding]:
    """The files of the databases that owners write: that they are there, and not cut off."""
    check = RootCheck(objects, clock, _silent)
    found = f"those of {{}} are there; {LOOK_DEEP}"
    problems = check.live_databases(deep=False)
    async for finding in _findings(
        FILES, problems, lambda: found.format(plural(check.databases, "database"))
    ):
        yield finding


async def check_deep(objects: Objects, clock: Clock, progress: Progress) -> AsyncIterator[Finding]:
    """Every file, and every reference."""
    check = RootCheck(objects, clock, progress)
    parts: list[tuple[str, AsyncIterator[Problem], Callable[[], str]]] = [
        (
            "control files",
            check.control_files(),
            lambda: f"{plural(check.files, 'file')} can be believed",
        ),
        (
            FILES,
            check.live_databases(deep=True),
            lambda: f"those of {plural(check.databases, 'live database')} are there, and whole",
        ),
        (
            "bulk shards",
            check.bulk_databases(),
            lambda: "they are as their writers left them",
        ),
        (
            "blobs",
            check.blob_references(),
            lambda: f"{plural(check.blobs, 'blob')} are what messages say of them",
        ),
        (
            "entries",
            check.queue_entries(),
            lambda: f"{plural(check.entries, 'message')} that wait in queues are there",
        ),
    ]
    for name, problems, summary in parts:
        async for finding in _findings(name, problems, summary):
            yield finding
    try:
        jobs = await check.uncommitted_jobs()
    except OdqError as error:
        yield fail("bulk jobs", str(error), "mend what is above, and check again")
        return
    yield _bulk_jobs(jobs)
    if check.damaged:
        yield warn(
            "left out",
            f"references in {', '.join(sorted(check.damaged)[:_JOBS_SHOWN])} were not checked",
            "mend what is damaged there, and check again",
        )


async def _findings(
    name: str, problems: AsyncIterator[Problem], summary: Callable[[], str]
) -> AsyncIterator[Finding]:
    """Problems as they are found; an error that ends the check becomes a finding, too."""
    count = 0
    try:
        async for problem in problems:
            count += 1
            if count <= _SHOWN:
                yield _finding(name, problem)
    except OdqError as error:
        yield fail(name, str(error), "mend what is above, and check again")
        return
    if count > _SHOWN:
        yield fail(name, f"{count - _SHOWN:,} more are wrong", "mend these first")
    if not count:
        yield ok(name, summary())


def _finding(name: str, problem: Problem) -> Finding:
    found = f"{problem.file} {problem.wrong}; what may be lost: {problem.lost}"
    return fail(name, found, problem.advice)


def _bulk_jobs(jobs: dict[str, int]) -> Finding:
    if not jobs:
        return ok("bulk jobs", "none has filled shards and no commit")
    shown = ", ".join(sorted(jobs)[:_JOBS_SHOWN]) + (" …" if len(jobs) > _JOBS_SHOWN else "")
    return warn(
        "bulk jobs",
        f"{plural(len(jobs), 'job')} ({shown}) have filled {plural(sum(jobs.values()), 'shard')} "
        "and have no commit",
        "they are running, or were given up, which is no harm; if one was committed, its file in "
        "commits/ was lost: run the job again, or restore the file",
    )


def _silent(_: str) -> None:
    pass
