"""Moving SlateDB's boundary files where SlateDB itself can't (RFC 0015).

``gc/manifest.boundary`` of a database holds the number up to which manifests may have been
removed, and ``gc/compactions.boundary`` the same of lists of compactions. A process that has
written or read one of these files reads the boundary, and takes nothing behind it for the newest.
SlateDB moves it before it removes anything, by the ETag in quotes, and where that is refused it
tries for ever. It moves nothing if the boundary is far enough already: so that is done here first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import CorruptStoreError, StoreUnavailableError
from opendata_queue.store.objects.abilities import Overwrite
from opendata_queue.store.objects.objects import Objects

T = TypeVar("T")

_KINDS: Final = ("manifest", "compactions")
_TRIES: Final = 16
_SLACK_MS: Final = 10_000
_FIRST_WAIT_SECONDS: Final = 1.0
_LONGEST_WAIT_SECONDS: Final = 16.0


class Boundaries:
    """Both boundaries of a database, which follow what is older than ``age_ms``."""

    def __init__(self, objects: Objects, path: str, *, how: Overwrite, age_ms: int) -> None:
        self._objects = objects
        self._path = path
        self._how = how
        self._age_ms = age_ms
        self._clock = SystemClock()

    @property
    def age_for_slatedb_ms(self) -> int:
        """At which age SlateDB shall remove a file: when it lists them, others are a bit older."""
        return self._age_ms + min(self._age_ms, _SLACK_MS)

    async def move(self) -> None:
        """Move both behind all that is old enough by now."""
        before_ms = self._clock.now_ms() - self._age_ms
        await asyncio.gather(*(self._move(kind, before_ms) for kind in _KINDS))

    async def moved_during(self, collecting: Awaitable[T]) -> T:
        """The result of a collection, which may wait for a boundary to be moved further.

        All that SlateDB has chosen to remove was old enough when it chose, and is so now: so it
        ends, however long this process has stood still since the last move.
        """
        running = asyncio.ensure_future(collecting)
        wait_seconds = _FIRST_WAIT_SECONDS
        try:
            while not (await asyncio.wait([running], timeout=wait_seconds))[0]:
                await self.move()
                wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)
            return running.result()
        finally:
            running.cancel()

    async def _move(self, kind: str, before_ms: int) -> None:
        objects = self._objects
        wanted = await _last_old(objects, f"{self._path}/{kind}", kind, before_ms)
        if wanted == 0:
            return
        boundary, data = f"{self._path}/gc/{kind}.boundary", str(wanted).encode()
        for _ in range(_TRIES):
            found = await objects.read_tagged(boundary)
            if found is None:
                if await objects.create(boundary, data):
                    return
            elif _number(objects, boundary, found[0]) >= wanted or await self._overwrite(
                boundary, data, found[1] or ""
            ):
                return
        url = objects.location.url_of(boundary)
        raise StoreUnavailableError(f"could not move {url}: it was another one {_TRIES} times")

    async def _overwrite(self, boundary: str, data: bytes, tag: str) -> bool:
        if self._how is Overwrite.NONE:
            # Nothing keeps two collectors apart here; the RFC says why that is bearable.
            await self._objects.write(boundary, data)
            return True
        quoted = self._how is Overwrite.QUOTED
        return await self._objects.replace_tagged(boundary, data, tag, quoted=quoted)


async def _last_old(objects: Objects, folder: str, suffix: str, before_ms: int) -> int:
    """The largest number of a file that is old enough to go, and is not the newest one."""
    numbers: dict[int, int] = {}
    for name, modified_ms in await objects.modified(folder):
        stem, _, ending = name.partition(".")
        if ending == suffix and stem.isdecimal():
            numbers[int(stem)] = modified_ms
    newest = max(numbers, default=0)
    old = (one for one, at_ms in numbers.items() if one != newest and at_ms < before_ms)
    return max(old, default=0)


def _number(objects: Objects, boundary: str, data: bytes) -> int:
    try:
        return int(data)
    except ValueError:
        url = objects.location.url_of(boundary)
        raise CorruptStoreError(f"{url} holds {data[:40]!r}, not a number") from None
