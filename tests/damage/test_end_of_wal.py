"""Databases without a journal: if the end of a WAL is missing, what owners have said tells it.

An owner is killed after a heartbeat, on files and on S3, and its newest WAL files are damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from opendata_queue import CorruptStoreError, Ingest, OdqError, StoreSettings
from opendata_queue.cli.doctor.findings import Level
from opendata_queue.cli.doctor.repair import _repair
from opendata_queue.cli.doctor.root import check_root
from opendata_queue.model.clock import SystemClock
from opendata_queue.root.owner_files import OwnerFiles, messages_role
from opendata_queue.store import DatabaseReader, Objects
from tests.conftest import NewRoot

SETTINGS = StoreSettings(outage_timeout_ms=5_000)
MESSAGES = 6
DATABASE = "messages/00001"
WAL = f"{DATABASE}/wal"
ROLE = messages_role(1)
ADVICE = "restore it from a backup; or let `odq repair` open the root without it"

Damage = Callable[[bytes], bytes | None]
DAMAGES: dict[str, Damage] = {
    "deleted": lambda data: None,
    "emptied": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "zeroed": lambda data: bytes(len(data)),
    "added to": lambda data: data + b"more",
    "flipped": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
}


@pytest.fixture(params=["file", "s3"])
def new_root(request: pytest.FixtureRequest) -> NewRoot:
    found: NewRoot = request.getfixturevalue(f"new_{request.param}_root")
    return found


@pytest.fixture
def new_file_root(tmp_path_factory: pytest.TempPathFactory) -> NewRoot:
    return lambda: tmp_path_factory.mktemp("root").as_uri()


async def copied(source: Objects, target: Objects, folder: str = "") -> None:
    for name in await source.names(folder):
        data = await source.read(f"{folder}/{name}".lstrip("/"))
        assert data is not None
        await target.write(f"{folder}/{name}".lstrip("/"), data)
    for name in await source.folders(folder):
        await copied(source, target, f"{folder}/{name}".lstrip("/"))


async def killed(new_root: NewRoot, *, unsaid: int = 0) -> Objects:
    """A root as a publisher leaves it that is killed, and has not said a word of its last ones."""
    url, objects = new_root(), Objects.open(new_root(), SETTINGS)
    ingest = await Ingest.open(url, settings=SETTINGS)
    for number in range(MESSAGES):
        if number == MESSAGES - unsaid:
            await ingest._ownership._beat()
        await ingest.publish(b"%d" % number)
    if not unsaid:
        await ingest._ownership._beat()
    await copied(Objects.open(url, SETTINGS), objects)
    await ingest.close()
    return objects


async def damage(objects: Objects, how: str, place: int = -1) -> str:
    """Damage a WAL file with rows; returns its name."""
    listed = await objects.list_from(WAL, "", 1_000)
    name = [name for name, size in listed if size][place].rpartition("/")[2]
    data = await objects.read(f"{WAL}/{name}")
    assert data
    after = DAMAGES[how](data)
    if after is None:
        await objects.delete(f"{WAL}/{name}")
    else:
        await objects.write(f"{WAL}/{name}", after)
    return name


async def opened(objects: Objects) -> set[bytes | None]:
    """What is there when the shard is opened again; it takes the same shard."""
    async with await Ingest.open(str(objects.location), settings=SETTINGS) as ingest:
        assert ingest.shard_number == 1
        ids = [one.message_id for some in [s async for s in ingest.scan_log()] for one in some]
        return {m.payload for m in await ingest.read_many(ids) if m is not None}


ALL = {b"%d" % number for number in range(MESSAGES)}


async def fails(objects: Objects) -> str:
    url = str(objects.location)
    found = [one async for one in check_root(url, SystemClock(), read_only=True, deep=False)]
    return "\n".join(f"{one.found} → {one.advice}" for one in found if one.level is Level.FAIL)


@pytest.mark.parametrize("how", DAMAGES)
async def test_damage_to_the_newest_wal_file_is_named_each_time(
    new_root: NewRoot, how: str
) -> None:
    objects = await killed(new_root)
    before = sorted(await objects.names(WAL))
    name = await damage(objects, how)
    found = await fails(objects)
    if how != "flipped" or objects.location.kind == "file":  # on S3 `--deep` finds that
        assert name in found

    for _ in range(3):
        with pytest.raises(CorruptStoreError, match=name) as refused:
            await opened(objects)
        assert "what may be lost: the commits" in str(refused.value)
        assert ADVICE in str(refused.value)

    assert set(await objects.names(WAL)) <= set(before) | {name}


@pytest.mark.parametrize("how", ["deleted", "emptied"])
async def test_several_files_at_the_end_are_missed_together(new_root: NewRoot, how: str) -> None:
    objects = await killed(new_root)
    await damage(objects, how)
    name = await damage(objects, how)

    with pytest.raises(CorruptStoreError, match=name):
        await opened(objects)


async def test_a_database_that_is_gone_as_a_whole_is_missed(new_root: NewRoot) -> None:
    objects = await killed(new_root)
    for folder in await objects.folders(DATABASE):
        for name in await objects.names(f"{DATABASE}/{folder}"):
            await objects.delete(f"{DATABASE}/{folder}/{name}")

    assert f"{DATABASE}/manifest/ is missing" in await fails(objects)
    with pytest.raises(CorruptStoreError, match=f"{DATABASE}/manifest/ is missing"):
        await opened(objects)


async def test_what_is_whole_opens_and_is_handed_on(new_root: NewRoot) -> None:
    objects = await killed(new_root)
    killed_at = await OwnerFiles(objects, ROLE).newest()
    assert killed_at is not None
    assert killed_at.durable >= MESSAGES

    assert await fails(objects) == ""
    assert await opened(objects) == ALL

    closed = await OwnerFiles(objects, ROLE).newest()
    assert closed is not None
    assert closed.released
    assert closed.durable >= killed_at.durable
    assert await opened(objects) == ALL


async def test_a_repair_forgets_what_is_missing(new_root: NewRoot) -> None:
    objects = await killed(new_root)
    name = await damage(objects, "deleted")
    with pytest.raises(CorruptStoreError, match=name):
        await opened(objects)

    repairs = await _repair(objects, SystemClock())

    assert any(name in one.file for one in repairs.problems)
    assert await fails(objects) == ""
    assert await opened(objects) == ALL - {b"%d" % (MESSAGES - 1)}
    again = await OwnerFiles(objects, ROLE).newest()
    assert again is not None
    assert again.durable >= MESSAGES - 1


@pytest.mark.parametrize("how", ["emptied", "cut", "flipped"])
async def test_a_wal_file_amid_others_is_named_by_a_check_and_mended_by_a_repair(
    new_root: NewRoot, how: str
) -> None:
    objects = await killed(new_root)
    name = await damage(objects, how, -2)
    with pytest.raises(CorruptStoreError, match=f"{name} .*; what may be lost: .*; restore it"):
        await opened(objects)

    repairs = await _repair(objects, SystemClock())

    assert any(name in one.file for one in repairs.problems)
    missing = ALL - await opened(objects)
    assert len(missing) == 1


@pytest.mark.parametrize("how", ["emptied", "cut", "flipped"])
async def test_a_repair_of_what_is_not_the_end_forgets_nothing(new_root: NewRoot, how: str) -> None:
    """What owners have said of the end is still true: that is missed if it is lost later."""
    objects = await killed(new_root)
    killed_at = await OwnerFiles(objects, ROLE).newest()
    name = await damage(objects, how, -2)

    repairs = await _repair(objects, SystemClock())

    assert any(name in one.file for one in repairs.problems)
    repaired = await OwnerFiles(objects, ROLE).newest()
    assert killed_at is not None
    assert repaired is not None
    assert repaired.released
    assert repaired.durable == killed_at.durable
    newest = await damage(objects, "deleted")
    with pytest.raises(CorruptStoreError, match=newest):
        await opened(objects)


async def test_the_first_wal_file_that_was_emptied_is_named(new_root: NewRoot) -> None:
    objects = await killed(new_root)
    name = await damage(objects, "emptied", 0)

    assert name in await fails(objects)
    with pytest.raises(CorruptStoreError, match=f"{name} is empty"):
        await opened(objects)


async def test_a_file_that_nobody_has_spoken_of_is_set_aside_on_files_and_damage_on_s3(
    new_root: NewRoot, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    objects = await killed(new_root, unsaid=1)
    name = await damage(objects, "cut")

    if objects.location.kind == "s3":
        with pytest.raises(CorruptStoreError, match=name):
            await opened(objects)
        return
    assert await opened(objects) == ALL - {b"%d" % (MESSAGES - 1)}
    assert any(name in record.getMessage() for record in caplog.records)


async def test_a_file_that_was_added_to_was_whole_once(new_root: NewRoot) -> None:
    objects = await killed(new_root, unsaid=1)
    name = await damage(objects, "added to")

    with pytest.raises(CorruptStoreError, match=name):
        await opened(objects)


async def test_an_open_that_fails_otherwise_hands_on_what_was_said(
    new_root: NewRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = await killed(new_root)
    killed_at = await OwnerFiles(objects, ROLE).newest()

    async def failing(*_: object, **__: object) -> None:
        raise OdqError("not now")

    with monkeypatch.context() as patched:
        patched.setattr("opendata_queue.systems.ingest.MessageShard.open", failing)
        with pytest.raises(OdqError, match="not now"):
            await opened(objects)

    after = await OwnerFiles(objects, ROLE).newest()
    assert killed_at is not None
    assert after is not None
    assert after.durable == killed_at.durable
    name = await damage(objects, "deleted")
    with pytest.raises(CorruptStoreError, match=name):
        await opened(objects)


# --- the rest of a database on S3 -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["emptied", "cut", "zeroed"])
@pytest.mark.parametrize("folder", ["manifest", "compactions"])
async def test_a_manifest_or_a_list_on_s3_that_can_not_be_read_is_named(
    new_s3_root: NewRoot, folder: str, how: str
) -> None:
    objects = await killed(new_s3_root)
    name = max(await objects.names(f"{DATABASE}/{folder}"))
    data = await objects.read(f"{DATABASE}/{folder}/{name}")
    await objects.write(f"{DATABASE}/{folder}/{name}", DAMAGES[how](data or b"") or b"")

    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=f"{name} .*; what may be lost: .*; restore it"):
            await opened(objects)


@pytest.mark.parametrize("how", ["emptied", "cut"])
async def test_an_sst_on_s3_that_is_cut_off_is_named(new_s3_root: NewRoot, how: str) -> None:
    objects = Objects.open(new_s3_root(), SETTINGS)
    async with await Ingest.open(str(objects.location), settings=SETTINGS) as ingest:
        await ingest.publish(b"in an SST")  # once it is closed
    (name,) = await objects.names(f"{DATABASE}/compacted")
    data = await objects.read(f"{DATABASE}/compacted/{name}")
    await objects.write(f"{DATABASE}/compacted/{name}", DAMAGES[how](data or b"") or b"")
    quick = Objects.open(str(objects.location), StoreSettings(outage_timeout_ms=1_000))
    reader = await DatabaseReader.open(quick, DATABASE)

    # SlateDB may ask for ever for what is not there.
    with pytest.raises(CorruptStoreError, match=f"{name}.*; what may be lost: .*; restore it"):
        await anext(aiter(reader.scan(b"\x00", b"\xff")))

    await reader.close()
