"""``odq doctor``: check a root or a server end to end."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from odq_encodings import EncodingError
from opendata_queue.cli.common import (
    FAILED,
    AsJson,
    Store,
    StoreArgument,
    Token,
    is_remote,
    print_json,
    run,
    url_of,
)
from opendata_queue.cli.doctor.findings import Finding, Level, fail
from opendata_queue.cli.doctor.root import check_root
from opendata_queue.cli.doctor.server import check_server
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import InvalidInputError, OdqError
from opendata_queue.model.safe_text import harmless

_STYLES: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
_CHECK_WIDTH: Final = 18


def doctor(
    url: StoreArgument = None,
    read_only: Annotated[
        bool,
        typer.Option("--read-only", help="Don't try what the store can do."),
    ] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Of a root: read every file, and check every reference. It takes long."
        ),
    ] = False,
    store: Store = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Check a root or a server end to end, and explain what is found.

    Each line is ok, warn or fail, and says what to do. The root's owner is not disturbed: all
    that is written is a probe object, which is removed again. Exits with 1 if anything fails.

    Examples:
      odq doctor s3://my-bucket/queues
      odq doctor --deep file:///var/lib/queues
      odq doctor http://localhost:8080 --token "$TOKEN"
    """
    target = url_of(store, url)
    clock = SystemClock()
    if is_remote(target) and deep:
        raise InvalidInputError(f"--deep reads the files of a root, and {target} is a server")
    if is_remote(target):
        checks = check_server(target, token, clock)
    else:
        checks = check_root(target, clock, read_only=read_only, deep=deep)
    findings = run(_all(checks, as_json))
    healthy = all(finding.level is not Level.FAIL for finding in findings)
    if as_json:
        print_json({"store": target, "healthy": healthy, "checks": findings})
    if not healthy:
        raise typer.Exit(FAILED)


async def _all(checks: AsyncIterator[Finding], as_json: bool) -> list[Finding]:
    """All findings; each is printed as soon as it is there."""
    console = Console(soft_wrap=True, highlight=False)
    findings = []
    async for finding in _to_the_end(checks):
        findings.append(finding)
        if not as_json:
            _print(console, finding)
            sys.stdout.flush()
    return findings


async def _to_the_end(checks: AsyncIterator[Finding]) -> AsyncIterator[Finding]:
    """The findings; an error that ends the checks becomes one, too."""
    try:
        async for finding in checks:
            yield finding
    except (OdqError, EncodingError) as error:
        yield fail("reading", str(error), "read the rows with `odq inspect`, and report it")


def _print(console: Console, finding: Finding) -> None:
    line = Text.assemble(
        (f"{finding.level:<4}", _STYLES[finding.level]),
        f"  {finding.check:<{_CHECK_WIDTH}}  {harmless(' '.join(finding.found.split()))}",
    )
    console.print(line)
    if finding.advice:
        console.print(Text(f"{'':<{_CHECK_WIDTH + 8}}→ {harmless(finding.advice)}"))
