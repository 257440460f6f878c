"""``odq doctor`` on roots that are well, and on others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from odq_encodings import (
    ClockKey,
    ClockMark,
    QueueCounters,
    QueueCountersKey,
)
from opendata_queue import Engine, NewMessage, SystemClock
from opendata_queue.store import Database, Objects, Rows, StoreSettings
from opendata_queue.testing import ManualClock
from tests.cli.careless_s3 import careless_s3
from tests.cli.conftest import Odq
from tests.conftest import NewRoot
from tests.support.broker import BrokerProcess
from tests.support.s3_server import S3Server


def levels(told: dict[str, Any]) -> dict[str, str]:
    return {check["check"]: check["level"] for check in told["checks"]}


def found(told: dict[str, Any], check: str) -> dict[str, str]:
    (one,) = (one for one in told["checks"] if one["check"] == check)
    return dict(one)


def test_a_root_in_use_is_well_and_its_owner_is_not_disturbed(orders: Odq) -> None:
    with orders.system() as owner:
        owner.publish_many([NewMessage(b"x", delay_ms=n % 2 * 60_000) for n in range(600)])
        owner.claim("orders", 10, wait_ms=60_000)

        told = orders.json("doctor")
        shown = orders("doctor", orders.url, "--read-only")

        owner.publish(b"still here")
    assert told["healthy"]
    assert set(levels(told).values()) == {"ok"}
    assert "alive" in found(told, "owner")["found"]
    assert "those of 1 queue agree" in found(told, "counters")["found"]
    assert "conditional writes" in levels(told)
    assert "conditional writes" not in shown
    assert all(line.startswith("ok") for line in shown.splitlines())


def test_an_owner_that_has_gone_is_told_from_one_that_is_there(orders: Odq) -> None:
    assert found(orders.json("doctor"), "owner")["found"].startswith("none: ")


def test_a_root_on_s3_is_well(new_s3_root: NewRoot) -> None:
    odq = Odq(new_s3_root())
    odq("init")
    odq.system().close()

    told = odq.json("doctor")

    assert set(levels(told).values()) == {"ok"}
    assert "as AWS_ACCESS_KEY_ID" in found(told, "environment")["found"]


@pytest.mark.parametrize(
    ("url", "check", "advice"),
    [
        ("nonsense", "url", "fix the URL"),
        ("memory:///x", "url", "fix the URL"),
        ("file:///no/such/folder", "reachable", "odq init"),
    ],
)
def test_what_is_no_root_is_explained(url: str, check: str, advice: str) -> None:
    told = Odq(url).json("doctor", code=1)

    assert not told["healthy"]
    assert found(told, check)["level"] == "fail"
    assert advice in found(told, check)["advice"]
    assert f"fail  {check}" in Odq(url)("doctor", code=1)


def test_an_empty_folder_is_told_from_a_root(tmp_path: Path) -> None:
    told = Odq(f"file://{tmp_path}").json("doctor", code=1)

    assert found(told, "system.json")["found"] == "there is no root here"


def test_a_root_that_nobody_has_used_yet_gets_warnings(tmp_path: Path) -> None:
    odq = Odq(f"file://{tmp_path}/new")
    odq("init")

    told = odq.json("doctor")

    assert levels(told)["queues/00000"] == levels(told)["messages/00000"] == "warn"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 99}, "knows up to 2"),
        ({"format_version": 1, "secret": "x"}, "does not describe a root: secret"),
    ],
)
def test_a_descriptor_that_can_not_be_used_is_explained(
    odq: Odq, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    file = tmp_path / "root" / "system.json"
    before = json.loads(file.read_text())
    del before["check"]
    file.write_text(json.dumps(before | change))

    told = odq.json("doctor", code=1)

    assert said in found(told, "system.json")["found"]


async def change_rows(url: str, rows: Rows) -> None:
    database = await Database.open(Objects.open(url, StoreSettings()), "queues/00000")
    await database.commit(rows)
    await database.close()


async def test_a_clock_that_was_ahead_is_warned_of(orders: Odq) -> None:
    rows = Rows()
    rows.put(ClockKey().encode(), ClockMark(now=1 << 60).encode())
    await change_rows(orders.url, rows)

    told = await _in_thread(orders)

    assert found(told, "clock")["level"] == "warn"


@pytest.mark.parametrize("ahead_ms", [420_000, -420_000], ids=["ahead", "behind"])
async def test_a_clock_of_a_root_that_differs_from_this_machines_is_warned_of(
    tmp_path: Path, ahead_ms: int
) -> None:
    odq = Odq(f"file://{tmp_path}/new")
    clock = ManualClock(SystemClock().now_ms() + ahead_ms)
    async with await Engine.open(odq.url, clock=clock) as system:
        await system.create_queue("q")
    clock.set_wall_ms(SystemClock().now_ms())
    async with await Engine.open(odq.url, clock=clock) as system:
        await system.publish(b"x")

    clock_found = found(await _in_thread(odq), "clock")

    assert clock_found["level"] == "warn"
    assert ("ahead of" if ahead_ms > 0 else "behind") in clock_found["found"]


async def test_counters_that_do_not_agree_with_their_rows_fail(orders: Odq) -> None:
    rows = Rows()
    wrong = QueueCounters(
        done_bucket=0,
        failed_bucket=0,
        done=0,
        failed=2,
        expired=0,
        scheduled=1,
        scheduled_from=0,
        backlog=(),
    )
    rows.put(QueueCountersKey(queue_id=b"orders").encode(), wrong.encode())
    await change_rows(orders.url, rows)

    told = await _in_thread(orders, code=1)

    assert found(told, "counters")["found"] == (
        "queue orders: schedule counts 1 and has 0 rows, failed counts 2 and has 0 rows"
    )


async def test_a_row_that_makes_no_sense_is_told_and_is_no_traceback(orders: Odq) -> None:
    rows = Rows()
    rows.put(QueueCountersKey(queue_id=b"orders").encode(), b"\x01")
    await change_rows(orders.url, rows)

    told = await _in_thread(orders, code=1)

    assert "QueueCounters" in found(told, "reading")["found"]


async def _in_thread(odq: Odq, code: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = await asyncio.to_thread(odq.json, "doctor", code=code)
    return told


def test_a_bucket_that_is_not_there_is_explained(s3_environment: S3Server) -> None:
    told = Odq("s3://odq-no-such-bucket/x").json("doctor", code=1)

    assert "--create-bucket" in found(told, "reachable")["advice"]


def test_a_store_without_conditional_writes_fails(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, odq: Odq, tmp_path: Path
) -> None:
    with careless_s3() as (endpoint, objects):
        objects["/bucket/root/system.json"] = (tmp_path / "root" / "system.json").read_bytes()
        monkeypatch.setenv("AWS_ENDPOINT", endpoint)
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)

        told = Odq("s3://bucket/root").json("doctor", code=1)

    assert found(told, "conditional writes")["level"] == "fail"


def test_a_server_that_does_not_answer_is_explained() -> None:
    told = Odq("http://127.0.0.1:1").json("doctor", code=1)

    assert list(levels(told)) == ["reachable"]
    assert "odq serve" in found(told, "reachable")["advice"]


def test_the_clock_of_a_server_is_compared_with_this_machines() -> None:
    with BrokerProcess("memory:///") as broker:
        told = Odq(broker.url).json("doctor")

    assert list(levels(told)) == ["reachable", "ready", "clock", "use"]


def test_something_else_that_answers_is_told_from_a_server() -> None:
    with careless_s3() as (endpoint, _):
        told = Odq(endpoint).json("doctor", code=1)

    assert "answers with 404" in found(told, "reachable")["found"]


def test_a_root_that_others_can_read_is_one_that_doctor_says_so_of(orders: Odq) -> None:
    folder = Path(orders.url.removeprefix("file://"))
    above = [place for place in folder.parents if not place.stat().st_mode & 0o001]
    modes = {place: place.stat().st_mode & 0o7777 for place in (folder, *above)}
    assert found(orders.json("doctor"), "permissions")["level"] == "ok"
    try:
        for place in modes:
            place.chmod(0o755)

        one = found(orders.json("doctor"), "permissions")
    finally:
        for place, mode in modes.items():
            place.chmod(mode)

    assert one["level"] == "warn"
    assert one["found"].startswith(f"everybody on this machine can read {folder}")
    assert one["advice"].startswith(f"chmod 700 {folder}")
