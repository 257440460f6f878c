"""What an object store can do of what we and SlateDB need, found out by trying (RFC 0015)."""

from __future__ import annotations

import asyncio
import enum
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from opendata_queue.model.errors import OdqError, StoreAccessError
from opendata_queue.store.location import Location, StoreKind
from opendata_queue.store.waiting import in_time

OUTCOME_PATH: Final = "store.json"
"""Where a root remembers what its store can do."""
VALID_MS: Final = 24 * 3_600_000
"""For how long that is believed. Who opens the root after that finds out anew."""

_FOLDER: Final = "probe"
_RACERS: Final = 3
_BYTES: Final = 32
_OVERWRITE_TIMEOUT_MS: Final = 10_000
_FLAGS: Final = ("creates_once", "lists_at_once", "reads_ranges")


class Overwrite(enum.StrEnum):
    """How an object is overwritten only if it is still the one that was read."""

    QUOTED = "quoted etag"
    """With ``If-Match`` and the ETag in quotes, as HTTP has it: this is what SlateDB does."""
    BARE = "bare etag"
    """The store takes the ETag without its quotes alone."""
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    creates_once: bool
    """Of several processes that create an object at once, one does, and its bytes stay."""
    lists_at_once: bool
    """A list has what was written before it."""
    reads_ranges: bool
    overwrite: Overwrite

    @property
    def missing(self) -> tuple[str, ...]:
        """What a root can't do without, and the store can't do."""
        needed = (
            (
                self.creates_once,
                "it creates an object that is there already over again, so that two owners could "
                "both win (If-None-Match: *)",
            ),
            (self.lists_at_once, "a list does not have what was written before it"),
            (self.reads_ranges, "a part of an object can't be read (Range)"),
        )
        return tuple(what for able, what in needed if not able)

    def check(self, root: str) -> None:
        """Refuse a store on which a root would not be safe."""
        if self.missing:
            raise StoreAccessError(
                f"{root} can't be used: {'; '.join(self.missing)}. Use a store with conditional "
                "writes and consistent reads (docs/operations.md has a table)"
            )

    def as_json(self) -> dict[str, object]:
        flags = {name: getattr(self, name) for name in _FLAGS}
        return flags | {"overwrite": str(self.overwrite)}


LOCAL: Final = {
    # A file has no ETag to overwrite it by; what that is about is left out there (see Upkeep).
    StoreKind.FILE: Abilities(
        creates_once=True, lists_at_once=True, reads_ranges=True, overwrite=Overwrite.NONE
    ),
    StoreKind.MEMORY: Abilities(
        creates_once=True, lists_at_once=True, reads_ranges=True, overwrite=Overwrite.QUOTED
    ),
}


_CREATES_AGAIN: Final = Abilities(  # nothing else matters then, or is tried
    creates_once=False, lists_at_once=True, reads_ranges=True, overwrite=Overwrite.NONE
)


class ProbedObjects(Protocol):
    """What a probe tries of ``Objects``, which remember what it has found."""

    location: Location

    async def create(self, path: str, data: bytes) -> bool: ...

    async def read(self, path: str) -> bytes | None: ...

    async def read_tagged(self, path: str) -> tuple[bytes, str | None] | None: ...

    async def read_range(self, path: str, start: int, end: int) -> bytes | None: ...

    async def replace_tagged(self, path: str, data: bytes, tag: str, *, quoted: bool) -> bool: ...

    async def names(self, folder: str) -> list[str]: ...

    async def delete(self, path: str) -> None: ...


async def probe(objects: ProbedObjects) -> Abilities:
    """Really try all of it, on an object that is removed afterwards; on S3 in six round trips."""
    name = secrets.token_hex(16)
    path = f"{_FOLDER}/{name}"
    racers = _drawn()
    try:
        won = await asyncio.gather(*(objects.create(path, data) for data in racers))
        if won.count(True) != 1:
            return _CREATES_AGAIN
        found, names, part = await asyncio.gather(
            objects.read_tagged(path), objects.names(_FOLDER), objects.read_range(path, 8, 16)
        )
        if found is None or found[0] != racers[won.index(True)]:
            return _CREATES_AGAIN
        return Abilities(
            creates_once=True,
            lists_at_once=name in names,
            reads_ranges=part == found[0][8:16],
            overwrite=await _overwrite(objects, path),
        )
    finally:
        await objects.delete(path)


async def _overwrite(objects: ProbedObjects, path: str) -> Overwrite:
    """Whether exactly one of several wins that overwrite the same version, and with which tag."""
    if objects.location.kind is StoreKind.FILE:
        return Overwrite.NONE
    try:
        for how in (Overwrite.QUOTED, Overwrite.BARE):
            racing = _one_overwrites(objects, path, quoted=how is Overwrite.QUOTED)
            doing = "overwrite a probe by its ETag"
            if await in_time(racing, _OVERWRITE_TIMEOUT_MS, doing):
                return how
    except OdqError:  # neither done nor refused, as where the header is not known at all
        return Overwrite.NONE
    return Overwrite.NONE


async def _one_overwrites(objects: ProbedObjects, path: str, *, quoted: bool) -> bool:
    before = await objects.read_tagged(path)
    if before is None or before[1] is None:
        return False
    racers, tag = _drawn(), before[1]
    won = await asyncio.gather(
        *(objects.replace_tagged(path, data, tag, quoted=quoted) for data in racers)
    )
    after = await objects.read(path)
    # The answer to the one that has won may be lost: then it hears, when it tries again, that the
    # tag is another one by now. What is there tells.
    return won.count(True) <= 1 and _is_of(after, racers, won)


def _is_of(after: bytes | None, racers: Sequence[bytes], won: Sequence[bool]) -> bool:
    if True in won:
        return after == racers[won.index(True)]
    return after in racers


def _drawn() -> list[bytes]:
    return [secrets.token_bytes(_BYTES) for _ in range(_RACERS)]


# --- what a root remembers ------------------------------------------------------------------------


def outcome(abilities: Abilities, place: str, now_ms: int) -> bytes:
    """What ``store.json`` says of a store, at a place that a copy of the root would not have."""
    return json.dumps({"place": place, "checked_at": now_ms} | abilities.as_json()).encode()


def remembered(data: bytes | None, place: str, now_ms: int) -> Abilities | None:
    """What ``store.json`` says, if it is about this place, can be read and is not too old."""
    if data is None:
        return None
    try:
        content = json.loads(data)
        if content["place"] != place or not 0 <= now_ms - content["checked_at"] < VALID_MS:
            return None
        flags = {name: content[name] is True for name in _FLAGS}
        return Abilities(overwrite=Overwrite(content["overwrite"]), **flags)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None  # whatever it is, finding out anew writes it again
