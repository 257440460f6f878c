"""Moving SlateDB's boundary files where SlateDB itself can't (RFC 0015).

``gc/manifest.boundary`` of a database holds the number up to which manifests may have been
removed, and ``gc/compactions.boundary`` the same of lists of compactions. Whoever has written or
read one of those looks there, and does not take for the newest what is behind the boundary. SlateDB
moves it before it removes anything, by the ETag in quotes, and where that is refused it tries for
ever. It moves nothing if the boundary is far enough already: that is what is done here, before it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from opendata_queue.errors import CorruptStoreError, StoreUnavailableError
from opendata_queue.store.abilities import Overwrite
from opendata_queue.store.objects import Objects

_KINDS: Final = ("manifest", "compactions")
_TRIES: Final = 16


async def move_boundaries(
    objects: Objects, path: str, *, how: Overwrite, now_ms: int, age_ms: int
) -> None:
    """Move both boundaries of a database behind all that is older than ``age_ms``."""
    before_ms = now_ms - age_ms
    await asyncio.gather(*(_move(objects, path, kind, how, before_ms) for kind in _KINDS))


async def _move(objects: Objects, path: str, kind: str, how: Overwrite, before_ms: int) -> None:
    wanted = await _last_old(objects, f"{path}/{kind}", kind, before_ms)
    if wanted == 0:
        return
    boundary, data = f"{path}/gc/{kind}.boundary", str(wanted).encode()
    for _ in range(_TRIES):
        found = await objects.read_tagged(boundary)
        if found is None:
            if await objects.create(boundary, data):
                return
            continue
        if _number(objects, boundary, found[0]) >= wanted:
            return
        if how is Overwrite.NONE:
            # Nothing keeps two collectors apart here; see the RFC on why that is bearable.
            await objects.write(boundary, data)
            return
        if await objects.replace_tagged(
            boundary, data, found[1] or "", quoted=how is Overwrite.QUOTED
        ):
            return
    url = objects.location.url_of(boundary)
    raise StoreUnavailableError(f"could not move {url}: it was another one {_TRIES} times")


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
