"""Files of a root on a disk: who may read them, and links that lead out of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendata_queue import Engine, StoreAccessError, StoreSettings
from opendata_queue.store import Objects
from opendata_queue.store.files.durable import set_aside
from opendata_queue.store.files.local import readable_by

SETTINGS = StoreSettings()
LARGE = b"x" * 100_000


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def ours(root: Path) -> list[Path]:
    """All files that are not SlateDB's."""
    slatedbs = {"manifest", "wal", "compacted", "compactions", "gc"}
    files = [path for path in root.rglob("*") if path.is_file()]
    return [path for path in files if slatedbs.isdisjoint(path.relative_to(root).parts[:-1])]


@pytest.mark.usefixtures("usual_umask")
async def test_a_new_root_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    root = tmp_path / "above" / "root"
    async with await Engine.open(root.as_uri()) as system:
        await system.publish(LARGE)
        found = ours(root)
        kinds = {path.relative_to(root).parts[0] for path in found}
        journals = [path for path in found if path.suffix == ".journal"]

        assert mode(root) == 0o700
        assert kinds >= {"system.json", "owners", "blobs", "messages", "queues"}
        assert journals
        assert {mode(path) for path in found} == {0o600}
    assert {mode(path) for path in ours(root)} == {0o600}
    assert mode(root.parent) == 0o755


@pytest.mark.usefixtures("usual_umask")
async def test_a_new_root_in_a_folder_that_is_there_keeps_its_own_files_to_itself(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    async with await Engine.open(root.as_uri()) as system:
        await system.publish(LARGE)

    assert mode(root) == 0o755
    assert {mode(path) for path in ours(root)} == {0o600}


@pytest.mark.usefixtures("usual_umask")
async def test_a_root_that_others_read_stays_one(tmp_path: Path) -> None:
    """As release 0.1 made them, and as an administrator opens one to a group."""
    root = tmp_path / "root"
    async with await Engine.open(root.as_uri()):
        pass
    root.chmod(0o750)
    (root / "system.json").chmod(0o640)
    before = set(ours(root))
    async with await Engine.open(root.as_uri()) as system:
        await system.publish(LARGE)
        new = set(ours(root)) - before

        assert mode(root) == 0o750
        assert mode(root / "system.json") == 0o640
        assert {mode(path) for path in new} == {0o640}


async def test_a_written_file_leaves_nothing_beside_it(tmp_path: Path) -> None:
    objects = Objects.open(tmp_path.as_uri(), SETTINGS)
    await objects.write("a/b", b"1")
    await objects.write("a/b", b"2")
    assert await objects.create("a/c", b"1")
    assert not await objects.create("a/c", b"2")

    assert sorted(os.listdir(tmp_path / "a")) == ["b", "c"]


@pytest.mark.parametrize("path", ["../out", "a/../../out", "/out", "a//b", "a/./b"])
async def test_no_object_is_written_or_deleted_out_of_a_root(tmp_path: Path, path: str) -> None:
    (tmp_path / "out").write_bytes(b"theirs")
    objects = Objects.open((tmp_path / "root").as_uri(), SETTINGS)

    with pytest.raises(StoreAccessError, match="is no path in a root"):
        await objects.write(path, b"ours")
    with pytest.raises(StoreAccessError, match="is no path in a root"):
        await objects.delete(path)
    with pytest.raises(StoreAccessError, match="is no path in a root"):
        await objects.delete_under(path)
    assert (tmp_path / "out").read_bytes() == b"theirs"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    (folder / "precious").write_bytes(b"12345")
    (folder / "deep" / "precious").write_bytes(b"12345")
    return folder


def whole(outside: Path) -> bool:
    files = (outside / "precious", outside / "deep" / "precious")
    return all(path.read_bytes() == b"12345" for path in files)


async def test_nothing_is_deleted_through_a_link(tmp_path: Path, outside: Path) -> None:
    objects = Objects.open((tmp_path / "root").as_uri(), SETTINGS)
    await objects.write("messages/7/manifest/1", b"abc")
    folder = tmp_path / "root" / "messages" / "7"
    (folder / "wal").symlink_to(outside)
    (folder / "manifest" / "2").symlink_to(outside / "precious")
    (folder / "loop").symlink_to(folder)

    assert await objects.delete_under("messages/7") == 3

    assert whole(outside)
    assert not folder.exists()


async def test_a_folder_that_is_a_link_is_not_emptied(tmp_path: Path, outside: Path) -> None:
    objects = Objects.open((tmp_path / "root").as_uri(), SETTINGS)
    (tmp_path / "root" / "blobs").symlink_to(outside)

    for folder in ("blobs", "blobs/deep"):
        with pytest.raises(StoreAccessError, match="root/blobs is a link"):
            await objects.delete_under(folder)
    with pytest.raises(StoreAccessError, match="root/blobs is a link"):
        await objects.delete("blobs/precious")
    assert whole(outside)


async def test_what_is_behind_links_is_not_counted_or_listed(tmp_path: Path, outside: Path) -> None:
    objects = Objects.open((tmp_path / "root").as_uri(), SETTINGS)
    await objects.write("blobs/1", b"abc")
    (tmp_path / "root" / "blobs" / "out").symlink_to(outside)
    (tmp_path / "root" / "blobs" / "loop").symlink_to(tmp_path / "root")

    assert await objects.size_bytes() == 3
    assert await objects.list_from("blobs", "", 10) == [("1", 3)]
    assert await objects.names("blobs") == ["1"]


def test_torn_files_are_not_moved_through_a_link(tmp_path: Path, outside: Path) -> None:
    manifests = tmp_path / "database" / "manifest"
    manifests.mkdir(parents=True)
    (manifests / "1.manifest").write_bytes(b"x")
    (manifests / "precious.manifest").touch()
    (tmp_path / "database" / "torn").symlink_to(outside)

    with pytest.raises(NotADirectoryError, match="torn is a link"):
        set_aside(tmp_path / "database", "manifest", ["precious.manifest"])

    assert sorted(os.listdir(outside)) == ["deep", "precious"]


def test_a_folder_can_be_read_by_those_who_get_there(tmp_path: Path) -> None:
    above, root = tmp_path / "above", tmp_path / "above" / "root"
    root.mkdir(parents=True)
    found = []
    for outer, inner in ((0o755, 0o755), (0o755, 0o750), (0o755, 0o700), (0o700, 0o755)):
        above.chmod(outer)
        root.chmod(inner)
        found.append(readable_by(root, below=tmp_path))

    assert found == ["everybody on this machine", "its group", "", ""]
