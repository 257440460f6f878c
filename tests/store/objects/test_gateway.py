"""Stores that can't overwrite an object by its ETag as SlateDB does it, as Ceph's gateway."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from opendata_queue.model.errors import StoreAccessError, StoreUnavailableError
from opendata_queue.model.figures import Figure
from opendata_queue.root.descriptor import open_root
from opendata_queue.store import (
    Abilities,
    Database,
    DatabaseReader,
    Objects,
    Overwrite,
    Rows,
    StoreSettings,
    Upkeep,
)
from opendata_queue.store.db.boundaries import Boundaries
from opendata_queue.store.waiting import in_time, timeout_figures
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.support.s3_server import S3Server

SETTINGS = StoreSettings(
    garbage_age_ms=1,
    unguarded_age_ms=1,
    garbage_interval_ms=3_600_000,
    compaction_poll_ms=3_600_000,
)
HANG_S = 60.0  # only ever waited for when something is broken
GATEWAYS = [(False, True), (False, False)]
"""Ceph's, and one that takes no ``If-Match`` at all: what they take, quoted or bare."""


def row(key: bytes) -> Rows:
    rows = Rows()
    rows.put(key, b"value")
    return rows


async def fill(database: Database, *keys: bytes) -> None:
    """Make a manifest for each row, and let it be older than what is collected."""
    for key in keys:
        await database.commit(row(key))
        await database.flush_to_files()
    await asyncio.sleep(0.02)


async def boundary_of(objects: Objects, kind: str = "manifest") -> int:
    found = await objects.read(f"db/gc/{kind}.boundary")
    return 0 if found is None else int(found)


@pytest.fixture
def objects(new_s3_root: NewRoot) -> Objects:
    return Objects.open(new_s3_root(), SETTINGS)


# --- what a store can do --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quoted", "bare", "overwrite"),
    [
        (True, True, Overwrite.QUOTED),
        (False, True, Overwrite.BARE),
        (False, False, Overwrite.NONE),
    ],
)
async def test_what_a_store_can_do_is_found_out_and_remembered(
    objects: Objects,
    s3_environment: S3Server,
    quoted: bool,
    bare: bool,
    overwrite: Overwrite,
) -> None:
    s3_environment.take_if_match(quoted=quoted, bare=bare)

    found = await objects.abilities()

    able = {"creates_once": True, "lists_at_once": True, "reads_ranges": True}
    assert found == Abilities(overwrite=overwrite, **able)
    assert await objects.names("probe") == []
    s3_environment.reset_requests(path_contains=str(objects.location).removeprefix("s3://"))
    assert await Objects.open(str(objects.location), SETTINGS).abilities() == found
    assert {k: n for k, n in s3_environment.requests().items() if n and k.isupper()} == {"GET": 1}


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[" * 100_000,
        b"{}",
        b'{"place": 1}',
        lambda said: said | {"checked_at": said["checked_at"] - 25 * 3_600_000},
        lambda said: said | {"checked_at": said["checked_at"] + 3_600_000},
        lambda said: said | {"place": "another endpoint, another-bucket"},
        lambda said: said | {"overwrite": "by magic"},
    ],
)
async def test_what_is_old_or_of_another_store_is_found_out_anew(
    objects: Objects, damage: object
) -> None:
    probed = await objects.probe()
    said = await objects.read("store.json")
    assert said is not None
    spoilt = json.dumps(damage(json.loads(said))).encode() if callable(damage) else damage
    assert isinstance(spoilt, bytes)
    await objects.write("store.json", spoilt)

    found = await Objects.open(str(objects.location), SETTINGS).abilities()

    assert found == probed
    again = await objects.read("store.json")
    assert again is not None
    assert json.loads(again)["place"] == json.loads(said)["place"]


@pytest.mark.parametrize("url", ["memory:///", "file://{tmp}/root"])
async def test_nothing_is_tried_where_it_is_known(url: str, tmp_path: object) -> None:
    objects = Objects.open(url.format(tmp=tmp_path), SETTINGS)

    abilities = await objects.abilities()

    assert abilities.missing == ()
    assert objects.requests == 0


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("creates_once", "two owners could both win"),
        ("lists_at_once", "a list does not have"),
        ("reads_ranges", "a part of an object"),
    ],
)
async def test_a_store_without_what_is_needed_is_refused_by_name(
    objects: Objects, flag: str, said: str
) -> None:
    able = {"creates_once": True, "lists_at_once": True, "reads_ranges": True, flag: False}
    objects._abilities = Abilities(overwrite=Overwrite.QUOTED, **able)

    with pytest.raises(StoreAccessError, match=said):
        await open_root(objects, ManualClock(1_700_000_000_000))


