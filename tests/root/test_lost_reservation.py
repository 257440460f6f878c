"""A live shard whose file in ``shards/`` was lost."""

from __future__ import annotations

import logging

import pytest

from opendata_queue import Engine, Ingest, StoreSettings
from opendata_queue.store import Objects


async def test_a_shard_that_was_routed_before_is_followed_without_its_file(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with await Engine.open(root) as system, await Ingest.open(root) as ingest:
        await system.create_queue("q")
        await ingest.publish(b"before")
        await system.all_is_routed()
        await ingest.publish(b"after")
    await Objects.open(root, StoreSettings()).delete("shards/00001.json")

    caplog.set_level(logging.ERROR)
    async with await Engine.open(root) as system:
        await system.all_is_routed()
        assert [one.payload for one in await system.claim("q", 10)] == [b"before", b"after"]
    assert "shards/00001.json is missing" in caplog.text
