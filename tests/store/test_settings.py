"""The settings that SlateDB is given."""

from __future__ import annotations

import json

import pytest

from opendata_queue import StoreSettings
from opendata_queue.store.settings import CROWDED_FILES


@pytest.mark.parametrize(
    ("given", "on_s3", "expected"),
    [(None, True, "15s"), (None, False, "1s"), (200, True, "200ms"), (200, False, "200ms")],
)
def test_files_to_compact_are_looked_for_often_where_a_look_costs_no_requests(
    given: int | None, on_s3: bool, expected: str
) -> None:
    settings = StoreSettings(compaction_poll_ms=given).for_slatedb(on_s3=on_s3)

    passed = json.loads(settings.to_json_string())

    assert passed["manifest_poll_interval"] == expected
    assert passed["compactor_options"]["poll_interval"] == expected
    assert passed["compactor_options"]["worker"]["compactions_poll_interval"] == expected


def test_files_to_compact_are_looked_for_more_often_on_s3_where_many_wait() -> None:
    settings = StoreSettings().for_slatedb(on_s3=True, waiting_files=CROWDED_FILES)

    passed = json.loads(settings.to_json_string())

    assert passed["manifest_poll_interval"] == "5s"
    assert passed["compactor_options"]["poll_interval"] == "5s"
    assert passed["compactor_options"]["worker"]["compactions_poll_interval"] == "5s"
    assert passed["l0_max_ssts"] > CROWDED_FILES


@pytest.mark.parametrize("on_s3", [True, False])
def test_a_compaction_of_an_owner_that_was_killed_is_soon_taken_up_again(on_s3: bool) -> None:
    passed = json.loads(StoreSettings().for_slatedb(on_s3=on_s3).to_json_string())

    options = passed["compactor_options"]
    silence_s = int(options["worker_heartbeat_timeout"].removesuffix("s"))
    beat_s = int(options["worker"]["heartbeat_interval"].removesuffix("s"))
    assert silence_s <= (20 if on_s3 else 6)
    assert silence_s >= 4 * beat_s  # one that is late must not lose its work


@pytest.mark.parametrize("on_s3", [True, False])
def test_what_compactions_have_in_memory_is_bounded(on_s3: bool) -> None:
    passed = json.loads(StoreSettings().for_slatedb(on_s3=on_s3).to_json_string())

    options = passed["compactor_options"]
    worker = options["worker"]
    files_merged = 8
    fetched = files_merged * worker["max_fetch_tasks"] * worker["bytes_to_fetch"]
    at_once = min(options["max_concurrent_compactions"], worker["max_concurrent_compactions"])
    assert 1 < at_once * worker["max_subcompactions"] <= 2  # a small one never waits for a large
    assert at_once * fetched <= 32 * 1024 * 1024
    assert worker["max_sst_size"] == passed["l0_sst_size_bytes"]
