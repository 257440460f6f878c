"""The options of the data source, read and checked in one place."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from opendata_queue.model.errors import InvalidInputError
from opendata_queue.root.commit_files import check_job
from opendata_queue.store import Location, StoreKind

WRITE_OPTIONS: Final = ("path", "jobId", "headerColumns", "rejectsPath")
_SPARKS_OWN: Final = {"checkpointlocation", "querytype", "streamname"}
_LIST: Final = re.compile(r"\s*,\s*")


def root_of(options: Mapping[str, str]) -> str:
    """The root's URL; a store that other processes can reach."""
    url = options.get("path")
    if not url:
        raise InvalidInputError('say where the root is: .option("path", "s3://bucket/prefix")')
    return shared_url("path", url)


def shared_url(name: str, url: str) -> str:
    if Location.parse(url).kind is StoreKind.MEMORY:
        raise InvalidInputError(f"{name} is {url}: a memory root is seen by one process alone")
    return url


def names_of(text: str | None) -> tuple[str, ...]:
    """The names in a list like ``a, b``."""
    return tuple(name for name in _LIST.split((text or "").strip()) if name)


def integer_of(options: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise InvalidInputError(f"{name} is {text!r}, not an integer within {least} to {most}")
    return value


def refuse_unknown(options: Mapping[str, str], known: tuple[str, ...]) -> None:
    """A misspelt option would otherwise do nothing, silently."""
    lower = {name.lower() for name in known} | _SPARKS_OWN
    unknown = sorted(name for name in options if name.lower() not in lower)
    if unknown:
        raise InvalidInputError(f"there is no option {unknown[0]!r}; there are {', '.join(known)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkOptions:
    """How a sink is configured. ``job`` is none for a stream: its batches have their own names."""

    root: str
    job: str | None
    header_columns: tuple[str, ...]
    rejects: str | None
    named: bool = False
    """Whether a user gave the job its name, and so may run it again."""

    @classmethod
    def read(cls, options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        refuse_unknown(options, WRITE_OPTIONS)
        job = options.get("jobId")
        if job is not None:
            if streaming:
                raise InvalidInputError("jobId is for batches: a stream's batches name themselves")
            check_job(job)
        rejects = options.get("rejectsPath")
        return cls(
            root=root_of(options),
            job=None if streaming else job or f"spark-{uuid.uuid4().hex}",
            header_columns=names_of(options.get("headerColumns")),
            rejects=None if rejects is None else shared_url("rejectsPath", rejects),
            named=job is not None,
        )
