"""How much a client may send, and how fast."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from opendata_queue.clock import Clock
from opendata_queue.server.refusals import come_back, invalid
from opendata_queue.server.settings import ServerSettings

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_BUCKETS_KEPT: Final = 10_000
_WHOLE_BODY_FACTOR: Final = 4


class Disconnected(Exception):
    """The client has gone: nobody waits for an answer."""


async def read_body(receive: Receive, settings: ServerSettings, announced: str | None) -> bytes:
    """A request's body, if it is neither too long nor too slow.

    What the client announces is only believed when it is too much.
    """
    limit = settings.max_body_bytes
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise _too_long(limit)
    pause_seconds = settings.body_timeout_ms / 1000
    try:
        async with asyncio.timeout(pause_seconds):
            first, more = await _chunk(receive)
        if not more:  # nearly always
            if len(first) > limit:
                raise _too_long(limit)
            return first
        async with asyncio.timeout(pause_seconds * _WHOLE_BODY_FACTOR):
            return await _rest(receive, first, pause_seconds, limit)
    except TimeoutError:
        refusal = invalid("the body did not come in time", 408)
        refusal.headers["Connection"] = "close"
        raise refusal from None


async def _rest(receive: Receive, first: bytes, pause_seconds: float, limit: int) -> bytes:
    chunks, size, more = [first], len(first), True
    while more:
        if size > limit:
            raise _too_long(limit)
        async with asyncio.timeout(pause_seconds):
            chunk, more = await _chunk(receive)
        chunks.append(chunk)
        size += len(chunk)
    if size > limit:
        raise _too_long(limit)
    return b"".join(chunks)


async def _chunk(receive: Receive) -> tuple[bytes, bool]:
    """A part of a body, and whether there is more of it."""
    event = await receive()
    if event["type"] == "http.disconnect":
        raise Disconnected
    return event.get("body", b""), event.get("more_body", False)


def _too_long(limit: int) -> Exception:
    refusal = invalid(f"the body has more than {limit:,} bytes", 413)
    refusal.headers["Connection"] = "close"  # the rest of it is not read
    return refusal


class RateLimits:
    """A bucket of tokens for each namespace.

    Whoever finds a token left may take as many as they need, and the next ones wait until that is
    made up for: a batch larger than the bucket is possible, only not often.
    """

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def take(self, namespace: str, cost: int = 1) -> None:
        """Take tokens of a namespace; a ``Refusal`` if there are none."""
        rate = self._settings.namespace_rates.get(namespace, self._settings.rate_per_second)
        if rate is None:
            return
        now_ms, burst = self._clock.elapsed_ns() // 1_000_000, float(self._settings.rate_burst)
        left, since_ms = self._buckets.pop(namespace, (burst, now_ms))
        left = min(burst, left + (now_ms - since_ms) / 1000 * rate)
        refused = left < 1
        self._buckets[namespace] = (left if refused else left - cost, now_ms)
        if len(self._buckets) > _BUCKETS_KEPT:
            self._buckets.popitem(last=False)
        if refused:
            wait_ms = int((1 - left) / rate * 1000) + 1
            raise come_back(429, f"namespace {namespace!r} is over its rate", wait_ms)
