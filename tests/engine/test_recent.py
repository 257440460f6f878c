"""Messages that got into the store a moment ago."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opendata_queue import NewMessage
from opendata_queue.recent import CheckedMessage, MessageBatch, RecentMessages

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
