"""Publishing twice with one key stores one message."""

from __future__ import annotations

import asyncio

import pytest

from odq_encodings import IdempotencyRecord
from opendata_queue import (
    Engine,
    InvalidInputError,
    NewMessage,
    PublishOptions,
)
from opendata_queue.testing import ManualClock
from tests.log.written_log import log_of


async def test_the_same_key_returns_the_same_id_and_stores_once(
    root: str, clock: ManualClock
) -> None:
    async with await Engine.open(root, clock=clock) as system:
        first = await system.publish(b"one", idempotency_key="k")
        again = await system.publish(b"two", idempotency_key="k")
    async with await Engine.open(root, clock=clock) as system:
        after_reopen = await system.publish(b"three", idempotency_key="k")
        stored = await system.read(first)
        entries = await log_of(system)

    assert (again, after_reopen) == (first, first)
    assert stored is not None
    assert stored.payload == b"one"
    assert len(entries) == 1


async def test_keys_are_scoped_to_their_namespace(memory_system: Engine) -> None:
    ids = [
        await memory_system.publish(b"x", headers=headers, idempotency_key="k")
        for headers in ({}, {"namespace": "a"}, {"namespace": "b"}, {"namespace": "a"})
    ]

    assert ids[3] == ids[1]
    assert len(set(ids)) == 3


async def test_a_key_is_forgotten_after_its_window(clock: ManualClock) -> None:
    options = PublishOptions(idempotency_window_seconds=60)
    async with await Engine.open("memory:///", clock=clock, options=options) as system:
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
    system: Engine,
) -> None:
    ids = await asyncio.gather(*(system.publish(b"%d" % n, idempotency_key="k") for n in range(30)))

    assert len(set(ids)) == 1
    assert len(await log_of(system)) == 1


async def test_calls_with_crossing_keys_do_not_wait_for_each_other_for_ever(
    memory_system: Engine,
) -> None:
    async def publish(keys: list[str]) -> list[int]:
        return await memory_system.publish_many(
            [NewMessage(b"x", idempotency_key=key) for key in keys]
        )

    async with asyncio.timeout(120):
        forward, backward = await asyncio.gather(publish(["a", "b"]), publish(["b", "a"]))

    assert forward == backward[::-1]


async def test_a_key_twice_in_one_call_is_one_message(memory_system: Engine) -> None:
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
    memory_system: Engine,
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


async def test_a_batch_under_one_key_is_published_once(memory_system: Engine) -> None:
    batch = [NewMessage(b"1"), NewMessage(b"2"), NewMessage(b"3")]

    first, again = await asyncio.gather(
        memory_system.publish_once(batch, "key"), memory_system.publish_once(batch, "key")
    )

    assert first == again
    assert await memory_system.publish_once(batch, "key") == first
    assert await memory_system.publish_once(batch, "other") != first
    assert [one.payload for one in await memory_system.read_many(first) if one] == [
        b"1",
        b"2",
        b"3",
    ]
    assert await memory_system.publish_once([], "key") == []


async def test_a_batch_under_one_key_has_no_other_keys(memory_system: Engine) -> None:
    with pytest.raises(InvalidInputError, match="keys of their own"):
        await memory_system.publish_once([NewMessage(b"1", idempotency_key="own")], "key")
    with pytest.raises(InvalidInputError, match="idempotency_key"):
        await memory_system.publish_once([NewMessage(b"1")], "")


async def test_a_larger_batch_under_the_same_key_is_not_told_ids_of_others(
    memory_system: Engine,
) -> None:
    small = await memory_system.publish_once([NewMessage(b"1")], "key")
    other = await memory_system.publish(b"another's")

    large = await memory_system.publish_once([NewMessage(b"1"), NewMessage(b"2")], "key")

    assert not {*small, other} & set(large)


@pytest.mark.parametrize("batch_first", [False, True])
async def test_the_key_of_a_batch_is_no_key_of_a_message_whatever_it_looks_like(
    memory_system: Engine, batch_first: bool
) -> None:
    batch = [NewMessage(b"a"), NewMessage(b"b"), NewMessage(b"c")]

    if batch_first:
        ids = await memory_system.publish_once(batch, "order")
        single = await memory_system.publish(b"single", idempotency_key="order/3")
    else:
        single = await memory_system.publish(b"single", idempotency_key="order/3")
        ids = await memory_system.publish_once(batch, "order")

    stored = await memory_system.read_many([single, *ids])
    assert [one and one.payload for one in stored] == [b"single", b"a", b"b", b"c"]
    assert await memory_system.publish_once(batch, "order") == ids
    assert await memory_system.publish(b"again", idempotency_key="order/3") == single


async def test_a_key_can_not_be_given_the_mark_of_a_batch(memory_system: Engine) -> None:
    await memory_system.publish_once([NewMessage(b"1")], "order")

    with pytest.raises(InvalidInputError, match=r"begins with U\+0000, which is reserved"):
        await memory_system.publish(b"single", idempotency_key="\0order/1")
    with pytest.raises(InvalidInputError, match=r"begins with U\+0000, which is reserved"):
        await memory_system.publish_once([NewMessage(b"1")], "\0order")

    assert len(await log_of(memory_system)) == 1


async def test_the_record_of_a_batch_has_the_key_that_the_rfc_says(
    memory_system: Engine,
) -> None:
    headers = {"namespace": "payments"}
    (first, *_) = await memory_system.publish_once(
        [NewMessage(b"x", headers=headers)] * 3, "order-17"
    )

    row = bytes.fromhex("0107 7061796d656e7473 00 0101 6f726465722d3137 2f33 00")
    value = await memory_system._shard.database.get(row)
    assert value is not None
    assert IdempotencyRecord.decode(value).message_id == first
