"""Control files and blobs on every kind of store, and stores that can't be used."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opendata_queue import Engine, StoreAccessError, StoreSettings, StoreUnavailableError
from opendata_queue.store import Objects
from opendata_queue.store.files.durable import WalSync
from opendata_queue.store.rows.writer import TIER_VARIABLE, Tier
from tests.conftest import NewRoot
from tests.support.s3_server import S3Server
from tests.support.sync_watch import SyncWatch, needs_sync_watch

SETTINGS = StoreSettings()


async def test_what_was_written_is_read_back(root: str) -> None:
    objects = Objects.open(root, SETTINGS)

    await objects.write("a/b/c", b"one")
    await objects.write("a/b/c", b"two")

    assert await objects.read("a/b/c") == b"two"
    assert await objects.read("a/b/missing") is None
    assert await Objects.open(root, SETTINGS).read("a/b/c") == b"two"


async def test_of_many_that_create_a_file_exactly_one_wins(root: str) -> None:
    objects = Objects.open(root, SETTINGS)

    won = await asyncio.gather(*(objects.create("epoch/1", b"%d" % n) for n in range(16)))

    assert won.count(True) == 1
    assert await objects.read("epoch/1") == b"%d" % won.index(True)
    assert not await objects.create("epoch/1", b"late")
    assert await objects.create("epoch/2", b"next")


@pytest.mark.parametrize("fault", ["fail_after", "drop_after"])
async def test_one_wins_even_if_the_answer_is_lost(
    s3_environment: S3Server, new_s3_root: NewRoot, fault: str
) -> None:
    objects = Objects.open(new_s3_root(), SETTINGS)
    getattr(s3_environment, fault)(methods={"PUT"}, path_contains="epoch", times=1)

    won = await asyncio.gather(*(objects.create("epoch/1", b"%d" % n) for n in range(4)))

    assert won.count(True) == 1
    assert await objects.read("epoch/1") == b"%d" % won.index(True)


async def test_a_create_without_an_answer_is_settled_by_reading(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    settings = StoreSettings(request_timeout_ms=300)
    objects = Objects.open(new_s3_root(), settings)
    s3_environment.stall_after(methods={"PUT"}, path_contains="epoch", times=1)

    assert await objects.create("epoch/1", b"mine")


async def test_a_caller_that_is_cancelled_waits_for_the_answer_that_is_on_its_way(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    objects = Objects.open(new_s3_root(), SETTINGS)
    await objects.write("epoch/1", b"theirs")
    s3_environment.stall_after(methods={"GET"}, path_contains="epoch", times=1)
    reading = asyncio.create_task(objects.read("epoch/1"))
    await asyncio.to_thread(s3_environment.wait_until_faulted)

    reading.cancel()
    await asyncio.sleep(0)
    assert not reading.done()

    await asyncio.to_thread(s3_environment.heal)
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_caller_that_is_cancelled_does_not_wait_for_ever(
    s3_environment: S3Server, new_s3_root: NewRoot
) -> None:
    objects = Objects.open(new_s3_root(), SETTINGS)
    s3_environment.stall(methods={"GET"}, path_contains="epoch")
    reading = asyncio.create_task(objects.read("epoch/1"))
    await asyncio.to_thread(s3_environment.wait_until_faulted)

    reading.cancel()

    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_listing_that_fails_says_so(s3_environment: S3Server, new_s3_root: NewRoot) -> None:
    root = new_s3_root()
    await Objects.open(root, SETTINGS).write("epoch/1", b"theirs")
    objects = Objects.open(root, StoreSettings(outage_timeout_ms=100))
    s3_environment.fail(methods={"LIST"})

    with pytest.raises(StoreUnavailableError):
        await objects.list_from("epoch", "", 10)


@pytest.mark.parametrize("name", ["é", "a b", "100%", "#1", "[x]", "日本"])
async def test_a_folder_of_any_name_holds_a_whole_root(tmp_path: Path, name: str) -> None:
    url = (tmp_path / name).as_uri()
    async with await Engine.open(url) as system:
        message_id = await system.publish(b"x" * 70_000)
    async with await Engine.open(url) as system:
        stored = await system.read(message_id)

    assert stored is not None
    assert stored.payload == b"x" * 70_000
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert {path.name for path in (tmp_path / name).iterdir()} == {
        "system.json",
        "features",
        "messages",
        "queues",
        "blobs",
        "owners",
    }


async def test_two_roots_do_not_see_each_other(root: str) -> None:
    await Objects.open(f"{root}/one", SETTINGS).write("x", b"1")

    assert await Objects.open(f"{root}/two", SETTINGS).read("x") is None


async def test_memory_without_a_name_is_new_each_time() -> None:
    await Objects.open("memory:///", SETTINGS).write("x", b"1")

    assert await Objects.open("memory:///", SETTINGS).read("x") is None


async def test_a_written_file_and_its_folders_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = watch_syncs(monkeypatch)
    objects = Objects.open(f"file://{tmp_path}/new/root", SETTINGS)

    await objects.write("a/b", b"x")

    root = tmp_path / "new" / "root"
    assert {root / "a" / "b", root / "a", root, root.parent, tmp_path} <= synced


async def test_nothing_is_synced_when_that_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = watch_syncs(monkeypatch)

    async with await Engine.open(
        f"file://{tmp_path}/root", settings=StoreSettings(fsync=False)
    ) as system:
        await system.publish(b"x" * 100_000)

    assert synced == set()


SYNCED_PUBLISHER = """
import asyncio, os, pathlib, sys
from opendata_queue import Engine, StoreSettings

