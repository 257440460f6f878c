"""The features that a root needs (RFC 0014): all who open it must know them."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import opendata_queue as odq
from odq_compactor import compact_root, free_space_beside, plan_root
from opendata_queue import Engine, FormatVersionError, Ingest, OwnedError, StoreSettings
from opendata_queue.root.descriptor import open_root, read_root
from opendata_queue.root.features import (
    CHECKED_BLOBS,
    KNOWN_FEATURES,
    PROVABLE_COMMITS,
    feature_content,
)
from opendata_queue.store import Objects
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot

CLOCK = ManualClock()
# As release 0.1 wrote it (the example of RFC 0002).
VERSION_1 = (
    b'{"format_version":1,"instance_id":"0b9d4bb5-3c09-4b57-9a3b-6f2f4f0f7a11",'
    b'"secret":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=","created_at":1763251200000}'
)
# What it is raised to (the example of RFC 0014).
VERSION_2 = (
    b'{"format_version":2,"instance_id":"0b9d4bb5-3c09-4b57-9a3b-6f2f4f0f7a11",'
    b'"secret":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=","created_at":1763251200000,'
    b'"check":"075000ff"}'
)
TELEPATHY = b'{"feature":"telepathy","since":"0.9.0","check":"d1f8dd8a"}'


def objects_at(root: str) -> Objects:
    return Objects.open(root, StoreSettings())


async def opened(opening: Awaitable[odq.AsyncSystem]) -> None:
    await (await opening).close()


OPENERS: dict[str, Callable[[str], Awaitable[object]]] = {
    "engine": lambda root: opened(Engine.open(root)),
    "queues alone": lambda root: opened(Engine.open(root, publishes=False)),
    "ingest": lambda root: opened(Ingest.open(root)),
    "read only": lambda root: opened(odq.open_async(root, read_only=True)),
    "compactor": compact_root,
    "dry run": plan_root,
    "space beside": free_space_beside,
}


def test_a_feature_is_named_by_a_file_as_in_the_rfc() -> None:
    assert feature_content(PROVABLE_COMMITS) == (
        b'{"feature":"provable-commits","since":"0.2.0","check":"02e02b82"}'
    )
    assert feature_content(CHECKED_BLOBS) == (
        b'{"feature":"checked-blobs","since":"0.2.0","check":"a3409684"}'
    )


async def test_a_new_root_names_the_features_that_it_needs_before_it_is_one(root: str) -> None:
    objects = objects_at(root)
    created: list[str] = []
    real = objects.create

    class Watched(Objects):
        async def create(self, path: str, data: bytes) -> bool:
            if not path.startswith("probe/"):  # of what the store can do
                created.append(path)
            return await real(path, data)

    watched = Watched(objects.location, objects.settings, objects._store, objects.slatedb_store)
    descriptor = await open_root(watched, CLOCK)

    assert descriptor.format_version == 2
    assert descriptor.features == KNOWN_FEATURES
    assert sorted(created[:-1]) == [f"features/{one}.json" for one in sorted(KNOWN_FEATURES)]
    assert created[-1] == "system.json"
    assert (await read_root(objects)) == descriptor


@pytest.mark.parametrize("how", OPENERS)
async def test_a_root_that_needs_an_unknown_feature_is_refused_by_all(
    new_memory_root: NewRoot, how: str
) -> None:
    root = new_memory_root()
    objects = objects_at(root)
    await open_root(objects, CLOCK)
    await objects.create("features/telepathy.json", TELEPATHY)
    everything = await objects.names("features")

    with pytest.raises(
        FormatVersionError,
        match=r"features/telepathy\.json.*'telepathy'.*upgrade opendata-queue to 0\.9\.0 or later",
    ):
        await OPENERS[how](root)

    assert await objects.names("features") == everything
    assert await objects.names("owners/queues") == []


@pytest.mark.parametrize("content", [b"", b"[[", TELEPATHY[:-3], b'{"feature":"telepathy"}'])
async def test_the_name_of_a_feature_counts_and_not_what_is_in_its_file(
    root: str, content: bytes
) -> None:
    objects = objects_at(root)
    await objects.create("system.json", VERSION_1)  # also of a root that is not raised yet
    await objects.create("features/telepathy.json", content)

    for opening in (open_root(objects, CLOCK), read_root(objects)):
        with pytest.raises(FormatVersionError, match=r"'telepathy'.*: upgrade opendata-queue$"):
            await opening


@pytest.mark.parametrize("how", ["engine", "queues alone", "ingest", "compactor"])
async def test_a_root_of_0_1_that_is_opened_for_writing_is_raised(
    root: str, how: str, tmp_path: Path
) -> None:
    objects = objects_at(root)
    await objects.create("system.json", VERSION_1)
    before = (await read_root(objects), await objects.names("features"))

    await OPENERS[how](root)

    assert await objects.read("system.json") == VERSION_2
    assert "provable-commits.json" in await objects.names("features")
    after = await read_root(objects)
    assert before[0] is not None
    assert after is not None
    assert (after.secret, after.instance_id) == (before[0].secret, before[0].instance_id)
    assert before[0].format_version == 1
    assert before[1] == []


async def test_a_root_of_0_1_is_left_as_it_is_by_readers_and_by_those_who_are_refused(
    new_memory_root: NewRoot,
) -> None:
    root = new_memory_root()
    objects = objects_at(root)
    await objects.create("system.json", VERSION_1)
    await opened(odq.open_async(root, read_only=True))
    await plan_root(root)
    assert (await open_root(objects, CLOCK)).format_version == 1  # odq init, and Spark
    assert await objects.names("features") == []

    async with await Engine.open(root):
        await objects.write("system.json", VERSION_1)  # as if its owner were of 0.1
        with pytest.raises(OwnedError):
            await Engine.open(root)
        assert await objects.read("system.json") == VERSION_1


async def test_properties_that_are_not_known_survive_the_raise(root: str) -> None:
    objects = objects_at(root)
    more = VERSION_1[:-1] + ',"näme":{"a":[1,2.5,null]}}'.encode()
    await objects.create("system.json", more)

    await opened(Engine.open(root))

    content = json.loads(await objects.read("system.json") or b"")
    assert content["näme"] == {"a": [1, 2.5, None]}
    assert content["format_version"] == 2


async def test_all_who_raise_a_root_at_once_write_the_same(root: str) -> None:
    objects = objects_at(root)
    await objects.create("system.json", VERSION_1)

    ingests = await asyncio.gather(*(Ingest.open(root) for _ in range(3)))

    assert await objects.read("system.json") == VERSION_2
    await asyncio.gather(*(one.close() for one in ingests))


async def test_one_that_dies_between_the_features_and_the_version_leaves_it_to_the_next(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = objects_at(root)
    await objects.create("system.json", VERSION_1)

    write = Objects.write

    async def dies(self: Objects, path: str, data: bytes, **options: Any) -> None:
        if path == "system.json":
            raise ConnectionError("killed")
        await write(self, path, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "write", dies)
        with pytest.raises(ConnectionError):
            await Engine.open(root)
    assert await objects.read("system.json") == VERSION_1
    assert await objects.names("features")

    await opened(Engine.open(root))  # nobody has it, and it is raised now
    assert await objects.read("system.json") == VERSION_2


async def test_a_raised_file_keeps_its_permissions_and_leaves_nothing_beside(
    tmp_path: Path,
) -> None:
    file = tmp_path / "system.json"
    file.write_bytes(VERSION_1)
    file.chmod(0o640)

    await opened(Engine.open(f"file://{tmp_path}"))

    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [one.name for one in tmp_path.iterdir() if "#" in one.name] == []


@pytest.mark.parametrize("there", [False, True])
async def test_an_open_costs_one_list_more_and_waits_for_it_beside_others(
    new_s3_root: NewRoot, there: bool
) -> None:
    root = new_s3_root()
    objects = objects_at(root)
    if there:
        await open_root(objects, CLOCK)
    await objects.abilities()  # which is found out once a day
    before = objects.requests

    await open_root(objects, CLOCK)

    # Read, list, try to create (and compare): it was three of them before there were features. A
    # place that is no root yet is also searched for the remains of one.
    assert objects.requests - before == (4 if there else 5 + len(KNOWN_FEATURES))
