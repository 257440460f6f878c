"""A root and its ``system.json`` (RFC 0002), and the features that it needs (RFC 0014)."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import uuid
from collections.abc import Awaitable
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator
from pydantic_core import from_json

from opendata_queue.model.clock import Clock
from opendata_queue.model.errors import CorruptStoreError, FormatVersionError
from opendata_queue.root.features import (
    KNOWN_FEATURES,
    check_features,
    create_features,
    named_features,
)
from opendata_queue.store import Objects
from opendata_queue.store.objects.control_files import is_sealed, parsed, sealed, sealed_model

FORMAT_VERSION: Final = 2
"""From 2 on the features that a root needs are named in ``features/``; release 0.1 knows 1."""

DESCRIPTOR_PATH: Final = "system.json"
_NO_ROOT: Final = "does not describe a root"
_REMAINS: Final = frozenset({"owners", "queues"})
_OF_A_ROOT: Final = re.compile(r"\d{5}|queues|messages-\d{5}")
_SECRET_BYTES: Final = 32

A = TypeVar("A")
B = TypeVar("B")


class _Version(BaseModel):
    model_config = ConfigDict(strict=True)

    format_version: Annotated[int, Field(ge=1)]


class SystemDescriptor(BaseModel):
    """What ``system.json`` says. Unknown properties are ignored, as the RFC asks."""

    model_config = ConfigDict(frozen=True, strict=True)

    format_version: Annotated[int, Field(ge=1)]
    instance_id: str
    secret: str = Field(repr=False)
    created_at: int

    _features: frozenset[str] = PrivateAttr(default=frozenset())

    @field_validator("secret")
    @classmethod
    def _is_a_secret(cls, secret: str) -> str:
        if len(base64.b64decode(secret, validate=True)) != _SECRET_BYTES:
            raise ValueError(f"secret is not {_SECRET_BYTES} bytes in base64")
        return secret

    @property
    def secret_bytes(self) -> bytes:
        return base64.b64decode(self.secret)

    @property
    def features(self) -> frozenset[str]:
        """The features that the root needed when it was opened."""
        return self._features

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
    content = await objects.read(DESCRIPTOR_PATH)
    if content is None:
        await _refuse_remains(objects)
        features = await named_features(objects)
        await check_features(objects, features)
        # Before the descriptor, whose version says that they have to be read.
        await create_features(objects, KNOWN_FEATURES - features)
        features |= KNOWN_FEATURES
        await _create(objects, clock)
        content, abilities = await _both(objects.read(DESCRIPTOR_PATH), objects.abilities())
    else:
        # Always tried, even where the file is known to be there: a root that can't be written to
        # shows here, with a clear error, and not in SlateDB, which would retry for ever.
        created, (features, abilities) = await _both(
            _create(objects, clock), _both(named_features(objects), objects.abilities())
        )
        if created:
            content = await objects.read(DESCRIPTOR_PATH)
    abilities.check(str(objects.location))
    if content is None:
        raise CorruptStoreError(f"{_url(objects)} is gone right after it was written")
    descriptor = described(content, _url(objects))
    await check_features(objects, features)
    return _with(descriptor, features)


async def read_root(objects: Objects) -> SystemDescriptor | None:
    """The descriptor of a root; none if there is no root. Nothing is made."""
    content, features = await _both(objects.read(DESCRIPTOR_PATH), named_features(objects))
    if content is None:
        await _refuse_remains(objects)
        return None
    descriptor = described(content, _url(objects))
    await check_features(objects, features)
    return _with(descriptor, features)


async def make_root_again(objects: Objects, clock: Clock) -> SystemDescriptor:
    """A new descriptor for a root that has lost its own. Only ``odq repair`` may do that."""
    features = await named_features(objects)
    await check_features(objects, features)
    await create_features(objects, KNOWN_FEATURES - features)
    await _create(objects, clock)
    return await open_root(objects, clock)


async def require_features(
    objects: Objects, descriptor: SystemDescriptor, features: frozenset[str]
) -> SystemDescriptor:
    """Let a root need features, before the first byte is written that they are about.

    A root of release 0.1 gets the version that makes that release refuse it. All who raise it write
    the same bytes, so any number may do so at once, and one that is killed leaves it to the next.
    """
    await create_features(objects, features - descriptor.features)
    if descriptor.format_version < FORMAT_VERSION:
        content = await objects.read(DESCRIPTOR_PATH)
        if content is None:
            raise CorruptStoreError(f"{_url(objects)} is gone")
        found = described(content, _url(objects))
        if found.format_version < FORMAT_VERSION:
            content = _raised(content)
            await objects.write(DESCRIPTOR_PATH, content)
        descriptor = _with(described(content, _url(objects)), descriptor.features)
    return _with(descriptor, descriptor.features | features)


async def _refuse_remains(objects: Objects) -> None:
    """Refuse a place without a descriptor where there is all else of a root: it was lost."""
    left = [
        f"{folder}/{one}"
        for folder in sorted(_REMAINS.intersection(await objects.folders("")))
        for one in await objects.folders(folder)
        if _OF_A_ROOT.fullmatch(one)
    ]
    # Another process may have made the root meanwhile.
    if left and await objects.read(DESCRIPTOR_PATH) is None:
        raise CorruptStoreError(
            f"{_url(objects)} is missing, and {left[0]} is there: restore it from a backup; or "
            "let `odq repair` make a new one, with which receipts that were handed out are void"
        )


def described(content: bytes, name: str) -> SystemDescriptor:
    """What the file ``name`` says; an error if it is damaged, or of a newer release."""
    version = parsed(_Version, content, name, _NO_ROOT).format_version
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{name} has format version {version}, and this release knows up to "
            f"{FORMAT_VERSION}: upgrade opendata-queue"
        )
    if version == FORMAT_VERSION and not is_sealed(content):
        raise CorruptStoreError(f"{name} is damaged: its checksum is missing")
    return parsed(SystemDescriptor, content, name, _NO_ROOT)


def _raised(content: bytes) -> bytes:
    """The same descriptor, properties included that this release does not know, with version 2."""
    raised = from_json(content) | {"format_version": FORMAT_VERSION}
    raised.pop("check", None)
    return sealed(json.dumps(raised, separators=(",", ":"), ensure_ascii=False).encode())


async def _create(objects: Objects, clock: Clock) -> bool:
    return await objects.create(DESCRIPTOR_PATH, sealed_model(SystemDescriptor.new(clock)))


async def _both(first: Awaitable[A], second: Awaitable[B]) -> tuple[A, B]:
    """Wait for two requests at once; neither goes on when this raises."""
    one, other = await asyncio.gather(first, second, return_exceptions=True)
    if isinstance(one, BaseException):
        raise one
    if isinstance(other, BaseException):
        raise other
    return one, other


def _with(descriptor: SystemDescriptor, features: frozenset[str]) -> SystemDescriptor:
    found = descriptor.model_copy()
    found._features = features
    return found


def _url(objects: Objects) -> str:
    return objects.location.url_of(DESCRIPTOR_PATH)