async def main(root, journal_ms):
    log = pathlib.Path(os.environ["SYNC_LOG"])
    wal = root / "messages" / "00000" / "wal"
    journal = root / "messages" / "00000" / "journal"
    settings = StoreSettings(journal_ms=journal_ms)
    async with await Engine.open(root.as_uri(), settings=settings) as system:
        for number in range(1, 21):
            await system.publish(b"x")
            synced = log.read_text().splitlines()
            if journal_ms:
                (file,) = journal.iterdir()
                assert synced.count(str(file)) >= number
                assert str(journal) in synced
            else:
                missing = {*map(str, wal.glob("*.sst")), str(wal)} - set(synced)
                assert not missing, missing
        await system.close()
        missing = {*map(str, wal.glob("*.sst")), str(wal)} - set(log.read_text().splitlines())
        assert not missing, missing

asyncio.run(main(pathlib.Path(sys.argv[1]), int(sys.argv[2])))
"""


@needs_sync_watch
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("journal_ms", [0, 10])
def test_every_file_of_a_commit_is_synced_before_it_is_acknowledged(
    tmp_path: Path, tier: Tier, journal_ms: int
) -> None:
    watch = SyncWatch(tmp_path)
    root = tmp_path / "root"

    subprocess.run(
        [sys.executable, "-c", SYNCED_PUBLISHER, root, str(journal_ms)],
        check=True,
        env=watch.environment() | {TIER_VARIABLE: tier.value},
    )

    synced = watch.synced()
    tree = root / "messages" / "00000"
    assert {tree, tree.parent, root} <= synced
    assert {*(tree / "compacted").iterdir(), tree / "compacted"} <= synced
    assert {max((tree / "manifest").iterdir()), tree / "manifest"} <= synced


async def test_a_file_that_another_process_made_is_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "epoch").write_bytes(b"theirs")
    synced = watch_syncs(monkeypatch)

    assert not await Objects.open(f"file://{tmp_path}", SETTINGS).create("epoch", b"ours")

    assert tmp_path / "epoch" in synced


async def test_a_file_that_can_not_be_synced_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError("EIO")

    objects = Objects.open(f"file://{tmp_path}", SETTINGS)
    monkeypatch.setattr(os, "fsync", broken)

    with pytest.raises(StoreUnavailableError, match="EIO"):
        await objects.create("epoch", b"ours")


@pytest.mark.usefixtures("s3_environment")
async def test_an_endpoint_that_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9")

    with pytest.raises(StoreAccessError, match=r"AWS_ENDPOINT_URL is '127\.0\.0\.1:9', not a URL"):
        await Engine.open("s3://bucket/root")


def test_gaps_among_old_wal_files_do_not_stop_the_syncing_of_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal = tmp_path / "wal"
    wal.mkdir()
    old = [wal / f"{number:020}.sst" for number in (1, 41, 42)]
    for path in old:
        path.write_bytes(b"old")
    synced = watch_syncs(monkeypatch)
    sync = WalSync(tmp_path)
    assert {*old, wal} <= synced

    new = wal / f"{43:020}.sst"
    new.write_bytes(b"new")
    sync()

    assert new in synced
    with pytest.raises(OSError, match="has made no WAL file"):
        sync()
    sync.close()


def watch_syncs(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The paths of all files and folders that are synced from now on."""
    synced: set[Path] = set()
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def watched(descriptor: int, real: object = real) -> None:
            synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            real(descriptor)  # type: ignore[operator]

        monkeypatch.setattr(os, name, watched)
    return synced


async def test_a_missing_bucket_is_named(s3_environment: S3Server) -> None:
    with pytest.raises(StoreAccessError, match=r"s3://no-such-bucket.*the bucket does not exist"):
        await Engine.open("s3://no-such-bucket/root")


async def test_wrong_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(check_credentials=True) as server:
        server.create_bucket("private")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEBODYELSE")

        with pytest.raises(StoreAccessError, match="the credentials are not accepted"):
            await Engine.open("s3://private/root")


READ_ONLY_CHILD = """
import asyncio, os, sys
from opendata_queue import StoreAccessError, Engine
if os.getuid() == 0:  # root may write anywhere
    os.setgid(65534)
    os.setuid(65534)
for url in sys.argv[1:]:
    try:
        asyncio.run(Engine.open(url))
    except StoreAccessError as error:
        print(error)
"""


@pytest.mark.parametrize("existing", [False, True], ids=["new root", "existing root"])
async def test_a_read_only_folder_is_named(tmp_path: Path, existing: bool) -> None:
    folder = tmp_path / "shut"
    folder.mkdir()
    url = f"file://{folder}/root"
    if existing:
        await (await Engine.open(url)).close()
    for place in (folder, *folder.rglob("*")):
        place.chmod(0o555 if place.is_dir() else 0o444)
    for place in (tmp_path, *list(tmp_path.parents)[:-1]):  # for the child that is not root
        place.chmod(place.stat().st_mode | 0o111)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY_CHILD, url],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    finally:
        for place in (folder, *folder.rglob("*")):
            place.chmod(0o755)

    assert "permission denied" in done.stdout, done.stderr
    assert str(folder) in done.stdout


async def test_a_file_where_a_folder_belongs_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StoreAccessError, match="is a file, not a folder"):
        await Engine.open(f"file://{tmp_path}/file/root")
