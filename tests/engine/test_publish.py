"""Publishing and reading back, on every kind of store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from odq_encodings import MessageMetadata, PayloadKey, SeqBlock, decode_any
from opendata_queue import (
    ClosedError,
    CommitLimits,
    CorruptStoreError,
    FencedError,
    InvalidInputError,
    NewMessage,
    PublishOptions,
    StoredMessage,
    StoreSettings,
    System,
)
from opendata_queue.recent import MESSAGE_OVERHEAD_BYTES
from opendata_queue.shard import MAX_MESSAGES_AT_ONCE
from opendata_queue.store import Database, Objects, Rows
from opendata_queue.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def system(root: str, clock: ManualClock) -> AsyncIterator[System]:
    async with await System.open(root, clock=clock) as system:
        yield system


@pytest.fixture
async def memory_system(clock: ManualClock) -> AsyncIterator[System]:
    async with await System.open("memory:///", clock=clock) as system:
        yield system


async def log_of(system: System, from_sequence: int = 0) -> list[MessageMetadata]:
    return [entry async for chunk in system.scan_log(from_sequence) for entry in chunk]


async def test_a_published_message_is_read_back_whole(system: System, clock: ManualClock) -> None:
    now = clock.now_ms()

    message_id = await system.publish(
        b"payload",
        headers={"type": "order.created", "größe": "10 €"},
        created_at_ms=now - 5,
        delay_ms=1_000,
        retention_seconds=60,
    )

    assert await system.read(message_id) == StoredMessage(
        message_id=message_id,
        payload=b"payload",
        payload_uri=None,
        headers=(("type", "order.created"), ("größe", "10 €")),
        created_at_ms=now - 5,
        received_at_ms=now,
        visible_at_ms=now + 1_000,
        retention_seconds=60,
    )


async def test_messages_are_there_after_a_reopen_and_ids_go_on(
    root: str, clock: ManualClock
) -> None:
    async with await System.open(root, clock=clock) as system:
        ids = await system.publish_many([NewMessage(b"%d" % n) for n in range(10)])

    async with await System.open(root, clock=clock) as system:
        stored = await system.read_many(ids)
        later = await system.publish(b"later")

    assert [message.payload for message in stored if message] == [b"%d" % n for n in range(10)]
    assert ids == sorted(ids)
    assert later > ids[-1]


async def test_the_log_has_every_message_in_the_order_of_ids(system: System) -> None:
    ids = []
    for size in (1, 700, 2, 1_500):
        ids += await system.publish_many([NewMessage(b"x", headers={"n": "1"})] * size)

    entries = await log_of(system)

    assert [entry.message_id for entry in entries] == ids
    assert [entry.message_id for entry in await log_of(system, ids[700])] == ids[700:]


@pytest.mark.parametrize(
    "size", [0, 1, 65_535, 65_536, 10_000_000], ids=lambda size: f"{size} bytes"
)
async def test_payloads_of_any_size_come_back_intact(root: str, size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with await System.open(root) as system:
        message_id = await system.publish(payload)
        fresh = await system.read(message_id)
    async with await System.open(root) as system:
        stored = await system.read(message_id)

    assert fresh is not None
    assert fresh.payload == payload
    assert stored == fresh


async def test_a_uri_of_the_producers_is_handed_on_untouched(system: System) -> None:
    message_id = await system.publish(payload_uri="s3://elsewhere/größe?x=1#y")

    stored = await system.read(message_id)

    assert stored is not None
    assert (stored.payload, stored.payload_uri) == (None, "s3://elsewhere/größe?x=1#y")


async def test_an_absolute_time_of_visibility_is_kept(memory_system: System) -> None:
    message_id = await memory_system.publish(b"", visible_at_ms=42)

    stored = await memory_system.read(message_id)

    assert stored is not None
    assert stored.visible_at_ms == 42


async def test_reading_keeps_the_order_asked_for_and_skips_nothing(system: System) -> None:
    ids = await system.publish_many([NewMessage(b"%d" % n) for n in range(50)])
    asked = [ids[30], ids[3], 999_999, ids[30], *ids[10:20], ids[49]]

    stored = await system.read_many(asked)

    assert [message and message.message_id for message in stored] == [
        ids[30], ids[3], None, ids[30], *ids[10:20], ids[49]
    ]  # fmt: skip


async def test_payloads_are_read_from_the_store_when_they_are_not_recent(
    root: str, clock: ManualClock
) -> None:
    options = PublishOptions(recent_bytes=0)
    async with await System.open(root, clock=clock, options=options) as system:
        ids = await system.publish_many([NewMessage(b"%d" % n) for n in range(2_000)])
        asked = [*ids[::300], *ids[100:140], ids[-1]]

        stored = await system.read_many(asked)

    assert [message and message.payload for message in stored] == [
        b"%d" % ids.index(message_id) for message_id in asked
    ]


async def test_recent_payloads_cost_no_read_and_are_bounded(clock: ManualClock) -> None:
    options = PublishOptions(recent_bytes=2 * (MESSAGE_OVERHEAD_BYTES + 40))
    async with await System.open("memory:///", clock=clock, options=options) as system:
        first, second, third = await system.publish_many([NewMessage(bytes(40))] * 3)
        recent = system._shard.recent

        assert recent.get(first) is None
        assert [
            message and message.payload for message in (recent.get(second), recent.get(third))
        ] == [
            bytes(40),
            bytes(40),
        ]
        message = await system.read(first)

    assert message is not None
    assert message.payload == bytes(40)


async def test_headers_that_change_after_the_publish_change_nothing(memory_system: System) -> None:
    headers = {"type": "a"}
    first = await memory_system.publish(b"x", headers=headers)
    headers["type"] = "b"

    stored = await memory_system.read(first)

    assert stored is not None
    assert stored.headers == (("type", "a"),)


async def test_a_blob_is_found_through_its_path_and_its_reference(
    tmp_path: Path, clock: ManualClock
) -> None:
    root = f"file://{tmp_path}/root"
    options = PublishOptions(inline_bytes=10)
    async with await System.open(root, clock=clock, options=options) as system:
        inline, blob = await system.publish_many([NewMessage(b"x" * 10), NewMessage(b"y" * 11)])
    (stored,) = (tmp_path / "root" / "blobs" / "00000").iterdir()
    rows = await rows_of(root)

    assert stored.read_bytes() == b"y" * 11
    assert bytes.fromhex(stored.name)[:6] == clock.now_ms().to_bytes(6, "big")
    by_key = {decode_any(key, value).key: decode_any(key, value).value for key, value in rows}
    assert str(by_key[PayloadKey(message_id=inline)]) == "InlinePayload(data=b'xxxxxxxxxx')"
    assert str(by_key[PayloadKey(message_id=blob)]) == (
        f"UriPayload(uri='blobs/00000/{stored.name}')"
    )
    assert any(f"BlobReference(message_id={blob})" == str(value) for value in by_key.values())


async def test_a_blob_that_is_gone_is_reported_never_replaced(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/root"
    async with await System.open(root) as system:
        message_id = await system.publish(b"x" * 70_000)
        (blob,) = (tmp_path / "root" / "blobs" / "00000").iterdir()
        blob.unlink()

        with pytest.raises(CorruptStoreError, match=f"payload of message {message_id} is missing"):
            await system.read(message_id)


async def test_every_row_of_a_shard_can_be_decoded_with_the_rfcs_alone(
    new_memory_root: object, tmp_path: Path
) -> None:
    root = f"file://{tmp_path}/root"
    async with await System.open(root) as system:
        await system.publish_many(
            [NewMessage(b"x", headers={"a": "b"}, idempotency_key="k"), NewMessage(b"y" * 70_000)]
        )
        await system.publish(payload_uri="https://example.org/x")

    kinds = [decode_any(key, value).kind.title for key, value in await rows_of(root)]

    assert sorted(kinds) == sorted(
        ["payload", "metadata log entry"] * 3
        + ["sequence block", "idempotency key", "blob reference"]
    )


async def rows_of(root: str) -> list[tuple[bytes, bytes]]:
    database = await Database.open(Objects.open(root, StoreSettings()), "messages/00000")
    rows = [row async for chunk in database.scan(b"\x00", b"\xff") for row in chunk]
    await database.close()
    return rows


# --- idempotency ----------------------------------------------------------------------------------


async def test_the_same_key_returns_the_same_id_and_stores_once(
    root: str, clock: ManualClock
) -> None:
    async with await System.open(root, clock=clock) as system:
        first = await system.publish(b"one", idempotency_key="k")
        again = await system.publish(b"two", idempotency_key="k")
    async with await System.open(root, clock=clock) as system:
        after_reopen = await system.publish(b"three", idempotency_key="k")
        stored = await system.read(first)
        entries = await log_of(system)

    assert (again, after_reopen) == (first, first)
    assert stored is not None
    assert stored.payload == b"one"
    assert len(entries) == 1


async def test_keys_are_scoped_to_their_namespace(memory_system: System) -> None:
    ids = [
        await memory_system.publish(b"x", headers=headers, idempotency_key="k")
        for headers in ({}, {"namespace": "a"}, {"namespace": "b"}, {"namespace": "a"})
    ]

    assert ids[3] == ids[1]
    assert len(set(ids)) == 3


async def test_a_key_is_forgotten_after_its_window(clock: ManualClock) -> None:
    options = PublishOptions(idempotency_window_seconds=60)
    async with await System.open("memory:///", clock=clock, options=options) as system:
        first = await system.publish(b"x", idempotency_key="k")
        clock.advance_ms(60_000)
        at_the_end = await system.publish(b"x", idempotency_key="k")
        clock.advance_ms(1)
        after_it = await system.publish(b"x", idempotency_key="k")
        again = await system.publish(b"x", idempotency_key="k")

    assert at_the_end == first
    assert after_it != first
    assert again == after_it


async def test_publishes_with_one_key_at_the_same_time_store_one_message(
    system: System,
) -> None:
    ids = await asyncio.gather(*(system.publish(b"%d" % n, idempotency_key="k") for n in range(30)))

    assert len(set(ids)) == 1
    assert len(await log_of(system)) == 1


async def test_calls_with_crossing_keys_do_not_wait_for_each_other_for_ever(
    memory_system: System,
) -> None:
    async def publish(keys: list[str]) -> list[int]:
        return await memory_system.publish_many(
            [NewMessage(b"x", idempotency_key=key) for key in keys]
        )

    async with asyncio.timeout(60):
        forward, backward = await asyncio.gather(publish(["a", "b"]), publish(["b", "a"]))

    assert forward == backward[::-1]


async def test_a_key_twice_in_one_call_is_one_message(memory_system: System) -> None:
    known = await memory_system.publish(b"x", idempotency_key="known")

    ids = await memory_system.publish_many(
        [
            NewMessage(b"a", idempotency_key="k"),
            NewMessage(b"b"),
            NewMessage(b"c", idempotency_key="k"),
            NewMessage(b"d", idempotency_key="known"),
            NewMessage(b"e"),
        ]
    )

    assert ids[2] == ids[0]
    assert ids[3] == known
    assert len({*ids}) == 4
    stored = await memory_system.read_many(ids)
    assert [message and message.payload for message in stored] == [b"a", b"b", b"a", b"x", b"e"]


async def test_a_cancelled_publish_keeps_its_key_until_its_commit_is_over(
    memory_system: System,
) -> None:
    first = asyncio.create_task(memory_system.publish(b"first", idempotency_key="k"))
    while not memory_system._shard._committer.rows:
        await asyncio.sleep(0)
    first.cancel()

    second = await memory_system.publish(b"second", idempotency_key="k")

    (entry,) = await log_of(memory_system)
    stored = await memory_system.read(second)
    assert first.cancelled() or first.cancelling()
    assert entry.message_id == second
    assert stored is not None
    assert stored.payload == b"first"


# --- group commit ---------------------------------------------------------------------------------


async def test_callers_that_arrive_during_a_commit_share_the_next_one(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = watch_commits(monkeypatch)
    async with await System.open(root) as system:
        await system.publish(b"reserves the first block of sequences")
        sizes.clear()

        ids = await asyncio.gather(*(system.publish(b"%d" % n) for n in range(64)))

    assert len(set(ids)) == 64
    assert sum(sizes) == 128
    assert len(sizes) <= 3


async def test_a_commit_takes_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = watch_commits(monkeypatch)
    options = PublishOptions(limits=CommitLimits(batch_rows=10))
    async with await System.open("memory:///", options=options) as system:
        await asyncio.gather(*(system.publish(b"%d" % n) for n in range(64)))

    assert max(sizes) <= 10


async def test_callers_wait_while_too_much_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = hold_commits(monkeypatch)
    options = PublishOptions(limits=CommitLimits(batch_bytes=10_000))
    async with await System.open("memory:///", options=options) as system:
        commits.set()
        await system.publish(b"reserves the first block of sequences")
        commits.clear()
        tasks = [asyncio.create_task(system.publish(bytes(1_000))) for _ in range(200)]
        for _ in range(1_000):
            await asyncio.sleep(0)
        pending = system._shard._committer.rows.size_bytes
        commits.set()
        ids = await asyncio.gather(*tasks)

    assert 10_000 <= pending < 12_000
    assert len(set(ids)) == 200


async def test_a_commit_lingers_for_company_until_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = watch_commits(monkeypatch)
    options = PublishOptions(limits=CommitLimits(batch_rows=8, linger_ms=60_000))
    async with await System.open("memory:///", options=options) as system:
        # The block of sequences does not linger; nobody could keep it company.
        await asyncio.gather(*(system.publish(b"%d" % n) for n in range(4)))

        assert sizes == [1, 8]


async def test_whatever_kills_the_committer_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(_: Database, rows: Rows) -> None:
        raise MemoryError("no room")

    system = await System.open("memory:///")
    monkeypatch.setattr(Database, "commit", broken)

    results = await asyncio.gather(
        *(system.publish(b"x") for _ in range(5)), return_exceptions=True
    )

    assert {type(result) for result in results} == {ClosedError}
    with pytest.raises(ClosedError, match="stopped by MemoryError"):
        await system.publish(b"x")
    with pytest.raises(MemoryError):
        await system.close()


async def test_giving_up_on_closing_does_not_cancel_a_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = hold_commits(monkeypatch)
    commits.set()
    system = await System.open("memory:///")
    await system.publish(b"reserves the first block of sequences")
    commits.clear()
    publishing = asyncio.create_task(system.publish(b"x"))
    while not system._shard._committer.rows:
        await asyncio.sleep(0)
    closing = asyncio.create_task(system.close())
    await asyncio.sleep(0)
    closing.cancel()

    commits.set()

    assert isinstance(await publishing, int)
    await system.close()


def test_a_system_whose_event_loop_is_gone_says_so() -> None:
    system = asyncio.run(System.open("memory:///"))

    with pytest.raises(ClosedError, match="stopped by CancelledError"):
        asyncio.run(system.publish(b"x"))


async def test_an_error_does_not_grow_with_those_who_get_it(root: str) -> None:
    first = await System.open(root)
    await first.publish(b"x")
    second = await System.open(root)
    with pytest.raises(FencedError):
        await first.publish(b"x")

    depths = []
    for _ in range(50):
        with pytest.raises(FencedError) as caught:
            await first.publish(b"x")
        depths.append(len(caught.traceback))

    assert len(set(depths)) == 1
    await second.close()
    await first.close()


async def test_a_waiting_publish_that_is_cancelled_passes_its_turn_on(
    memory_system: System,
) -> None:
    tasks = [
        asyncio.create_task(memory_system.publish(b"x", idempotency_key="k")) for _ in range(30)
    ]
    await asyncio.sleep(0)
    for task in tasks[1::2]:
        task.cancel()

    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert len({result for result in results if isinstance(result, int)}) == 1
    assert not memory_system._shard._keys._waiting


async def test_nothing_is_uploaded_for_a_publish_that_must_fail(tmp_path: Path) -> None:
    system = await System.open(f"file://{tmp_path}/root")
    await system.close()

    with pytest.raises(ClosedError):
        await system.publish(bytes(100_000))

    assert not (tmp_path / "root" / "blobs").exists()


async def test_a_message_past_its_retention_is_gone(
    memory_system: System, clock: ManualClock
) -> None:
    message_id = await memory_system.publish(b"x", retention_seconds=60)
    clock.advance_ms(60_000)
    assert await memory_system.read(message_id) is not None

    clock.advance_ms(1)

    assert await memory_system.read(message_id) is None


async def test_closing_commits_what_is_pending(root: str) -> None:
    system = await System.open(root)
    tasks = [asyncio.create_task(system.publish(b"%d" % n)) for n in range(10)]
    while not system._shard._committer.rows:
        await asyncio.sleep(0)
    await system._shard._reserve(100)
    await asyncio.sleep(0)

    await system.close()

    results = await asyncio.gather(*tasks, return_exceptions=True)
    async with await System.open(root) as system:
        stored = {entry.message_id for entry in await log_of(system)}
    assert {result for result in results if isinstance(result, int)} == stored
    assert all(isinstance(result, int | ClosedError) for result in results)


async def test_a_closed_system_takes_no_more_messages(root: str) -> None:
    system = await System.open(root)
    await system.close()

    with pytest.raises(ClosedError, match="is closed"):
        await system.publish(b"late")


async def test_a_publish_larger_than_a_block_of_sequences_is_one_publish(
    memory_system: System,
) -> None:
    ids = await memory_system.publish_many([NewMessage(b"x")] * 9_000)

    assert ids == list(range(ids[0], ids[0] + 9_000))


async def test_publishing_nothing_is_nothing(memory_system: System) -> None:
    assert await memory_system.publish_many([]) == []
    assert await log_of(memory_system) == []


async def test_the_block_of_a_sequence_is_durable_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    durable_end = 0
    commit = Database.commit

    async def checked(self: Database, rows: Rows) -> None:
        nonlocal durable_end
        if "/messages/" not in self.name:
            await commit(self, rows)
            return
        block = durable_end
        for _, key, value, _ in rows:
            if key == b"\x01\x02":
                block = SeqBlock.decode(value).end
            elif len(key) == 10:
                assert PayloadKey.decode(key).message_id < durable_end
        await commit(self, rows)
        durable_end = block

    monkeypatch.setattr(Database, "commit", checked)
    async with await System.open("memory:///") as system:
        for size in (1, 4_095, 5_000, 100, 9_999, 1):
            await system.publish_many([NewMessage(b"x")] * size)


def watch_commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each commit of messages from now on."""
    sizes: list[int] = []
    commit = Database.commit

    async def watched(self: Database, rows: Rows) -> None:
        if "/messages/" in self.name:
            sizes.append(len(rows))
        await commit(self, rows)

    monkeypatch.setattr(Database, "commit", watched)
    return sizes


