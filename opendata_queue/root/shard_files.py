"""The files that reserve shard numbers (RFC 0008, RFC 0009)."""

from __future__ import annotations

import enum
import re
import secrets
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from opendata_queue.model.errors import CorruptStoreError, StoreUnavailableError
from opendata_queue.model.ids import FIRST_BULK_SHARD, LAST_SHARD, is_bulk
from opendata_queue.model.paths import BULK_SHARDS_FOLDER, LIVE_SHARDS_FOLDER
from opendata_queue.store import Objects
from opendata_queue.store.objects.control_files import parsed, sealed_model

COMMITTED_WITHIN_MS: Final = 6 * 24 * 3_600_000
"""How old a bulk shard may be when it is committed. Retention removes shards without a commit that
are older than this by a day or more, so that none goes while its commit is being made."""

_COUNTED_FROM_MS: Final = 1_767_225_600_000
"""2026-01-01T00:00:00Z, from where on bulk shards are numbered by time."""
_MS_PER_NUMBER: Final = 1_500
_FIRST_CHOICE: Final = 1_024
_LAST_CHOICE: Final = 1 << 20
_TRIES: Final = 64
_NAME: Final = re.compile(r"(\d{5,10})\.json")


class ShardKind(enum.StrEnum):
    LIVE = "live"
    """Written by one process after the other, for as long as the root lives."""
    BULK = "bulk"
    """Written once, by one task of a bulk job, and never again."""


class Reservation(BaseModel):
    """Who reserved a shard number. Unknown properties are ignored, as the RFC asks."""

    model_config = ConfigDict(frozen=True)

    shard: Annotated[int, Field(ge=1, le=LAST_SHARD)]
    kind: ShardKind
    holder: str
    reserved_at: int
    job: str | None = None
    """The job that a bulk shard is for."""


def earliest_bulk_shard(now_ms: int) -> int:
    """The smallest number that a bulk shard gets that is reserved at that time.

    Numbers grow with time, so that none is given out again after its file was removed, and so
    that messages of later jobs have greater ids.
    """
    number = FIRST_BULK_SHARD + max(0, now_ms - _COUNTED_FROM_MS) // _MS_PER_NUMBER
    return min(number, LAST_SHARD + 1 - _LAST_CHOICE)


class ShardFiles:
    """Reserves shard numbers, and reads who did."""

    __slots__ = ("_objects",)

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def live_shards(self) -> list[int]:
        """The numbers of all live shards but 0, which has no file, in their order: one list."""
        return _numbers(await self._objects.names(LIVE_SHARDS_FOLDER))

    async def bulk_shards(self, *, after: int = 0, limit: int = 1_000) -> list[int]:
        """The next reserved bulk shards, committed or not, in the order of their numbers."""
        names = await self._objects.names_after(BULK_SHARDS_FOLDER, f"{after:010}.json", limit)
        return _numbers(names)

    def path_of(self, shard: int) -> str:
        """The file that reserves a shard."""
        return _path(shard)

    async def read(self, shard: int) -> Reservation | None:
        """Who reserved a shard; none if it is free."""
        path = _path(shard)
        data = await self._objects.read(path)
        if data is None:
            return None
        name = self._objects.location.url_of(path)
        reservation = parsed(Reservation, data, name, "reserves no shard")
        if reservation.shard != shard:
            raise CorruptStoreError(f"{name} reserves another shard, {reservation.shard}")
        return reservation

    async def reserve_live(self, *, now_ms: int) -> Reservation:
        """Reserve the lowest live number that is free."""
        for _ in range(_TRIES):
            taken = set(await self.live_shards())
            number = next(one for one in range(1, len(taken) + 2) if one not in taken)
            if is_bulk(number):
                raise StoreUnavailableError(f"all {FIRST_BULK_SHARD - 1} live shards are reserved")
            reservation = await self._try(number, ShardKind.LIVE, now_ms, None)
            if reservation is not None:
                return reservation
        raise StoreUnavailableError(f"others were faster {_TRIES} times in reserving a live shard")

    async def reserve_bulk(self, *, job: str, now_ms: int) -> Reservation:
        """Reserve a number for one attempt of one task of a bulk job; usually with one request.

        Nothing is listed: a number is drawn out of the next thousand of this time, and if it is
        taken, another one out of more and more. So it costs the same with millions of shards.
        """
        choice = _FIRST_CHOICE
        earliest = earliest_bulk_shard(now_ms)
        for _ in range(_TRIES):
            number = earliest + secrets.randbelow(choice)
            reservation = await self._try(number, ShardKind.BULK, now_ms, job)
            if reservation is not None:
                return reservation
            choice = min(2 * choice, _LAST_CHOICE)
        raise StoreUnavailableError(
            f"no number is left for a bulk shard of {job}: all {_TRIES} that were drawn are taken. "
            "Jobs have reserved more than 57,600 shards a day for long: use fewer partitions "
            "(coalesce), or longer triggers"
        )

    async def restore(self, shard: int, *, now_ms: int) -> None:
        """Reserve a shard again whose file was lost, and with it the name of its job."""
        await self._try(shard, ShardKind.BULK if is_bulk(shard) else ShardKind.LIVE, now_ms, None)

    async def remove(self, shard: int) -> None:
        """Forget a reservation; its number may be given out again only if it is a live one."""
        await self._objects.delete(_path(shard))

    async def _try(
        self, number: int, kind: ShardKind, now_ms: int, job: str | None
    ) -> Reservation | None:
        # A process in doubt reads the file back, and knows its own by the holder.
        reservation = Reservation(
            shard=number, kind=kind, holder=secrets.token_hex(16), reserved_at=now_ms, job=job
        )
        data = sealed_model(reservation)
        return reservation if await self._objects.create(_path(number), data) else None


def _path(shard: int) -> str:
    return (
        f"{BULK_SHARDS_FOLDER}/{shard:010}.json"
        if is_bulk(shard)
        else f"{LIVE_SHARDS_FOLDER}/{shard:05}.json"
    )


def _numbers(names: list[str]) -> list[int]:
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match is not None)
