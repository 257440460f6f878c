"""The files that commit bulk jobs (RFC 0009): what none of them names does not exist."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from opendata_queue.model.errors import CorruptStoreError, InvalidInputError
from opendata_queue.model.ids import FIRST_BULK_SHARD, LAST_SHARD
from opendata_queue.model.paths import COMMITS_FOLDER
from opendata_queue.store import Objects
from opendata_queue.store.objects.control_files import parsed, sealed_model

MAX_COMMITTED_SHARDS: Final = 10_000
"""Shards of one job: all of them are registered in one batch."""

_FOLDER: Final = COMMITS_FOLDER
_SUFFIX: Final = ".json"
_JOB: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


def check_job(job: str) -> str:
    """Refuse what can't be the name of a job."""
    if not isinstance(job, str) or _JOB.fullmatch(job) is None:
        raise InvalidInputError(
            f"job is {job!r}, not 1 to 200 letters, digits, dots, hyphens and underscores"
        )
    return job


class CommittedShard(BaseModel):
    """One shard of a job, complete: nothing is ever added to it."""

    model_config = ConfigDict(frozen=True)

    shard: Annotated[int, Field(ge=FIRST_BULK_SHARD, le=LAST_SHARD)]
    messages: Count
    next_sequence: Annotated[int, Field(ge=0, le=1 << 32)]
    """The sequence behind the last message."""
    bytes: Count
    """Of payloads and headers, for people and for planning."""
    expires_from: Count | None = None
    """When the first of its messages expires, 0 if none does. Older files do not say."""
    expires_at: Count | None = None
    """When the last of its messages expires, 0 if one never does."""


class Commit(BaseModel):
    """What ``commits/<job>.json`` says. Unknown properties are ignored, as the RFC asks."""

    model_config = ConfigDict(frozen=True)

    job: str
    holder: str
    committed_at: int
    shards: Annotated[tuple[CommittedShard, ...], Field(max_length=MAX_COMMITTED_SHARDS)]

    @field_validator("shards")
    @classmethod
    def _are_different(cls, shards: tuple[CommittedShard, ...]) -> tuple[CommittedShard, ...]:
        if len({one.shard for one in shards}) < len(shards):
            raise ValueError("a shard is named twice")
        return shards

    @classmethod
    def new(cls, job: str, shards: Sequence[CommittedShard], *, now_ms: int) -> Commit:
        """A commit with a holder of its own, by which its writer knows it."""
        check_job(job)
        if len(shards) > MAX_COMMITTED_SHARDS:
            raise InvalidInputError(
                f"{len(shards)} shards are over the limit of {MAX_COMMITTED_SHARDS} in one job: "
                "use fewer partitions"
            )
        return cls(job=job, holder=secrets.token_hex(16), committed_at=now_ms, shards=tuple(shards))


class CommitFiles:
    """Makes and finds the commits of bulk jobs."""

    __slots__ = ("_objects",)

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def path_of(self, job: str) -> str:
        """The file that commits a job."""
        return _path(job)

    async def create(self, commit: Commit) -> Commit:
        """Commit a job, unless it was committed before; returns the commit that counts.

        It is the caller's if it has the same ``holder``. If this raises, the outcome is in doubt:
        call it again with the very same commit, which settles it.
        """
        path = _path(commit.job)
        if await self._objects.create(path, sealed_model(commit)):
            return commit
        winner = await self.read(commit.job)
        if winner is None:
            raise CorruptStoreError(
                f"{self._objects.location.url_of(path)} was there, and was removed"
            )
        return winner

    async def read(self, job: str) -> Commit | None:
        """The commit of a job; none if it has none."""
        path = _path(job)
        data = await self._objects.read(path)
        if data is None:
            return None
        name = self._objects.location.url_of(path)
        commit = parsed(Commit, data, name, "commits no job")
        if commit.job != job:
            raise CorruptStoreError(f"{name} commits another job, {commit.job!r}")
        return commit

    async def jobs(self) -> list[str]:
        """The jobs that have a commit, in the order of their names."""
        names = await self._objects.names(_FOLDER)
        jobs = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        return sorted(job for job in jobs if _JOB.fullmatch(job))

    async def remove(self, job: str) -> None:
        """Forget a commit: only if its shards are registered, and the job is not run again."""
        await self._objects.delete(_path(job))


def _path(job: str) -> str:
    return f"{_FOLDER}/{check_job(job)}{_SUFFIX}"
