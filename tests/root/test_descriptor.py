"""Opening a root."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from opendata_queue import CorruptStoreError, Engine, FormatVersionError, StoreSettings, open_async
from opendata_queue.queues.store.admin import QueueAdmin
from opendata_queue.root.descriptor import SystemDescriptor, open_root
from opendata_queue.store import Database, Objects
from opendata_queue.store.objects.control_files import sealed
from opendata_queue.testing import ManualClock

CLOCK = ManualClock()


async def test_a_root_is_described_once_and_for_all(root: str) -> None:
    objects = Objects.open(root, StoreSettings())

    first = await open_root(objects, CLOCK)
    second = await open_root(objects, CLOCK)

    assert first == second
    assert first.format_version == 2
    assert first.created_at == CLOCK.now_ms()
    assert len(first.secret_bytes) == 32
    assert first.secret not in repr(first)


async def test_all_who_open_a_new_root_at_once_agree(root: str) -> None:
    objects = Objects.open(root, StoreSettings())

    found = await asyncio.gather(*(open_root(objects, CLOCK) for _ in range(16)))

    assert len({descriptor.instance_id for descriptor in found}) == 1


async def test_the_file_is_what_the_rfc_says(new_memory_root: object) -> None:
    objects = Objects.open("memory:///", StoreSettings())
    await open_root(objects, CLOCK)

    content = json.loads(await objects.read("system.json") or b"")

    assert set(content) == {"format_version", "instance_id", "secret", "created_at", "check"}


async def test_a_root_of_a_newer_format_is_refused(root: str) -> None:
    newer = SystemDescriptor.new(CLOCK).model_dump() | {"format_version": 3, "shape": "new"}
    await Objects.open(root, StoreSettings()).create("system.json", json.dumps(newer).encode())

    with pytest.raises(
        FormatVersionError, match="format version 3, and this release knows up to 2"
    ):
        await Engine.open(root)


async def test_unknown_properties_are_ignored(root: str) -> None:
    more = SystemDescriptor.new(CLOCK).model_dump() | {"note": "added later"}
    content = sealed(json.dumps(more).encode())
    await Objects.open(root, StoreSettings()).create("system.json", content)

    await (await Engine.open(root)).close()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "does not describe a root"),
        (b"\xff\xfe", "does not describe a root"),
        (b"[]", "does not describe a root"),
        (b"{}", "does not describe a root: format_version"),
        (b"[" * 200_000, "does not describe a root"),
        (b'{"format_version":1,"x":' + b"[" * 200_000, "does not describe a root"),
        (b'{"format_version": "1"}', "does not describe a root"),
        (b'{"format_version": 1}', "instance_id: Field required"),
        (b'{"format_version": 0, "instance_id": "i", "secret": "", "created_at": 1}', "greater"),
        (b'{"format_version": 1, "instance_id": "i", "secret": "AA==", "created_at": 1}', "secret"),
    ],
)
async def test_a_damaged_description_is_refused(content: bytes, complaint: str) -> None:
    objects = Objects.open("memory:///", StoreSettings())
    await objects.create("system.json", content)

    with pytest.raises(CorruptStoreError, match=complaint):
        await open_root(objects, CLOCK)


async def test_a_root_whose_description_is_lost_is_no_new_one(root: str) -> None:
    async with await Engine.open(root) as system:
        await system.create_queue("q")
    objects = Objects.open(root, StoreSettings())
    await objects.delete("system.json")

    for opening in (Engine.open(root), open_async(root, read_only=True)):
        with pytest.raises(CorruptStoreError, match=r"system\.json is missing, and .*odq repair"):
            await opening
    assert await objects.read("system.json") is None


@pytest.mark.parametrize("broken", ["messages/00000", "queues/00000"])
@pytest.mark.parametrize("other_is_open", [False, True])
async def test_a_database_is_closed_if_the_other_one_can_not_be_opened(
    root: str, broken: str, other_is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(root) as system:
        await system.create_queue("q")
        await system.publish(b"kept")
    opened: list[Database] = []
    both_begun, other_opened = asyncio.Event(), asyncio.Event()
    real_open = Database.open

    async def open_one(objects: Objects, path: str, **options: Any) -> Database:
        if path == broken:
            await (other_opened if other_is_open else both_begun).wait()
            raise CorruptStoreError("it is broken")
        both_begun.set()
        opened.append(await real_open(objects, path, **options))
        other_opened.set()
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Database, "open", open_one)
        with pytest.raises(CorruptStoreError, match="it is broken"):
            await Engine.open(root)

    assert all([one._housekeeping is None for one in opened])
    assert bool(opened) or not other_is_open
    assert asyncio.all_tasks() == {asyncio.current_task()}
    async with await Engine.open(root) as system:  # and nobody has it
        (message,) = await system.claim("q", 1)
        assert message.payload == b"kept"


async def test_a_root_is_free_again_though_nobody_waits_until_the_other_database_is_closed(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await Engine.open(root)).close()
    both_begun, letting_go, let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def open_one(_: Objects, path: str, **__: Any) -> Database:
        if path.startswith("messages"):
            await both_begun.wait()
            raise CorruptStoreError("it is broken")
        both_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            letting_go.set()
            await let_go.wait()
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(Database, "open", open_one)
        opening = asyncio.create_task(Engine.open(root))
        await letting_go.wait()
        opening.cancel()
        await asyncio.wait([opening])
        let_go.set()

    assert opening.cancelled()
    await (await Engine.open(root)).close()


async def test_queues_that_can_not_be_loaded_leave_nothing_behind(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Engine.open(root) as system:
        await system.create_queue("q")
    load = QueueAdmin.load

    async def broken(admin: QueueAdmin) -> None:
        await load(admin)
        raise CorruptStoreError("it is broken")

    with monkeypatch.context() as patch:
        patch.setattr(QueueAdmin, "load", broken)
        with pytest.raises(CorruptStoreError, match="it is broken"):
            await Engine.open(root)

    assert asyncio.all_tasks() == {asyncio.current_task()}
    await (await Engine.open(root)).close()
