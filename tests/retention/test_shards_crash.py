"""Passes over shards of others that are killed for real, on files and on S3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from odq_compactor import (
    IngestRetention,
    RetentionCompactor,
    alone,
    compact_root,
    set_delete_when_done,
)
from opendata_queue import Engine, NewMessage, QueueOptions
from opendata_queue.root.commit_files import CommitFiles
from opendata_queue.root.shard_files import ShardFiles
from opendata_queue.store import Objects
from opendata_queue.systems.ingest import Ingest
from opendata_queue.testing import ManualClock
from tests.conftest import NewRoot
from tests.retention.pass_process import COMPACTOR, PUBLISHING, SETTINGS, kill_after
from tests.retention.rows import decoded, queue_rows
from tests.support.bulk_jobs import commit, write_shard

# After how many writes: among those of expired messages and of blobs, in and behind the checkpoint
# by which a publisher sees the queues, and while bulk shards and what others wrote are removed.
KILLS_OF_PUBLISHER = 14, 14, 6, 3
KILLS_OF_COMPACT = 20, 13, 4, 6, 10
START_MS = 1_790_000_000_000
LATER_MS = START_MS + 8 * 86_400_000
LARGE = bytes(70_000)
OPTIONS = QueueOptions(window=4, bucket=5, max_attempts=1, done_retention_seconds=60)


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{request.getfixturevalue('tmp_path')}/root"
    else:
        new_root: NewRoot = request.getfixturevalue("new_s3_root")
        yield new_root()


def some_messages(count: int) -> list[NewMessage]:
    """In turn: some that expire or don't, that will be done or not, and one in five large."""
    return [
        NewMessage(
            b"%d" % n if n % 5 else LARGE,
            headers={"done": str(n % 2)},
            retention_seconds=60 if n % 3 else 0,
        )
        for n in range(count)
    ]


def survivors(ids: list[int], messages: list[NewMessage]) -> dict[int, bytes | None]:
    return {
        one: message.payload
        for one, message in zip(ids, messages, strict=True)
        if not message.retention_seconds and message.headers["done"] == "0"
    }


async def make_queues(engine: Engine) -> None:
    await set_delete_when_done(engine.stores.queues, True)
    await engine.create_queue("done", filter="done = '1'", options=OPTIONS)
    await engine.create_queue("waits", filter="done = '0'", options=OPTIONS)


async def handle_all(engine: Engine) -> None:
    while messages := await engine.claim("done", 100):
        await engine.ack("done", *(one.receipt for one in messages))


async def rows_of(ingest: Ingest) -> Counter[str]:
    return Counter(title for title, _, _ in await decoded(ingest.shard.database))


async def test_a_publisher_that_is_killed_in_passes_completes_them(url: str) -> None:
    clock = ManualClock(START_MS)
    messages = some_messages(120)
    async with await Engine.open(url, settings=SETTINGS, clock=clock, publishes=False) as owner:
        await make_queues(owner)
        async with await Ingest.open(
            url, settings=SETTINGS, options=PUBLISHING, clock=clock
        ) as ingest:
            number = ingest.shard_number
            ids = await ingest.publish_many(messages)
            await owner.all_is_routed()
        await handle_all(owner)
        clock.advance_ms(LATER_MS - START_MS)
        # It says how far the publisher may go, and writes what is finished to files.
        await RetentionCompactor(owner, COMPACTOR).run_once(thorough=True)
    for writes in KILLS_OF_PUBLISHER:
        assert kill_after(url, writes, now_ms=LATER_MS, who="ingest")

    async with await Ingest.open(url, settings=SETTINGS, options=PUBLISHING, clock=clock) as ingest:
        assert ingest.shard_number == number
        retention = IngestRetention(ingest, COMPACTOR)
        assert not (await retention.run_once(thorough=True)).is_empty, "the kills did all of it"
        assert (await retention.run_once(thorough=True)).is_empty

        expected = survivors(ids, messages)
        left = {one.message_id: one.payload for one in await ingest.read_many(ids) if one}
        assert left == expected
        large = sum(one == LARGE for one in expected.values())
        rows = await rows_of(ingest)
        assert rows["payload"] == rows["metadata log entry"] == len(expected)
        assert rows["blob of a message"] == rows["blob reference"] == large
        assert rows["expiry"] == 0
        blobs = await ingest.shard.objects.names(f"blobs/{number:05}")
        assert len(blobs) == large
    async with await Engine.open(url, settings=SETTINGS, clock=clock, publishes=False) as owner:
        waiting = {one.message_id: one.payload for one in await owner.claim("waits", 1_000)}
        assert waiting == expected


async def test_odq_compact_that_is_killed_completes_all_shards(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "_KEPT_MS", 1)  # there is nothing to collect
    clock = ManualClock(START_MS)
    expected: dict[int, bytes | None] = {}
    bulk: dict[str, list[NewMessage]] = {
        "past": [NewMessage(LARGE, headers={"done": "0"}, retention_seconds=60)] * 2,
        "finished": [NewMessage(LARGE, headers={"done": "1"})] * 2,
        "waits": some_messages(8),
        "lost": [NewMessage(LARGE)],
    }
    async with await Engine.open(url, settings=SETTINGS, options=PUBLISHING, clock=clock) as engine:
        await make_queues(engine)
        messages = some_messages(30)
        expected |= survivors(await engine.publish_many(messages), messages)
        async with await Ingest.open(
            url, settings=SETTINGS, options=PUBLISHING, clock=clock
        ) as ingest:
            expected |= survivors(await ingest.publish_many(messages), messages)
            await engine.all_is_routed()
        shards = {name: await write_shard(url, some, clock=clock) for name, some in bulk.items()}
        del bulk["lost"]
        await commit(url, "job", [shards[name] for name in bulk], now_ms=START_MS)
        await engine.parts.following.bulk.look()
        await engine.parts.following.bulk.finished()
        await handle_all(engine)
    first_id = shards["waits"].shard << 32
    bulk_ids = [first_id + n for n in range(8)]
    expected |= survivors(bulk_ids, bulk["waits"])
    for writes in KILLS_OF_COMPACT:
        assert kill_after(url, writes, now_ms=LATER_MS, who="root")

    clock.advance_ms(LATER_MS - START_MS)
    report = await compact_root(url, options=COMPACTOR, settings=SETTINGS, clock=clock)
    again = await compact_root(url, options=COMPACTOR, settings=SETTINGS, clock=clock)

    assert not report.is_empty, "the kills did all of it"
    assert again.is_empty, again.removed
    objects = Objects.open(url, SETTINGS)
    files = {
        name: await objects.size_bytes(f"messages/{one.shard:05}") for name, one in shards.items()
    }
    assert [name for name, size in files.items() if size] == ["waits"]
    assert not await objects.size_bytes(f"blobs/{shards['past'].shard:05}")
    assert await CommitFiles(objects).jobs() == []
    assert shards["lost"].shard not in await ShardFiles(objects).bulk_shards()
    async with await Engine.open(url, settings=SETTINGS, options=PUBLISHING, clock=clock) as engine:
        read = await engine.read_many(expected)
        assert {one.message_id: one.payload for one in read if one} == expected
        assert (await queue_rows(engine))["bulk shard"] == 1
        waiting = {one.message_id: one.payload for one in await engine.claim("waits", 1_000)}
        assert waiting == expected
