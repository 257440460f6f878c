"""Messages that got into the store a moment ago."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_queue import NewMessage
from opendata_queue.log.cache import CheckedMessage, MessageBatch, RecentMessages
from opendata_queue.log.rows import put_messages
from opendata_queue.store import Rows

INLINE_BYTES = 100


@given(
    batches=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
        max_size=6,
    ),
    forgotten=st.sets(st.integers(0, 40)),
    limit_bytes=st.sampled_from([0, 3_000, 1_000_000]),
    asked=st.lists(st.integers(0, 40), max_size=30),
)
def test_several_are_found_like_each_alone(
    batches: list[tuple[int, list[int]]],
    forgotten: set[int],
    limit_bytes: int,
    asked: list[int],
) -> None:
    recent = RecentMessages(limit_bytes)
    next_id = 0
    for gap, retentions in batches:
        next_id += gap
        messages = [
            CheckedMessage(NewMessage(b"%d" % place, retention_seconds=retention), INLINE_BYTES)
            for place, retention in enumerate(retentions, next_id)
        ]
        recent.add_many(next_id, MessageBatch.of(messages), received_at=1_000 + next_id)
        next_id += len(messages)
    recent.forget(forgotten)

    found = recent.get_many(asked)

    assert found == [recent.get(one) for one in asked]
    for one, message in zip(asked, found, strict=True):
        if message is not None:
            assert one not in forgotten
            assert (message.message_id, message.payload) == (one, b"%d" % one)


@given(
    messages=st.lists(
        st.tuples(st.binary(max_size=12), st.dictionaries(st.text(max_size=3), st.text())),
        min_size=1,
        max_size=8,
    ),
    shared=st.booleans(),
    first_id=st.integers(0, (1 << 63) - 10),
)
def test_a_batch_by_column_is_stored_and_routed_like_each_message_alone(
    messages: list[tuple[bytes, dict[str, str]]], shared: bool, first_id: int
) -> None:
    new = [
        NewMessage(payload, headers=messages[0][1] if shared else headers)
        for payload, headers in messages
    ]
    plain = MessageBatch.of_plain(new, INLINE_BYTES)
    alone = MessageBatch.of([CheckedMessage(message, INLINE_BYTES) for message in new])
    assert plain is not None

    rows, expected = Rows(), Rows()
    put_messages(rows, first_id, plain, 1_000, ttl_grace_ms=0)
    put_messages(expected, first_id, alone, 1_000, ttl_grace_ms=0)
    recent, of_each = RecentMessages(1_000_000), RecentMessages(1_000_000)
    recent.add_many(first_id, plain, 1_000)
    of_each.add_many(first_id, alone, 1_000)

    assert sorted(rows) == sorted(expected)
    assert rows.size_bytes == expected.size_bytes
    assert plain.published(first_id, 1_000) == alone.published(first_id, 1_000)
    ids = range(first_id, first_id + len(new))
    assert recent.get_many(ids) == of_each.get_many(ids)
    assert plain.size_bytes == alone.size_bytes


@pytest.mark.parametrize(
    "unusual",
    [
        NewMessage(bytes(INLINE_BYTES + 1)),
        NewMessage(payload_uri="s3://bucket/key"),
        NewMessage(b"", delay_ms=0),
        NewMessage(b"", visible_at_ms=0),
        NewMessage(b"", created_at_ms=0),
        NewMessage(b"", retention_seconds=1),
        NewMessage(b"", retention_seconds=False),
        NewMessage(b"", idempotency_key="key"),
        NewMessage(b"", headers={"number": 1}),  # type: ignore[dict-item]
        NewMessage(b"", headers=MappingProxyType({"a": "b"})),
        NewMessage("text"),  # type: ignore[arg-type]
        "no message",
    ],
    ids=repr,
)
def test_a_batch_with_something_unusual_is_not_taken_by_column(unusual: NewMessage) -> None:
    assert MessageBatch.of_plain([NewMessage(b""), unusual], INLINE_BYTES) is None
