"""What SlateDB counts: the short way and the binding's own give the same."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import slatedb.uniffi as slatedb

from opendata_queue.store import Database, Objects, Rows, StoreSettings
from opendata_queue.store.db import recorder
from opendata_queue.store.native.binding import checked_binding

WRITES = "slatedb.db.write_ops"


async def metrics_of_a_database(path: str) -> list[slatedb.Metric]:
    database = await Database.open(Objects.open("memory:///", StoreSettings()), path)
    rows = Rows()
    rows.put(b"key", b"value")
    await database.commit(rows)
    await database.close()
    return list(database._metrics.snapshot())


def registered(metrics: list[slatedb.Metric]) -> set[Any]:
    """All of a metric that was said when it was registered."""
    return {
        (
            metric.name,
            metric.description,
            tuple((one.key, one.value) for one in metric.labels if one.key != "worker_id"),
            type(metric.value),
            tuple(getattr(metric.value[0], "boundaries", ())),
        )
        for metric in metrics
    }


def refuse(*_: Any) -> Any:
    raise AssertionError("the request was unpacked in Python")


async def test_both_ways_register_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorder._take_short_cut()
    with monkeypatch.context() as short:
        for method in recorder.METHODS:
            short.setattr(slatedb.DefaultMetricsRecorder, method, refuse)
        ours = await metrics_of_a_database("short")
    binding = checked_binding()
    for method in recorder.METHODS:
        stock = getattr(binding._UniffiTraitImplMetricsRecorderImpl, method)
        monkeypatch.setattr(recorder.table_of(binding), method, stock)
    theirs = await metrics_of_a_database("stock")

    assert registered(ours) == registered(theirs)
    assert {type(metric.value) for metric in ours} == {
        slatedb.MetricValue.COUNTER,
        slatedb.MetricValue.GAUGE,
        slatedb.MetricValue.HISTOGRAM,
        slatedb.MetricValue.UP_DOWN_COUNTER,
    }
    for metrics in (ours, theirs):
        assert [metric.value[0] for metric in metrics if metric.name == WRITES] == [1]


async def test_a_recorder_that_is_not_ours_is_still_asked() -> None:
    class Theirs(slatedb.DefaultMetricsRecorder):  # type: ignore[misc]
        asked: list[str] = []  # noqa: RUF012 - one recorder only

        def register_counter(self, name: str, *rest: Any) -> Any:
            self.asked.append(name)
            return super().register_counter(name, *rest)

    assert recorder._take_short_cut()
    builder = slatedb.DbBuilder("theirs", slatedb.ObjectStore.resolve("memory:///"))
    theirs = Theirs()
    builder.with_metrics_recorder(theirs)
    db = await builder.build()
    await db.shutdown()

    assert WRITES in theirs.asked
    assert theirs.metrics_by_name(WRITES)


def test_another_binding_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        recorder, "CHECKSUMS", {"method_defaultmetricsrecorder_register_counter": 1}
    )
    table = recorder.table_of(checked_binding())
    before = bytes(table)

    with caplog.at_level(logging.WARNING):
        assert not recorder._take_short_cut.__wrapped__()

    assert "checksum of method_defaultmetricsrecorder_register_counter is" in caplog.text
    assert bytes(table) == before


# A database is opened twice, so that the first owner is replaced, and neither is closed. The
# process stays for some seconds after the interpreter has ended (``on_exit`` calls ``sleep`` with
# the exit status): meanwhile a thread of SlateDB's finds out, and lets go of the first one's
# recorder.
UNCLOSED = """
import asyncio, ctypes, sys
from opendata_queue.store import Database, Objects, StoreSettings

libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)

async def main():
    global replaced, owner
    objects = Objects.open("memory:///", StoreSettings(compaction_poll_ms=500))
    replaced = await Database.open(objects, "db")
    owner = await Database.open(objects, "db")

asyncio.run(main())
sys.exit(3)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on_exit is glibc's")
@pytest.mark.parametrize("_", range(3))
def test_a_process_that_was_replaced_and_closes_nothing_ends_without_a_crash(_: int) -> None:
    """Python fills what it frees: a thread that still reads there can't find it as it was."""
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONMALLOC": "debug"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 3, done.stderr