def hold_commits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Commits of messages wait until the event is set."""
    go = asyncio.Event()
    commit = Database.commit

    async def held(self: Database, rows: Rows) -> None:
        if "/messages/" in self.name:
            await go.wait()
        await commit(self, rows)

    monkeypatch.setattr(Database, "commit", held)
    return go


# --- bad input ------------------------------------------------------------------------------------

BAD_MESSAGES = {
    "256 headers": (
        NewMessage(b"x", headers={str(n): "v" for n in range(256)}),
        "256 headers are over the limit of 255",
    ),
    "a 70 kB header": (
        NewMessage(b"x", headers={"ok": "v", "big": "v" * 70_000}),
        r"headers\[1\]\.value: 70000 bytes of UTF-8 are over the limit of 65535",
    ),
    "a header that is no text": (
        NewMessage(b"x", headers={"n": 5}),  # type: ignore[dict-item]
        r"headers\[0\]\.value: 5 is no text",
    ),
    "a header without UTF-8": (NewMessage(b"x", headers={"\ud800": ""}), "has no UTF-8"),
    "text as payload": (NewMessage("text"), "payload is str, not bytes"),  # type: ignore[arg-type]
    "no payload": (NewMessage(), "payload is NoneType, not bytes, and there is no payload_uri"),
    "payload and URI": (NewMessage(b"x", payload_uri="s3://b/k"), "exclude each other"),
    "a URI without scheme": (NewMessage(payload_uri="blobs/00000/00"), "has no scheme"),
    "an empty URI": (NewMessage(payload_uri=""), "has no scheme"),
    "a URI too long": (NewMessage(payload_uri="s3://" + "x" * 65_535), "over the limit of 65535"),
    "a negative delay": (NewMessage(b"x", delay_ms=-1), "delay_ms is -1"),
    "a fractional delay": (NewMessage(b"x", delay_ms=0.5), r"delay_ms is 0\.5"),  # type: ignore[arg-type]
    "two times": (NewMessage(b"x", delay_ms=1, visible_at_ms=1), "exclude each other"),
    "a time out of range": (NewMessage(b"x", visible_at_ms=2**63), "visible_at_ms is"),
    "a creation out of range": (NewMessage(b"x", created_at_ms=2**63), "created_at_ms is"),
    "negative retention": (NewMessage(b"x", retention_seconds=-1), "retention_seconds is -1"),
    "endless retention": (NewMessage(b"x", retention_seconds=2**32), "retention_seconds is"),
    "no retention": (NewMessage(b"x", retention_seconds=None), "retention_seconds is None"),  # type: ignore[arg-type]
    "headers as a list": (NewMessage(b"x", headers=[("a", "b")]), "headers are a list"),  # type: ignore[arg-type]
    "no message": (b"bytes", "is a bytes, not a NewMessage"),
    "an empty key": (NewMessage(b"x", idempotency_key=""), "has 0 bytes, not 1 to 512"),
    "a long key": (NewMessage(b"x", idempotency_key="ü" * 257), "has 514 bytes"),
    "a key without UTF-8": (NewMessage(b"x", idempotency_key="\ud800"), "has no UTF-8"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_a_message_that_can_not_be_stored_is_refused_and_nothing_is_written(
    memory_system: System, name: str
) -> None:
    bad, complaint = BAD_MESSAGES[name]

    with pytest.raises(InvalidInputError, match=rf"^message 1: .*{complaint}"):
        await memory_system.publish_many([NewMessage(b"good"), bad])  # type: ignore[list-item]

    assert await log_of(memory_system) == []


async def test_too_many_messages_at_once_are_refused(memory_system: System) -> None:
    with pytest.raises(InvalidInputError, match="10001 messages are over the limit of 10000"):
        await memory_system.publish_many([NewMessage(b"x")] * (MAX_MESSAGES_AT_ONCE + 1))


async def test_too_many_bytes_at_once_are_refused(memory_system: System) -> None:
    with pytest.raises(InvalidInputError, match="bytes are over the limit of 67108864 in one call"):
        await memory_system.publish_many([NewMessage(bytes(60_000))] * 1_200)


async def test_messages_that_are_no_list_are_refused(memory_system: System) -> None:
    with pytest.raises(InvalidInputError, match="messages are a generator, not a list"):
        await memory_system.publish_many(NewMessage(b"x") for _ in range(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("message_id", [-1, 2**63, "1", None])
async def test_an_id_that_is_none_is_refused(memory_system: System, message_id: int) -> None:
    with pytest.raises(InvalidInputError, match="message_id is"):
        await memory_system.read(message_id)


async def test_a_sequence_before_the_first_is_refused(memory_system: System) -> None:
    with pytest.raises(InvalidInputError, match="from_sequence is -1"):
        memory_system.scan_log(-1)


@pytest.mark.parametrize("bad", [{"batch_rows": 0}, {"batch_bytes": 0}, {"linger_ms": -1}])
def test_limits_that_make_no_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="a limit that is too small"):
        CommitLimits(**bad)


def test_a_threshold_over_the_formats_limit_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="inline_bytes is 65536"):
        PublishOptions(inline_bytes=65_536)
