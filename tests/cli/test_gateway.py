"""Commands and owners on an S3 that takes no quoted ETag, as Ceph's gateway does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import opendata_queue
from opendata_queue import NewMessage, StoreSettings
from opendata_queue.cli.doctor.store import check_garbage
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import StoreAccessError
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.systems.engine import Engine
from tests.cli.careless_s3 import careless_s3
from tests.cli.conftest import Odq
from tests.conftest import NewRoot
from tests.http.conftest import served
from tests.support.s3_server import S3Server

HANG_S = 60.0  # only ever waited for when something is broken
SETTINGS = StoreSettings(garbage_age_ms=1, replaced_files_kept_ms=1, garbage_interval_ms=20)


@pytest.fixture
def gateway(s3_environment: S3Server) -> S3Server:
    s3_environment.take_if_match(quoted=False, bare=True)
    return s3_environment


def found(told: dict[str, Any], check: str) -> dict[str, str]:
    (one,) = (one for one in told["checks"] if one["check"] == check)
    return dict(one)


def test_init_and_doctor_say_what_works_and_what_is_done_about_the_rest(
    gateway: S3Server, new_s3_root: NewRoot
) -> None:
    odq = Odq(new_s3_root())

    told = odq.json("init")
    said = odq("init")
    odq.system().close()
    seen = found(odq.json("doctor"), "overwrite by ETag")
    gateway.take_if_match(quoted=False, bare=False)
    seen_worse = found(odq.json("doctor"), "overwrite by ETag")

    assert told["abilities"]["overwrite"] == "bare etag"
    assert "its boundaries are moved for it" in said
    assert (seen["level"], seen_worse["level"]) == ("ok", "warn")
    assert "manifests are kept for longer" in seen_worse["found"]


def test_compactions_in_a_row_end(gateway: S3Server, new_s3_root: NewRoot) -> None:
    odq = Odq(new_s3_root())
    odq("init")
    for number in range(2):
        with odq.system() as system:
            system.publish_many([NewMessage(b"%d" % number)] * 10)
        odq("compact")

    assert len(odq.json("doctor")["checks"]) > 5


def test_an_open_refuses_a_store_that_creates_twice(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with careless_s3() as (endpoint, _):
        monkeypatch.setenv("AWS_ENDPOINT", endpoint)
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)

        with pytest.raises(StoreAccessError, match="two owners could both win"):
            opendata_queue.open("s3://bucket/root")


async def test_garbage_that_nobody_collects_is_found(tmp_path: Path) -> None:
    objects = Objects.open(f"file://{tmp_path}/root", StoreSettings(fsync=False, journal_ms=0))
    database = await Database.open(objects, "db")
    for number in range(3):
        rows = Rows()
        rows.put(b"%d" % number, b"value")
        await database.commit(rows)
    await database.flush_to_files()
    await database.close()
    an_hour_ago = SystemClock().now_ms() / 1000 - 3_600
    for number in range(120):  # as many names for one that was flushed
        file = tmp_path / "root/db/wal" / f"{1:0{number + 1}}.sst"
        file.write_bytes(b"x")
        os.utime(file, (an_hour_ago, an_hour_ago))

    found = [
        await check_garbage(objects, ["db"], SystemClock(), served=served)
        for served in (True, False)
    ]

    assert [one.level for one in found] == ["warn", "ok"]
    assert "of db 120 WAL objects" in found[0].found
    assert "1h" in found[0].found or "60m" in found[0].found


async def test_an_owner_with_nothing_to_do_leaves_the_boundaries_alone(
    gateway: S3Server, new_s3_root: NewRoot
) -> None:
    """SlateDB tried without end to move them: 42 puts a second."""
    async with await Engine.open(new_s3_root(), settings=SETTINGS) as engine:
        databases = (engine._shard.database, engine._queues.database)
        await engine.create_queue("q")
        for _ in range(2):
            await engine.publish_many([NewMessage(b"x")])
            for database in databases:
                await database.flush_to_files()
            async with asyncio.timeout(HANG_S):
                while not all(one._garbage._is_clean for one in databases):
                    await asyncio.sleep(0.02)
        gateway.reset_requests(path_contains="/gc/")
        looked = [one._garbage._since_look for one in databases]
        async with asyncio.timeout(HANG_S):
            while any(
                one._garbage._since_look < before + 25
                for one, before in zip(databases, looked, strict=True)
            ):
                await asyncio.sleep(0.02)
        idle = gateway.requests()
        found = [one for one in engine.figures() if one.name == "odq_garbage_rounds"]

        assert idle["PUT"] == idle["GET"] == 0
        assert all(one.value >= 2 for one in found)
        assert engine.troubles == []


async def test_a_broker_whose_garbage_piles_up_stays_ready_and_says_so(
    gateway: S3Server, new_s3_root: NewRoot
) -> None:
    async with await Engine.open(new_s3_root(), settings=SETTINGS) as engine:
        gateway.fail(methods=["PUT"], path_contains="/gc/", status=403)
        async with served(engine, open_metrics=True) as client:
            assert (await client.get("/readyz")).text == "ready\n"
            async with asyncio.timeout(HANG_S):
                while not engine.troubles:
                    await engine.publish_many([NewMessage(b"x")])
                    await engine._shard.database.flush_to_files()
            answer = await client.get("/readyz")
            metrics = (await client.get("/metrics")).text
        gateway.heal()

    assert (answer.status_code, answer.text) == (200, "ready, degraded: see the log and /metrics\n")
    assert "odq_garbage_failures_in_a_row" in metrics
