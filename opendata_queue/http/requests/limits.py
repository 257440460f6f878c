"""How much a client may send, and how fast."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from opendata_queue.http.refusals import Refusal, come_back, invalid
from opendata_queue.http.requests.decoding import LARGE_BODY_BYTES, no_room
from opendata_queue.http.requests.room import Share
from opendata_queue.http.settings import ServerSettings
from opendata_queue.model.clock import Clock

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_BUCKETS_KEPT: Final = 10_000
_WHOLE_BODY_FACTOR: Final = 4
_LONGEST_NUMBER: Final = 20
_CHUNK_BYTES: Final = 100
"""What each part of a body takes in addition to its bytes."""


class Disconnected(Exception):
    """The client has gone, and needs no answer."""


async def read_body(
    receive: Receive, settings: ServerSettings, announced: str | None, share: Share
) -> bytes:
    """A request's body, if it is neither too long nor too slow, and there is room for it.

    What the client announces is only believed when it is too much. Room is taken as the body comes:
    one that is slow, or never comes, keeps none from others.
    """
    limit = settings.max_body_bytes
    if announced is not None and announced.isascii() and announced.isdigit():
        size = int(announced.lstrip("0")[:_LONGEST_NUMBER] or 0)
        if size > limit:
            raise _too_long(limit)
        if size > LARGE_BODY_BYTES and not share.fits(size):
            raise _closing(no_room())
    pause_seconds = settings.body_timeout_ms / 1000
    try:
        async with asyncio.timeout(pause_seconds):
            first, more = await _chunk(receive)
        if not more:  # nearly always
            _check_chunk(len(first), len(first), limit, share)
            return first
        async with asyncio.timeout(pause_seconds * _WHOLE_BODY_FACTOR):
            return await _rest(receive, first, pause_seconds, limit, share)
    except TimeoutError:
        raise _closing(invalid("the body did not come in time", 408)) from None


async def _rest(
    receive: Receive, first: bytes, pause_seconds: float, limit: int, share: Share
) -> bytes:
    chunks, size, more = [first], len(first), True
    _check_chunk(size, size, limit, share)
    while more:
        async with asyncio.timeout(pause_seconds):
            chunk, more = await _chunk(receive)
        chunks.append(chunk)
        size += len(chunk)
        _check_chunk(len(chunk), size, limit, share)
    return b"".join(chunks)


def _check_chunk(size: int, so_far: int, limit: int, share: Share) -> None:
    if so_far > limit:
        raise _too_long(limit)
    # Small ones are bounded by the number of connections.
    if so_far > LARGE_BODY_BYTES and not share.take(size + _CHUNK_BYTES):
        raise _closing(no_room())


async def _chunk(receive: Receive) -> tuple[bytes, bool]:
    """A part of a body, and whether there is more of it."""
    event = await receive()
    if event["type"] == "http.disconnect":
        raise Disconnected
    return event.get("body", b""), event.get("more_body", False)


def _too_long(limit: int) -> Refusal:
    return _closing(invalid(f"the body has more than {limit:,} bytes", 413))


def _closing(refusal: Refusal) -> Refusal:
    """The rest of a body is not read."""
    refusal.headers["Connection"] = "close"
    return refusal


class RateLimits:
    """A bucket of tokens for each namespace.

    A request that finds a token left may take as many as it needs. The next ones wait until these
    are made up for: a batch larger than the bucket is possible, but not often.
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