# --- garbage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quoted", "bare"), GATEWAYS)
async def test_garbage_is_collected_again_and_again(
    objects: Objects, s3_environment: S3Server, quoted: bool, bare: bool
) -> None:
    s3_environment.take_if_match(quoted=quoted, bare=bare)
    database = await Database.open(objects, "db")
    boundaries = []
    try:
        async with asyncio.timeout(HANG_S):
            for number in range(3):
                await fill(database, b"a%d" % number, b"b%d" % number)
                await database.collect_garbage()
                boundaries.append(await boundary_of(objects))
        assert boundaries == sorted(set(boundaries))
        left = await objects.names("db/manifest")
        assert all(int(name.partition(".")[0]) > boundaries[-1] for name in left)
        assert len(left) <= 2
        assert len(await objects.names("db/wal")) <= 2
        assert await database.get(b"a0") == b"value"
        assert database.trouble is None
    finally:
        await database.close()


@pytest.mark.parametrize(("quoted", "bare"), GATEWAYS)
async def test_a_reader_that_stood_still_finds_the_newest_manifest(
    objects: Objects, s3_environment: S3Server, quoted: bool, bare: bool
) -> None:
    """The manifests after the one that it knows are gone by then: the boundary tells it so."""
    s3_environment.take_if_match(quoted=quoted, bare=bare)
    database = await Database.open(objects, "db")
    try:
        await fill(database, b"a")
        reader = await DatabaseReader.open(
            objects, "db", poll_interval_ms=1_500, leave_no_trace=True
        )
        try:
            await fill(database, b"b", b"c", b"d")
            await database.collect_garbage()
            assert len(await objects.names("db/manifest")) <= 2
            async with asyncio.timeout(HANG_S):
                while await reader.get(b"d") is None:
                    await asyncio.sleep(0.05)
        finally:
            await reader.close()
    finally:
        await database.close()


async def test_a_boundary_that_several_move_at_once_never_goes_back(
    objects: Objects, s3_environment: S3Server
) -> None:
    s3_environment.take_if_match(quoted=False, bare=True)
    for number in range(1, 9):
        await objects.write(f"db/manifest/{number:020}.manifest", b"")
    await objects.write("db/gc/manifest.boundary", b"1")
    boundaries = Boundaries(objects, "db", how=Overwrite.BARE, age_ms=-2_000)

    await asyncio.gather(*(boundaries.move() for _ in range(8)))

    assert await boundary_of(objects) == 7


async def test_collecting_that_gets_nowhere_ends_is_counted_and_finds_out_why(
    objects: Objects, s3_environment: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    await objects.abilities()
    impatient = StoreSettings(garbage_age_ms=1, outage_timeout_ms=400)
    upkeep = Upkeep(Objects.open(str(objects.location), impatient), "db")
    database = await Database.open(objects, "db")
    try:
        await fill(database, b"a", b"b")
        await database.collect_garbage()
        s3_environment.take_if_match(quoted=False, bare=True)  # not what the root remembers
        await fill(database, b"c", b"d")

        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(StoreUnavailableError, match=r"collect garbage of s3://.*/db: no answer"),
        ):
            await upkeep.collect_garbage()
        assert rounds(upkeep) == (1, 1, 1)
        assert "collect garbage of" in caplog.text

        s3_environment.reset_requests(path_contains="/db/gc/")
        await Upkeep(objects, "db").collect_garbage(min_age_ms=3_600_000)
        assert s3_environment.requests()["PUT"] == 0  # SlateDB has stopped trying

        upkeep._timeout_ms = SETTINGS.outage_timeout_ms
        await upkeep.collect_garbage()  # finds out anew what the store can do
        assert rounds(upkeep) == (2, 1, 0)
        assert await boundary_of(objects) > 1
    finally:
        await database.close()


def rounds(upkeep: Upkeep) -> tuple[float, ...]:
    """How many there were, how many have failed, and how many of the last ones."""
    return tuple(one.value for one in upkeep.record.figures(()))


# --- time limits ----------------------------------------------------------------------------------


def timeouts(kind: str) -> float:
    found: list[Figure] = [one for one in timeout_figures() if one.labels == (("doing", kind),)]
    return found[0].value if found else 0


async def test_a_call_without_an_answer_is_counted_and_logged_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = timeouts("ponder")
    for _ in range(5):
        with pytest.raises(StoreUnavailableError, match="could not ponder it: no answer"):
            await in_time(asyncio.Event().wait(), 1, "ponder it")

    assert timeouts("ponder") == before + 5
    warned = [one for one in caplog.records if "ponder" in one.getMessage()]
    assert len([one for one in warned if one.levelno == logging.WARNING]) == 3  # 1, 2 and 4


async def test_every_question_about_a_database_ends(
    objects: Objects, s3_environment: S3Server
) -> None:
    database = await Database.open(objects, "db")
    impatient = Objects.open(str(objects.location), StoreSettings(outage_timeout_ms=100))
    upkeep = Upkeep(impatient, "db")
    try:
        s3_environment.stall(path_contains="/db/")
        for ask in (
            upkeep.size_bytes,
            upkeep.file_counts,
            upkeep.is_compacting,
            upkeep.wal_files,
            upkeep.compact,
            upkeep.sync_in_use,
        ):
            with pytest.raises(StoreUnavailableError, match=r"s3://.*/db: no answer within 100 ms"):
                await ask()
    finally:
        s3_environment.heal()
        await database.close()
