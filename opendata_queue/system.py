"""A root and its ``system.json`` (RFC 0002)."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import uuid
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from opendata_queue.clock import Clock
from opendata_queue.errors import CorruptStoreError, FormatVersionError
from opendata_queue.store import Objects

FORMAT_VERSION: Final = 1

_PATH: Final = "system.json"
_SECRET_BYTES: Final = 32


class SystemDescriptor(BaseModel):
    """What ``system.json`` says. Unknown properties are ignored, as the RFC asks."""

    model_config = ConfigDict(frozen=True, strict=True)

    format_version: Annotated[int, Field(ge=1)]
    instance_id: str
    secret: str = Field(repr=False)
    created_at: int

    @field_validator("secret")
    @classmethod
    def _is_a_secret(cls, secret: str) -> str:
        if len(base64.b64decode(secret, validate=True)) != _SECRET_BYTES:
            raise ValueError(f"secret is not {_SECRET_BYTES} bytes in base64")
        return secret

    @property
    def secret_bytes(self) -> bytes:
        return base64.b64decode(self.secret)

    @classmethod
    def new(cls, clock: Clock) -> SystemDescriptor:
        return cls(
            format_version=FORMAT_VERSION,
            instance_id=str(uuid.uuid4()),
            secret=base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode(),
            created_at=clock.now_ms(),
        )


async def open_root(objects: Objects, clock: Clock) -> SystemDescriptor:
    """The descriptor of a root; a root that has none gets one.

    If two processes try at once, both return the descriptor of the one that was first. A store
    that can't do what a root needs is refused: it remembers what was found out (RFC 0015).
    """
    # Always tried, even where the file is known to be there: a root that can't be written to shows
    # here, with a clear error, and not in SlateDB, which would retry for ever.
    await objects.create(_PATH, SystemDescriptor.new(clock).model_dump_json().encode())
    found, abilities = await asyncio.gather(objects.read(_PATH), objects.abilities())
    abilities.check(str(objects.location))
    if found is None:
        raise CorruptStoreError(f"{objects.location}/{_PATH} is gone right after it was written")
    return _parse(found, f"{objects.location}/{_PATH}")


async def read_root(objects: Objects) -> SystemDescriptor | None:
    """The descriptor of a root; none if there is no root. Nothing is made."""
    found = await objects.read(_PATH)
    return None if found is None else _parse(found, f"{objects.location}/{_PATH}")


def _parse(data: bytes, name: str) -> SystemDescriptor:
    try:
        content = json.loads(data)
        version = content["format_version"]
        newer = version > FORMAT_VERSION
    except (ValueError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"{name} does not describe a root: {error!r}") from error
    if newer:
        raise FormatVersionError(
            f"{name} has format version {version}, and this release knows up to "
            f"{FORMAT_VERSION}: upgrade opendata-queue"
        )
    try:
        return SystemDescriptor.model_validate_json(data)
    except ValidationError as error:
        problems = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise CorruptStoreError(f"{name} does not describe a root: {problems}") from error
