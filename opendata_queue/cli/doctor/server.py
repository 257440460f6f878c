"""The checks of ``odq doctor`` for a server."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from typing import Any, Final

from opendata_queue.cli.common import duration_text
from opendata_queue.cli.doctor.findings import Finding, Level, fail, ok, warn
from opendata_queue.cli.hosts import given_hosts
from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import OdqError, OtherRoleError
from opendata_queue.opening import open_async

_TIMEOUT_SECONDS: Final = 5.0
_SKEW_MS: Final = 2_000  # a Date has whole seconds


async def check_server(url: str, token: str | None, clock: Clock) -> AsyncIterator[Finding]:
    """One finding after the other, up to one that makes the remaining checks pointless."""
    finding, date = await asyncio.to_thread(_healthy, url.rstrip("/"))
    yield finding
    if finding.level is Level.FAIL:
        return
    yield await asyncio.to_thread(_ready, url.rstrip("/"))
    if date is not None:
        yield _check_clock(date, clock.now_ms())
    yield await _use(url, token)


def _healthy(url: str) -> tuple[Finding, str | None]:
    try:
        with _get(f"{url}/healthz") as answer:
            return ok("reachable", f"{url} answers"), answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        advice = "check that this is the URL of `odq serve`, and of nothing else"
        return fail("reachable", f"{url}/healthz answers with {error.code}", advice), None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        advice = "check host and port, and whether `odq serve` runs there"
        return fail("reachable", f"{url} does not answer: {reason}", advice), None


def _ready(url: str) -> Finding:
    try:
        with _get(f"{url}/readyz") as answer:
            said = answer.read(1_000).decode(errors="replace").strip()
        if "degraded" in said:
            advice = "see the server's log, and odq_garbage_* in /metrics"
            return warn("ready", f"it takes work, and something is wrong: {said}", advice)
        return ok("ready", "it takes work")
    except (OSError, ValueError) as error:
        advice = "it is starting, ending or a standby, or its store does not answer; see its log"
        return fail("ready", f"it takes no work: {error}", advice)


def _get(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)


def _check_clock(date: str, now_ms: int) -> Finding:
    try:
        theirs_ms = round(parsedate_to_datetime(date).timestamp() * 1_000)
    except ValueError:
        return warn("clock", f"it says that it is {date!r}", "something in between spoils answers")
    if abs(theirs_ms - now_ms) > _SKEW_MS:
        apart = duration_text(abs(theirs_ms - now_ms))
        advice = "let both follow the same time (NTP): deadlines are by the server's clock"
        return warn("clock", f"the server's clock and this machine's are {apart} apart", advice)
    return ok("clock", "the server's clock and this machine's agree")


async def _use(url: str, token: str | None) -> Finding:
    given: dict[str, Any] = {"token": token} if token else {}
    try:
        async with await open_async(url, **given, hosts=given_hosts()) as system:
            names = await system.list_queues()
            for name in names[:1]:
                await system.stats(name)
    except OtherRoleError as error:
        return ok("use", str(error))
    except OdqError as error:
        advice = "give a --token that permits it" if not token else "check the token's claims"
        return fail("use", " ".join(str(error).split()), advice)
    return ok("use", f"it lists its queues: {len(names)}")
