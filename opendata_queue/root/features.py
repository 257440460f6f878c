"""The features that a root needs: a release that does not know one refuses it (RFC 0014)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel, ConfigDict

from opendata_queue.model.errors import CorruptStoreError, FormatVersionError
from opendata_queue.model.paths import FEATURES_FOLDER
from opendata_queue.store import Objects
from opendata_queue.store.objects.control_files import parsed, sealed_model

PROVABLE_COMMITS: Final = "provable-commits"
"""What is acknowledged can be proven from the files of a database (RFC 0013)."""

CHECKED_BLOBS: Final = "checked-blobs"
"""References to blobs say their size and checksum (RFC 0004)."""

_SINCE: Final = {PROVABLE_COMMITS: "0.2.0", CHECKED_BLOBS: "0.2.0"}
KNOWN_FEATURES: Final = frozenset(_SINCE)
"""Of this release, which writes all of them into a new root."""

_FOLDER: Final = FEATURES_FOLDER
_SUFFIX: Final = ".json"
_NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class FeatureFile(BaseModel):
    """What ``features/<name>.json`` says. That it is there is what counts; the rest is for people.

    Unknown properties are ignored, as the RFC asks.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    feature: str
    since: str
    """The first release that knows it."""


async def named_features(objects: Objects) -> frozenset[str]:
    """The names of all features that a root needs, known or not: one list."""
    names = await objects.names(_FOLDER)
    return frozenset(one.removesuffix(_SUFFIX) for one in names if one.endswith(_SUFFIX))


async def check_features(objects: Objects, features: Iterable[str]) -> None:
    """Refuse a root that needs a feature which this release does not know."""
    unknown = sorted(set(features) - KNOWN_FEATURES)
    if unknown:
        path = feature_path(unknown[0])
        since = await _since(objects, path)
        raise FormatVersionError(
            f"{objects.location.url_of(path)}: this root needs the "
            f"{'features' if len(unknown) > 1 else 'feature'} {', '.join(map(repr, unknown))}, "
            f"which this release does not know: upgrade opendata-queue{since}"
        )


async def checked_features(objects: Objects) -> frozenset[str]:
    """The features of a root, all of which this release knows.

    For a process that goes on where another has opened the root, like a task of Spark: it may be
    of another release.
    """
    features = await named_features(objects)
    await check_features(objects, features)
    return features


async def create_features(objects: Objects, features: Iterable[str]) -> None:
    """Say that a root needs features. Returns when that is durable."""
    await asyncio.gather(
        *(objects.create(feature_path(one), feature_content(one)) for one in sorted(features))
    )


def feature_content(feature: str) -> bytes:
    """The file of a feature, the same from all who make it."""
    assert _NAME.fullmatch(feature)
    return sealed_model(FeatureFile(feature=feature, since=_SINCE[feature]))


async def _since(objects: Objects, path: str) -> str:
    """Which release to upgrade to, if the file can be understood."""
    content = await objects.read(path)
    try:
        file = parsed(FeatureFile, content or b"", path, "names no feature")
    except CorruptStoreError:
        return ""
    return f" to {file.since} or later"


def feature_path(feature: str) -> str:
    """Its file."""
    return f"{_FOLDER}/{feature}{_SUFFIX}"
